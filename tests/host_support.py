"""What the tests of channels share: two ends on one loop, and a raw end that says what no channel would."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel.process.channel import Channel
from accel.process.incoming import Incoming
from accel.process.protocol import MAX_MESSAGE, encode_header, greeting

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from accel.errors import AccelError

    Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]

PATIENCE = 30.0


class End:
    """A channel that notes what it is told."""

    def __init__(
        self, sock: socket.socket, react: Callable[[End, int, bytes, list[int]], None] | None = None, max_message: int = MAX_MESSAGE
    ) -> None:
        self.messages: list[tuple[int, bytes]] = []
        self.descriptors: list[int] = []
        self.losses: list[AccelError | None] = []
        self.changed = asyncio.Event()
        self.react = react
        self.channel = Channel(
            sock, asyncio.get_running_loop(), on_message=self._on_message, on_lost=self._on_lost, max_message=max_message
        )

    def _on_message(self, kind: int, payload: bytes, descriptors: list[int]) -> None:
        self.messages.append((kind, payload))
        self.changed.set()
        if self.react is not None:
            self.react(self, kind, payload, descriptors)

    def _on_lost(self, error: AccelError | None) -> None:
        self.losses.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def greeted(self) -> None:
        """Wait until nothing of the other end's greeting lies in the socket: closing it then resets no connection."""
        async with asyncio.timeout(PATIENCE):
            while not self.channel._is_greeted:
                await asyncio.sleep(0)

    async def lost(self) -> AccelError | None:
        await self.until(lambda: self.losses)
        assert len(self.losses) == 1
        assert self.channel.is_closed
        return self.losses[0]

    async def received(self, count: int) -> list[tuple[int, bytes]]:
        await self.until(lambda: len(self.messages) >= count or self.losses)
        assert self.losses == []
        return self.messages


def take_all(end: End, kind: int, payload: bytes, descriptors: list[int]) -> None:
    end.descriptors += descriptors
    descriptors.clear()


@contextmanager
def two_ends(max_message: int = MAX_MESSAGE) -> Iterator[tuple[End, End]]:
    one, other = socket.socketpair()
    first, second = End(one, max_message=max_message), End(other, max_message=max_message)
    try:
        yield first, second
    finally:
        first.channel.close()
        second.channel.close()


@contextmanager
def raw_end(max_message: int = MAX_MESSAGE) -> Iterator[tuple[End, socket.socket]]:
    """Yield a channel that has been greeted, and the plain, blocking socket at its other end."""
    one, other = socket.socketpair()
    end = End(one, max_message=max_message)
    other.settimeout(PATIENCE)
    other.sendall(greeting())
    with other:
        try:
            yield end, other
        finally:
            end.channel.close()


def message(kind: int, payload: bytes = b"", descriptors: int = 0) -> bytes:
    return encode_header(kind, len(payload), descriptors) + payload


@contextmanager
def reading(max_message: int = MAX_MESSAGE) -> Iterator[tuple[Incoming, socket.socket]]:
    """Yield what reads a socket, and the socket at its other end."""
    one, other = socket.socketpair()
    one.setblocking(False)
    with one, other:
        yield Incoming(one, max_message, close_all), other


def frames(data: bytes) -> list[tuple[int, bytes]]:
    with reading() as (incoming, other):
        for start in range(0, len(data), 1 << 16):
            other.sendall(data[start : start + (1 << 16)])
            incoming.read(1 << 16)
        other.close()
        assert incoming.read(1) == 0
        return [(found.kind, found.payload) for found in incoming.messages]


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def write_end() -> int:
    """Return the write end of a pipe whose read end is closed: a descriptor and nothing else."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing
