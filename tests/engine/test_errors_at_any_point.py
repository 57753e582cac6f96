"""Property: any exception at any point of an op's way is that op's error. Every op is answered, the device goes on, the next op works, nothing is left."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import accel
from tests.op_bugs_support import Bug, Bugs, BugsOnTheLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

PATIENCE = 10.0
"""Seconds for what takes milliseconds, on a machine that has much else to do."""

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
