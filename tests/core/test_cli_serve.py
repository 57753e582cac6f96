from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest

import accel
from accel.cli import serve
from accel.cli.digits import Model, load_digits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CLIENTS = 200


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(params=["fastapi", "aiohttp"])
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, *words: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Run the command in this process, and end it with a signal."""
    listening = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(serve, "print", lambda text, **_: listening.set_result(text), raising=False)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve.run(arguments("--device", "cpu", "--port", "0", *words)))
        try:
            line = await listening
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found is not None
            assert "on cpu:0 at" in line
            async with aiohttp.ClientSession(found[0], connector=aiohttp.TCPConnector(limit=0)) as session:
                yield session
        finally:
            os.kill(os.getpid(), number)
    assert task.result() == 0


async def test_no_request_is_lost_or_wrong_through_a_fault(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load_digits()
    async with accel.System() as system:
        model = await Model.load(await system.open_device("cpu"), digits)
    images = digits.held_out_images[:CLIENTS]
    expected = np.argmax(model.reference(images), axis=1).tolist()

    async with running(monkeypatch, signal.SIGTERM, "--framework", framework, "--fault-at", "40") as session:

        async def client(image: list[float]) -> list[tuple[int, Any]]:
            answers = []
            for _ in range(3):
                async with session.post("/digits", json={"pixels": image}) as answer:
                    answers.append((answer.status, await answer.json()))
            return answers

        answers = await asyncio.gather(*(client(image.tolist()) for image in images))
        async with session.get("/readyz") as answer:
            assert await answer.json() == {"ok": True, "state": "ready", "generation": 2}
    assert answers == [[(200, {"digit": digit})] * 3 for digit in expected]


async def test_what_is_no_image_is_refused_alone(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, signal.SIGINT, "--framework", framework) as session:
        async with session.get("/samples/100003") as answer:
            sample = await answer.json()
        good = session.post("/digits", json=sample)
        wrong: list[Any] = [
            [],
            {},
            7,
            {"pixels": 3},
            {"pixels": [0.5] * 63},
            {"pixels": ["x"] * 64},
            {"pixels": [2.0] * 64},
            {"pixels": [[0.0] * 8] * 8},
        ]
        answers = await asyncio.gather(good, *(session.post("/digits", json=body) for body in wrong))
        assert [answer.status for answer in answers] == [200] + [422] * len(wrong)
        assert await answers[0].json() == {"digit": sample["label"]}
        assert {(await answer.json())["error"] for answer in answers[1:]} == {"InvalidArgumentError"}
        async with session.post("/digits", data=b"{", headers={"content-type": "application/json"}) as answer:
            assert answer.status == 422


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "99999"), "--port: must be a whole number from 0 to 65535, not '99999'"),
        (("--port", "http"), "--port: must be a whole number from 0 to 65535, not 'http'"),
        (("--fault-at", "0"), "--fault-at: must be a whole number at least 1, not '0'"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_with_its_limits(
    words: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(*words)
    assert said in capsys.readouterr().err


async def test_a_taken_port_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert await serve.run(arguments("--device", "cpu", "--port", str(port))) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"accel: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert said.count("\n") == 1


async def test_a_device_that_is_not_there_is_told_before_anything_starts() -> None:
    with pytest.raises(accel.BackendUnavailableError):
        await serve.run(arguments("--device", "cpu:99"))


@pytest.mark.parametrize("words", [["--port", "65536"], ["--port", "-1"], ["--port", "x"], ["--fault-at", "0"], ["--framework", "flask"]])
def test_wrong_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        arguments(*words)
    assert left.value.code == 2
    assert words[0] in capsys.readouterr().err
