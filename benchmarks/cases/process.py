"""What an op costs whose device lives in a child process, beside the same op inline."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import numpy as np

from accel import System
from accel.cli.bench.measure import awaited
from accel.cli.bench.suite import Bench, BenchCase
from benchmarks.measures import together

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["CASES", "Echo"]

_TASKS = 64
_ECHO = """
import asyncio, socket, sys
async def main():
    sock, loop = socket.socket(fileno=int(sys.argv[1])), asyncio.get_running_loop()
    sock.setblocking(False)
    over = loop.create_future()
    def answer():
        data = sock.recv(65536)
        sock.send(data) if data else over.done() or over.set_result(None)
    loop.add_reader(sock, answer)
    await over
asyncio.run(main())
"""


class Echo:
    """Another process that sends back what it gets over a socket pair: what a message there and back costs at least."""

    async def __aenter__(self) -> Callable[[], Awaitable[None]]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _ECHO, str(theirs.fileno()), pass_fds=(theirs.fileno(),)
            )
        ours.setblocking(False)
        self._sock = ours
        loop = asyncio.get_running_loop()
        waiter: list[asyncio.Future[None]] = []

        def answered() -> None:
            if ours.recv(4096):
                waiter.pop().set_result(None)

        loop.add_reader(ours, answered)

        async def there_and_back() -> None:
            waiter.append(loop.create_future())
            ours.send(b"x" * 256)
            await waiter[0]

        return there_and_back

    async def __aexit__(self, *details: object) -> None:
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        await self._process.wait()


async def _await_small(bench: Bench) -> None:
    a = bench.rng.standard_normal((8, 8), dtype=np.float32)
    async with System("bench") as system, Echo() as echo:
        remote, inline = await system.open_device(bench.spec, host="process"), await system.open_device(bench.spec, host="inline")
        x, y = await remote.put(a), await inline.put(a)
        out, here = await remote.empty((8, 8), "float32"), await inline.empty((8, 8), "float32")
        count = bench.scale(1000, 200)
        subjects = {
            "process host": awaited(lambda: remote.blas.gemm(x, x, out=out), count),
            "inline": awaited(lambda: inline.blas.gemm(y, y, out=here), count),
            "a message there and back": awaited(echo, count),
        }
        await bench.compare("await an 8x8 gemm", subjects, rounds=bench.scale(5, 2))
        many = {"process host": together(lambda: remote.blas.gemm(x, x, out=out), _TASKS, bench.scale(100, 30))}
        await bench.compare(f"8x8 gemms from {_TASKS} tasks", many, rounds=bench.scale(5, 2))


CASES = (BenchCase("process", "an 8x8 gemm on a process host, beside inline and a bare message", _await_small),)
