"""Children that do not keep to the protocol, for tests of the parent."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from typing import TYPE_CHECKING

from accel.process.channel import Channel

if TYPE_CHECKING:
    import socket


_PING = 8


async def noise(sock: socket.socket) -> None:
    """Send bytes that are no message."""
    sock.setblocking(True)
    sock.sendall(os.urandom(4096))
    await asyncio.Event().wait()


async def _speak(sock: socket.socket, first: tuple[int, bytes], later: tuple[int, bytes] | None = None) -> None:
    """Answer the second message, with which a generation begins, with ``first``, and the next, which is an op, with ``later``."""
    asked: asyncio.Queue[int] = asyncio.Queue()
    channel = Channel(sock, asyncio.get_running_loop(), on_message=lambda kind, *_: asked.put_nowait(kind), on_lost=lambda _: None)
    for answer in (None, first, later):
        while await asked.get() == _PING:
            pass
        if answer is not None:
            channel.send(*answer)
    await asyncio.Event().wait()


async def no_json(sock: socket.socket) -> None:
    """Offer something that cannot be read."""
    await _speak(sock, (101, b"\xff{"))


async def no_error(sock: socket.socket) -> None:
    """Refuse with something that is no error."""
    await _speak(sock, (102, os.urandom(64)))


def _ready() -> tuple[int, bytes]:
    return 101, json.dumps({"capabilities": {"unary.neg": ["float64"]}}).encode()


async def answers_unasked(sock: socket.socket) -> None:
    """Say that something has ended which was never sent."""
    await _speak(sock, _ready(), (103, struct.pack("<Q", 7)))


async def times_unasked(sock: socket.socket) -> None:
    """Say how long the first op took, which was not asked."""
    await _speak(sock, _ready(), (125, struct.pack("<QQ", 1, 5)))


async def cut_numbers(sock: socket.socket) -> None:
    """Say that half a number has ended."""
    await _speak(sock, _ready(), (103, b"\0\0\0"))


async def slab_without_memory(sock: socket.socket) -> None:
    """Announce durable memory without its descriptor."""
    await _speak(sock, _ready(), (108, struct.pack("<QQ", 1 << 32, 1 << 20)))


async def half_a_place(sock: socket.socket) -> None:
    """Say where half a durable buffer is."""
    await _speak(sock, _ready(), (110, struct.pack("<QQ", 1, 5)))


async def log_that_is_too_deep(sock: socket.socket) -> None:
    """Send an event of the log that no parser takes."""
    await _speak(sock, (122, b"[" * 200_000))


async def log_with_odd_keys(sock: socket.socket) -> None:
    """Send an event of the log with the names of parameters as its keys, and then an offer."""
    keys = ("self", "level", "event", "method_name", "args", "kw", "exc_info", "stack_info", "extra", "name", "msg", "error")
    channel = Channel(sock, asyncio.get_running_loop(), on_message=lambda *_: None, on_lost=lambda _: None)
    for key in keys:
        channel.send(122, json.dumps(["error", "odd", {key: 1}]).encode())
    channel.send(*_ready())
    await asyncio.Event().wait()
