"""Random programs in which ops fail at any point: each is answered with its own error, and none that ends well has read what a failed one was to write."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import accel
from tests.cpu_ops_support import PATIENCE, Ways, Work
from tests.op_bugs_support import Bug, Bugs, BugsOnTheLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


LARGE = 200_000  # elements, of which the copy takes another thread


USERS = st.tuples(
    st.sampled_from(["plan", "result", "kernel", "half"]),
    st.sampled_from(["value", "unprintable", "cancelled", "generator", "stop", "base", "demanding", "memory"]),
)


CALLS: dict[str, tuple[Any, str, Callable[[], BaseException]]] = {
    "dup": (os, "dup", lambda: OSError(errno.EMFILE, "Too many open files")),
    "memfd": (os, "memfd_create", lambda: OSError(errno.ENFILE, "Too many open files in system")),
    "map": (mmap, "mmap", lambda: OSError(errno.ENOMEM, "Cannot allocate memory")),
    "memory": (mmap, "mmap", MemoryError),
    "odd": (os, "dup", lambda: KeyError("odd")),
    "thread": (threading.Thread, "start", lambda: RuntimeError("can't start new thread")),
}


SYSTEMS = st.tuples(
    st.sampled_from(sorted(CALLS)), st.integers(0, 2), st.sampled_from(["put", "large", "zeros", "durable", "get", "batch", "user"])
)


STEPS = st.lists(st.one_of(USERS, SYSTEMS), min_size=1, max_size=6)


AT_ONCE = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], report_multiple_bugs=False)
"""A step that goes wrong is not answered for many seconds: no smaller example is looked for."""


@contextmanager
def failing(call: str, after: int) -> Iterator[None]:
    """Have a call of the system fail, after some that work."""
    owner, name, error = CALLS[call]
    real, left = getattr(owner, name), [after]

    def fails(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error()
        return real(*arguments, **options)

    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, real)


async def batch_of(device: accel.Device, x: accel.AccelRef) -> accel.AccelRef:
    """Run a batch that brings an array."""
    async with device.batch() as batch:
        y = batch.put(np.ones(LARGE))
        batch.run(Bug(x))
    return y


def work(device: accel.Device, x: accel.AccelRef, what: str) -> Awaitable[Any]:
    """Return an op, not awaited yet."""
    ops: dict[str, Callable[[], Awaitable[Any]]] = {
        "put": lambda: device.put(np.ones(8)),
        "large": lambda: device.put(np.ones(LARGE)),
        "zeros": lambda: device.zeros(LARGE),
        "durable": lambda: device.zeros(8, durable=True),
        "get": lambda: device.get(x),
        "batch": lambda: batch_of(device, x),
        "user": lambda: device.run(Bug(x)),
    }
    return ops[what]()


async def bounded(work: Awaitable[Any]) -> Any:
    """Await in time. Not by ``asyncio.wait_for``, whose frame keeps an error in a cycle, and so what the error's frames name."""
    async with asyncio.timeout(PATIENCE):
        return await work


async def one_step(device: accel.Device, x: accel.AccelRef, step: tuple[Any, ...]) -> None:
    """Do one thing that goes wrong, or not: it is answered, with an error of the op if with any, and the next op works."""
    try:
        if len(step) == 2:
            where, kind = step
            await bounded(device.run(Bug(x, f"{where}:{kind}")))
        else:
            call, after, what = step
            with failing(call, after):
                await bounded(work(device, x, what))
    except accel.AccelError as error:
        assert error.scope is accel.FaultScope.OP, repr(error)  # noqa: PT017 - of whichever error comes, if one does
        assert error.retryable or len(step) == 2 or step[0] == "odd", repr(error)  # noqa: PT017
    except TimeoutError:
        raise AssertionError(f"{step} was not answered") from None
    except Exception:
        assert step[0] == "plan", step  # what plan() raises is seen as it is, before anything is sent
    assert (device.state, device.generation) == (accel.DeviceState.READY, 1), step
    assert not x.is_stale
    y = await bounded(device.run(Bug(x)))
    np.testing.assert_array_equal(await bounded(device.get(y)), np.arange(4.0) + 1)


async def scenario(host: Any, library: type[Bugs], steps: list[tuple[Any, ...]]) -> None:
    """Go through the steps, and see that nothing is left of them."""
    loop = asyncio.get_running_loop()
    async with accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(library)
        x = await device.put(np.arange(4.0))
        used = device.info().memory.used
        for step in steps:
            await one_step(device, x, step)
        async with asyncio.timeout(PATIENCE):
            while (info := device.info()).memory.used != used or info.in_flight or info.queued:
                await asyncio.sleep(0)
        assert info.memory.durable == 0
        began = loop.time()
    assert loop.time() - began < 5 + 3, "closing keeps its time"


@pytest.mark.parametrize("library", [Bugs, BugsOnTheLoop])
@settings(AT_ONCE, max_examples=12)
@given(steps=STEPS)
def test_any_exception_at_any_point_inline(library: type[Bugs], steps: list[tuple[Any, ...]]) -> None:
    asyncio.run(scenario("inline", library, steps))


@settings(AT_ONCE, max_examples=2)
@given(steps=st.lists(st.one_of(USERS, SYSTEMS), min_size=20, max_size=30))
def test_any_exception_at_any_point_in_a_child(steps: list[tuple[Any, ...]]) -> None:
    asyncio.run(scenario("process", Bugs, steps))


BUFFERS, OPS = 4, 60


Held = set[tuple[float, ...] | None]
"""What a buffer may hold; ``None``: what a failed op was to write."""


class Program:
    """Sends ops at random, all at once, and knows what each buffer may hold after them."""

    def __init__(self, device: accel.Device, refs: list[accel.AccelRef], rng: random.Random) -> None:
        self.device, self.refs, self.rng = device, refs, rng
        self.may_hold: list[Held] = [{tuple(np.full(4, float(at)))} for at in range(len(refs))]
        self.sent: list[tuple[asyncio.Task[Any], bool, bool, Held | None]] = []

    def send(self, call: Any, *, may_fail: bool, may_succeed: bool = True, gives: Held | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(call)
        self.sent.append((task, may_fail, may_succeed, gives))
        return task

    def negate(self, source: int, target: int, *, fails: bool = False) -> None:
        """Take note of ``target = -source``, which fails if that must not be read."""
        held, before = self.may_hold[source], self.may_hold[target]
        after: Held = {None} if fails else {None if each is None else tuple(-value for value in each) for each in held}
        # An op that was refused before it was enqueued has left its output as it was.
        self.may_hold[target] = after | before if None in held else after

    async def batch(self, steps: list[tuple[int, int]]) -> None:
        async with self.device.batch() as batch:
            for source, target in steps:
                batch.elementwise.unary("neg", self.refs[source], out=self.refs[target])

    def step(self, number: int) -> None:
        device, refs, rng = self.device, self.refs, self.rng
        source, target = rng.sample(range(BUFFERS), 2)
        held = self.may_hold[source]
        unsound = None in held
        kind = rng.choice(["work", "fail", "unary", "put", "part", "get", "get", "batch", "cancel"])
        if kind in ("work", "fail"):
            work = Work(refs[source], "raise" if kind == "fail" else "", refs[target], gated=rng.random() < 0.5)
            self.send(device.run(work), may_fail=unsound or kind == "fail", may_succeed=kind == "work" and held != {None})
            self.negate(source, target, fails=kind == "fail")
        elif kind == "unary":
            self.send(device.elementwise.unary("neg", refs[source], out=refs[target]), may_fail=unsound, may_succeed=held != {None})
            self.negate(source, target)
        elif kind == "put":
            self.send(device.put(np.full(4, float(number)), out=refs[target]), may_fail=False)
            self.may_hold[target] = {tuple(np.full(4, float(number)))}
        elif kind == "part":
            part, before = (float(number), float(number)), self.may_hold[target]
            put = device.put(np.full(2, float(number)), out=refs[target][:2])
            self.send(put, may_fail=None in before, may_succeed=before != {None})  # it keeps the rest
            after: Held = {None if each is None else (*part, *each[2:]) for each in before}
            self.may_hold[target] = after | before if None in before else after
        elif kind == "get":
            self.send(device.get(refs[source]), may_fail=unsound, may_succeed=held != {None}, gives=set(held))
        elif kind == "batch":
            steps = [(source, target), (target, rng.choice([each for each in range(BUFFERS) if each != target]))]
            self.send(self.batch(steps), may_fail=unsound, may_succeed=held != {None})
            before = set(self.may_hold[steps[1][1]])
            for each in steps:
                self.negate(*each)
            if unsound:
                self.may_hold[steps[1][1]] |= before
        else:
            before = set(self.may_hold[target])
            task = self.send(device.run(Work(refs[source], "", refs[target])), may_fail=True)
            self.negate(source, target)
            self.may_hold[target] |= before
            asyncio.get_running_loop().call_soon(task.cancel)

    async def ended(self) -> None:
        """Wait for all, and see that each has ended as it may."""
        answers = await asyncio.wait_for(asyncio.gather(*[task for task, *_ in self.sent], return_exceptions=True), PATIENCE)
        for answer, (_, may_fail, may_succeed, gives) in zip(answers, self.sent, strict=True):
            if isinstance(answer, BaseException):
                assert may_fail, answer
                assert isinstance(answer, asyncio.CancelledError) or "ValueError: a bad request" in str(answer), answer
            else:
                assert may_succeed, "an op has read what a failed one was to write"
                assert gives is None or tuple(answer) in gives


@pytest.mark.parametrize("round_", range(6))
async def test_no_op_ends_well_that_read_what_a_failed_one_was_to_write(round_: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    async with accel.System() as system:
        device = await system.open_device("cpu", streams=rng.choice([8, 2]))
        await device.register(Ways)
        refs = [await device.put(np.full(4, float(at))) for at in range(BUFFERS)]
        for _ in range(4):
            program = Program(device, refs, rng)
            Ways.gate.clear()
            opens = rng.randrange(OPS)
            for number in range(OPS):
                program.step(number)
                if number == opens:
                    Ways.gate.set()
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            Ways.gate.set()
            await program.ended()
            for at, ref in enumerate(refs):
                await device.put(np.full(4, float(at)), out=ref)
                np.testing.assert_array_equal(await device.get(ref), np.full(4, float(at)))
        assert (device.state, device.generation, device.info().in_flight) == (accel.DeviceState.READY, 1, 0)
