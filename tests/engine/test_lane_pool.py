"""Independent ops run side by side, and chains stay in one stream."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import accel
from accel.cpu import backend
from accel.cpu.backend import CpuDevice
from accel.engine.captures import captures_of
from accel.libraries.kernel_library import kernels_of
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, generation, in_flight, opened, task
from tests.own_library_support import Spread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.cpu.stream import CpuStream
    from accel.engine.lanes import Lanes


pytestmark = pytest.mark.usefixtures("nothing_left")


X = np.arange(16.0).reshape(4, 4)


def lanes_of(device: accel.Device) -> Lanes:
    lanes: Lanes = device._host.context.lanes
    return lanes


def issued(device: accel.Device) -> list[int]:
    """Return how many ops each lane of the pool was given, those that were given none left out."""
    return [lane.issued for lane in lanes_of(device).pool if lane.issued]


async def hanging(device: accel.Device, x: accel.AccelRef, count: int) -> list[asyncio.Future[Any]]:
    """Let ``count`` products hang."""
    found = [task(device.blas.gemm(x, x)) for _ in range(count)]
    await in_flight(device, count)
    return found


async def test_it_is_the_default_and_small_products_do_not_wait_behind_a_large_one() -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan) as device:
        x = await device.put(X)
        [large] = await hanging(device, x, 1)
        for _ in range(3):
            np.testing.assert_array_equal(await device.get(await bounded(device.blas.gemm(x, x))), X @ X)
        assert not large.done()
        assert issued(device) == [1, 3]
        plan.release()
        await large


async def test_ops_one_after_the_other_use_one_stream() -> None:
    async with opened(libraries=("blas", "elementwise")) as device:
        x = await device.put(X)
        for _ in range(5):
            await device.get(await device.elementwise.unary("neg", await device.blas.gemm(x, x)))
            async with device.batch() as batch:
                batch.blas.scal(x, 1.0)
        assert issued(device) == [15]


async def test_the_least_loaded_stream_is_taken_and_the_pool_has_a_bound() -> None:
    plan = FaultPlan()
    for number in range(1, 4):
        plan.hang_at(number, op="gemm")
    async with opened(plan, streams=3) as device:
        x = await device.put(X)
        calls = await hanging(device, x, 3)
        assert issued(device) == [1, 1, 1]
        calls += [task(device.blas.gemm(x, x)) for _ in range(4)]
        await in_flight(device, 7)
        assert issued(device) == [3, 2, 2]
        async with device.graph() as graph:  # its stream is made after all that was asked for before
            graph.elementwise.unary("neg", x)
        assert len(lanes_of(device).all) == 6, "three, those of transfers and that of captures"
        plan.release()
        for each in await asyncio.gather(*calls):
            np.testing.assert_array_equal(await device.get(each), X @ X)


async def test_transfers_captures_and_replays_keep_streams_of_their_own() -> None:
    plan = FaultPlan().hang_at(1, op="replay")
    async with opened(plan, libraries=("blas", "graph", "capture")) as device:
        x = await device.put(X)
        graphs, results = [], []
        for factor in (2.0, 3.0):
            async with device.graph() as graph:
                y = graph.blas.gemm(x, x)
                graph.blas.scal(y, factor)
            graphs.append(graph)
            results.append(y)
        both = [task(graph.replay()) for graph in graphs]
        await in_flight(device, 2)
        lanes = lanes_of(device)
        own = {lanes.routes[name] for name in ("graph", "capture")} | set(lanes.transfer_lanes.values())
        assert len(own) == 4
        assert own.isdisjoint(lanes.pool)
        assert lanes.routes["graph"].issued == 2, "two graphs at once follow each other"
        assert not any(each.done() for each in both)
        plan.release()
        await asyncio.gather(*both)
        for result, factor in zip(results, (2.0, 3.0), strict=True):
            np.testing.assert_array_equal(await device.get(result), factor * (X @ X))


async def test_without_a_stream_in_reserve_ops_run_in_the_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    create, made = CpuDevice.create_stream, itertools.count(1)

    def scarce(self: CpuDevice, *, library: str = "") -> CpuStream:
        if next(made) > 1:
            raise accel.OutOfMemoryError("no stream")
        return create(self)

    monkeypatch.setattr(CpuDevice, "create_stream", scarce)
    async with opened() as device:
        x = await device.put(X)
        for each in await asyncio.gather(*[bounded(device.blas.gemm(x, x)) for _ in range(4)]):
            np.testing.assert_array_equal(await device.get(each), X @ X)
        assert len(lanes_of(device).all) == 1


async def test_the_tree_shows_libraries_and_lanes() -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, streams=2) as device:
        x = await device.put(X)
        [product] = await hanging(device, x, 1)
        [context] = [each for each in device._core.system.tree() if each.name == "context"]
        shown = {each.name: (each.state, each.depth) for each in context.children}
        idle = ("idle", 0)
        assert shown == {"blas": ("running", 0), "lane-1": ("busy", 1), "put": idle, "get": idle, "lane-2": idle}
        plan.release()
        await product


async def test_a_library_that_could_not_be_opened_is_opened_by_its_next_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in ones like those of users: the kernel actor ends with the error, and another one is started."""
    failing = [accel.OutOfMemoryError("not now")]
    create = CpuDevice.create_stream

    def create_stream(self: CpuDevice, **options: Any) -> CpuStream:
        if armed and failing:
            raise failing.pop()
        return create(self, **options)

    armed = False
    monkeypatch.setattr(CpuDevice, "create_stream", create_stream)
    async with opened() as device:
        x = await device.put(X)
        async with device.graph() as graph:
            y = graph.elementwise.unary("neg", x)
        armed = True
        await failure(graph.replay(), accel.OutOfMemoryError)  # the lane of replays cannot be made
        await graph.replay()
        np.testing.assert_array_equal(await device.get(y), -X)
        assert "graph" in device._host.context.libraries.actors


async def test_debug_runs_everything_in_one_stream() -> None:
    async with opened(debug=True, libraries=("blas", "reduce")) as device:
        assert len(lanes_of(device).all) == 1


class Spreading(accel.KernelLibrary):
    """Copies in whichever stream it is given."""

    name = "spread"
    several_streams = True
    blocking = False

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def open(self, stream: Any) -> None:
        if self.fails:
            raise ValueError("not today")

    @accel.kernel(Spread)
    def spread(self, op: Spread, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        stream.copy(outputs[0].address, inputs[0].address, inputs[0].nbytes)


class Kept(Spreading):
    """The same in one stream."""

    several_streams = False


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_library_of_the_users_is_spread_if_it_says_so(host: Any) -> None:
    plan = FaultPlan().hang_at(2, op="spread").poison_at(5, op="spread")
    async with opened(plan, host=host) as device:
        await device.register(Spreading)
        x = await device.put(X)
        await device.run(Spread(x))
        slow = task(device.run(Spread(x)))
        await in_flight(device, 1)
        np.testing.assert_array_equal(await device.get(await bounded(device.run(Spread(x)))), X)
        async with device.batch() as batch:
            y = batch.run(Spread(batch.elementwise.unary("neg", x)))
        np.testing.assert_array_equal(await device.get(y), -X)
        assert not slow.done()
        plan.release()
        await bounded(slow)
        await failure(device.run(Spread(x)), accel.ContextPoisonedError)
        await generation(device, 2)
        x = await device.put(X)
        several = await bounded(asyncio.gather(*(device.run(Spread(x)) for _ in range(20))))
        np.testing.assert_array_equal(await device.get(several[-1]), X)


async def test_a_library_of_the_users_keeps_one_stream_by_default() -> None:
    plan = FaultPlan().hang_at(1, op="spread")
    async with opened(plan) as device:
        await device.register(Kept)
        x = await device.put(X)
        sent = [task(device.run(Spread(x))) for _ in range(3)]
        await in_flight(device, 3)
        await device.get(x)
        assert [each.done() for each in sent] == [False] * 3
        assert "spread" not in lanes_of(device).pooled_libraries
        plan.release()
        await bounded(asyncio.gather(*sent))


async def test_a_library_that_does_not_open_is_not_spread_and_the_choice_is_checked() -> None:
    class Wrong(Kept):
        several_streams: ClassVar[Any] = "yes"

    async with opened() as device:
        await failure(device.register(Spreading, fails=True), accel.LibraryError)
        assert "spread" not in lanes_of(device).pooled_libraries
        error = await failure(device.register(Wrong), accel.InvalidArgumentError)
        assert "several_streams" in str(error)
        await device.register(Spreading)
        await device.get(await device.run(Spread(await device.put(X))))
        assert "spread" in lanes_of(device).pooled_libraries
    async with opened(streams=1) as device:
        await device.register(Spreading)
        await device.get(await device.run(Spread(await device.put(X))))


class Capturing(Kept):
    """Has captures going on while it opens."""

    captures = True
    going_on: ClassVar[Callable[[], int]]
    opened: ClassVar[list[tuple[Any, int]]]

    def open(self, stream: Any) -> None:
        self.opened.append((stream, type(self).going_on()))


@pytest.mark.parametrize("streams", [1, 2, 8])
async def test_a_library_that_captures_shares_its_stream_with_nothing(streams: int) -> None:
    async with opened(streams=streams) as device:
        captures = captures_of(device._core)
        Capturing.opened, Capturing.going_on = [], lambda: captures.count
        x = await device.elementwise.unary("neg", await device.put(X))
        for _ in range(2):
            await device.register(Capturing)
            np.testing.assert_array_equal(await device.get(await device.run(Spread(x))), -X)
            await device.unregister("spread")
            assert captures.count == 0
        await device.register(Kept)
        np.testing.assert_array_equal(await device.get(await device.run(Spread(x))), -X)
        (stream, count), (again, _) = Capturing.opened
        assert count == 1, "memory of others is not waited for meanwhile"
        assert stream is again, "it is kept for the next one"
        lanes = lanes_of(device)
        assert [lane.stream for lane in lanes.all].count(stream) == 1
        assert stream not in [lane.stream for lane in (*lanes.pool, *lanes.transfer_lanes.values())]


def test_a_library_that_captures_has_one_stream() -> None:
    class Both(Capturing):
        several_streams = True

    with pytest.raises(accel.InvalidArgumentError, match="captures"):
        kernels_of(Both)


@pytest.mark.parametrize("streams", [8, 2, 1])
async def test_each_named_library_is_prepared_in_the_streams_that_it_runs_in(monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    prepared: list[tuple[str, Any]] = []

    class Preparing(CpuDevice):  # a class of its own: what a class offers is remembered
        def prepare(self, library: str, stream: Any) -> None:
            prepared.append((library, stream))

    monkeypatch.setattr(backend, "CpuDevice", Preparing)
    libraries = ("blas", "elementwise", "reduce", "fft")
    async with opened(streams=streams, libraries=libraries) as device:
        pool = device._host.context.lanes.pool
        assert len(pool) == streams
        assert prepared == [(library, lane.stream) for library in libraries for lane in pool]
        prepared.clear()
        await device.rng.normal(3)
        assert not prepared, "others are made at their first use"


@pytest.mark.parametrize("kind", ["put", "get", "gemm"])
async def test_a_put_a_get_and_compute_overlap(kind: str) -> None:
    """Each in turn hangs in its stream, and the other two go on."""
    plan = FaultPlan().hang_at(2, op=kind)
    async with opened(plan) as device:
        x = np.eye(4)
        a = await device.put(x)
        np.testing.assert_array_equal(await device.get(await device.blas.gemm(a, a)), x)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "put": lambda: device.put(x),
            "get": lambda: device.get(a),
            "gemm": lambda: device.blas.gemm(a, a),
        }
        hanging = task(calls[kind]())
        await in_flight(device, 1)
        for other in calls.keys() - {kind}:
            await bounded(calls[other]())
        assert not hanging.done()
        plan.release()
        await hanging


async def test_with_one_stream_everything_waits_for_what_was_sent_before() -> None:
    plan = FaultPlan().hang_at(1, op="get")
    async with opened(plan, streams=1) as device:
        a = await device.put(np.eye(4))
        hanging = task(device.get(a))
        await in_flight(device, 1)
        sent = [task(device.put(np.eye(4))), task(device.blas.gemm(a, a))]
        await in_flight(device, 3)
        assert not any(each.done() for each in sent)
        plan.release()
        await asyncio.gather(hanging, *sent)
