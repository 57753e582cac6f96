"""A batch costs time in proportion to its ops, however long it is and wherever the device lives, and fails as a short one does."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

import accel

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
