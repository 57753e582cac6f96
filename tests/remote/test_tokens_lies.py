"""Owners of tokens that answer what is none: each answer is an error with a remedy, and costs the device nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.process.channel import Channel
from accel.process.protocol import ProtocolError
from accel.remote import tokens
from tests.child_support import no_child_left
from tests.device_support import bounded, failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

__all__ = ["no_child_left"]  # a fixture

pytestmark = pytest.mark.usefixtures("nothing_left", "no_child_left")


@pytest.fixture(params=["inline", "process"])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", host=request.param)


@contextlib.contextmanager
def lying(answer: Callable[[Channel], None]) -> Iterator[accel.AccelToken]:
    """Yield a token whose device answers each request in its own way."""
    token = accel.AccelToken("cpu:0/" + os.urandom(16).hex(), 1, 1)
    loop, channels = asyncio.get_running_loop(), []
    listener = tokens._listen(token.device)

    def accept() -> None:
        channel = Channel(
            listener.accept()[0],
            loop,
            on_message=lambda *_: answer(channel),
            on_lost=lambda _: None,
        )
        channels.append(channel)

    with listener:
        loop.add_reader(listener, accept)
        try:
            yield token
        finally:
            loop.remove_reader(listener)
            for channel in channels:
                channel.close()


async def test_an_owner_that_lies_is_told(device: accel.Device) -> None:
    memory = await device.share(await device.zeros(4, shareable=True))
    reading, writing = os.pipe()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 4096)
    right = [memory.nbytes, [4], "float32", memory.uuid]
    answers: list[tuple[int, Any, tuple[int, ...]]] = [
        (2, right, ()),
        (2, right, (memory.fd, memory.fd)),
        (2, right, (reading,)),
        (2, right, (unsealed,)),
        (2, [1 << 40, *right[1:]], (memory.fd,)),
        (2, [-1, *right[1:]], (memory.fd,)),
        (2, ["x", *right[1:]], (memory.fd,)),
        (2, [right[0], [1 << 40], *right[2:]], (memory.fd,)),
        (2, [right[0], 5, *right[2:]], (memory.fd,)),
        (2, [right[0], ["x"], *right[2:]], (memory.fd,)),
        (2, [*right[:2], "float99", right[3]], (memory.fd,)),
        (2, {}, (memory.fd,)),
        (2, right[:3], (memory.fd,)),
        (3, {}, ()),
        (3, right, (memory.fd,)),
        (9, right, (memory.fd,)),
    ]
    for kind, content, fds in answers:
        data = json.dumps(content).encode()
        with lying(lambda channel, kind=kind, data=data, fds=fds: channel.send(kind, data, fds=fds)) as token:  # type: ignore[misc]
            for use in (device.attach, device.put):
                with pytest.raises(accel.AccelError) as caught:
                    await bounded(use(token))
                assert caught.value.remedy, (kind, content)
    deep = json.dumps([right[0], [1] * 1000, *right[2:]]).encode()
    with lying(lambda channel: channel.send(2, deep, fds=(memory.fd,))) as token:
        await failure(device.put(token), accel.InvalidArgumentError)
    with lying(lambda channel: channel.send(2, b"x" * (1 << 20))) as token:
        await failure(device.put(token), ProtocolError)
    with lying(lambda channel: channel.close()) as token:
        await failure(device.put(token), accel.StaleRefError)
    with lying(lambda channel: channel.send(2, json.dumps(right).encode(), fds=(memory.fd,))) as token:
        assert (await device.get(await device.put(token))).tolist() == [0.0] * 4
        assert (await device.get(await device.attach(token))).tolist() == [0.0] * 4
    for fd in (memory.fd, reading, writing, unsealed):
        os.close(fd)
    assert device.generation == 1
