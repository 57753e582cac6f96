"""The demo's side of the plain service: starts it, asks it, kills it, and clears it away."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cli.digits import PIXELS
from accel.errors import HostDiedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from numpy.typing import NDArray

    from accel.cli.demo_screen import Tally
    from accel.cli.digits import Model

__all__ = ["PlainService", "plain_service"]

_PROGRAM = Path(__file__).with_name("plain_service.py")


class PlainService(asyncio.Protocol):
    """A connection to the service's process; made by :func:`plain_service`.

    Parameters
    ----------
    process
        The service.
    tally
        Told of each answer and each failure.
    """

    def __init__(self, process: subprocess.Popen[bytes], tally: Tally) -> None:
        self._process = process
        self._tally = tally
        self._transport: Any = None
        self._is_closed = False
        self._waiting: collections.deque[asyncio.Future[int]] = collections.deque()

    @property
    def pid(self) -> int:
        """The service's process."""
        return self._process.pid

    def ask(self, image: NDArray[np.float32]) -> asyncio.Future[int]:
        """Send a request; the future gets its digit, or -1 where the service has gone."""
        future = asyncio.get_running_loop().create_future()
        if self._tally.is_over or self._transport.is_closing():
            self._fail(future)
        else:
            self._waiting.append(future)
            self._transport.write(image.tobytes())
        return future

    def kill(self) -> None:
        """Send SIGKILL to the service, which ends it for good."""
        self._process.kill()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for digit in data:
            self._tally.on_answer()
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(digit)

    def close(self) -> None:
        """Leave the service, which then ends."""
        self._is_closed = True
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.is_over = not self._is_closed
        while self._waiting:
            self._fail(self._waiting.popleft())

    def _fail(self, future: asyncio.Future[int]) -> None:
        self._tally.on_failure()
        if not future.done():
            future.set_result(-1)


@contextlib.asynccontextmanager
async def plain_service(model: Model, tally: Tally) -> AsyncIterator[PlainService]:
    """Run the service of a model in a process of its own while the block runs.

    It has answered once when the block begins.

    Parameters
    ----------
    model
        What it serves.
    tally
        Counts its answers from the block's beginning.
    """
    ours, theirs = socket.socketpair()
    with ours:
        process = await asyncio.to_thread(_start, model, theirs)
        try:
            _, service = await asyncio.get_running_loop().create_unix_connection(lambda: PlainService(process, tally), sock=ours)
            try:
                if await service.ask(np.zeros(PIXELS, np.float32)) < 0:
                    raise HostDiedError(f"the plain service, process {process.pid}, did not start: it has said why above")
                tally.begin()
                yield service
            finally:
                service.close()
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


def _start(model: Model, theirs: socket.socket) -> subprocess.Popen[bytes]:
    with theirs, tempfile.TemporaryFile() as file:
        np.savez(file, projection=model.projection, weights=model.weights)
        file.seek(0)
        # A group of its own: Ctrl-C is for the demo, which then ends the service.
        # -P: modules beside the program are not what it imports.
        command = (sys.executable, "-P", str(_PROGRAM), str(theirs.fileno()))
        return subprocess.Popen(command, stdin=file, pass_fds=(theirs.fileno(),), process_group=0)
