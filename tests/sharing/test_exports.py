"""Memory that other libraries have: who keeps it, what replays wait for, and the end of what outlives its device. Shown on a CPU that exports."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import dlpack
from accel.cpu.backend import CpuDevice
from accel.cpu.exchange import CpuExchange
from accel.engine.kernels import LIBRARIES
from accel.testing import FaultPlan
from tests.child_support import descriptors
from tests.device_support import PATIENCE, bounded, failure, generation, opened, task, turns, until

if TYPE_CHECKING:
    from accel.cpu.stream import CpuEvent

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the CPU device export its memory; write down what is asked of everybody else in the process."""
    asked: list[str] = []

    class Others:
        def record(self, event: CpuEvent) -> bool:
            asked.append("record")
            return True

    def init(self: CpuExchange, context: Any) -> None:
        self._context = context
        self.stream = Others()  # type: ignore[assignment]
        self.device = (dlpack.CPU, 0)

    monkeypatch.setattr(CpuExchange, "__init__", init)
    monkeypatch.setattr(CpuExchange, "follow", lambda self, stream, event: event.synchronize())
    monkeypatch.setattr(CpuExchange, "settle", lambda self: asked.append("settle"))
    return asked


def slabs() -> int:
    """Return how many slabs this process has mapped."""
    return sum(target.startswith("/memfd:accel-slab") for target in descriptors().values())


async def test_memory_that_outlives_its_device_goes_with_the_last_tensor(marks: list[str]) -> None:
    before = slabs()
    async with opened() as device:
        refs = [await device.full(1000, value) for value in (4.0, 5.0)]
        arrays = [np.from_dlpack(ref) for ref in refs]
        assert slabs() > before
        del refs
    assert float(arrays[0].sum()) == 4000.0
    del arrays[0]
    gc.collect()
    assert float(arrays[0].sum()) == 5000.0
    assert marks.count("settle") == 0, "both are in one slab, and one is still shown"
    assert slabs() > before
    del arrays
    gc.collect()
    await until(lambda: slabs() == before, "giving the slab back")
    assert marks.count("settle") == 1


async def test_replays_wait_for_others_as_long_as_one_result_is_theirs(marks: list[str], device: accel.Device) -> None:
    x = await device.put(np.ones(64))
    async with device.graph() as graph:
        y = graph.elementwise.unary("neg", x)
        z = graph.elementwise.binary("add", y, y)
    await graph.replay()
    first, second = np.from_dlpack(y), np.from_dlpack(z)
    await device.put(np.full(64, 3.0), out=x)
    marks.clear()
    await graph.replay()
    assert marks == ["record"]
    np.testing.assert_array_equal(first, np.full(64, -3.0))
    np.testing.assert_array_equal(second, np.full(64, -6.0))
    del second
    gc.collect()
    for _ in range(3):
        marks.clear()
        await graph.replay()
        assert marks == ["record"], "the first result is another library's still"
    del first
    gc.collect()
    await graph.replay()
    marks.clear()
    await graph.replay()
    assert marks == []


async def test_a_result_that_is_given_away_during_the_capture_is_shared_after_it(monkeypatch: pytest.MonkeyPatch, marks: list[str]) -> None:
    """When the capture ends, the uses of all results are tracked as one from then on."""
    began, go_on = blocked_capture(monkeypatch)
    async with opened() as device:
        x = await device.put(np.ones(64))
        given: list[accel.AccelRef] = []

        async def record() -> accel.Graph:
            async with device.graph() as graph:
                given.append(graph.elementwise.unary("neg", x))
                given.append(graph.elementwise.unary("abs", x))
            return graph

        recording = task(record())
        await asyncio.to_thread(began.wait, PATIENCE)
        array = np.from_dlpack(given[0])
        go_on.set()
        graph = await bounded(recording)
        for _ in range(2):
            marks.clear()
            await graph.replay()
            assert marks == ["record"]
        np.testing.assert_array_equal(array, -np.ones(64))


def blocked_capture(monkeypatch: pytest.MonkeyPatch, marks: list[str] | None = None) -> tuple[threading.Event, threading.Event]:
    """Let captures wait, beside the loop; return what says that one has begun, and what lets it go on."""
    began, go_on, original, said = threading.Event(), threading.Event(), CpuDevice.kernels, [] if marks is None else marks
    at_replay = LIBRARIES["graph"]["replay"]

    def capture(lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        said.append("capture")
        began.set()
        assert go_on.wait(PATIENCE)
        said.append("captured")

    def kernels(self: CpuDevice, library: str) -> Any:
        return {"capture": capture, "replay": at_replay} if library in ("capture", "graph") else original(self, library)

    monkeypatch.setattr(CpuDevice, "kernels", kernels)
    monkeypatch.setattr(CpuDevice, "may_block", lambda self, lane, op: op.kind == "capture")
    return began, go_on


async def test_nobodys_work_is_marked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, marks: list[str]) -> None:
    """A mark of all streams breaks captures off: ops on shared memory wait for their end, also those of another device that has the same driver's context."""
    began, go_on = blocked_capture(monkeypatch, marks)
    async with accel.System() as system:
        device, other = await system.open_device("cpu"), await system.open_device("cpu")
        x = await device.put(np.ones(4))
        mine, theirs = [await each.wrap(np.full(4, 2.0)) for each in (device, other)]
        early = await device.elementwise.unary("neg", mine)  # by a mark from before

        async def record() -> accel.AccelRef:
            async with device.graph() as graph:
                y = graph.elementwise.unary("neg", x)
            await graph.replay()
            return y

        recording = task(record())
        await asyncio.to_thread(began.wait, PATIENCE)
        marks.clear()
        waiting = [task(device.elementwise.unary("neg", mine)), task(other.elementwise.unary("neg", theirs))]
        late = task(device.wrap(np.full(4, 3.0)))
        async with device.batch() as batch:
            plain = batch.elementwise.unary("neg", x)
        await turns()
        assert not any(each.done() for each in waiting)
        assert marks == []
        np.testing.assert_array_equal(await device.get(plain), np.full(4, -1.0))
        np.testing.assert_array_equal(await device.get(early), np.full(4, -2.0))
        await late
        del early
        device.info()
        go_on.set()
        np.testing.assert_array_equal(await device.get(await bounded(waiting[0])), np.full(4, -2.0))
        np.testing.assert_array_equal(await other.get(await bounded(waiting[1])), np.full(4, -2.0))
        assert marks[0] == "captured"
        assert marks.count("record") >= 2
        np.testing.assert_array_equal(await device.get(await bounded(recording)), np.full(4, -1.0))


async def test_what_waits_for_a_capture_is_told_of_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = blocked_capture(monkeypatch)
    async with opened(FaultPlan().poison_at(1, op="gemm")) as device:
        x = await device.put(np.ones((4, 4)))
        shared = await device.wrap(np.ones(4))

        async def record() -> None:
            async with device.graph() as graph:
                graph.elementwise.unary("neg", x)

        recording = task(record())
        await asyncio.to_thread(began.wait, PATIENCE)
        waiting = task(device.elementwise.unary("neg", shared))
        await turns()
        assert not waiting.done()
        await failure(device.blas.gemm(x, x), accel.ContextPoisonedError)
        await failure(waiting, accel.ContextPoisonedError)
        await failure(recording, accel.ContextPoisonedError)
        go_on.set()
        await generation(device, 2)
        shared = await device.wrap(np.ones(4))
        np.testing.assert_array_equal(await device.get(await bounded(device.elementwise.unary("neg", shared))), -np.ones(4))


async def test_memory_that_is_given_away_again_and_again_is_given_back_like_any_other(device: accel.Device) -> None:
    before = device.info().memory.used
    x = await device.full(64, 2.0)
    for _ in range(3000):
        assert float(np.from_dlpack(x)[0]) == 2.0
    gc.collect()
    await bounded(device.free(x))
    await until(lambda: device.info().memory.used == before, "giving the memory back")
    assert device.generation == 1


async def test_an_address_keeps_the_memory_and_orders_ops_behind_others(marks: list[str], rng: np.random.Generator) -> None:
    x = rng.standard_normal(64)
    async with opened() as device:
        ref = await device.put(x)
        with ref[8:].address() as pointer:
            seen = np.ctypeslib.as_array((ctypes.c_double * 56).from_address(pointer))
            assert np.array_equal(seen, x[8:])
            with pytest.raises(accel.InvalidArgumentError, match=r"ref\.address\(\)"):
                await device.free(ref)
            seen[:] = 1.0
            marks.clear()
            y = await device.elementwise.unary("neg", ref)
            assert marks, "the op did not wait for what others had enqueued"
            assert np.array_equal(await device.get(y), np.concatenate([-x[:8], np.full(56, -1.0)]))
            kept, used = ref.buffer, device.info().memory.used
            del ref
            gc.collect()
            await device.zeros(1)
            assert device.info().memory.used >= used
            assert kept
        gc.collect()
        marks.clear()
        await device.get(y)
        await until(lambda: device.info().memory.used < used, "giving the memory back")


async def test_after_the_block_ops_wait_once_and_the_buffer_is_ordinary_again(marks: list[str], device: accel.Device) -> None:
    ref = await device.zeros(8)
    with ref.address(stream=-1):
        pass
    marks.clear()
    for _ in range(3):
        await device.elementwise.unary("neg", ref)
    assert marks.count("record") in (1, 2)  # once for all that was enqueued by the end of the block
    await device.free(ref)
    with pytest.raises(accel.StaleRefError), ref.address():
        pass
    with pytest.raises(BufferError, match="stream is 0"), (await device.zeros(3)).address(stream=0):
        pass


async def test_a_mark_that_cannot_be_recorded_takes_no_event_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: object) -> bool:
        raise accel.DriverError("the mark cannot be recorded")

    async with opened() as device:
        ref = await device.full(1000, 1.0)
        np.from_dlpack(ref)
        gc.collect()
        context: Any = device._host.context
        sharing = context.core.refs.sharing
        events = [context.events.acquire() for _ in range(3)]
        for event in events:
            context.events.release(event)
        monkeypatch.setattr(sharing._external_lane.stream, "record", fail, raising=False)
        sharing._watch_external_work()
        lane = context.lanes.transfer_lanes["put"]
        with pytest.raises(accel.DriverError):
            lane.wait_for(sharing._external_lane, sharing._external_work.now())
        assert [context.events.acquire() for _ in range(3)] == events[::-1]
