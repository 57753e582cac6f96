"""The shared memory of arrays on their way to and from a child comes back, whatever becomes of their op; the child lets go of it too."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.ops import Get
from accel.remote import arrays
from accel.remote.context import RemoteContext
from accel.storage.pinned import PinnedMemory
from accel.testing import FaultPlan
from tests.device_support import cancelled, child_pid, failure, generation, in_flight, task, turns, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


pytestmark = pytest.mark.usefixtures("nothing_left")


LARGE = arrays.MAX_INLINE_COPY * 4


class Gate:
    """Holds copies on their worker threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        before = getattr(arrays.SharedArray, method)

        def held(outgoing: arrays.SharedArray) -> None:
            self.reached.set()
            assert self.opened.wait(20)
            before(outgoing)

        monkeypatch.setattr(arrays.SharedArray, method, held)


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, "copy_in")
    yield gate
    gate.opened.set()


@pytest.fixture
def landing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, "copy_back")
    yield gate
    gate.opened.set()


async def record(device: accel.Device, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    async with device.batch() as batch:
        batch.put(array)
        batch.put(array)


@pytest.mark.parametrize("way", ["op", "batch"])
async def test_of_what_was_cancelled_while_it_was_copied(filling: Gate, way: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        array = np.zeros(LARGE, np.uint8)
        sending = task(device.put(array) if way == "op" else record(device, array))
        await until(filling.reached.is_set)
        await cancelled(sending)
        assert device.info().memory.used == 0  # what was dropped is accounted for
        filling.opened.set()
        await until(lambda: device.info().pinned.used == 0, "the memory coming back")
        assert device.info().memory.used == 0
        np.testing.assert_array_equal(await device.get(await device.put(array)), array)


async def test_a_batch_with_small_arrays_is_sent_in_the_call_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    given = np.arange(12.0), np.arange(3.0)

    async def queued(*_: object) -> None:
        raise AssertionError("it was queued")

    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.put(given[0])  # makes the first block
        monkeypatch.setattr(RemoteContext, "dispatch", queued)
        async with device.batch() as batch:
            found = [batch.get(batch.elementwise.unary("neg", batch.put(array))) for array in given]
        for got, array in zip(found, given, strict=True):
            np.testing.assert_array_equal(got, -array)
        assert device.info().pinned.used == 0


async def test_the_gets_of_a_batch_that_runs_leave_room_for_others() -> None:
    plan, block = FaultPlan().hang_at(1, op="unary"), 16 << 20
    async with accel.System(close_timeout=3) as system:
        device = await system.open_device("cpu", host="process", pinned_limit=4 * block, faults=plan)
        held = [await device.pinned(block, "uint8") for _ in range(4)]
        del held  # the blocks are there
        x, large = await device.zeros(3), await device.zeros(block, "uint8")

        async def batch() -> None:
            async with device.batch() as batch:
                batch.elementwise.unary("neg", x)
                for _ in range(4):
                    batch.get(large)

        running = task(batch())
        await until(lambda: device.info().in_flight > 0)
        await device.pinned(1000, "uint8", timeout=5)
        plan.release()
        await running


async def test_the_arrays_of_a_message_to_another_machine_leave_room_for_others() -> None:
    """They take places in its memory, although nothing is copied here."""
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", pinned_limit=64 << 20)
        held = [await device.pinned(16 << 20, "uint8") for _ in range(4)]
        del held  # the blocks are there
        pinned, x = device._core.pinned, await device.zeros(3)
        shared = arrays.SharedArrays(pinned, set(), lambda _: None, is_sent=True)
        ops = [Get(x, np.empty(pinned.max_chunk, np.uint8)) for _ in range(3)]
        placed = shared.place_now(ops[:1])
        assert placed is not None
        placed[0].close()
        assert shared.place_now(ops) is None
        assert pinned.info().used == 0


@pytest.mark.parametrize("count", [511, 20])
async def test_a_batch_that_waits_for_an_array_in_chunks_holds_no_memory(count: int) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", pinned_limit=1 << 16, max_in_flight=count + 1)
        await device.put(np.zeros(3))
        array = np.arange(1 << 20, dtype=np.int64)
        putting = task(device.put(array))
        await until(lambda: device.info().in_flight == 1)
        async with asyncio.timeout(30), device.batch() as batch:
            small = batch.put(np.arange(5000.0))
            for _ in range(count):
                batch.zeros(1)
        np.testing.assert_array_equal(await device.get(small), np.arange(5000.0))
        np.testing.assert_array_equal(await device.get(await putting), array)
        assert device.info().pinned.used == 0


async def test_of_small_arrays_of_a_batch_whose_ops_were_not_sent() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        freed = await device.put(np.ones(4))
        with pytest.raises(accel.StaleRefError) as raised:
            async with device.batch() as batch:
                first = batch.put(np.arange(4.0))
                batch.elementwise.unary("neg", freed)
                batch.put(np.zeros(4))
                await device.free(freed)
        assert raised.value.op_index == 1
        np.testing.assert_array_equal(await device.get(first), np.arange(4.0))
        assert device.info().pinned.used == 0


@pytest.mark.parametrize("way", ["op", "batch"])
async def test_of_what_was_copied_while_the_child_died(filling: Gate, way: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        array = np.zeros(LARGE, np.uint8)
        sending = task(device.put(array) if way == "op" else record(device, array))
        await until(filling.reached.is_set)
        os.kill(child_pid(device), signal.SIGKILL)
        await until(lambda: device.state is accel.DeviceState.REBUILDING)
        filling.opened.set()
        await asyncio.wait({sending}, timeout=20)
        if sending.exception() is not None:  # a batch belongs to the generation in which it was recorded
            assert isinstance(sending.exception(), accel.StaleRefError)
        del sending
        await until(lambda: device.info().pinned.used == 0, "the memory coming back")


async def test_of_what_came_back_right_before_the_child_died(landing: Gate) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        ref = await device.put(np.zeros(LARGE, np.uint8))
        # The second is answered while the first is copied: it waits for its turn.
        reading = [task(device.get(ref)) for _ in range(2)]
        await until(landing.reached.is_set)
        os.kill(child_pid(device), signal.SIGKILL)
        for each in reading:
            await failure(each, accel.ContextPoisonedError)
        landing.opened.set()
        await until(lambda: device.info().pinned.used == 0, "the memory coming back")
        assert np.all(await device.get(await device.put(np.ones(LARGE, np.uint8))) == 1)


async def test_what_finds_room_in_the_turn_of_a_fault_is_not_sent_to_the_child_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is found, and before its owner goes on the context has faulted: the op goes to the next generation, and the memory comes back."""
    room = PinnedMemory.wait_chunk

    async def then_faults(self: PinnedMemory, nbytes: int, check: Any) -> Any:
        piece = await room(self, nbytes, check)
        monkeypatch.undo()
        device._host.context.report_fault(accel.LibraryError("it faults now", scope=accel.FaultScope.CONTEXT))
        return piece

    async with accel.System() as system:
        device: Any = await system.open_device("cpu", host="process")
        x = await device.zeros(4)
        monkeypatch.setattr(PinnedMemory, "wait_chunk", then_faults)
        error = await failure(device.get(x), accel.StaleRefError)
        assert error.reason == "generation"
        np.testing.assert_array_equal(await device.get(await device.put(np.arange(3.0))), np.arange(3.0))
        assert device.generation == 2
        assert device.info().pinned.used == 0


@pytest.mark.parametrize("way", ["put", "get"])
@pytest.mark.parametrize("in_batch", [False, True])
async def test_of_an_array_that_moves_in_pieces_when_the_child_dies(request: pytest.FixtureRequest, way: str, *, in_batch: bool) -> None:
    """One piece is with the child, and another one is copied here."""
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", pinned_limit=1 << 20)
        array = np.arange(8 << 20, dtype=np.uint8)
        ref = await device.put(array)
        gate: Gate = request.getfixturevalue("filling" if way == "put" else "landing")

        async def moved() -> object:
            if not in_batch:
                return await (device.put(array) if way == "put" else device.get(ref))
            async with device.batch() as batch:
                batch.run(accel.ops.Put(array)) if way == "put" else batch.run(accel.ops.Get(ref, np.empty_like(array)))
            return None

        moving = task(moved())
        await until(gate.reached.is_set)
        os.kill(child_pid(device), signal.SIGKILL)
        await until(lambda: device.state is accel.DeviceState.REBUILDING)
        gate.opened.set()
        await asyncio.wait({moving}, timeout=20)
        assert isinstance(moving.exception(), accel.AccelError) or way == "put"
        del moving
        await until(lambda: device.info().pinned.used == 0, "the memory coming back")
        np.testing.assert_array_equal(await device.get(await device.put(array)), array)
        assert device.info().pinned.used == 0


MIB = 1 << 20


USUAL, OWN_BLOCK, LIMIT = 32 * MIB, 36 * MIB, 40 * MIB
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
    array = await device.pinned(nbytes, "uint8") if nbytes == OWN_BLOCK else np.empty(nbytes, np.uint8)
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
        await moved(device, OWN_BLOCK, rng)
        await only(device, OWN_BLOCK)
        await moved(device, MIB, rng)
        await only(device, OWN_BLOCK)
        assert device.info().pinned.reserved == OWN_BLOCK


async def test_it_is_told_although_nothing_is_sent_any_more() -> None:
    async with accel.System() as system:
        device = await opened(system)
        first = await device.pinned(MIB, "uint8")
        first[:] = 1
        ref = await device.put(first)
        await only(device, USUAL)
        del first
        await device.pinned(OWN_BLOCK, "uint8")
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
        larger = task(device.pinned(OWN_BLOCK, "uint8"))
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
        await only(device, OWN_BLOCK)


@pytest.mark.parametrize("ahead", ["none", "context"])
async def test_the_next_child_knows_only_what_there_is(ahead: Any, rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await opened(system, standby=ahead, faults=FaultPlan().poison_at(1, op="unary"))
        await moved(device, MIB, rng)
        if ahead != "none":
            assert await device.spare_ready()
        await moved(device, OWN_BLOCK, rng)
        await failure(device.elementwise.unary("neg", await device.zeros(3)), accel.ContextPoisonedError)
        await generation(device, 2)
        await moved(device, OWN_BLOCK, rng)
        await only(device, OWN_BLOCK)
