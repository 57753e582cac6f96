"""The encoder of ``model_service.py`` over HTTP: accel with FastAPI beside LitServe, and what a poisonous request costs each.

``python benchmarks/model_http.py [--backend cpu] [--clients 256] [--seconds 5] [--rounds 3] [--workers 4] [--processes 1] [--json FILE]``; needs torch,
``accel[web]`` and, for that part, litserve. Each server is a process of its own, and so are the clients, eight of them, which begin together. Servers take
turns; LitServe, whose workers poll, is stopped while others are measured. At the end a token out of range is sent to each, twice: on a GPU it asserts on the
device, on the CPU torch raises. With ``--rounds 0`` that alone is measured. Interrupt it with SIGINT, which ends the servers too.

All clients connect at once, so their first requests wait for a loop that is busy with the others: ``p99_later_ms`` leaves these out. accel is served on
asyncio's loop. uvloop, which uvicorn takes where it is installed, accepts one connection in each iteration (libuv/libuv#3696), so a client that comes while
others send waits for one iteration, and the requests in it, for each client before it.

``--processes 4`` also serves accel from four processes of HTTP. Each has a device, and a copy of the model there, of its own, as LitServe's workers have.

LitServe has the settings that its documentation gives for many requests: ``workers_per_device`` is the number of cores on a CPU, and 4 on a GPU, as in its
example for production; each worker has a model and gathers its own batches. There is a process for HTTP for each worker, its recommended default.
``fast_queue`` is set, though 0.2.19 ignores it (Lightning-AI/LitServe issue 751). ``restart_workers`` is not: it restarts processes that died, costs a
message for each request, and an exception of torch does not end the process. On a GPU LitServe runs with the CUDA graphs of ``model_service.py``'s
hand-written batcher, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import aiohttp
import numpy as np

from benchmarks.model_service import BATCHES, LENGTH, VOCABULARY, build, build_half, captured, eager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

try:
    import litserve
except ImportError:
    litserve = None

_LitAPI: Any = object if litserve is None else litserve.LitAPI

DRIVERS = 8
SEVERAL = "accel, several"
"""Begins the names of servers with several processes of HTTP."""
CORES = len(os.sched_getaffinity(0))
DELAY = 0.002
"""Seconds that an item waits for others, in both."""
SETTINGS = "ACCEL_MODEL_HTTP"
"""Environment variable by which the processes of a server know the backend, and whether there are graphs."""
OVER = 10.0
"""Seconds for which answers are counted after the poison."""


def application() -> Any:
    """Return the application that serves with accel, by the settings in the environment."""
    from fastapi import FastAPI

    import accel
    from accel.integrations.fastapi import add_model, install, lifespan

    backend, graphs = os.environ[SETTINGS].split(",")

    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> AsyncIterator[Any]:
        wanted: Any = graphs
        model = await device.load_model(
            f"benchmarks.model_service:{'build_half' if backend == 'cuda' else 'build'}",
            weights=_weights(backend),
            inputs={"input_ids": accel.TensorSpec(("batch", LENGTH), "int64")},
            buckets={"batch": BATCHES},
            graphs=wanted,
        )
        async with accel.serve(model, max_delay=DELAY) as service:
            add_model(app, "/encode", service)
            yield service

    app = FastAPI(lifespan=lifespan(setup, device=backend, host="process", standby="model"))
    install(app)
    return app


def serve_accel(backend: str, port: int, graphs: str, processes: int) -> None:
    """Serve with accel in FastAPI, until killed."""
    import uvicorn

    os.environ[SETTINGS] = f"{backend},{graphs}"
    app = "benchmarks.model_http:application"
    uvicorn.run(app, factory=True, port=port, workers=processes, loop="asyncio", log_level="error", access_log=False)


class LitEncoder(_LitAPI):  # type: ignore[misc]
    """The encoder as LitServe wants it."""

    def __init__(self, backend: str, graphs: bool, threads: int) -> None:
        super().__init__(max_batch_size=BATCHES[-1], batch_timeout=DELAY)
        self.backend, self.graphs, self.threads = backend, graphs, threads

    def setup(self, device: str) -> None:
        """Build it."""
        import torch

        torch.set_num_threads(self.threads)  # workers share the cores
        module = (build_half() if self.backend == "cuda" else build()).eval()
        module.load_state_dict(_weights(self.backend))
        self.run = (captured if self.graphs else eager)(module.to(device), device)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe takes an annotation for FastAPI's
        """Return the ids."""
        return request["input_ids"]

    def batch(self, inputs: list[Any]) -> Any:
        """Return the ids of a batch."""
        return np.array(inputs)

    def predict(self, x: Any) -> Any:
        """Return the vectors."""
        return self.run(x)

    def unbatch(self, output: Any) -> list[Any]:
        """Return them one by one."""
        return list(output.tolist())

    def encode_response(self, output: Any) -> Any:  # with an annotation FastAPI encodes the answer eight times as fast
        """Return what is sent."""
        return {"output": output}


def serve_litserve(backend: str, port: int, graphs: bool, workers: int) -> None:
    """Serve with LitServe, until killed."""
    encoder = LitEncoder(backend, graphs, max(1, CORES // workers))
    server = litserve.LitServer(encoder, accelerator=backend, devices=1, workers_per_device=workers, fast_queue=True)
    server.run(host="127.0.0.1", port=port, log_level="error", access_log=False, generate_client_file=False)


def _weights(backend: str) -> dict[str, Any]:
    return dict((build_half() if backend == "cuda" else build()).state_dict())


# -- clients


async def drive(url: str, clients: int, seconds: float, seed: int) -> dict[str, Any]:
    """Send requests from many tasks, and return latencies in milliseconds, the first ones of connections apart, and what went wrong."""
    first, later, wrong = list[float](), list[float](), dict[str, int]()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    end = start + seconds

    async def client(number: int) -> None:
        rng = np.random.default_rng((seed, number))
        latencies = first
        while time.perf_counter() < end:
            body = json.dumps({"input_ids": rng.integers(0, VOCABULARY, LENGTH).tolist()})
            began = time.perf_counter()
            try:
                async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
                    data = await response.read()
                    what = str(response.status) if response.status != 200 else ""
            except (aiohttp.ClientError, TimeoutError) as error:
                what = type(error).__name__
            if what:
                wrong[what] = wrong.get(what, 0) + 1
                await asyncio.sleep(0.05)
                continue
            latencies.append(1e3 * (time.perf_counter() - began))
            latencies = later
            if len(latencies) % 64 == 1:
                assert abs(float(np.linalg.norm(json.loads(data)["output"])) - 1) < 1e-2

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as session:
        await asyncio.gather(*(client(number) for number in range(clients)))
    return {"first": first, "later": later, "wrong": wrong, "seconds": time.perf_counter() - start}


def load(url: str, clients: int, seconds: float) -> dict[str, Any]:
    """Drive a server from several processes, which begin when all are ready."""
    command = [sys.executable, __file__, "--drive", url, "--clients", str(clients // DRIVERS), "--seconds", str(seconds)]
    drivers = [
        subprocess.Popen([*command, "--seed", str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(DRIVERS)
    ]
    for each in drivers:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in drivers:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    found = [json.loads(each.communicate()[0]) for each in drivers]
    later = np.concatenate([each["later"] for each in found])
    latencies = np.concatenate([later, *(each["first"] for each in found)])
    wrong: dict[str, int] = {}
    for each in found:
        for what, count in each["wrong"].items():
            wrong[what] = wrong.get(what, 0) + count
    p50, p99 = np.percentile(latencies, (50, 99)) if latencies.size else (np.nan, np.nan)
    p99_later = np.percentile(later, 99) if later.size else np.nan
    return {
        "requests_per_s": latencies.size / max(each["seconds"] for each in found),
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "p99_later_ms": float(p99_later),
        "wrong": wrong,
    }


async def poisoned(url: str) -> dict[str, Any]:
    """Send a token out of range; return how it was answered, and how good requests, one after another, fared in the time after it."""
    good = json.dumps({"input_ids": [1] * LENGTH})
    bad = json.dumps({"input_ids": [1] * (LENGTH - 1) + [100 * VOCABULARY]})
    headers = {"content-type": "application/json"}
    answered, failed, worst, last = 0, 0, 0.0, time.perf_counter()
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30)) as session:

        async def send() -> str:
            try:
                async with session.post(url, data=bad) as response:
                    return f"{response.status} {(await response.text())[:120]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                return type(error).__name__

        sent, end = asyncio.create_task(send()), time.perf_counter() + OVER
        while time.perf_counter() < end:
            try:
                async with session.post(url, data=good) as response:
                    is_good = response.status == 200
                    await response.read()
            except (aiohttp.ClientError, TimeoutError):
                is_good = False
            answered, failed = answered + is_good, failed + (not is_good)
            if is_good:
                worst, last = max(worst, time.perf_counter() - last), time.perf_counter()
            else:
                await asyncio.sleep(0.05)
        return {
            "poison": await sent,
            "poison_again": await send(),
            "answered": answered,
            "failed": failed,
            "longest_without_answer_s": max(worst, time.perf_counter() - last),
        }


# -- servers


@contextlib.contextmanager
def server(name: str, backend: str, workers: int, processes: int) -> Iterator[Callable[[], contextlib.AbstractContextManager[str]]]:
    """Have a server; yield what makes a context in which it runs, entered with the address of its route."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, __file__, "--serve", name, "--backend", backend, "--port", str(port), "--workers", str(workers)]
    command += ["--processes", str(processes if name.startswith(SEVERAL) else 1)]
    process = subprocess.Popen(command, start_new_session=True)
    url = f"http://127.0.0.1:{port}/{'encode' if name.startswith('accel') else 'predict'}"
    try:
        asyncio.run(_ready(url, process))
        polls = name.startswith("litserve")  # while it waits for requests

        @contextlib.contextmanager
        def running() -> Iterator[str]:
            if polls:
                os.killpg(process.pid, signal.SIGCONT)
            try:
                yield url
            finally:
                if polls:
                    os.killpg(process.pid, signal.SIGSTOP)

        if polls:
            os.killpg(process.pid, signal.SIGSTOP)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a request is answered."""
    body = {"input_ids": [1] * LENGTH}
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url, json=body) as response:
                    if response.status == 200:
                        return
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            await asyncio.sleep(0.1)


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one block of a server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, help="LitServe's workers_per_device (default: the cores on a CPU, 4 on a GPU)")
    parser.add_argument("--processes", type=int, default=1, help="of HTTP for accel, measured beside one (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results there")
    for hidden in ("--serve", "--drive", "--port", "--seed"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.workers = given.workers or (4 if given.backend == "cuda" else CORES)
    if given.serve and given.serve.startswith("litserve"):
        serve_litserve(given.backend, int(given.port), given.backend == "cuda" and "eager" not in given.serve, given.workers)
    elif given.serve:
        serve_accel(given.backend, int(given.port), "off" if "eager" in given.serve else "auto", given.processes)
    elif given.drive:
        print(json.dumps(asyncio.run(drive(given.drive, given.clients, given.seconds, int(given.seed)))))
    else:
        _compare(given)


def _compare(given: argparse.Namespace) -> None:
    kinds = ["", " eager"] if given.backend == "cuda" else [""]
    subjects = ["accel", *([SEVERAL] if given.processes > 1 else []), *(["litserve"] if litserve else [])]
    names = [of + kind for of in subjects for kind in kinds]
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(name, given.backend, given.workers, given.processes)) for name in names}
        for number in range(given.rounds + 1 if given.rounds else 0):
            for name, each in servers.items():
                with each() as url:
                    row = load(url, given.clients, given.seconds if number else min(given.seconds, 2.0))
                if number:
                    found.setdefault(name, {"rounds": []})["rounds"].append(row)
                    print(f"{name:14}", row, flush=True)
        for name, each in servers.items():
            with each() as url:
                found.setdefault(name, {"rounds": []})["poison"] = asyncio.run(poisoned(url))
            print(f"{name:14}", found[name]["poison"], flush=True)
    for name, each in found.items():
        if not each["rounds"]:
            continue
        each["median"] = {
            key: statistics.median(row[key] for row in each["rounds"]) for key in ("requests_per_s", "p50_ms", "p99_ms", "p99_later_ms")
        }
        print(f"{name:14}", *(f"{key} {value:9.2f}" for key, value in each["median"].items()))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
