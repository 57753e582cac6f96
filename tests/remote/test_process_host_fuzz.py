"""A peer that answers a process host with whatever comes to its mind: its device says so and goes on with the next; this process is never harmed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import random
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pytest

import accel
from accel.process.child import ChildProcess
from accel.process.exit_status import ExitStatus
from accel.process.incoming import Incoming
from accel.process.protocol import MAX_MESSAGE, ProtocolError, encode_header, greeting
from accel.remote import actor
from accel.remote.error_codec import encode_error
from accel.remote.messages import Kind
from tests.fork_support import close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

SECONDS, LONGEST = 2.0, 45.0
"""For how long at least, and at most, where the machine is so busy that too little has happened by then."""
HUNG = 10.0
OFTEN = accel.RestartStrategy(max_restarts=1_000_000, within=3600.0, backoff=(0.0, 0.0))
READY = json.dumps({"capabilities": {"unary.neg": ["float64"], "unary.abs": ["float64"]}}).encode()
NESTED = b"[" * 100_000 + b"]" * 100_000


class Peer:
    """Stands where a child process would: at the other end of a socket pair, and killed by closing it."""

    rng: ClassVar[random.Random] = random.Random()
    made: ClassVar[int] = 0

    def __init__(self, on_exit: Callable[[ExitStatus], None] | None) -> None:
        type(self).made += 1
        self.sock, self._own = socket.socketpair()
        self.pid = os.getpid()
        for end in (self.sock, self._own):
            end.setblocking(False)
        self.exit: ExitStatus | None = None
        self.is_stopped = False
        self._on_exit = on_exit
        self._task = asyncio.get_running_loop().create_task(self._talk())
        self._task.add_done_callback(self._ended)

    @classmethod
    async def start(cls, system: Any, target: str, *, uvloop: bool, on_exit: Callable[[ExitStatus], None] | None = None, **_: Any) -> Self:
        return cls(on_exit)

    def kill(self) -> None:
        self._task.cancel()

    async def aclose(self, grace: float = 1.0) -> ExitStatus:
        self._task.cancel()
        await asyncio.wait({self._task})
        self.sock.close()
        return ExitStatus(None, 9, "")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._own.close()
        self.exit = ExitStatus(None, 9, "")
        if self._on_exit is not None:
            self._on_exit(self.exit)
            self._on_exit = None

    async def _talk(self) -> None:
        loop, rng = asyncio.get_running_loop(), self.rng
        incoming, readable = Incoming(self._own, MAX_MESSAGE, close_all), asyncio.Event()
        loop.add_reader(self._own, readable.set)
        try:
            await loop.sock_sendall(self._own, damaged(rng, greeting(), 0.02))
            is_first = True
            while True:
                readable.clear()
                await readable.wait()
                try:
                    if not incoming.read(1 << 16):
                        break
                except BlockingIOError:
                    continue
                numbers = [number_of(message.payload) for message in incoming.messages if message.kind in (Kind.BATCH, Kind.GRAPH)]
                incoming.close()
                if is_first:
                    is_first = False
                    await self._say(damaged(rng, frame(Kind.READY, rng.choice([READY] * 20 + OFFERS)), 0.02))
                for number in numbers:
                    await self._say(b"".join(answers(rng, number)))
        except (OSError, ProtocolError):
            pass  # the parent has had enough
        finally:
            loop.remove_reader(self._own)
            incoming.close()

    async def _say(self, data: bytes) -> None:
        loop, rng = asyncio.get_running_loop(), self.rng
        while data:
            piece, data = (data, b"") if rng.random() < 0.8 else (data[: len(data) // 2], data[len(data) // 2 :])
            if piece and rng.random() < 0.1:
                with open(os.devnull, "rb") as file:
                    socket.send_fds(self._own, [piece[:100]], [file.fileno()] * rng.randint(1, 5))
                piece = piece[100:]
            await loop.sock_sendall(self._own, piece)


OFFERS = [
    b"",
    b"{}",
    b"null",
    b'"text"',
    b"[]",
    NESTED,
    b'{"capabilities": []}',
    b'{"capabilities": {"a": 1}}',
    b'{"capabilities": {"a": ["no"]}}',
    b"\xff",
]
OFFERS += [b'{"capabilities": "text"}', b'{"capabilities": {"a": [[]]}}', b'{"capabilities": {"a": null}}', b'{"capabilities": 1e999}']


def number_of(payload: bytes) -> int:
    """Return the number of an op that was sent."""
    number: int = marshal.loads(payload)[0]
    return number


def frame(kind: int, payload: bytes = b"", descriptors: int = 0) -> bytes:
    return encode_header(kind, len(payload), descriptors) + payload


def damaged(rng: random.Random, data: bytes, chance: float = 1.0) -> bytes:
    """Return the bytes, perhaps with some changed, cut off, or added."""
    if rng.random() >= chance or not data:
        return data
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        what = rng.randrange(3)
        if what == 0 and changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        elif what == 1:
            del changed[rng.randrange(len(changed) + 1) :]
        else:
            at = rng.randrange(len(changed) + 1)
            changed[at:at] = rng.randbytes(rng.randint(1, 20))
    return bytes(changed)


def answers(rng: random.Random, number: int) -> Iterator[bytes]:
    """Yield what an op is answered with: the truth, half of the time, and then something else, which ends it in the end."""
    if rng.random() < 0.5:
        yield frame(Kind.DONE, struct.pack("<Q", number))
        return
    for _ in range(rng.randint(1, 3)):
        yield damaged(rng, rng.choice(NONSENSE)(rng, number), 0.3)
    if rng.random() < 0.5:
        yield frame(Kind.DONE, struct.pack("<Q", number))
    yield rng.choice([b"", frame(Kind.FAULT, encode_error(accel.DriverError("broke", code=700, scope=accel.FaultScope.PROCESS)))])
    yield b"no message begins like this"


def an_error(rng: random.Random) -> bytes:
    cls = rng.choice([accel.DriverError, accel.OutOfMemoryError, accel.StaleRefError, accel.PoisonedInputError, accel.ContextPoisonedError])
    return encode_error(cls("said the child", scope=rng.choice(list(accel.FaultScope)[:3])))


NONSENSE: list[Callable[[random.Random, int], bytes]] = [
    lambda rng, _: rng.randbytes(rng.randint(1, 300)),
    lambda rng, _: frame(rng.randint(0, 65_535), rng.randbytes(rng.randint(0, 100))),
    lambda rng, _: frame(rng.choice(list(Kind)), rng.randbytes(rng.randint(0, 100))),
    lambda rng, _: frame(rng.choice(list(Kind)), rng.choice([*OFFERS, READY]), rng.randint(0, 3)),
    lambda rng, number: frame(Kind.DONE, struct.pack("<Q", number) * rng.randint(1, 3)),
    lambda rng, _: frame(Kind.DONE, struct.pack("<QQ", rng.getrandbits(64), 2**64 - 1)),
    lambda rng, number: frame(Kind.FAILED, struct.pack("<Qi", number, rng.choice([-1, 0, 7, 2**31 - 1, -(2**31)])) + an_error(rng)),
    lambda rng, number: frame(Kind.FAILED, struct.pack("<Qi", number, -1) + rng.choice(OFFERS)),
    lambda rng, number: frame(Kind.TIMES, struct.pack("<QQ", number, rng.getrandbits(64))),
    lambda rng, _: frame(Kind.TIMES, rng.randbytes(rng.randint(0, 33))),
    lambda rng, _: frame(Kind.FAULT, an_error(rng)),
    lambda rng, _: frame(Kind.FAULT, rng.choice(OFFERS)),
    lambda rng, _: frame(Kind.MEMORY, struct.pack("<QQ", 2**64 - 1, rng.getrandbits(64))),
    lambda rng, _: frame(Kind.MEMORY, rng.randbytes(rng.randint(0, 17))),
    lambda rng, _: frame(Kind.PONG, rng.randbytes(5)),
    lambda _rng, _: struct.pack("<IHHI", 0x4C434341, Kind.DONE, 0, 2**32 - 1),
    lambda _rng, _: struct.pack("<IHHI", 0x4C434341, Kind.DONE, 65_535, 8),
    lambda _rng, _: greeting(),
]


async def use(device: accel.Device, rng: random.Random) -> int:
    """Do something with the device, and return whether it was answered; every await ends, with an answer or with an error of accel's."""

    async def work() -> None:
        match rng.randrange(5):
            case 0:
                await device.get(await device.zeros(rng.randint(0, 50)))
            case 1:
                await device.put(np.ones(rng.choice([1, 1000, 60_000])))
            case 2:
                async with device.batch() as batch:
                    batch.elementwise.unary("neg", batch.zeros(3, "float64"))
            case 3:
                x = await device.zeros(4, "float64")
                await asyncio.gather(*(device.elementwise.unary("abs", x) for _ in range(3)))
            case _:
                x = await device.zeros(4, "float64")
                async with device.graph() as graph:
                    graph.elementwise.unary("neg", x, out=x)
                await graph.replay()
        device.info()
        device.health()

    with contextlib.suppress(accel.AccelError):
        await asyncio.wait_for(work(), HUNG)  # a TimeoutError of its own fails the test
        return 1
    return 0


async def test_whatever_a_child_says_every_await_ends_and_the_next_child_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    monkeypatch.setattr(ChildProcess, "start", Peer.start)
    monkeypatch.setattr(Peer, "rng", random.Random(seed))
    # A header that announces more than comes is silence, which ends like that of a child that hangs.
    monkeypatch.setattr(actor, "STARTUP_TIMEOUT", 0.5)
    quick = accel.ProcessHost(busy_timeout=0.5, heartbeat_interval=0.05, heartbeat_timeout=0.2)
    unexpected: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unexpected.append(context))
    rng, began, answered, opened, uses = random.Random(seed + 1), time.monotonic(), 0, 0, 0

    def goes_on() -> bool:
        return time.monotonic() < began + (SECONDS if min(answered, Peer.made) > 20 else LONGEST)

    while goes_on():
        async with accel.System(close_timeout=1.0) as system:
            try:
                device = await asyncio.wait_for(system.open_device("cpu", host=quick, restart=OFTEN), HUNG)
            except accel.AccelError:
                continue
            opened += 1
            while device.state is not accel.DeviceState.LOST and rng.random() < 0.98 and goes_on():
                answered += await use(device, rng)
                uses += 1
        assert unexpected == [], f"seed {seed}: {unexpected}"
    print(f"{Peer.made} children, {opened} devices, {uses} uses, {answered} answered")
    assert answered > 20, f"seed {seed}"
    assert Peer.made > 20, f"seed {seed}"
