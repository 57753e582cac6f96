"""What may become of the process that describes files."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from accel.actors import ActorSystem
from accel.files import describer, description
from accel.files.messages import Kind
from accel.process.channel import Channel

if TYPE_CHECKING:
    import socket


async def has_little_room(sock: socket.socket) -> None:
    describer._ROOM = 64 << 20  # type: ignore[misc]
    await describer.serve(sock)


async def dies(sock: socket.socket) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def ends(sock: socket.socket) -> None:
    pass


async def raises(sock: socket.socket) -> None:
    raise LookupError("a bug")


async def babbles(sock: socket.socket) -> None:
    lost = asyncio.Event()
    channel = Channel(sock, asyncio.get_running_loop(), on_message=lambda *_: None, on_lost=lambda _: lost.set())
    channel.send(Kind.TENSOR, b"[[[")
    await lost.wait()


async def hangs(sock: socket.socket) -> None:
    if mark := os.environ.get("ACCEL_TEST_MARK"):
        Path(mark).touch()
    time.sleep(1000)


async def describes(sock: socket.socket) -> None:
    """Describe a file from within a child, and say what is in it."""
    async with ActorSystem() as system:
        (found,) = await description.describe(system, [Path(os.environ["ACCEL_TEST_MARK"])])
    sock.setblocking(True)
    sock.sendall(" ".join(found.tensors).encode())
