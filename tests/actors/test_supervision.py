"""Supervision: what is decided from an error, budgets and delays, restarts."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.actors import ActorContext, ActorState, Directive, RestartStrategy, default_decision
from accel.actors.supervision import RestartBudget
from accel.errors import (
    AccelError,
    ActorStoppedError,
    ContextPoisonedError,
    DeviceLostError,
    FaultScope,
    HostDiedError,
    InvalidArgumentError,
)
from tests.actor_support import Counter, Time, fail, system_on, turns

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("error", "directive"),
    [
        (AccelError("op"), Directive.RESUME),
        (InvalidArgumentError("op"), Directive.RESUME),
        (ContextPoisonedError("context"), Directive.RESTART),
        (HostDiedError("process"), Directive.RESTART),
        (DeviceLostError("device"), Directive.STOP),
        (AccelError("raised", scope=FaultScope.DEVICE), Directive.STOP),
        (AccelError("raised", scope=FaultScope.CONTEXT), Directive.RESTART),
        (ValueError("CUDA_ERROR_DEVICE_LOST"), Directive.RESTART),
    ],
)
def test_the_default_decision_follows_class_and_scope(error: Exception, directive: Directive) -> None:
    assert default_decision(error) is directive


@pytest.mark.parametrize(
    "options",
    [
        {"max_restarts": -1},
        {"max_restarts": 1.5},
        {"max_restarts": True},
        {"within": 0},
        {"within": math.nan},
        {"within": "60"},
        {"within": None},
        {"backoff": 1},
        {"backoff": None},
        {"backoff": "12"},
        {"backoff": (1, 2, 3)},
        {"backoff": (1, "2")},
        {"decide": "restart"},
        {"backoff": (-1, 1)},
        {"backoff": (2, 1)},
        {"backoff": (0, math.inf)},
        {"backoff": (math.nan, 1)},
    ],
)
def test_a_strategy_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        RestartStrategy(**options)


def test_delays_grow_within_their_bounds_and_are_spread() -> None:
    strategy = RestartStrategy(backoff=(0.05, 2.0))
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)

    assert strategy.delay(0, rng) == 0.0
    for earlier in range(1, 2000):
        low = min(2.0, 0.05 * 2 ** min(earlier - 1, 60))
        delay = strategy.delay(earlier, rng)
        assert low <= delay <= min(2.0, 2 * low), f"seed={seed} earlier={earlier}"
    assert len({strategy.delay(2, rng) for _ in range(50)}) > 1, f"seed={seed}"


def test_a_budget_refills_when_its_window_has_passed() -> None:
    time = Time()
    budget = RestartBudget(RestartStrategy(max_restarts=2, within=10.0, backoff=(1.0, 1.0)), time, random.Random(1))

    assert (budget.request(), budget.request(), budget.request()) == (0.0, 1.0, None)
    assert budget.left() == 0
    time.now += 10.0
    assert budget.left() == 2
    assert (budget.request(), budget.restarts) == (0.0, 3)
    time.now += 20.0
    assert budget.left() == 2


def test_a_strategy_restarts_three_times_a_minute_unless_told_otherwise() -> None:
    documented = RestartStrategy(max_restarts=3, within=60.0, backoff=(0.05, 2.0), decide=None, on_exception=Directive.RESTART)

    assert RestartStrategy() == documented


@pytest.mark.parametrize(
    ("error", "decide", "level"),
    [
        (AccelError("op"), None, "DEBUG"),
        (ValueError("bug"), None, "WARNING"),
        (ValueError("bug"), lambda error: Directive.RESUME, "WARNING"),
        (AccelError("op"), lambda error: Directive.RESTART, "WARNING"),
    ],
)
async def test_a_failure_is_logged_as_a_warning_unless_it_is_an_ops_own(
    caplog: pytest.LogCaptureFixture, error: Exception, decide: Callable[[BaseException], Directive] | None, level: str
) -> None:
    caplog.set_level(logging.DEBUG)
    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(decide=decide))
        await fail(ref, error)
        await ref.ask(1)

    assert [record.levelname for record in caplog.records if "actor_failed" in record.getMessage()] == [level]


async def test_a_restart_gives_a_fresh_state_and_keeps_the_mailbox() -> None:
    time = Time()
    async with system_on(time) as system:
        ref = await system.spawn(Counter)
        assert await ref.ask(5) == 5
        failing = asyncio.create_task(ref.ask(ValueError("boom")))
        queued = asyncio.create_task(ref.ask(1))

        with pytest.raises(ValueError, match="boom"):
            await failing
        assert await queued == 1
        assert ref.statistics().restarts == 1
        assert time.delays == []


async def test_an_error_of_one_op_keeps_the_state() -> None:
    async with system_on(Time()) as system:
        ref = await system.spawn(Counter)
        await ref.ask(5)
        await fail(ref, AccelError("only this op"))

        assert await ref.ask(1) == 6
        assert (ref.statistics().restarts, ref.statistics().failures) == (0, 1)


async def test_the_second_restart_in_a_window_waits_and_the_mailbox_takes_messages_meanwhile() -> None:
    time = Time(auto=False)
    async with system_on(time) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(backoff=(1.0, 1.0)))
        await fail(ref)
        await fail(ref)
        await turns()
        assert ref.state is ActorState.RESTARTING
        assert time.delays == [1.0]
        asking = asyncio.create_task(ref.ask(3))
        await time.advance(0.5)
        assert not asking.done()

        await time.advance(0.5)

        assert await asking == 3
        assert ref.is_alive


async def test_over_budget_the_circuit_opens_and_every_waiter_is_told(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    async with system_on(time) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(max_restarts=2))
        await fail(ref)
        await fail(ref)
        last = ValueError("the last")
        failing = asyncio.create_task(ref.ask(last))
        queued = [asyncio.create_task(ref.ask(number)) for number in range(3)]

        with pytest.raises(ValueError, match="the last"):
            await failing
        errors = await asyncio.gather(*queued, return_exceptions=True)

        assert await ref.wait_stopped() is last
        assert all(isinstance(error, ActorStoppedError) and error.__cause__ is last for error in errors)
        assert len({id(error) for error in errors}) == 3
        with pytest.raises(ActorStoppedError) as caught:
            ref.tell(1)
        assert caught.value.__cause__ is last
    assert "actor_circuit_open" in caplog.text


async def test_a_failing_start_is_raised_to_the_spawner_and_not_tried_again() -> None:
    async with system_on(Time()) as system:
        broken: list[BaseException] = [ValueError("first"), ValueError("second")]

        with pytest.raises(ValueError, match="first"):
            await system.spawn(Counter, broken, name="counter")

        assert len(broken) == 1
        assert system.tree().children == ()
        broken.clear()
        await system.spawn(Counter, broken, name="counter")


@pytest.mark.parametrize("error", [StopIteration("odd"), asyncio.CancelledError()])
async def test_an_odd_exception_from_a_start_reaches_the_spawner(error: BaseException) -> None:
    class Odd(Counter):
        def __init__(self) -> None:
            raise error

    async with system_on(Time()) as system:
        with pytest.raises((RuntimeError, AccelError)) as caught:
            await system.spawn(Odd)

        assert caught.value.__cause__ is error


async def test_a_renewal_is_immediate_and_free_and_delayed_only_after_attempts_in_vain() -> None:
    time = Time()
    broken: list[BaseException] = []
    strategy = RestartStrategy(max_restarts=0, backoff=(1.0, 4.0), decide=lambda _: Directive.RENEW)
    async with system_on(time) as system:
        ref = await system.spawn(Counter, broken, restart=strategy)
        for _ in range(5):
            await fail(ref)
            assert await ref.ask(4) == 4
        assert time.delays == []
        broken.extend(ValueError("not yet") for _ in range(6))
        await fail(ref)
        assert await ref.ask(4) == 4
        assert len(time.delays) == 6
        assert time.delays == sorted(time.delays)
        assert (time.delays[0] <= 2.0, time.delays[-1]) == (True, 4.0)
        assert ref.statistics().restarts == 12


async def test_a_charge_counts_like_a_restart_and_leaves_with_its_window() -> None:
    time = Time()
    budget = RestartBudget(RestartStrategy(max_restarts=2, within=60.0), time, random.Random(1))
    assert budget.renew(0) == 0.0
    assert budget.left() == 2
    budget.charge()
    assert (budget.left(), budget.restarts) == (1, 1)
    assert budget.request() is not None
    assert budget.request() is None
    time.now += 60.0
    assert budget.left() == 2


async def test_a_start_that_loses_the_device_during_a_restart_stops_at_once() -> None:
    broken: list[BaseException] = []
    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, broken)
        lost = DeviceLostError("gone")
        broken.append(lost)
        await fail(ref)

        assert await ref.wait_stopped() is lost


async def test_stopping_at_once_cuts_a_delay_short(caplog: pytest.LogCaptureFixture) -> None:
    time = Time(auto=False)
    async with system_on(time) as system:
        ref = await system.spawn(Counter)
        await fail(ref)
        await fail(ref)
        asking = asyncio.create_task(ref.ask(1))
        await turns()

        await ref.stop(drain=False)

        with pytest.raises(ActorStoppedError):
            await asking
        assert await ref.wait_stopped() is None
    assert "system_failed" not in caplog.text


async def test_a_drain_lasts_through_a_restart() -> None:
    time = Time(auto=False)
    async with system_on(time) as system:
        ref = await system.spawn(Counter)
        await fail(ref)
        await fail(ref)
        asking = asyncio.create_task(ref.ask(1))
        await turns()
        stopping = asyncio.create_task(ref.stop())
        await time.advance(10.0)

        assert await asking == 1
        await stopping


async def test_a_failure_reported_while_it_restarts_is_not_counted() -> None:
    time = Time(auto=False)
    async with system_on(time) as system:
        ref = await system.spawn(Counter)
        await fail(ref)
        await fail(ref)
        await turns()

        assert not ref.fail(ValueError("the same fault, seen by another"))

        await time.advance(10.0)
        assert await ref.ask(1) == 1
        assert ref.statistics().failures == 2


async def test_a_failure_reported_during_a_start_fails_the_start() -> None:
    gate: list[asyncio.Event] = []

    class Slow(Counter):
        async def started(self, context: ActorContext) -> None:
            if gate:
                await gate[0].wait()

    time = Time()
    async with system_on(time) as system:
        ref = await system.spawn(Slow)
        gate.append(asyncio.Event())
        await fail(ref)
        await turns()
        assert ref.state is ActorState.STARTING

        assert ref.fail(ValueError("while starting"))

        gate.clear()
        assert await ref.ask(1) == 1
        assert ref.statistics().restarts == 2


@pytest.mark.parametrize(
    ("options", "failures", "total"),
    [
        ({}, 1, 0),
        ({"on_exception": Directive.RESUME}, 1, 3),
        ({"on_exception": Directive.RESUME}, 20, 3),
        ({"on_exception": Directive.STOP, "decide": lambda _: Directive.RESUME}, 1, 3),
    ],
    ids=["a fresh instance by default", "its state is kept", "no budget is spent", "a function of the user's goes before it"],
)
async def test_what_an_exception_does_to_the_state_is_an_option(options: dict[str, Any], failures: int, total: int) -> None:
    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(backoff=(0.0, 0.0), **options))
        await ref.ask(3)
        for _ in range(failures):
            await fail(ref)
        assert await ref.ask(0) == total


async def test_an_exception_stops_the_actor_where_that_is_chosen() -> None:
    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(on_exception=Directive.STOP))
        await fail(ref)
        with pytest.raises(ActorStoppedError):
            await ref.ask(0)


async def test_what_is_no_directive_is_refused_and_a_device_has_no_state_to_keep() -> None:
    with pytest.raises(InvalidArgumentError, match="on_exception"):
        RestartStrategy(on_exception="resume")  # type: ignore[arg-type]
    async with accel.System(close_timeout=5) as system:
        with pytest.raises(InvalidArgumentError, match="on_exception"):
            await system.open_device("cpu", restart=RestartStrategy(on_exception=Directive.RESUME))
