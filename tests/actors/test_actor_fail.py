"""Failures that are reported from outside."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from accel.actors import Actor, ActorContext, ActorSystem, Directive, RestartStrategy
from accel.errors import (
    AccelError,
    ActorStoppedError,
    InvalidArgumentError,
)
from tests.actor_support import Echo, Hooked, blocked


async def test_fail_interrupts_the_work_in_hand_and_its_caller_gets_the_error() -> None:
    async with ActorSystem() as system:
        ref, _, seen, asking = await blocked(system)
        ref.tell("next")

        assert ref.fail(ValueError("from outside"))

        with pytest.raises(ValueError, match="from outside"):
            await asking
        await ref.ask("end")
        assert seen == ["waiting", "cancelled", "next", "end"]
        assert ref.statistics().restarts == 1


async def test_fail_overtakes_what_is_queued_when_the_actor_is_idle() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        ref = await system.spawn(Hooked, log)
        ref.tell("queued")
        ref.fail(ValueError("first"))
        await ref.ask("end")

    assert log == ["started", "restarting", "started", "receive", "receive", "stopped"]


async def test_a_failure_reported_by_the_actor_itself_waits_for_the_message_in_hand() -> None:
    class Doubts(Actor[str, str]):
        async def receive(self, message: str, context: ActorContext) -> str:
            if message == "fail":
                context.self_ref.fail(ValueError("doubt"))
            return message

    async with ActorSystem() as system:
        ref = await system.spawn(Doubts)

        assert await ref.ask("fail") == "fail"
        assert await ref.ask("end") == "end"
        assert ref.statistics().restarts == 1


async def test_a_failure_of_an_earlier_instance_does_not_fail_the_next() -> None:
    class Twice(Actor[str, str]):
        async def receive(self, message: str, context: ActorContext) -> str:
            if message == "fail":
                context.self_ref.fail(ValueError("reported"))
                raise ValueError("raised")
            return message

    async with ActorSystem() as system:
        ref = await system.spawn(Twice)
        with pytest.raises(ValueError, match="raised"):
            await ref.ask("fail")

        assert await ref.ask("end") == "end"
        assert ref.statistics().restarts == 1


async def test_fail_takes_only_exceptions_and_only_from_the_living() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)
        with pytest.raises(InvalidArgumentError):
            ref.fail(KeyboardInterrupt())  # type: ignore[arg-type]
        await ref.stop()

        assert not ref.fail(ValueError("too late"))


async def test_of_two_failures_during_one_message_the_first_counts() -> None:
    async with ActorSystem() as system:
        ref, _, _, asking = await blocked(system)
        ref.fail(ValueError("first"))
        ref.fail(ValueError("second"))

        with pytest.raises(ValueError, match="first"):
            await asking
        await ref.ask("end")
        assert ref.statistics().failures == 1


async def test_something_cancelled_inside_receive_is_an_error_of_that_message_alone() -> None:
    class Awaits(Actor[Any, Any]):
        async def receive(self, message: Any, context: ActorContext) -> Any:
            return await message

    async with ActorSystem() as system:
        ref = await system.spawn(Awaits)
        future = system.loop.create_future()
        future.cancel()

        with pytest.raises(AccelError, match="was cancelled") as caught:
            await ref.ask(future)

        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert ref.statistics().restarts == 0


async def test_an_actor_whose_task_is_cancelled_before_its_first_step_is_gone() -> None:
    async with ActorSystem(close_timeout=5.0) as system:
        spawning = asyncio.ensure_future(system.spawn(Echo, name="unborn"))
        await asyncio.sleep(0)  # it has made the task, which has not run
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "accel-actor-unborn"]
        task.cancel()
        with pytest.raises(ActorStoppedError):
            await spawning
        assert system.tree().children == ()
        ref = await system.spawn(Echo, name="unborn")
        assert await ref.ask(1) == 1


@pytest.mark.parametrize("decided", [Directive.RESUME, Directive.RESTART, Directive.STOP])
async def test_a_verdict_that_comes_with_the_failure_is_not_asked_for_again(decided: Directive) -> None:
    def decide(error: BaseException) -> Directive:
        raise AssertionError("it was decided")

    log: list[str] = []
    async with ActorSystem() as system:
        ref = await system.spawn(Hooked, log, restart=RestartStrategy(decide=decide))
        assert ref.fail(ValueError("from outside"), decided)
        if decided is Directive.STOP:
            assert str(await ref.wait_stopped()) == "from outside"
        else:
            await ref.ask("end")
        assert ref.statistics().restarts == (decided is Directive.RESTART)


async def test_a_verdict_is_for_one_failure() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Hooked, [])
        ref.fail(ValueError("first"), Directive.RESUME)
        await ref.ask("go on")
        ref.fail(ValueError("second"))
        await ref.ask("end")
        assert ref.statistics().restarts == 1
