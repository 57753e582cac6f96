"""A child lets the blocks of shared host memory go that its parent has given back, and not before its ops are through with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import child_pid, failure, generation, in_flight, task, turns, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


pytestmark = pytest.mark.usefixtures("nothing_left")

MIB = 1 << 20
USUAL, LARGE, LIMIT = 32 * MIB, 36 * MIB, 40 * MIB
"""Bytes of a block that small arrays share, of one for a large array alone, and less than both together."""

_HOST = "memfd:accel-host"


def mapped(pid: int) -> list[int]:
    """Return the bytes of each block of host memory that a process has mapped."""
    sizes = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if _HOST in line:
            start, _, end = line.split()[0].partition("-")
            sizes.append(int(end, 16) - int(start, 16))
    return sorted(sizes)


async def only(device: accel.Device, *sizes: int) -> None:
    """Wait until the child has mapped blocks of these sizes and no others."""
    await until(lambda: mapped(child_pid(device)) == sorted(sizes), f"{sizes} mapped, and nothing else")


@pytest.fixture
async def plan() -> AsyncIterator[FaultPlan]:
    made = FaultPlan()
    yield made
    made.release()


async def opened(system: accel.System, **options: Any) -> accel.Device:
    return await system.open_device("cpu", host="process", pinned_limit=LIMIT, **options)


async def moved(device: accel.Device, nbytes: int, rng: np.random.Generator) -> None:
    """Move an array there and back, in a block of its own if it is large: ordinary arrays of that size go in parts."""
    array = await device.pinned(nbytes, "uint8") if nbytes == LARGE else np.empty(nbytes, np.uint8)
    wanted = rng.integers(0, 255, nbytes, np.uint8)
    array[:] = wanted
    ref = await device.put(array)
    array[:] = 0
    np.testing.assert_array_equal(await device.get(ref, out=array), wanted)


async def test_what_is_given_back_here_is_given_back_there(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await opened(system)
        await moved(device, MIB, rng)
        await only(device, USUAL)
        await moved(device, LARGE, rng)
        await only(device, LARGE)
        await moved(device, MIB, rng)
        await only(device, LARGE)
        assert device.info().pinned.reserved == LARGE


async def test_it_is_told_although_nothing_is_sent_any_more() -> None:
    async with accel.System() as system:
        device = await opened(system)
        first = await device.pinned(MIB, "uint8")
        first[:] = 1
        ref = await device.put(first)
        await only(device, USUAL)
        del first
        await device.pinned(LARGE, "uint8")
        await only(device)
        assert (await device.get(ref)).min() == 1


@pytest.mark.parametrize("way", ["pinned", "copied"])
async def test_not_while_an_op_uses_it(plan: FaultPlan, way: str) -> None:
    async with accel.System() as system:
        device = await opened(system, faults=plan.hang_at(1, op="put"))
        array = await device.pinned(MIB, "uint8") if way == "pinned" else np.empty(MIB, np.uint8)
        array[:] = 7
        putting = task(device.put(array))
        del array
        await in_flight(device, 1)
        putting.cancel()  # the op is on the device, and reads on
        await asyncio.wait({putting})
        larger = task(device.pinned(LARGE, "uint8"))
        await until(lambda: device.info().pinned.waiting == 1, "waiting for room")
        await only(device, USUAL)
        await turns()
        assert not larger.done()
        plan.release()
        del putting
        found = await asyncio.wait_for(larger, 20)
        found[:] = 1
        ref = await device.put(found)
        found[:] = 0
        assert (await device.get(ref, out=found)).min() == 1
        await only(device, LARGE)


@pytest.mark.parametrize("ahead", ["none", "context"])
async def test_the_next_child_knows_only_what_there_is(ahead: Any, rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await opened(system, standby=ahead, faults=FaultPlan().poison_at(1, op="unary"))
        await moved(device, MIB, rng)
        if ahead != "none":
            assert await device.spare_ready()
        await moved(device, LARGE, rng)
        await failure(device.elementwise.unary("neg", await device.zeros(3)), accel.ContextPoisonedError)
        await generation(device, 2)
        await moved(device, LARGE, rng)
        await only(device, LARGE)
