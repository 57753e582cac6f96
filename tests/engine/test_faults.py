"""A fault ends what was in flight, the context is rebuilt, what waited goes on, and everybody is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import accel
from accel.actors.turns import Turn
from accel.cpu.backend import CpuBackend, CpuDevice
from accel.engine.context import Context
from accel.engine.in_flight import MANY_FREES
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, generation, in_flight, opened, task, turns, until, used

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")

ALL = ("blas", "elementwise", "reduce", "dnn")
FAST = accel.RestartStrategy(max_restarts=10, backoff=(0.0, 0.0))


async def test_fault_ends_everything_in_flight_on_every_lane() -> None:
    error = accel.DriverError("illegal address", code=700, library="driver")
    plan = FaultPlan().hang_at(1, op="gemm").hang_at(1, op="reduce").poison_at(1, error, op="unary")
    async with opened(plan, libraries=ALL, streams=8) as device:
        a = await device.zeros((3, 3))
        calls = [task(device.blas.gemm(a, a)), task(device.reduce("sum", a)), task(device.put(np.zeros(1)))]
        await calls[2]
        await in_flight(device, 2)
        calls[2] = task(device.elementwise.unary("neg", a))
        errors = [await failure(call, accel.ContextPoisonedError) for call in calls]
        assert len({id(each) for each in errors}) == 3, "each waiter has an instance of its own"
        for each, op in zip(errors, ("gemm", "reduce", "unary"), strict=True):
            assert (each.code, each.library, each.device, each.generation) == (700, "driver", "cpu:0", 1)
            assert (each.scope, each.retryable, each.executed) == (accel.FaultScope.CONTEXT, True, "unknown")
            assert set(each.suspects) == {"gemm", "reduce", "unary"}, op
            assert isinstance(each.__cause__, accel.DriverError)
        assert a.is_stale
        await generation(device, 2)
        assert device.info().restarts == 1


async def test_queued_ops_with_live_operands_run_in_the_next_generation() -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, max_in_flight=2, libraries=["blas"], streams=1) as device:
        a = await device.zeros((3, 3))
        flying = [task(device.blas.gemm(a, a)) for _ in range(2)]
        await in_flight(device, 2)
        x = np.arange(4.0)
        queued: list[asyncio.Future[Any]] = [
            task(device.put(x)),
            task(device.elementwise.unary("neg", a)),
            task(device.full(2, 3.0)),
            task(device.free(a)),
        ]
        await turns()
        assert device.info().queued == 4
        device._host.context.report_fault(accel.DriverError("now", scope=accel.FaultScope.CONTEXT))
        for call in flying:
            await failure(call, accel.ContextPoisonedError)
        np.testing.assert_array_equal(await device.get(await bounded(queued[0])), x)
        assert (await failure(queued[1], accel.StaleRefError)).reason in ("generation", "freed")
        np.testing.assert_array_equal(await device.get(await bounded(queued[2])), np.full(2, 3, np.float32))
        await bounded(queued[3])
        assert device.generation == 2


async def test_an_error_that_is_no_fault_but_ends_a_context_is_the_cause_of_its_fault() -> None:
    raised = accel.OutOfMemoryError("the driver has no memory for an event", code=2)
    raised.__cause__ = MemoryError("planted")
    async with opened(FaultPlan().hang_at(1, op="gemm"), libraries=["blas"]) as device:
        a = await device.zeros((3, 3))
        flying = task(device.blas.gemm(a, a))
        await in_flight(device, 1)
        device._host.context.report_fault(raised)
        fault = (await failure(flying, accel.ContextPoisonedError)).__cause__
        assert isinstance(fault, accel.LibraryError)
        assert fault.scope is accel.FaultScope.CONTEXT
        assert isinstance(fault.__cause__, accel.OutOfMemoryError)
        assert isinstance(fault.__cause__.__cause__, MemoryError)


async def test_new_ops_wait_while_rebuilding() -> None:
    plan = FaultPlan().poison_at(2)
    async with opened(plan) as device:
        a = await device.zeros(3)
        await failure(device.elementwise.unary("neg", a), accel.ContextPoisonedError)
        assert device.state is accel.DeviceState.REBUILDING
        assert not device.health().is_ready
        assert device.health().is_live
        assert "fault plan" in device.health().reason
        np.testing.assert_array_equal(await device.get(await device.full(2, 1.0)), np.ones(2))
        assert device.generation == 2


async def test_many_tasks_go_on_through_a_fault() -> None:
    plan = FaultPlan().poison_at(150)
    async with opened(plan, pending_limit=16, max_in_flight=8) as device:

        async def client(number: int) -> int:
            retries = 0
            for step in range(6):
                while True:
                    try:
                        ref = await device.full(3, float(number * 10 + step))
                        ref = await device.elementwise.unary("neg", ref)
                        got = await device.get(ref)
                        break
                    except (accel.ContextPoisonedError, accel.StaleRefError):
                        retries += 1
                np.testing.assert_array_equal(got, np.full(3, -(number * 10 + step), np.float32))
            return retries

        retries = await bounded(asyncio.gather(*(client(number) for number in range(32))))
        assert sum(retries) > 0
        assert device.generation == 2
        await until(lambda: used(device) == 0)


async def test_two_faults_at_once_are_one() -> None:
    plan = FaultPlan().hang_at(2).poison_at(1, op="gemm").poison_at(1, op="unary")
    async with opened(plan, libraries=ALL) as device:
        a = await device.zeros((3, 3))
        first = task(device.put(np.ones((3, 3), np.float32), out=a))
        calls = [task(device.blas.gemm(a, a)), task(device.elementwise.unary("neg", a))]
        await in_flight(device, 3)
        plan.release()
        await bounded(asyncio.gather(first, return_exceptions=True))
        for call in calls:
            await failure(call, accel.ContextPoisonedError)
        await generation(device, 2)
        await turns()
        assert device.info().restarts == 1


@pytest.mark.parametrize(
    ("host", "scope", "turn"),
    [*(("inline", accel.FaultScope.CONTEXT, turn) for turn in range(8)), *(("auto", accel.FaultScope.PROCESS, turn) for turn in (0, 4))],
)
async def test_fault_at_any_moment_of_opening_a_library(turn: int, host: Literal["inline", "auto"], scope: accel.FaultScope) -> None:
    async with opened(host=host) as device:
        a = await device.zeros((3, 3))
        opening = task(device.blas.gemm(a, a))
        await turns(turn)
        device._host.context.report_fault(accel.DriverError("now", scope=scope))
        [outcome] = await asyncio.gather(opening, return_exceptions=True)
        assert isinstance(outcome, accel.StaleRefError | accel.ContextPoisonedError | accel.AccelRef)
        b = await bounded(device.put(np.eye(3)))
        np.testing.assert_array_equal(await device.get(await bounded(device.blas.gemm(b, b))), np.eye(3))
        assert device.generation == 2


async def test_rebuild_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = failing_opens(monkeypatch, lambda n: n in (2, 3))
    async with opened(FaultPlan().poison_at(1), restart=FAST) as device:
        await failure(device.zeros(1), accel.ContextPoisonedError)
        assert (await device.get(await bounded(device.full(1, 2.0)))).tolist() == [2.0]
        assert len(attempts) == 4
        assert device.generation == 2


def failing_opens(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[int]:
    """Let some of the attempts to open a context fail; return the list that counts them."""
    attempts: list[int] = []
    really = CpuBackend.open

    def open_context(self: CpuBackend, index: int) -> Any:
        attempts.append(index)
        if fails(len(attempts)):
            raise accel.DriverError("no context today", scope=accel.FaultScope.CONTEXT)
        return really(self, index)

    monkeypatch.setattr(CpuBackend, "open", open_context)
    return attempts


async def test_device_that_cannot_be_opened_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_opens(monkeypatch, lambda _: True)
    async with accel.System() as system:
        await failure(system.open_device("cpu"), accel.DriverError)
        assert system.devices == ()
        monkeypatch.undo()
        device = await system.open_device("cpu")
        assert device.generation == 1


@pytest.mark.parametrize("how", ["rebuilds fail", "faults again and again"])
async def test_budget_that_is_spent_loses_the_device(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "rebuilds fail":
        failing_opens(monkeypatch, lambda n: n > 1)
        plan = FaultPlan().hang_at(1).poison_at(2)
    else:
        plan = FaultPlan().hang_at(1)
        for n in range(2, 20):
            plan.poison_at(n)
    # In one stream: the op that faults is behind the one that hangs.
    async with opened(plan, streams=1, max_in_flight=2, pending_limit=1, restart=accel.RestartStrategy(2, backoff=(0.0, 0.0))) as device:
        flying = [task(device.zeros(1)) for _ in range(2)]
        await in_flight(device, 2)
        waiting = [task(device.zeros(1)) for _ in range(6)]
        watching = task(_listen(device))
        await turns()
        plan.release()
        results = await bounded(asyncio.gather(*flying, *waiting, return_exceptions=True))
        await until(lambda: device.state is accel.DeviceState.LOST)
        kinds = [type(result) for result in results[1:]]
        assert kinds[0] is accel.ContextPoisonedError
        assert kinds[-1] is accel.DeviceLostError
        assert len({id(result) for result in results}) == len(results)
        for call in (device.zeros(1), device.put([1]), _one_batch(device)):
            error = await failure(call, accel.DeviceLostError)
            assert error.scope is accel.FaultScope.DEVICE
            assert isinstance(error.__cause__, accel.AccelError)
        await failure(watching, accel.DeviceLostError)
        await failure(_listen(device), accel.DeviceLostError)
        health = device.health()
        assert (health.is_live, health.is_ready) == (False, False)
        assert device.info().state is accel.DeviceState.LOST
        assert device.info().queued == device.info().in_flight == 0


async def _one_graph(device: accel.Device, a: accel.AccelRef) -> None:
    async with device.graph() as graph:
        graph.elementwise.unary("neg", a)


async def _one_batch(device: accel.Device) -> None:
    async with device.batch() as batch:
        batch.zeros(1)


async def _listen(device: accel.Device) -> list[int]:
    return [generation async for generation in device.generations()]


async def test_error_with_a_scope_is_a_fault_wherever_it_is_raised() -> None:
    plan = FaultPlan().fail_at(2, accel.LibraryError("internal", code=14, scope=accel.FaultScope.CONTEXT))
    async with opened(plan) as device:
        a = await device.zeros(1)
        error = await failure(device.elementwise.unary("neg", a), accel.ContextPoisonedError)
        assert (error.code, error.op, error.suspects) == (14, "unary", ("unary",))
        await generation(device, 2)


@pytest.mark.parametrize("where", ["create_slab", "create_stream"])
async def test_fault_that_surfaces_while_an_op_is_made_ready_is_the_contexts(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(CpuDevice, where)
    armed: list[accel.AccelError] = []

    def faulted(*args: Any, **kwargs: Any) -> Any:
        if armed:
            raise armed.pop()
        return before(*args, **kwargs)

    monkeypatch.setattr(CpuDevice, where, faulted)
    async with opened() as device:
        a = await device.put(np.eye(3))
        armed.append(accel.DriverError("lost", code=700, scope=accel.FaultScope.CONTEXT))
        # Neither is told the driver's own error: of what had not been sent, the operands alone say whether it runs in the next generation.
        asked = device.zeros(1 << 24) if where == "create_slab" else _one_graph(device, a)  # whose stream is made at its first use
        other = device.get(a)
        ended = await bounded(asyncio.gather(asked, other, return_exceptions=True))
        assert {type(each) for each in ended} <= {accel.AccelRef, accel.StaleRefError, accel.ContextPoisonedError, np.ndarray}, ended
        await generation(device, 2)
        assert np.array_equal(await device.get(await device.put(np.eye(3))), np.eye(3))


async def test_failed_op_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().fail_at(2, accel.LibraryError("refused", code=7))
    async with opened(plan) as device:
        a = await device.full(2, 1.0)
        calls = [task(device.elementwise.unary("neg", a)) for _ in range(3)]
        error = await failure(calls[0], accel.LibraryError)
        assert (error.code, error.op, error.device, error.generation, error.op_index) == (7, "unary", "cpu:0", 1, None)
        for call in calls[1:]:
            np.testing.assert_array_equal(await device.get(await call), [-1, -1])
        assert (device.generation, plan.fired) == (1, 1)


async def test_debug_names_the_op_that_faulted() -> None:
    for debug in (False, True):
        plan = FaultPlan().poison_at(3)
        async with opened(plan, debug=debug, libraries=ALL) as device:
            a = await device.zeros((2, 2))
            calls = [task(device.blas.gemm(a, a)), task(device.elementwise.unary("neg", a)), task(device.reduce("sum", a))]
            results = await bounded(asyncio.gather(*calls, return_exceptions=True))
            error = results[1]
            assert isinstance(error, accel.ContextPoisonedError)
            if debug:
                assert error.op == "unary"
            await generation(device, 2)


async def test_generations_yields_the_present_one_and_then_the_latest_only() -> None:
    plan = FaultPlan().poison_at(1).poison_at(2).poison_at(3)
    async with opened(plan, restart=FAST) as device:
        seen = device.generations()
        assert await bounded(anext(seen)) == 1
        following = task(_collect(device))
        for number in range(2, 5):
            await failure(device.zeros(1), accel.ContextPoisonedError)
            await generation(device, number)
            await turns()
        assert await bounded(anext(seen)) == 4
        waiting = task(_next(seen))
        await turns()
        assert not waiting.done()
        await device.aclose()
        with pytest.raises(StopAsyncIteration):
            await bounded(waiting)
        assert await bounded(following) == [1, 2, 3, 4]
        assert await _collect(device) == []


async def _collect(device: accel.Device) -> list[int]:
    return [number async for number in device.generations()]


async def _next(seen: Any) -> int:
    value: int = await anext(seen)
    return value


async def test_bug_of_the_device_layer_costs_one_op_and_nothing_else(monkeypatch: pytest.MonkeyPatch, device: accel.Device) -> None:
    a = await device.zeros(1)

    def broken(*_: Any) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr("accel.engine.context.Context.dispatch_now", broken)
    error = await failure(device.zeros(1), accel.LibraryError)
    assert isinstance(error.__cause__, RuntimeError)
    monkeypatch.undo()
    assert (await bounded(device.full(1, 3.0))).generation == 1
    assert not a.is_stale


async def test_an_op_is_answered_although_the_fault_came_while_many_refs_were_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, apply_frees = asyncio.get_running_loop(), Context.apply_frees

    def apply_and_fault(self: Context, most: int | None = None) -> None:
        apply_frees(self, most)
        if most is not None and len(self.core.refs.dropped) <= MANY_FREES:
            loop.call_soon(self.report_fault, accel.DriverError("gone", scope=accel.FaultScope.CONTEXT))

    async with opened() as device:
        x = await device.put(np.zeros(4))
        await device.elementwise.unary("neg", x)
        monkeypatch.setattr(Turn, "is_over", True)
        monkeypatch.setattr(Context, "apply_frees", apply_and_fault)
        device._core.refs.dropped.extend(range(1 << 40, (1 << 40) + MANY_FREES + 1))  # of no buffers
        error = await failure(device.elementwise.unary("neg", x), accel.StaleRefError)
        assert error.reason == "generation"
