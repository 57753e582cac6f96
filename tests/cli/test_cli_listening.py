"""What clients of `accel serve` may hold: connections in number and time; and what a terminal that closes does not lose."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from accel.cli import serve
from accel.cli.listening import Listener, default_limit
from tests.cli.test_cli_serve import arguments
from tests.device_support import bounded, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MODULE = """
import asyncio
from aiohttp import web
from fastapi import FastAPI

gate, entered = asyncio.Event(), []

async def wait(numbers):
    entered.append(numbers)
    await gate.wait()
    return numbers

asgi, aio = FastAPI(), web.Application()

@asgi.post("/wait")
async def wait_asgi():
    return await wait(1)

async def wait_aio(request):
    return web.json_response(await wait(1))

aio.router.add_post("/wait", wait_aio)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"listening_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@contextlib.asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, *words: str) -> AsyncIterator[tuple[int, asyncio.Task[int]]]:
    """Run the command in this process; give its port and its task."""
    listening = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(serve, "print", lambda text, **_: listening.set_result(text), raising=False)
    task = asyncio.ensure_future(serve.run(arguments("--port", "0", *words)))
    try:
        found = re.search(r":(\d+) ", (await bounded(listening)).partition("http://")[2])
        assert found is not None
        yield int(found[1]), task
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        assert await bounded(task) == 0


def listener(limit: int) -> Listener:
    made = Listener(socket.create_server(("127.0.0.1", 0)), limit)
    made.setblocking(False)
    return made


def test_connections_beyond_the_limit_are_answered_and_closed_and_room_is_used_again() -> None:
    with listener(2) as bound, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(bound.getsockname(), timeout=20)) for _ in range(5)]
        accepted = [bound.accept()[0] for _ in range(2)]
        with pytest.raises(BlockingIOError):
            bound.accept()
        for refused in clients[2:]:
            assert refused.recv(1000).startswith(b"HTTP/1.1 503 ")
            assert refused.recv(1000) == b""
        accepted[0].close()
        stack.enter_context(socket.create_connection(bound.getsockname(), timeout=20))
        accepted.append(stack.enter_context(bound.accept()[0]))
        accepted[2].send(b"x")
        accepted[1].close()


def test_a_shortage_of_descriptors_is_told_once_and_not_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: socket.socket) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with listener(2) as bound:
        monkeypatch.setattr(socket.socket, "accept", none)
        with pytest.raises(OSError, match="open files"):
            bound.accept()
        for _ in range(5):
            with pytest.raises(BlockingIOError):
                bound.accept()


def test_half_of_the_descriptors_are_left_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, limit in ((256, 96), (1024, 480), (1 << 20, 4096), (-1, 4096), (10, 1)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert default_limit() == limit


HEAD = b"POST /wait HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n"


@pytest.mark.parametrize("target", ["wait", "asgi", "aio"])
async def test_a_head_has_a_time_and_an_answer_takes_as_long_as_it_takes(target: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--device", "cpu") if target == "wait" else ()
    async with running(monkeypatch, *words, "--head-timeout", "0.4", f"{module}:{target}") as (port, _):
        working, to_work = await asyncio.open_connection("127.0.0.1", port)
        to_work.write(HEAD + b"1")
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for (_, writer), begun in zip(others, (b"", b"POST /wa", b"POST /wait HTTP/1.1\r\nHost: a\r\n"), strict=True):
            writer.write(begun)
        for reader, writer in others:
            with contextlib.suppress(ConnectionResetError):
                assert await bounded(reader.read()) == b"", "it was closed without an answer"
            writer.close()
        found = sys.modules[module]
        await until(lambda: len(found.entered) == 1)
        found.gate.set()
        assert (await bounded(working.readline())).split()[1] == b"200"
        to_work.write(b"POST /wa")  # a kept connection on which the next head begins
        with contextlib.suppress(ConnectionResetError):
            assert (await bounded(working.read())).endswith(b"1")
        to_work.close()


@pytest.mark.parametrize("target", ["wait", "asgi", "aio"])
async def test_a_terminal_that_closes_loses_no_request_in_flight(target: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--device", "cpu") if target == "wait" else ()
    async with running(monkeypatch, *words, f"{module}:{target}") as (port, task):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"1")
        await until(lambda: len(sys.modules[module].entered) == 1)
        for _ in range(2):  # the terminal sends one, and the shell another
            os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        sys.modules[module].gate.set()
        assert (await bounded(reader.readline())).split()[1] == b"200"
        writer.close()
        assert await bounded(task) == 0


async def test_a_service_that_ignores_hang_ups_goes_on_doing_so(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with running(monkeypatch, f"{module}:asgi") as (_, task):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert not task.done()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
