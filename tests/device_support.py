"""What the tests of devices share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest

import accel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from accel.testing import FaultPlan

PATIENCE = 30.0
"""Seconds until a wait that should end has failed."""

Array = np.ndarray[Any, Any]
E = TypeVar("E", bound=BaseException)
T = TypeVar("T")


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Let the loop turn until ``condition`` holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} never came true"
        await asyncio.sleep(0)


async def turns(count: int = 40) -> None:
    """Let everything run that needs nothing but turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def bounded(awaitable: Awaitable[T]) -> T:
    """Await what must end."""
    async with asyncio.timeout(PATIENCE):
        return await awaitable


async def failure(awaitable: Awaitable[Any], kind: type[E]) -> E:
    """Return the error of exactly ``kind`` that ``awaitable`` ends with."""
    with pytest.raises(kind) as caught:
        await bounded(awaitable)
    assert type(caught.value) is kind, repr(caught.value)
    return caught.value


def task(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """Start awaiting in a task."""
    return asyncio.ensure_future(awaitable)


async def cancelled(future: asyncio.Future[Any]) -> None:
    """Cancel a task and see it end so, at once."""
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(future)


class SharedFaults:
    """The faults of a device that tests share: those that the test which runs has planned."""

    def __init__(self) -> None:
        self._plan: FaultPlan | None = None

    def take(self, kind: str) -> Any:
        """See :meth:`accel.testing.FaultPlan.take`."""
        return None if self._plan is None else self._plan.take(kind)

    @contextlib.contextmanager
    def planned(self, plan: FaultPlan | None) -> Iterator[None]:
        """Follow a plan while the block runs; hangs end with it."""
        self._plan = plan
        try:
            yield
        finally:
            self._plan = None
            if plan is not None:
                plan.release()


@contextlib.asynccontextmanager
async def opened(faults: FaultPlan | None = None, *, close_timeout: float = PATIENCE, **options: Any) -> AsyncIterator[accel.Device]:
    """Open a CPU device in a system of its own; hangs end before it closes."""
    async with accel.System(close_timeout=close_timeout) as system:
        try:
            yield await system.open_device("cpu", faults=faults, **options)
        finally:
            if faults is not None:
                faults.release()


async def in_flight(device: accel.Device, count: int) -> None:
    """Wait until so many ops are on the device."""
    await until(lambda: device.info().in_flight == count, f"{count} in flight")
    await turns()


async def generation(device: accel.Device, number: int) -> None:
    """Wait until a generation is ready."""
    await until(lambda: device.generation >= number and device.state is accel.DeviceState.READY, f"generation {number}")


def child_pid(device: accel.Device) -> int:
    """Return the process of the child that holds a device's context."""
    pid = device.info().pid
    assert pid is not None, "there is no child"
    return pid


def used(device: accel.Device) -> int:
    """Return the bytes held by live buffers."""
    return device.info().memory.used


def some_view(rng: np.random.Generator, array: Array, ref: Any) -> tuple[Array, Any]:
    """Return the same view, of up to three steps, of an array and of a ref."""
    for _ in range(rng.integers(1, 4)):
        if array.ndim > 1 and rng.random() < 0.4:
            axes = tuple(int(axis) for axis in rng.permutation(array.ndim))
            array, ref = array.transpose(axes), ref.transpose(axes)
        else:
            index = tuple(
                slice(*sorted(int(n) for n in rng.integers(0, length + 1, 2)))
                if rng.random() < 0.5
                else slice(None, None, int(rng.choice([-2, -1, 1, 2, 3])))
                for length in array.shape
            )
            array, ref = array[index], ref[index]
    return array, ref
