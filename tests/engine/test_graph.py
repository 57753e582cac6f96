"""Graphs: recorded once, replayed in place, given back; the same semantics on every backend, shown on the CPU."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.cpu.backend import CpuDevice
from accel.engine.program import CollectiveReplay
from accel.testing import FaultPlan
from tests.device_support import failure, in_flight, opened, task, turns, until
from tests.own_library_support import Scale, Scaling

if TYPE_CHECKING:
    from accel.device.graph import GraphFunction


def rng() -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence().entropy)


async def test_replay_computes_with_what_its_inputs_hold_now() -> None:
    generator = rng()
    async with accel.System() as system:
        device = await system.open_device("cpu")
        a, w = generator.standard_normal((2, 24, 24))
        x, weight = await device.put(a), await device.put(w)
        async with device.graph() as graph:
            h = graph.blas.gemm(x, weight)
            h = graph.elementwise.unary("relu", h, out=h)
            total = graph.reduce("sum", h, axis=0)
        assert len(graph) == 0
        for _ in range(3):
            a = generator.standard_normal((24, 24))
            await device.put(a, out=x)
            await graph.replay()
            np.testing.assert_allclose(await device.get(total), np.maximum(a @ w, 0).sum(axis=0), rtol=1e-12, atol=1e-12)


async def test_nothing_runs_before_the_first_replay(device: accel.Device) -> None:
    y = await device.put(np.ones(8))
    x = await device.put(np.full(8, 2.0))
    async with device.graph() as graph:
        graph.blas.axpy(x, y, alpha=3.0)
    np.testing.assert_array_equal(await device.get(y), np.ones(8))
    await graph.replay()
    await graph.replay()
    np.testing.assert_array_equal(await device.get(y), np.full(8, 13.0))


async def test_replays_and_other_ops_keep_their_order(device: accel.Device) -> None:
    x = await device.zeros((1 << 14,), "float64")
    one = await device.full((1 << 14,), 1.0, "float64")
    async with device.graph() as graph:
        graph.elementwise.binary("add", x, one, out=x)
    waits: list[asyncio.Future[object]] = []
    for _ in range(20):
        waits.append(asyncio.ensure_future(graph.replay()))
        waits.append(asyncio.ensure_future(device.blas.scal(x, 2.0)))
    await asyncio.gather(*waits)
    expected = 0.0
    for _ in range(20):
        expected = (expected + 1) * 2
    np.testing.assert_array_equal(await device.get(x), np.full(1 << 14, expected))


async def test_dropping_the_graph_and_its_refs_gives_their_memory_back(device: accel.Device) -> None:
    x = await device.put(np.ones((64, 64)))
    before = device.info().memory.used
    async with device.graph() as graph:
        y = graph.blas.gemm(x, x)
    await graph.replay()
    held = device.info().memory.used
    assert held > before
    del y
    gc.collect()
    assert device.info().memory.used == held, "the graph writes it at each replay"
    await graph.replay()
    await graph.aclose()
    await graph.aclose()
    gc.collect()
    assert device.info().memory.used == before
    with pytest.raises(accel.ClosedError):
        await graph.replay()


async def test_a_graph_of_a_gone_generation_is_refused() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(3))
        x = await device.put(np.ones(4))
        async with device.graph() as graph:
            graph.elementwise.unary("neg", x, out=x)
        with pytest.raises(accel.ContextPoisonedError):
            await graph.replay()
            await graph.replay()
        async for generation in device.generations():
            if generation == 2:
                break
        assert graph.is_stale
        with pytest.raises(accel.StaleRefError) as caught:
            await graph.replay()
        assert caught.value.reason == "generation"


async def test_a_freed_result_ends_the_graph(device: accel.Device) -> None:
    x = await device.put(np.ones(64))
    async with device.graph() as graph:
        y = graph.elementwise.unary("neg", x)
    await graph.replay()
    await device.free(y)
    other = await device.full(64, 7.0, "float64")  # where y was, likely
    with pytest.raises(accel.StaleRefError) as caught:
        await graph.replay()
    assert caught.value.reason == "freed"
    assert caught.value.op == "replay"
    np.testing.assert_array_equal(await device.get(other), np.full(64, 7.0))


async def test_a_body_that_raises_leaves_nothing_behind(device: accel.Device) -> None:
    x = await device.put(np.ones((8, 8)))
    used = device.info().memory.used
    graph = device.graph()
    with pytest.raises(RuntimeError, match="mine"):
        async with graph:
            y = graph.blas.gemm(x, x)
            raise RuntimeError("mine")
    with pytest.raises(accel.ClosedError):
        await graph.replay()
    with pytest.raises(accel.StaleRefError):
        await device.get(y)
    assert device.info().memory.used == used


async def test_misuse_says_what_to_do(device: accel.Device) -> None:
    x = await device.put(np.ones(4))
    graph = device.graph()
    with pytest.raises(accel.NotInitializedError):
        graph.elementwise.unary("neg", x)
    with pytest.raises(accel.NotInitializedError):
        await graph.replay()
    async with graph:
        y = graph.elementwise.unary("neg", x)
        with pytest.raises(accel.InvalidArgumentError, match="graph that has not ended"):
            await device.get(y)
        with pytest.raises(accel.InvalidArgumentError, match="host memory"):
            graph.run(ops.Put(np.ones(4)))
        with pytest.raises(accel.InvalidArgumentError, match="no buffer"):
            graph.run(ops.Get(x, np.empty(4)))
    with pytest.raises(accel.ClosedError):
        graph.elementwise.unary("neg", x)
    with pytest.raises(accel.ClosedError):
        async with graph:
            pass


async def test_an_op_that_fails_at_replay_is_answered_there_and_the_device_goes_on() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().fail_at(2, accel.LibraryError("broken", code=13), op="replay"))
        x = await device.put(np.ones(4))
        async with device.graph() as graph:
            graph.elementwise.unary("neg", x, out=x)
        await graph.replay()
        with pytest.raises(accel.LibraryError) as caught:
            await graph.replay()
        assert (caught.value.code, caught.value.op) == (13, "replay")
        await graph.replay()
        np.testing.assert_array_equal(await device.get(x), np.ones(4))


async def test_a_recording_that_is_cancelled_during_its_capture_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    began, let_go, closed = threading.Event(), threading.Event(), threading.Event()
    original = CpuDevice.kernels

    def capture(lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        began.set()
        assert let_go.wait(10)
        op.program.native = SimpleNamespace(close=closed.set)

    def kernels(self: CpuDevice, library: str) -> Any:
        return {"capture": capture} if library == "capture" else original(self, library)

    monkeypatch.setattr(CpuDevice, "kernels", kernels)
    monkeypatch.setattr(CpuDevice, "may_block", lambda self, lane, op: op.kind == "capture")
    async with accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.put(np.ones(4))
        used = device.info().memory.used
        raised: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))

        async def record() -> None:
            async with device.graph() as graph:
                graph.elementwise.unary("neg", x)

        task = asyncio.create_task(record())
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task
        # What was recorded is given back by the next op, before the capture has ended.
        np.testing.assert_array_equal(await device.get(x), np.ones(4))
        let_go.set()
        while not closed.is_set() and not raised:
            gc.collect()
            await device.get(x)
        assert not raised
        assert device.info().memory.used == used


class Native:
    """What a backend made of a graph: its closing waits until it is let go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.closed: list[threading.Thread] = []

    def close(self) -> None:
        assert self.go_on.wait(10)
        self.closed.append(threading.current_thread())


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    made, original = Native(), CpuDevice.kernels

    def capture(lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        op.program.native = made

    monkeypatch.setattr(
        CpuDevice, "kernels", lambda self, library: {"capture": capture} if library == "capture" else original(self, library)
    )
    return made


async def test_a_graph_is_given_back_beside_the_loop(native: Native) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.put(np.ones(4))
        async with device.graph() as graph:
            y = graph.elementwise.unary("neg", x)
        await graph.replay()
        del graph, y
        for _ in range(3):
            np.testing.assert_array_equal(await device.get(x), np.ones(4))
        assert not native.closed
        native.go_on.set()
        await until(lambda: native.closed, "giving the graph back")
        assert native.closed != [threading.current_thread()]
    assert len(native.closed) == 1


async def closed_in_flight(device: accel.Device) -> asyncio.Future[None]:
    """Return a replay that hangs, of a graph that nobody has any more."""
    x = await device.put(np.ones(4))
    async with device.graph() as graph:
        graph.elementwise.unary("neg", x, out=x)
    replay = task(graph.replay())
    await in_flight(device, 1)
    await graph.aclose()
    return replay


async def test_a_graph_that_is_dropped_in_flight_is_given_back_when_its_replay_has_ended(native: Native) -> None:
    """Although nothing is sent after it, and nobody asks the device for anything."""
    native.go_on.set()
    plan = FaultPlan().hang_at(1, op="replay")
    async with opened(plan) as device:
        replay = await closed_in_flight(device)
        device.info()  # frees the buffers of refs that were dropped
        assert not native.closed
        plan.release()
        await replay
        await until(lambda: native.closed, "giving the graph back")


async def test_closing_gives_graphs_back_that_rest(native: Native) -> None:
    native.go_on.set()
    plan = FaultPlan().hang_at(1, op="replay")
    async with opened(plan) as device:
        replay = await closed_in_flight(device)
        assert not native.closed
        plan.release()
    await replay
    assert len(native.closed) == 1


async def test_graphs_that_are_one_command_follow_each_other_in_whichever_lane_they_are_replayed(native: Native) -> None:
    """Both were captured in one lane, and use its workspaces."""
    native.go_on.set()
    plan = FaultPlan().hang_at(1, op="replay")
    async with opened(plan) as device:
        x = await device.put(np.ones(4))
        async with device.graph() as first:
            first.elementwise.unary("neg", x)
        async with device.graph() as second:
            second.elementwise.unary("neg", x)
        replays = [task(first.replay())]
        await in_flight(device, 1)
        replays.append(task(device._sender.run(CollectiveReplay(second._live_program()), None)))
        await in_flight(device, 2)
        np.testing.assert_array_equal(await device.get(x), np.ones(4))
        await turns()
        assert [replay.done() for replay in replays] == [False, False]
        plan.release()
        await asyncio.gather(*replays)


async def test_dropping_a_graph_or_a_batch_needs_no_collector(device: accel.Device) -> None:
    x = await device.put(np.ones((64, 64)))
    used = device.info().memory.used
    gc.collect()
    gc.disable()
    try:
        async with device.graph() as graph:
            y = graph.blas.gemm(x, x)
            del y
        await graph.replay()
        async with device.batch() as batch:
            y = batch.blas.gemm(x, x)
        gone: list[weakref.ref[Any]] = [weakref.ref(graph), weakref.ref(batch)]
        assert device.info().memory.used > used
        del graph, batch, y
        assert [each() for each in gone] == [None, None]
        assert device.info().memory.used == used
        with pytest.raises(RuntimeError, match="mine"):
            async with device.graph() as graph:
                graph.blas.gemm(x, x)
                raise RuntimeError("mine")
        gone = [weakref.ref(graph)]
        del graph
        assert gone[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_memory_of_a_graph_that_is_gone_has_owners_that_do_not_share_an_error(host: Any) -> None:
    """All buffers of a graph are tracked as one; those that get their memory later are not: an op with a bad index once failed their readers."""
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        x = await device.put(np.ones(4))
        async with device.graph() as graph:
            y = x
            for _ in range(6):
                y = graph.elementwise.unary("neg", y)
        await graph.replay()
        del graph, y
        await device.zeros((4,))  # frees what was dropped
        kept = [await device.full((4,), float(n)) for n in range(3)]
        with pytest.raises(accel.InvalidArgumentError, match="99"):
            await device.arrays.take(x, await device.put(np.array([99], np.int32)))
        for n, ref in enumerate(kept):
            np.testing.assert_array_equal(await device.get(await device.elementwise.binary("add", ref, ref)), np.full(4, 2.0 * n))


async def exp_plus(device: accel.Device, y: accel.AccelRef) -> GraphFunction:
    """Return ``exp(x) + y`` as a function of ``x``, replayed once with ones."""
    async with device.graph() as graph:
        x = graph.empty(4, np.float64)
        total = graph.elementwise.binary("add", graph.elementwise.unary("exp", x), y)
    await device.put(np.ones(4), out=x)
    await graph.replay()
    return graph.into_function([x], [total])


async def test_a_function_computes_with_its_operands_where_a_graph_is_not_one_command(hosted: accel.Device) -> None:
    y = await hosted.put(np.full(4, 0.5))
    function = await exp_plus(hosted, y)
    for number in range(3):
        (result,) = await function(await hosted.put(np.full(4, float(number))), y)
        np.testing.assert_allclose(await hosted.get(result), np.exp(number) + 0.5)


async def test_a_function_refuses_operands_that_do_not_fit_its_inputs(hosted: accel.Device) -> None:
    x, y = await hosted.put(np.full(4, 2.0)), await hosted.put(np.full(4, 0.5))
    function = await exp_plus(hosted, y)
    short, other = await hosted.zeros(3, np.float64), await hosted.zeros(4, np.float32)
    wide, nothing = await hosted.zeros((4, 2), np.float64), None
    for operands in ((), (short, y), (other, y), (nothing, y), (x,), (x, x), (wide[:, 0], y)):
        given: Any = operands
        assert (await failure(function(*given), accel.InvalidArgumentError)).remedy, operands
    (result,) = await function(x, y)
    np.testing.assert_allclose(await hosted.get(result), np.exp(2.0) + 0.5)


async def test_a_freed_buffer_ends_the_function(hosted: accel.Device) -> None:
    async with hosted.graph() as graph:
        x = graph.empty(4, np.float64)
        h = graph.elementwise.unary("exp", x)
        y = graph.elementwise.unary("neg", h)
    function = graph.into_function([x], [y])
    a = await hosted.put(np.ones(4))
    await hosted.free(h)
    other = await hosted.put(np.full(4, 7.0))  # where h was, likely
    assert (await failure(function(a), accel.StaleRefError)).reason == "freed"
    np.testing.assert_array_equal(await hosted.get(other), np.full(4, 7.0))


async def test_a_function_without_results_returns_none_of_its_buffers(hosted: accel.Device) -> None:
    async with hosted.graph() as graph:
        x = graph.empty(4, np.float64)
        y = graph.elementwise.unary("neg", x)
    function = graph.into_function([x], [])
    assert await function(await hosted.put(np.ones(4))) == ()
    np.testing.assert_array_equal(await hosted.get(y), -np.ones(4))


async def test_a_function_refuses_an_operand_that_another_one_overwrites(hosted: accel.Device) -> None:
    async with hosted.graph() as graph:
        a, b = graph.empty(4, np.float64), graph.empty(4, np.float64)
        difference = graph.elementwise.binary("sub", a, b)
    function = graph.into_function([a, b], [difference])
    await hosted.put(np.full(4, 3.0), out=a)
    await hosted.put(np.ones(4), out=b)
    for operands in ((b, a), (b, b), (a, a)):
        assert (await failure(function(*operands), accel.InvalidArgumentError)).remedy
    (result,) = await function(a, b)
    np.testing.assert_array_equal(await hosted.get(result), np.full(4, 2.0))


async def test_a_graph_that_writes_a_buffer_of_others_is_no_function(device: accel.Device) -> None:
    y = await device.put(np.zeros(4))
    async with device.graph() as graph:
        x = graph.empty(4, np.float64)
        graph.copy(x, y)
    with pytest.raises(accel.InvalidArgumentError, match="writes"):
        graph.into_function([], [x])
    await device.put(np.ones(4), out=x)
    await graph.replay()
    np.testing.assert_array_equal(await device.get(y), np.ones(4))


@pytest.mark.parametrize("is_result", [True, False])
@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_call_does_not_read_what_a_failed_op_has_left_in_the_state_of_its_graph(host: Any, *, is_result: bool) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        one = await device.put(np.ones(4))
        async with device.graph() as graph:
            x, state = graph.empty(4, np.float64), graph.empty(4, np.float64)
            graph.elementwise.binary("add", state, x, out=state)
            made = graph.elementwise.unary("neg", state)
        await device.put(np.zeros(4), out=state)
        function = graph.into_function([x], [state if is_result else made])
        for total in (1.0, 2.0):
            (result,) = await function(one)
            np.testing.assert_array_equal(await device.get(result), np.full(4, total if is_result else -total))
        with pytest.raises(accel.InvalidArgumentError):
            await device.arrays.take(one, await device.put(np.array([0, 99, 0, 0], np.int32)), out=state)
        for use in (function(one), device.get(state), function(one)):
            with pytest.raises(accel.InvalidArgumentError):
                await use
        await device.put(np.zeros(4), out=state)
        (result,) = await function(one)
        np.testing.assert_array_equal(await device.get(result), np.full(4, 1.0 if is_result else -1.0))


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_replay_that_is_sent_behind_the_end_of_its_library_is_refused(host: Any) -> None:
    plan = FaultPlan()
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host, max_in_flight=1, faults=plan)
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        async with device.graph() as graph:
            y = graph.run(Scale(x))
        await graph.replay()
        np.testing.assert_array_equal(await device.get(y), np.full(4, 2.0))
        plan.hang_at(plan.count + 1)
        holding = [task(device.zeros(4))]
        await in_flight(device, 1)
        holding.append(task(device.zeros(4)))  # it waits for room, and so do those behind it
        await turns(3)
        ending, replaying = task(device.unregister("sent")), task(graph.replay())
        await turns(3)
        plan.release()
        await asyncio.gather(*holding, ending)
        error = await failure(replaying, accel.UnsupportedError)
        assert "was unregistered" in str(error)
