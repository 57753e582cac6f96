"""A fault that no context can follow loses the device in the same turn, and says so to who waited."""

from __future__ import annotations

import logging

import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, generation, opened, task, turns

pytestmark = pytest.mark.usefixtures("nothing_left")

LOST = accel.DeviceState.LOST


def dead(scope: accel.FaultScope) -> accel.DriverError:
    return accel.DriverError("dead", code=719, scope=scope)


def assert_final(error: accel.ContextPoisonedError, device: accel.Device) -> None:
    assert device.state is LOST, "at once, and not after the supervisor has had its turn"
    assert not error.retryable
    assert "being rebuilt" not in str(error)
    assert error.remedy == accel.DeviceLostError.default_remedy


@pytest.mark.parametrize("scope", [accel.FaultScope.PROCESS, accel.FaultScope.DEVICE])
async def test_fault_that_this_process_cannot_survive_is_final_at_once(scope: accel.FaultScope, caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan().hang_at(1, op="gemm").poison_at(1, dead(scope), op="unary")
    async with opened(plan, libraries=["blas", "elementwise"], host="inline") as device:
        a = await device.zeros((2, 2))
        flying = task(device.blas.gemm(a, a))
        await turns()
        with caplog.at_level(logging.ERROR, "accel"):
            first = await failure(device.elementwise.unary("neg", a), accel.ContextPoisonedError)
            assert_final(first, device)
            assert (first.scope, first.code, first.executed) == (scope, 719, "unknown")
            other = await failure(flying, accel.ContextPoisonedError)
            assert not other.retryable
            assert (await failure(device.zeros(1), accel.DeviceLostError)).code == 719
            await turns()
        assert (device.state, device.generation) == (LOST, 1)
        assert [record.getMessage().split()[0] for record in caplog.records].count("device_lost") == 1


async def test_fault_that_spends_the_budget_is_final_at_once() -> None:
    plan = FaultPlan().poison_at(1).poison_at(2)
    async with opened(plan, restart=accel.RestartStrategy(1)) as device:
        first = await failure(device.zeros(1), accel.ContextPoisonedError)
        assert first.retryable
        assert device.state is accel.DeviceState.REBUILDING
        await generation(device, 2)
        assert_final(await failure(device.zeros(1), accel.ContextPoisonedError), device)
        await failure(device.zeros(1), accel.DeviceLostError)


async def test_what_was_told_to_be_final_stays_so_when_the_budget_recovers_in_the_same_moment() -> None:
    now = [0.0]
    plan = FaultPlan().poison_at(1).poison_at(2)
    async with accel.System(clock=lambda: now[0]) as system:
        device = await system.open_device("cpu", faults=plan, restart=accel.RestartStrategy(1, within=10.0))
        await failure(device.zeros(1), accel.ContextPoisonedError)
        await generation(device, 2)
        device._host.context.report_fault(dead(accel.FaultScope.CONTEXT))
        now[0] = 11.0
        await turns()
        assert (device.state, device.generation) == (LOST, 2)


async def test_decision_of_the_user_stands() -> None:
    plan = FaultPlan().poison_at(1, dead(accel.FaultScope.PROCESS))
    seen: list[BaseException] = []

    def decide(error: BaseException) -> accel.Directive:
        seen.append(error)
        return accel.Directive.RESTART

    async with opened(plan, restart=accel.RestartStrategy(decide=decide)) as device:
        assert (await failure(device.zeros(1), accel.ContextPoisonedError)).retryable
        await generation(device, 2)
    assert len(seen) == 1, "it is asked once for each failure"


async def test_decision_of_the_user_to_stop_is_final_at_once() -> None:
    plan = FaultPlan().poison_at(1)
    seen: list[BaseException] = []

    def decide(error: BaseException) -> accel.Directive:
        seen.append(error)
        return accel.Directive.STOP

    async with opened(plan, restart=accel.RestartStrategy(decide=decide)) as device:
        assert_final(await failure(device.zeros(1), accel.ContextPoisonedError), device)
        await turns()
        assert (device.state, device.generation) == (LOST, 1)
    assert len(seen) == 1, "the supervisor receives the verdict and does not ask again"


async def test_last_rebuild_after_a_bug_of_the_contexts_actor_is_made() -> None:
    async with opened(restart=accel.RestartStrategy(1)) as device:
        keeper = device._actor._cell.children["context"].ref
        assert keeper.fail(RuntimeError("a bug"))
        await generation(device, 2)
        await bounded(device.zeros(1))


async def test_device_whose_actor_ends_by_itself_is_lost(device: accel.Device) -> None:
    await device.zeros(1)
    await device._actor.stop()
    await turns()
    assert device.state is LOST
    await failure(device.zeros(1), accel.DeviceLostError)
