"""What the checks of whole devices are written with: devices opened as users open them, bounded waits, and comparison."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from accel.device import DeviceState, System
from accel.errors import AccelError
from accel.testing.conformance.harness import Array, Harness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from accel.backend import AccelBackend
    from accel.device import Device
    from accel.testing.faults import FaultPlan

__all__ = ["PATIENCE", "DeviceHarness"]

PATIENCE = 30.0
"""Seconds until a wait that must end has failed; a fault of real hardware takes up to half a second to surface, a new context another."""

E = TypeVar("E", bound=AccelError)
T = TypeVar("T")


class DeviceHarness(Harness):
    """A :class:`Harness` that also says with which options of ``open_device`` its devices are opened.

    Parameters
    ----------
    backend, index, seed
        As for :class:`Harness`.
    options
        Options of :meth:`accel.System.open_device`, such as ``host``, ``completion`` and ``streams``; a check's own come on top.
    """

    def __init__(self, backend: AccelBackend, index: int = 0, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().__init__(backend, index, seed=seed)
        self.options = options or {}


@contextlib.asynccontextmanager
async def opened(harness: Harness, faults: FaultPlan | None = None, **options: Any) -> AsyncIterator[Device]:
    """Open the device in a system of its own; the plan's hangs end before it closes."""
    given = harness.options if isinstance(harness, DeviceHarness) else {}
    async with System() as system:
        spec = f"{harness.backend.name}:{harness.index}"
        try:
            yield await system.open_device(spec, **{**given, "faults": faults, **options})
        finally:
            if faults is not None:
                faults.release()


async def until(what: str, condition: Callable[[], object]) -> None:
    """Let the loop turn until ``condition`` holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {PATIENCE} s"
        await asyncio.sleep(0)


async def bounded(awaitable: Awaitable[T]) -> T:
    """Await what must end."""
    async with asyncio.timeout(PATIENCE):
        return await awaitable


async def failure(awaitable: Awaitable[Any], kind: type[E]) -> E:
    """Return the error of ``kind`` that ``awaitable`` must end with."""
    try:
        value = await bounded(awaitable)
    except kind as error:
        return error
    raise AssertionError(f"it gave {value!r} where {kind.__name__} was due")


def task(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """Start awaiting in a task."""
    return asyncio.ensure_future(awaitable)


async def in_flight(device: Device, count: int) -> None:
    """Wait until ``count`` ops are in flight."""
    await until(f"{count} in flight", lambda: device.info().in_flight == count)


async def next_generation(device: Device) -> None:
    """Wait until a generation after the first is ready."""
    await until("the next generation", lambda: device.state is DeviceState.READY and device.generation > 1)


def close_to(harness: Harness, got: Array, expected: Array, what: str) -> None:
    """Fail unless ``got``, computed in single precision, is ``expected``."""
    assert got.shape == expected.shape, f"{what} has shape {got.shape}, not {expected.shape} (seed {harness.seed})"
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4, err_msg=f"{what} (seed {harness.seed})")
