"""Supervision: policies of one's own, escalation, and what becomes of children."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from accel.actors import Actor, ActorContext, ActorRef, Directive, RestartStrategy
from accel.errors import (
    ActorStoppedError,
)
from tests.actor_support import Counter, Time, fail, system_on, turns


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
