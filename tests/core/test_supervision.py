"""Supervision: what is decided from an error, budgets and delays, restarts, escalation, children."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest

from accel.actors import Actor, ActorContext, ActorRef, ActorState, ActorSystem, Directive, RestartStrategy, default_decision
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


class Time:
    """A clock and a sleep under the test's hand: a sleep lasts until ``advance`` passes its end, or ends at once with ``auto``."""

    def __init__(self, *, auto: bool = True) -> None:
        self.now = 1000.0
        self.auto = auto
        self.delays: list[float] = []
        self._sleeping: list[tuple[float, asyncio.Event]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        if self.auto:
            self.now += seconds
            await asyncio.sleep(0)
            return
        event = asyncio.Event()
        self._sleeping.append((self.now + seconds, event))
        await event.wait()

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        for end, event in self._sleeping:
            if end <= self.now:
                event.set()
        await turns()


class Counter(Actor[Any, int]):
    """Counts what it is told to add; raises exceptions; fails to start while ``broken`` says so."""

    def __init__(self, broken: list[BaseException] | None = None) -> None:
        self.total = 0
        self.broken = [] if broken is None else broken

    async def started(self, context: ActorContext) -> None:
        if self.broken:
            raise self.broken.pop(0)

    async def receive(self, message: Any, context: ActorContext) -> int:
        if isinstance(message, BaseException):
            raise message
        self.total += message
        return self.total


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def system_on(time: Time, **options: Any) -> ActorSystem:
    return ActorSystem(clock=time, sleep=time.sleep, rng=random.Random(7), **options)


async def fail(ref: ActorRef[Any, Any], error: Exception | None = None) -> None:
    error = ValueError("boom") if error is None else error
    with pytest.raises(type(error)):
        await ref.ask(error)


# -- deciding


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
    time.now += 10.0
    assert (budget.request(), budget.restarts) == (0.0, 3)


# -- restarting


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


async def test_a_window_that_passed_makes_the_next_restart_immediate_again() -> None:
    time = Time()
    async with system_on(time) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(max_restarts=1, within=60.0))
        for _ in range(5):
            await fail(ref)
            time.now += 60.0

        assert await ref.ask(1) == 1
        assert time.delays == []


async def test_a_failing_start_is_raised_to_the_spawner_and_not_tried_again() -> None:
    async with system_on(Time()) as system:
        broken: list[BaseException] = [ValueError("first"), ValueError("second")]

        with pytest.raises(ValueError, match="first"):
            await system.spawn(Counter, broken, name="counter")

        assert len(broken) == 1
        assert system.tree().children == ()
        broken.clear()
        await system.spawn(Counter, broken, name="counter")


async def test_a_failing_constructor_is_raised_to_the_spawner() -> None:
    async with system_on(Time()) as system:
        with pytest.raises(TypeError):
            await system.spawn(Counter, 1, 2, 3)


@pytest.mark.parametrize("error", [StopIteration("odd"), asyncio.CancelledError()])
async def test_an_odd_exception_from_a_start_reaches_the_spawner(error: BaseException) -> None:
    class Odd(Counter):
        def __init__(self) -> None:
            raise error

    async with system_on(Time()) as system:
        with pytest.raises((RuntimeError, AccelError)) as caught:
            await system.spawn(Odd)

        assert caught.value.__cause__ is error


async def test_a_start_that_fails_during_a_restart_counts_and_is_tried_again_after_a_delay() -> None:
    time = Time()
    broken: list[BaseException] = []
    async with system_on(time) as system:
        ref = await system.spawn(Counter, broken, restart=RestartStrategy(backoff=(1.0, 1.0)))
        broken.extend([ValueError("again"), ValueError("and again")])
        await fail(ref)

        assert await ref.ask(4) == 4
        assert time.delays == [1.0, 1.0]
        assert (ref.statistics().restarts, ref.statistics().failures) == (3, 3)


async def test_a_start_that_never_works_again_opens_the_circuit() -> None:
    time = Time()
    broken: list[BaseException] = []
    async with system_on(time) as system:
        ref = await system.spawn(Counter, broken, restart=RestartStrategy(max_restarts=2))
        last = ValueError("3")
        broken.extend([ValueError("2"), last, ValueError("not reached")])
        await fail(ref)

        assert await ref.wait_stopped() is last
        assert len(broken) == 1


async def test_a_start_that_loses_the_device_during_a_restart_stops_at_once() -> None:
    broken: list[BaseException] = []
    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, broken)
        lost = DeviceLostError("gone")
        broken.append(lost)
        await fail(ref)

        assert await ref.wait_stopped() is lost


async def test_stopping_at_once_cuts_a_delay_short() -> None:
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


# -- directives


async def test_a_policy_of_ones_own_decides() -> None:
    def decide(error: BaseException) -> Directive:
        return Directive.RESUME if isinstance(error, ValueError) else Directive.STOP

    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(decide=decide))
        await ref.ask(1)
        await fail(ref, ValueError("harmless"))
        assert await ref.ask(1) == 2
        error = KeyError("fatal")
        await fail(ref, error)

        assert await ref.wait_stopped() is error


async def test_a_policy_that_breaks_is_replaced_by_the_default(caplog: pytest.LogCaptureFixture) -> None:
    def decide(error: BaseException) -> Directive:
        raise RuntimeError("no idea")

    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(decide=decide))
        await fail(ref)

        assert await ref.ask(1) == 1
    assert "actor_decision_failed" in caplog.text


class Parent(Actor[Any, Any]):
    """Spawns a Counter for each strategy it gets; keeps count of its own instances."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append("made")

    async def receive(self, message: Any, context: ActorContext) -> Any:
        if isinstance(message, RestartStrategy):
            return await context.spawn(Counter, restart=message)
        if isinstance(message, Exception):
            raise message
        return message


ESCALATES = RestartStrategy(decide=lambda error: Directive.ESCALATE)


async def test_escalation_fails_the_parent_with_the_same_error() -> None:
    log: list[str] = []
    seen: list[BaseException] = []

    def decide(error: BaseException) -> Directive:
        seen.append(error)
        return Directive.RESTART

    async with system_on(Time()) as system:
        parent = await system.spawn(Parent, log, restart=RestartStrategy(decide=decide))
        child, sibling = await parent.ask(ESCALATES), await parent.ask(RestartStrategy())
        error = ValueError("too much for me")
        await fail(child, error)

        assert await child.wait_stopped() is error
        assert await sibling.wait_stopped() is None
        assert await parent.ask("alive") == "alive"
        assert seen == [error]
        assert log == ["made", "made"]


async def test_escalation_past_the_top_stops_the_actor_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, restart=ESCALATES)
        other = await system.spawn(Counter)
        error = ValueError("nobody above")
        await fail(ref, error)

        assert await ref.wait_stopped() is error
        assert await other.ask(1) == 1
    assert "actor_escalated_to_system" in caplog.text


async def test_a_parent_that_resumes_goes_on_without_the_child_that_escalated() -> None:
    log: list[str] = []
    async with system_on(Time()) as system:
        parent = await system.spawn(Parent, log, restart=RestartStrategy(decide=lambda error: Directive.RESUME))
        child, sibling = await parent.ask(ESCALATES), await parent.ask(RestartStrategy())
        await fail(child)
        await child.wait_stopped()

        assert await parent.ask("alive") == "alive"
        assert await sibling.ask(1) == 1
        assert log == ["made"]


async def test_a_restart_stops_the_children_before_the_new_instance_starts() -> None:
    log: list[str] = []

    class Child(Actor[None, None]):
        async def receive(self, message: None, context: ActorContext) -> None:
            pass

        async def stopped(self, context: ActorContext) -> None:
            log.append("child stopped")

    class Owner(Actor[Exception, None]):
        async def started(self, context: ActorContext) -> None:
            log.append(f"started over {len(context.children)}")
            await context.spawn(Child, name="child")

        async def restarting(self, error: BaseException, context: ActorContext) -> None:
            log.append(f"restarting over {len(context.children)}")

        async def receive(self, message: Exception, context: ActorContext) -> None:
            raise message

    async with system_on(Time()) as system:
        ref = await system.spawn(Owner)
        await fail(ref)
        await ref.stop()

    assert log == ["started over 0", "restarting over 1", "child stopped", "started over 0", "child stopped"]


async def test_children_of_a_start_that_failed_are_stopped() -> None:
    children: list[ActorRef[Any, Any]] = []

    class Owner(Counter):
        async def started(self, context: ActorContext) -> None:
            children.append(await context.spawn(Counter))
            raise ValueError("after the child")

    async with system_on(Time()) as system:
        with pytest.raises(ValueError, match="after the child"):
            await system.spawn(Owner)

        assert not children[0].is_alive


async def test_a_stopping_actor_starts_no_more_children() -> None:
    class Late(Counter):
        async def stopped(self, context: ActorContext) -> None:
            with pytest.raises(ActorStoppedError, match="stopping"):
                await context.spawn(Counter)
            tried.append(True)

    tried: list[bool] = []
    async with system_on(Time()) as system:
        ref = await system.spawn(Late)
        await ref.stop()

    assert tried == [True]


async def test_a_failure_does_not_touch_the_body_of_the_system() -> None:
    async with system_on(Time()) as system:
        ref = await system.spawn(Counter, restart=RestartStrategy(max_restarts=0))
        ref.tell(ValueError("fatal"))
        await ref.wait_stopped()
        await turns()

        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
