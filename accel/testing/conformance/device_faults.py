"""A fault ends what is in flight, the context is rebuilt, and the device goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from accel.actors import RestartStrategy
from accel.device import DeviceState
from accel.dtype import DType
from accel.errors import ContextPoisonedError, DeviceLostError, StaleRefError
from accel.testing.conformance.device_harness import bounded, close_to, failure, in_flight, next_generation, opened, task, until
from accel.testing.faults import FaultPlan

if TYPE_CHECKING:
    from accel.device import Device
    from accel.ref import AccelRef
    from accel.testing.conformance.harness import Harness

__all__ = [
    "check_batch_meets_a_fault",
    "check_everyone_in_flight_is_told",
    "check_fault_is_survived",
    "check_generations_are_told",
    "check_load_goes_on_through_faults",
    "check_spent_budget_loses_the_device",
]


async def check_fault_is_survived(harness: Harness) -> None:
    """Check that the op's caller is told, old refs are stale, and the next generation computes."""
    x = harness.random((8, 8), DType.FLOAT32)
    async with opened(harness, FaultPlan().poison_at(2)) as device:
        a = await device.put(x)
        error = await failure(device.blas.gemm(a, a), ContextPoisonedError)
        assert error.is_fault, f"{error!r} is no fault"
        assert error.code is not None, "the driver's code is missing"
        assert "gemm" in error.suspects, f"gemm is not among the suspects {error.suspects}"
        assert a.is_stale, "an ordinary ref outlived its context"
        assert (await failure(device.blas.gemm(a, a), StaleRefError)).reason == "generation"
        a = await bounded(device.put(x))
        close_to(harness, await device.get(await device.blas.gemm(a, a)), x.astype(np.float64) @ x, "gemm after the rebuild")
        assert (device.generation, device.info().restarts, device.state) == (2, 1, DeviceState.READY)


async def check_everyone_in_flight_is_told(harness: Harness) -> None:
    """Check that ops of several libraries each end with an error of their own, and queued ones end too."""
    plan = FaultPlan().hang_at(3).poison_at(1, op="gemm")
    async with opened(harness, plan, max_in_flight=3, libraries=("blas", "elementwise")) as device:
        a, b = await device.zeros((4, 4)), await device.zeros((4, 4))
        # All of them wait for the first, so that all are on the device when the second faults.
        first = task(device.put(np.ones((4, 4), np.float32), out=a))
        calls = [task(device.blas.gemm(a, a, out=b)), task(device.elementwise.unary("neg", b))]
        await in_flight(device, 3)
        stale = task(device.elementwise.unary("abs", b))
        await until("it is queued", lambda: device.info().queued == 1)
        plan.release()
        await bounded(asyncio.gather(first, return_exceptions=True))
        errors = [await failure(call, ContextPoisonedError) for call in calls]
        assert errors[0] is not errors[1], "two waiters were given one error"
        # Whether there was room for it before the fault is a matter of time.
        result = (await bounded(asyncio.gather(stale, return_exceptions=True)))[0]
        assert isinstance(result, (StaleRefError, ContextPoisonedError)), f"a queued op with operands that are gone gave {result!r}"
        assert np.array_equal(await device.get(await bounded(device.full(3, 2.0))), np.full(3, 2.0))
        assert device.info().in_flight == 0


async def check_load_goes_on_through_faults(harness: Harness) -> None:
    """Check that tasks which try again lose nothing through two faults under load."""
    plan = FaultPlan().poison_at(60).poison_at(200)
    async with opened(harness, plan, max_in_flight=16) as device:

        async def client(number: int) -> None:
            for step in range(5):
                while True:
                    try:
                        ref = await device.elementwise.unary("neg", await device.full(4, float(number * 5 + step)))
                        got = await device.get(ref)
                        break
                    except (ContextPoisonedError, StaleRefError):
                        continue
                assert np.array_equal(got, np.full(4, -float(number * 5 + step))), f"task {number} was given another one's result"

        await bounded(asyncio.gather(*(client(number) for number in range(24))))
        assert device.generation == 3, f"two faults made generation {device.generation}"
        await until("all memory is given back", lambda: device.info().memory.used == 0)


async def check_batch_meets_a_fault(harness: Harness) -> None:
    """Check a fault inside a batch, and one while a batch is recorded."""
    async with opened(harness, FaultPlan().poison_at(3).poison_at(6)) as device:
        await failure(_batch(device), ContextPoisonedError)
        await next_generation(device)
        poison = await bounded(device.zeros(2))
        error = await failure(_batch_through_a_fault(device, poison), StaleRefError)
        assert error.reason == "generation", f"{error!r} gives another reason"


async def _batch_through_a_fault(device: Device, poison: AccelRef) -> None:
    async with device.batch() as batch:
        batch.zeros(2)
        await failure(device.elementwise.unary("neg", poison), ContextPoisonedError)


async def _batch(device: Device) -> None:
    async with device.batch() as batch:
        for _ in range(4):
            batch.zeros(4)


async def check_generations_are_told(harness: Harness) -> None:
    """Check that listeners are given the present generation, the next after a rebuild, and the end."""
    async with opened(harness, FaultPlan().poison_at(1)) as device:
        seen: list[int] = []

        async def listen() -> None:
            async for generation in device.generations():
                seen.append(generation)  # noqa: PERF401 - seen as they come

        listening = task(listen())
        await until("the first generation is told", lambda: seen == [1])
        await failure(device.zeros(1), ContextPoisonedError)
        await until("the second generation is told", lambda: seen == [1, 2])
        await device.aclose()
        await bounded(listening)


async def check_spent_budget_loses_the_device(harness: Harness) -> None:
    """Check that a device without restarts left is lost, and says so to everybody."""
    async with opened(harness, FaultPlan().poison_at(1), restart=RestartStrategy(max_restarts=0)) as device:
        await failure(device.zeros(1), ContextPoisonedError)
        await failure(device.zeros(1), DeviceLostError)
        assert device.state is DeviceState.LOST
        assert not device.health().is_live
