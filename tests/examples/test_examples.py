from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest

from accel.cli.digits import load_digits
from tests.device_support import until
from tests.program_support import ROOT, python, started

CLIENTS = 200
FAULT_AT = 150

PROGRAMS = {
    "fastapi example": ["examples/fastapi_digits.py"],
    "aiohttp example": ["examples/aiohttp_digits.py"],
    "serve": ["-m", "accel", "serve", "--device", "cpu", "--port", "0", "--fault-at", str(FAULT_AT)],
}


def run_example(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path} | variables
    command = [sys.executable, f"examples/{name}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run an example that starts no process as the program of this one, and return its lines."""
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert not end.value.code, end.value.code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("cuda_*.py")))
def test_an_example_for_a_gpu_says_what_is_missing_without_one(name: str) -> None:
    done = run_example(name, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done
    assert done.stderr.startswith("This example needs "), done.stderr
    assert "Traceback" not in done.stderr


def test_the_example_of_a_library_of_ones_own_computes_what_numpy_does() -> None:
    done = run_example("own_library.py")
    assert done.returncode == 0, done
    first, *others = done.stdout.splitlines()
    assert first.startswith("a fault in ")
    assert len(others) == 3
    assert all(line.endswith(": True") for line in others), done.stdout


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("nearest_neighbours.py", 3),
        ("image_pipeline.py", 2),
        ("least_squares.py", 3),
        ("spectral_filter.py", 3),
        ("option_pricing.py", 3),
    ],
)
def test_the_examples_of_array_programs_compute_what_numpy_does(name: str, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(name, capsys)
    assert len(found) == lines
    assert all(line.endswith(": True") for line in found), found


def test_the_example_of_page_rank_computes_what_scipy_does(capsys: pytest.CaptureFixture[str]) -> None:
    *_, chances, same = found = printed("pagerank.py", capsys)
    assert chances.endswith(": True"), found
    assert same.endswith(": True"), found


def test_the_example_of_poissons_equation_comes_close_to_the_exact_solution(capsys: pytest.CaptureFixture[str]) -> None:
    _, *steps, error, last = found = printed("poisson_equation.py", capsys)
    residuals = [float(step.split()[-1]) for step in steps]
    assert residuals[-1] <= 1e-8
    assert int(error.split()[0]) == int(steps[-1].split()[1].rstrip(":"))
    assert last.endswith(": True"), found


async def test_the_service_of_option_prices_answers_with_the_formulas_price() -> None:
    module = runpy.run_path(str(ROOT / "examples" / "option_pricing.py"))
    app = module["service"]("cpu")
    body = {"spot": 100, "strike": 95, "rate": 0.01, "volatility": 0.3, "years": 0.5, "steps": 4}
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        answer = await client.post("/price", json=body)
        assert answer.status_code == 200, answer.text
        exact = module["kemna_vorst"](module["Option"](100, 95, 0.01, 0.3, 0.5), 4)
        assert abs(answer.json()["price"] - exact) < 6 * answer.json()["standard_error"]
        assert (await client.post("/price", json={**body, "strike": -1})).status_code == 422
        assert (await client.get("/readyz")).json()["ok"]


def test_the_example_of_a_transformer_block_computes_what_its_twin_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(printed("transformer_block.py", capsys)) == 3


def test_the_example_of_a_model_over_two_ranks_answers_as_the_whole_model_through_a_loss() -> None:
    done = run_example("tensor_parallel.py")
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == ["as the whole model: True; same bits in epoch 2: True; 0 failed"]
    assert len((ROOT / "examples" / "tensor_parallel.py").read_text().splitlines()) <= 50


def test_the_example_of_a_poisoned_input_names_it_and_answers_the_others() -> None:
    done = run_example("poisoned_input.py")
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == [
        "99 answered",
        f"poison: {1 << 50}, because of ContextPoisonedError",
        "generation 2, 100 isolated, 1 poisoned",
    ]


async def ask(session: aiohttp.ClientSession, path: str, **options: Any) -> Any:
    async with session.request("POST" if "json" in options else "GET", path, **options) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_linear_models_and_components_are_served(rng: np.random.Generator) -> None:
    x = rng.standard_normal((30, 3)) @ np.diag([3.0, 2.0, 1.0]) + 1
    y = x @ [1.0, -2.0, 0.5] + 4
    command = python("-m", "uvicorn", "--app-dir", "examples", "--port", "0", "least_squares:app")
    async with started(command, ACCEL_DEVICE="cpu") as program, aiohttp.ClientSession(f"http://127.0.0.1:{program.port}") as session:
        fit = await ask(session, "/fits", json={"x": x.tolist(), "y": y.tolist()})
        np.testing.assert_allclose([*fit["coefficients"], fit["intercept"]], [1.0, -2.0, 0.5, 4.0], atol=1e-9)
        assert fit["rank"] == 4
        found = await ask(session, "/components", json={"x": x.tolist(), "count": 2, "project": x[:5].tolist()})
        variances, vectors = np.linalg.eigh(np.cov(x.T))
        np.testing.assert_allclose(found["variances"], variances[:0:-1])
        projection = vectors[:, 1:] @ vectors[:, 1:].T
        np.testing.assert_allclose(np.array(found["coordinates"]) @ found["directions"], (x - x.mean(0))[:5] @ projection, atol=1e-9)
        for path, body, field in (
            ("/fits", {"x": [[1], [2, 3]], "y": [1, 2]}, "x"),
            ("/fits", {"x": [[1], [2]], "y": [1]}, "y"),
            ("/components", {"x": x.tolist(), "project": [[1.0]]}, "project"),
        ):
            async with session.post(path, json=body) as answer:
                assert (answer.status, (await answer.json())["field"]) == (422, field)
        async with session.post("/fits", data='{"x": [[NaN], [1]], "y": [1, 2]}', headers={"content-type": "application/json"}) as answer:
            assert answer.status == 422


async def is_refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return True
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return False


def has_read_all(port: int) -> bool:
    """Whether nothing that was sent to a port of this machine is still in the system's hands."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        if local.endswith(f":{port:04X}") and state == "01" and not queues.endswith(":00000000"):
            return False
    return True


class RawClient:
    """A connection that is kept between its requests, with its bytes in our hands."""

    def __init__(self, image: Any) -> None:
        body = json.dumps(image).encode()
        head = f"POST /digits HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body

    async def connect(self, port: int) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.writer.write(self.request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        await self.reader.readexactly(int(length[1]))

    async def send(self) -> None:
        self.writer.write(self.request)
        await self.writer.drain()

    async def last_answer(self) -> tuple[bytes, Any]:
        answer = await self.reader.read()
        self.writer.close()
        await self.writer.wait_closed()
        head, _, body = answer.partition(b"\r\n\r\n")
        return head.partition(b"\r\n")[0], json.loads(body or b"null")


async def classify_all(session: aiohttp.ClientSession, images: list[Any]) -> list[int]:
    return [found["digit"] for found in await asyncio.gather(*(ask(session, "/digits", json=image) for image in images))]


@pytest.mark.slow
@pytest.mark.parametrize("command", PROGRAMS.values(), ids=PROGRAMS)
async def test_it_survives_a_fault_under_load_and_a_graceful_end(command: list[str]) -> None:
    digits = load_digits()
    variables = {"PORT": "0", "ACCEL_DEVICE": "cpu", "FAULT_AT": str(FAULT_AT)}
    async with started(python(*command), **variables) as program:
        base = f"http://127.0.0.1:{program.port}"
        async with aiohttp.ClientSession(base, connector=aiohttp.TCPConnector(limit=0)) as session:
            images = [{"pixels": pixels.tolist()} for pixels in digits.held_out_images[:CLIENTS]]
            assert (await ask(session, "/readyz"))["generation"] == 1, "the fault is to come under load"
            answers, rounds = [await classify_all(session, images)], 1
            while (await ask(session, "/healthz"))["generation"] == 1:
                answers.append(await classify_all(session, images))
                rounds += 1
                assert rounds < 100, "the fault did not come"
            answers.append(await classify_all(session, images))
            assert (await ask(session, "/readyz"))["generation"] == 2
        assert all(own == answers[-1] for own in answers), "an image is told apart the same way before, through and after the fault"
        assert (digits.held_out_labels[:CLIENTS] == answers[-1]).mean() >= 0.93

        clients = [RawClient(image) for image in images]
        await asyncio.gather(*(client.connect(program.port) for client in clients))
        # Stopped, the process finds all requests at once when it goes on. It is asked to end when it has read them, not before: a wait that a signal ended,
        # and whose time was up meanwhile, gives the loop no sockets, and the server closes connections on which there is nothing as far as it knows.
        program.process.send_signal(signal.SIGSTOP)
        await asyncio.gather(*(client.send() for client in clients))
        program.process.send_signal(signal.SIGCONT)
        await until(lambda: has_read_all(program.port), "it has read all requests")
        program.process.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*(client.last_answer() for client in clients))
        assert ends == [(b"HTTP/1.1 200 OK", {"digit": digit}) for digit in answers[-1]]
        while not await is_refused(program.port):
            pass
        assert await program.ended() == 0, program.output
    # The fault itself is logged, with a traceback where it surfaced; none may come from the end.
    assert "Traceback" not in program.output.rpartition("actor_failed")[2], program.output
    assert "Warning" not in program.output, program.output
