"""A batch costs time in proportion to its ops, however long it is and wherever the device lives, and fails as a short one does."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from accel import AccelRef, Device

_BOUND = 40.0
"""Seconds after which a test has failed; each takes about two."""


async def _chain(device: Device, start: AccelRef, length: int) -> tuple[AccelRef, float]:
    """Negate ``length`` times in one batch; return the last result, and the CPU seconds that this process took for the end of the block."""
    batch = device.batch()
    await batch.__aenter__()
    last = start
    for _ in range(length):
        last = batch.elementwise.unary("neg", last)
    began = time.process_time()
    await batch.__aexit__(None, None, None)
    return last, time.process_time() - began


async def test_the_time_of_an_op_does_not_grow_with_the_batch() -> None:
    short, long = 2_000, 60_000
    async with asyncio.timeout(_BOUND), accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        start = await device.put(np.ones(4))
        await _chain(device, start, short)  # what the first ops set up is not measured
        usual = min([(await _chain(device, start, short))[1] / short for _ in range(5)])
        last, seconds = await _chain(device, start, long)
        np.testing.assert_array_equal(await device.get(last), np.ones(4))
    assert seconds / long < 2 * usual, f"{usual * 1e6:.1f} us an op of {short}, {seconds / long * 1e6:.1f} us an op of {long}"


@pytest.mark.parametrize("failing", [None, 275])
async def test_a_batch_of_more_bytes_than_a_message_holds_runs_and_fails_as_any(failing: int | None) -> None:
    faults = None if failing is None else FaultPlan().fail_at(failing + 3, accel.LibraryError("not this one"))
    async with asyncio.timeout(_BOUND), accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=faults)
        counter, one = await device.put(np.zeros(1)), await device.full(1, 1.0, "float64")
        batch = device.batch()
        await batch.__aenter__()
        for _ in range(180):
            last = batch.empty((1,) * 20_000)  # about 100 KiB of numbers on its way
            batch.elementwise.binary("add", counter, one, out=counter)
        if failing is None:
            await batch.__aexit__(None, None, None)
            assert not last.is_stale
        else:
            with pytest.raises(accel.LibraryError, match="not this one") as caught:
                await batch.__aexit__(None, None, None)
            assert caught.value.op_index == failing
            with pytest.raises(accel.StaleRefError):
                last.check()
        assert (await device.get(counter)).tolist() == [180 if failing is None else failing // 2]
        assert (device.generation, device.info().in_flight) == (1, 0)


async def test_the_loop_turns_while_a_long_batch_goes_to_a_process_host() -> None:
    async with asyncio.timeout(_BOUND), accel.System() as system:
        device = await system.open_device("cpu", host="process")
        start, worst = await device.put(np.ones(4)), 0.0

        async def turning() -> None:
            nonlocal worst
            before = time.thread_time()  # of this thread: what other processes take does not count
            while True:
                await asyncio.sleep(0)
                worst, before = max(worst, time.thread_time() - before), time.thread_time()

        batch = device.batch()
        await batch.__aenter__()
        last = start
        for _ in range(40_000):
            last = batch.elementwise.unary("neg", last)
        gc.freeze()  # or a collection walks through what other tests have left in this process
        watching = asyncio.get_running_loop().create_task(turning())
        try:
            await asyncio.sleep(0)
            await batch.__aexit__(None, None, None)
        finally:
            watching.cancel()
        np.testing.assert_array_equal(await device.get(last), np.ones(4))
        assert worst < 0.15, f"the loop stood still for {worst * 1e3:.0f} ms while the batch was written"
