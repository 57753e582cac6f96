"""What ops of a batch that are not launched, because one before them failed, leave as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from tests.op_bugs_support import Bug, Bugs, BugsOnTheLoop

OLD, NEW = np.full(4, 7.0), np.arange(4.0)


async def opened(system: accel.System, library: type[Bugs], host: Any) -> accel.Device:
    device = await system.open_device("cpu", host=host)
    await device.register(library)
    x = await device.put(NEW)
    async with device.batch() as batch:  # from here on batches of these libraries go into the lane as a whole
        batch.copy(batch.run(Bug(x)), batch.copy(x, batch.zeros(4, "float64")))
    return device


async def fail(device: accel.Device, x: accel.AccelRef, first: Bug, *outs: accel.AccelRef) -> None:
    with pytest.raises(accel.LibraryError) as caught:
        async with device.batch(timeout=20) as batch:
            batch.run(first)
            for out in outs:
                batch.copy(x, out)
    assert (caught.value.op, caught.value.op_index, caught.value.scope) == ("bug", 0, accel.FaultScope.OP)


@pytest.mark.parametrize("host", ["inline", "process"])
@pytest.mark.parametrize("library", [Bugs, BugsOnTheLoop])
async def test_what_ops_behind_a_kernel_that_raises_were_to_write_stays_sound(library: type[Bugs], host: str) -> None:
    async with accel.System() as system:
        device = await opened(system, library, host)
        x = await device.put(NEW)
        durable, ordinary = await device.put(OLD, durable=True), await device.put(OLD)
        await fail(device, x, Bug(x, "kernel:value"), durable, ordinary)
        for ref in (durable, ordinary):
            np.testing.assert_array_equal(await device.get(ref), OLD)


@pytest.mark.parametrize("host", ["inline", "process"])
@pytest.mark.parametrize("library", [Bugs, BugsOnTheLoop])
@pytest.mark.parametrize("durable", [False, True])
async def test_what_the_kernel_itself_was_to_write_does_not_although_an_op_behind_it_was_to_write_it_anew(
    library: type[Bugs], host: str, durable: bool
) -> None:
    async with accel.System() as system:
        device = await opened(system, library, host)
        x, out = await device.put(NEW), await device.put(OLD, durable=durable)
        await fail(device, x, Bug(x, "kernel:value", out), out, out)
        with pytest.raises(accel.StaleRefError if durable else accel.LibraryError) as caught:
            await device.get(out)
        assert caught.value.scope is accel.FaultScope.OP
        await device.put(OLD, out=out)
        np.testing.assert_array_equal(await device.get(out), OLD)
