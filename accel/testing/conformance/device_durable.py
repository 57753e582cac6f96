"""Durable buffers outlive a fault, where the backend's memory can outlive its context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from accel.actors import RestartStrategy
from accel.dtype import DType
from accel.errors import ContextPoisonedError, StaleRefError, UnsupportedError
from accel.testing.conformance.device_harness import bounded, failure, opened, until
from accel.testing.faults import FaultPlan

if TYPE_CHECKING:
    from accel.device import Device
    from accel.testing.conformance.harness import Harness

__all__ = ["check_durable_data_outlives_faults", "check_torn_buffers_say_so"]


async def _is_offered(device: Device) -> bool:
    try:
        await device.empty(1, durable=True)
    except UnsupportedError:
        return False
    return True


async def check_durable_data_outlives_faults(harness: Harness) -> None:
    """Check that durable data and its ref are there after two faults, that its memory is counted, and that dropping it gives the memory back."""
    x = harness.random((300, 70), DType.FLOAT32)
    plan = FaultPlan().poison_at(1, op="conv2d").poison_at(2, op="conv2d")
    async with opened(harness, plan, restart=RestartStrategy(max_restarts=5)) as device:
        if not await _is_offered(device):
            return
        ref = await device.put(x, durable=True, checksum=True)
        for _ in range(2):
            ordinary, one = await device.zeros((1, 1, 3, 3)), await device.zeros((1, 1, 1, 1))
            await failure(device.dnn.conv2d(ordinary, one), ContextPoisonedError)
            assert not ref.is_stale, f"{ref!r} did not outlive the fault"
            got = await bounded(device.get(ref))
            assert np.array_equal(got, x), f"the durable data has changed (seed {harness.seed})"
            assert ordinary.is_stale, "an ordinary ref outlived the fault"
            assert ref.generation == device.generation
        assert device.info().memory.durable >= x.nbytes
        del ref
        await until("its memory is not counted any more", lambda: device.info().memory.durable == 0)


async def check_torn_buffers_say_so(harness: Harness) -> None:
    """Check that a buffer which was being written at the fault can be used only after all of it was written anew."""
    x = harness.random((1000,), DType.FLOAT32)
    async with opened(harness, FaultPlan().poison_at(1, op="unary")) as device:
        if not await _is_offered(device):
            return
        sound, written = await device.put(x, durable=True), await device.put(x, durable=True)
        await failure(device.elementwise.unary("neg", sound, out=written), ContextPoisonedError)
        assert (await failure(device.get(written), StaleRefError)).reason == "torn"
        assert np.array_equal(await bounded(device.get(sound)), x), f"a buffer that was only read has changed (seed {harness.seed})"
        await device.put(x[:10], out=written[:10])
        assert (await failure(device.get(written), StaleRefError)).reason == "torn"
        await device.elementwise.unary("neg", sound, out=written)
        assert np.array_equal(await device.get(written), -x), f"the buffer is not what was written to it (seed {harness.seed})"
