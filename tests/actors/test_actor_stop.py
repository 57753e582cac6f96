"""Stopping actors: with a drain, at once, from inside, against their will; and those who watch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from accel.actors import Actor, ActorContext, ActorState, ActorSystem, RestartStrategy, Terminated
from accel.errors import (
    ActorStoppedError,
)
from tests.actor_support import Echo, Stubborn, blocked, turns


async def test_stop_handles_what_is_queued_and_takes_nothing_new() -> None:
    async with ActorSystem() as system:
        ref, gate, seen, asking = await blocked(system)
        ref.tell(1)
        queued = asyncio.create_task(ref.ask(2))
        await turns()
        stopping = asyncio.create_task(ref.stop())
        await turns()
        assert ref.state is ActorState.DRAINING

        with pytest.raises(ActorStoppedError):
            ref.tell(3)
        gate.set()
        await stopping

        assert await queued == 2
        assert await asking == "opened"
        assert seen == ["waiting", 1, 2]
        assert not ref.is_alive


async def test_a_drain_goes_on_in_the_children() -> None:
    handled: list[int] = []

    class Child(Actor[int, None]):
        async def receive(self, message: int, context: ActorContext) -> None:
            await asyncio.sleep(0)
            handled.append(message)

    class Owner(Actor[int, None]):
        async def started(self, context: ActorContext) -> None:
            self.child = await context.spawn(Child)

        async def receive(self, message: int, context: ActorContext) -> None:
            self.child.tell(message)

    async with ActorSystem() as system:
        ref = await system.spawn(Owner)
        for number in range(5):
            ref.tell(number)
        await ref.stop()

        assert handled == [0, 1, 2, 3, 4]


async def test_stop_at_once_refuses_the_queued_and_cancels_the_work_in_hand() -> None:
    async with ActorSystem() as system:
        ref, _, seen, asking = await blocked(system, mailbox_size=1)
        queued = asyncio.create_task(ref.ask("queued"))
        await turns()
        waiting = asyncio.create_task(ref.ask("waiting for room"))
        await turns()

        await ref.stop(drain=False)

        errors = await asyncio.gather(asking, queued, waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [ActorStoppedError] * 3
        assert len({id(error) for error in errors}) == 3
        assert seen == ["waiting", "cancelled"]


async def test_a_drain_can_be_cut_short() -> None:
    async with ActorSystem() as system:
        ref, _, seen, asking = await blocked(system)
        draining = asyncio.create_task(ref.stop())
        await turns()

        await ref.stop(drain=False)

        await draining
        assert isinstance((await asyncio.gather(asking, return_exceptions=True))[0], ActorStoppedError)
        assert seen == ["waiting", "cancelled"]


async def test_stop_is_idempotent_and_messages_to_the_stopped_are_refused() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)
        await asyncio.gather(ref.stop(), ref.stop(), ref.stop(drain=False))
        await ref.stop()

        with pytest.raises(ActorStoppedError):
            ref.tell("x")
        with pytest.raises(ActorStoppedError):
            await ref.ask("x")
        with pytest.raises(ActorStoppedError):
            await ref.send("x")
        assert ref.state is ActorState.STOPPED


async def test_cancelling_a_stop_ends_the_wait_and_not_the_stop() -> None:
    async with ActorSystem() as system:
        ref, gate, _, asking = await blocked(system)
        stopping = asyncio.create_task(ref.stop())
        await turns()
        stopping.cancel()
        await asyncio.wait({stopping})
        gate.set()

        assert await asking == "opened"
        assert await ref.wait_stopped() is None


async def test_an_actor_can_stop_itself_and_its_parent() -> None:
    class Child(Actor[str, str]):
        async def receive(self, message: str, context: ActorContext) -> str:
            target = context.self_ref if message == "self" else context.parent
            assert target is not None
            await target.stop()
            return "asked for it"

    class Parent(Actor[str, Any]):
        async def receive(self, message: str, context: ActorContext) -> Any:
            return await context.spawn(Child, name=message)

    async with ActorSystem() as system:
        parent = await system.spawn(Parent)
        one, two = await parent.ask("one"), await parent.ask("two")

        assert await one.ask("self") == "asked for it"
        assert await one.wait_stopped() is None
        assert await two.ask("parent") == "asked for it"
        assert await parent.wait_stopped() is None
        assert not two.is_alive


async def test_messages_lost_at_a_stop_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with ActorSystem() as system:
        ref, _, _, asking = await blocked(system)
        ref.tell(1)
        ref.tell(2)
        await ref.stop(drain=False)
        await asyncio.gather(asking, return_exceptions=True)

    assert "actor_messages_lost" in caplog.text
    assert "count=2" in caplog.text


async def test_an_actor_that_disposes_of_its_messages_loses_none(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[str] = []

    class Disposing(Actor[str, None]):
        async def receive(self, message: str, context: ActorContext) -> None:
            await asyncio.Event().wait()

        def refused(self, message: str) -> None:
            refused.append(message)

    async with ActorSystem() as system:
        ref = await system.spawn(Disposing)
        for message in ("taken", "one", "two"):
            ref.tell(message)
        await turns()
        await ref.stop(drain=False)
    assert refused == ["one", "two"]
    assert "actor_messages_lost" not in caplog.text


async def test_a_receive_that_will_not_be_cancelled_still_ends_the_actor() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Stubborn, [], "receive")
        asking = asyncio.create_task(ref.ask("x"))
        await turns()

        await ref.stop(drain=False)

        assert await asking == "finished all the same"


async def test_a_receive_that_will_not_be_cancelled_still_fails_when_told_to() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Stubborn, [], "receive")
        asking = asyncio.create_task(ref.ask("x"))
        await turns()
        ref.fail(ValueError("outside"))

        assert await asking == "finished all the same"
        await turns()
        assert ref.statistics().restarts == 1
        await ref.stop(drain=False)


async def test_a_start_that_will_not_be_cancelled_ends_with_its_spawner() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        spawning = asyncio.create_task(system.spawn(Stubborn, log, "started"))
        await turns()
        spawning.cancel()
        await asyncio.wait({spawning})
        await turns()

        assert system.tree().children == ()
    assert log == ["started", "ended"]


async def test_a_start_that_will_not_be_cancelled_still_fails_when_told_to() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        spawning = asyncio.create_task(system.spawn(Stubborn, log, "started"))
        await turns()
        (cell,) = system._children.values()
        cell.ref.fail(ValueError("outside"))

        with pytest.raises(ValueError, match="outside"):
            await spawning
    assert log == ["started"]


async def test_an_end_that_will_not_be_cancelled_is_let_finish() -> None:
    log: list[str] = []
    async with ActorSystem(close_timeout=0) as system:
        await system.spawn(Stubborn, log, "stopped")

    assert log == ["stopped", "ended"]


async def test_an_error_raised_after_asking_for_ones_own_stop_does_not_restart() -> None:
    class Quits(Actor[str, None]):
        async def receive(self, message: str, context: ActorContext) -> None:
            await context.self_ref.stop(drain=False)
            raise ValueError(message)

    async with ActorSystem() as system:
        ref = await system.spawn(Quits)
        with pytest.raises(ValueError, match="last words"):
            await ref.ask("last words")

        assert await ref.wait_stopped() is None
        assert ref.statistics().restarts == 0


@pytest.mark.parametrize("also_fails", [True, False])
@pytest.mark.parametrize("idle", [True, False])
async def test_cancelling_the_task_of_an_actor_stops_it_and_answers_everybody(idle: bool, also_fails: bool) -> None:
    async with ActorSystem() as system:
        if idle:
            ref, askings = await system.spawn(Echo), []
        else:
            ref, _, _, asking = await blocked(system)
            askings = [asking, asyncio.create_task(ref.ask("queued"))]
            await turns()
        task = ref._cell.task
        assert task is not None
        if also_fails:
            ref.fail(ValueError("at the same time"))
        task.cancel()

        assert await ref.wait_stopped() is None
        errors = await asyncio.gather(*askings, return_exceptions=True)
        assert [type(error) for error in errors] == [ActorStoppedError] * len(askings)
        assert task.cancelled()
        assert await (await system.spawn(Echo)).ask("the system goes on") == "the system goes on"


class Watcher(Actor[Any, Any]):
    def __init__(self, news: list[Terminated]) -> None:
        self.news = news

    async def receive(self, message: Any, context: ActorContext) -> Any:
        if isinstance(message, Terminated):
            self.news.append(message)
        elif isinstance(message, tuple):
            context.unwatch(message[0])
        elif message is not None:
            context.watch(message)


async def test_a_watcher_is_told_once_who_stopped_and_with_what() -> None:
    news: list[Terminated] = []
    async with ActorSystem() as system:
        watcher = await system.spawn(Watcher, news)
        fine = await system.spawn(Echo)
        failing = await system.spawn(Echo, restart=RestartStrategy(max_restarts=0))
        for ref in (fine, failing, failing):
            await watcher.ask(ref)
        error = ValueError("fatal")

        await fine.stop()
        failing.tell(error)
        assert await failing.wait_stopped() is error
        await watcher.ask(None)

    assert news == [Terminated(fine, None), Terminated(failing, error)]


async def test_watching_a_stopped_actor_tells_at_once_and_unwatching_works() -> None:
    news: list[Terminated] = []
    async with ActorSystem() as system:
        watcher = await system.spawn(Watcher, news)
        gone, other = await system.spawn(Echo), await system.spawn(Echo)
        await gone.stop()
        await watcher.ask(gone)
        await watcher.ask(other)
        await watcher.ask((other,))
        await other.stop()
        await watcher.ask(None)

    assert news == [Terminated(gone, None)]


async def test_a_watcher_that_stopped_is_forgotten() -> None:
    async with ActorSystem() as system:
        watcher = await system.spawn(Watcher, [])
        ref = await system.spawn(Echo)
        ref.watch(watcher)
        await watcher.stop()
        ref.watch(watcher)

        assert not ref._cell.watchers
        await ref.stop()
