"""A connection for arrays is lost when an array that is due stops coming, and not when there is no room for one."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

import accel
from accel.node.arrays import ArrayConnection, Place
from accel.node.handshake import Streams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATIENCE = 30.0
SILENCE = 0.4
ARRAY = memoryview(bytes(range(256)) * (8 << 12))
PLACE = Place(1, 1, 0, ARRAY.nbytes)


class Side:
    """One end of a connection, which may have no room for an array yet."""

    def __init__(self, streams: Streams) -> None:
        self.memory: memoryview | None = memoryview(bytearray(ARRAY.nbytes))
        self.received = asyncio.Event()
        self.lost: asyncio.Future[accel.AccelError | None] = asyncio.get_running_loop().create_future()
        self.arrays = ArrayConnection(
            streams,
            locate=lambda place: self.memory,
            on_received=lambda place: self.received.set(),
            on_lost=self.lost.set_result,
            silence=SILENCE,
        )

    async def beat(self, seconds: float = PATIENCE, *, is_due: bool = True) -> None:
        """Have heartbeats for some time, or until the connection is lost."""
        end = asyncio.get_running_loop().time() + seconds
        while not self.lost.done() and asyncio.get_running_loop().time() < end:
            self.arrays.check(is_due=is_due)
            await asyncio.sleep(SILENCE / 20)


async def streams_of(sock: socket.socket) -> Streams:
    sock.setblocking(False)
    return Streams(*await asyncio.open_connection(sock=sock), sock)


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    pair = Side(await streams_of(first)), Side(await streams_of(second))
    yield pair
    for side in pair:
        side.arrays.abort()
    await asyncio.sleep(0)


async def test_an_array_that_is_due_and_does_not_come_loses_the_connection(sides: tuple[Side, Side]) -> None:
    _, to = sides
    await to.beat(2 * SILENCE, is_due=False)
    assert not to.lost.done()
    begin = asyncio.get_running_loop().time()
    await to.beat()
    error = await to.lost
    assert isinstance(error, accel.HostDiedError)
    assert not error.hung, "it proves nothing against the work of the child"
    assert asyncio.get_running_loop().time() - begin >= SILENCE


async def test_an_array_that_comes_slowly_loses_nothing(sides: tuple[Side, Side]) -> None:
    sender, to = sides
    head = bytearray()
    sender.arrays._transport.write = head.extend  # type: ignore[method-assign, assignment]
    sender.arrays.send(PLACE, ARRAY)
    await asyncio.sleep(0)
    beating = asyncio.ensure_future(to.beat(3 * SILENCE))
    for byte in head[:60]:  # the loop is not woken for these: the system gathers a MiB
        sender.arrays._sock.send(bytes((byte,)))
        await asyncio.sleep(SILENCE / 20)
    await beating
    assert not to.lost.done()


async def test_an_end_that_was_held_up_has_time_to_read_what_has_come(sides: tuple[Side, Side]) -> None:
    sender, to = sides
    to.arrays.check(is_due=True)
    to.arrays._checked -= 100 * SILENCE
    to.arrays.check(is_due=True)
    sender.arrays.send(PLACE, ARRAY)
    await asyncio.wait_for(to.received.wait(), PATIENCE)
    assert not to.lost.done()


async def test_an_end_without_room_for_an_array_is_waited_for(sides: tuple[Side, Side]) -> None:
    sender, to = sides
    memory, to.memory = to.memory, None
    sender.arrays.send(PLACE, ARRAY)
    await asyncio.gather(to.beat(4 * SILENCE, is_due=False), sender.beat(4 * SILENCE, is_due=False))
    assert not sender.lost.done()
    assert not to.lost.done()
    to.memory = memory
    to.arrays.resume()
    await asyncio.wait_for(to.received.wait(), PATIENCE)
    assert memory == ARRAY
