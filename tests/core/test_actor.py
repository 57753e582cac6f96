"""Actors: messages, answers, deadlines, contexts, hooks, stopping, watching, and what the loop keeps alive."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import logging
import pickle
import weakref
from typing import Any

import pytest

from accel.actors import Actor, ActorContext, ActorRef, ActorState, ActorSystem, RestartStrategy, Terminated
from accel.errors import (
    AccelError,
    ActorStoppedError,
    DeadlineExceededError,
    InvalidArgumentError,
    MailboxFullError,
)

user = contextvars.ContextVar("user", default="nobody")


class Echo(Actor[Any, Any]):
    """Answers with the message; raises it if it is an exception."""

    async def receive(self, message: Any, context: ActorContext) -> Any:
        if isinstance(message, BaseException):
            raise message
        return message


class Gate(Actor[Any, Any]):
    """Handles a message only when its gate is opened; records what it handled."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    async def receive(self, message: Any, context: ActorContext) -> Any:
        if isinstance(message, asyncio.Event):
            self.seen.append("waiting")
            try:
                await message.wait()
            except asyncio.CancelledError:
                self.seen.append("cancelled")
                raise
            return "opened"
        self.seen.append(message)
        return message


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def blocked(system: ActorSystem, **options: Any) -> tuple[ActorRef[Any, Any], asyncio.Event, list[Any], asyncio.Task[Any]]:
    """Return a Gate that has a message in hand, the gate, its record, and the task that asked."""
    gate, seen = asyncio.Event(), list[Any]()
    ref = await system.spawn(Gate, seen, **options)
    asking = asyncio.create_task(ref.ask(gate))
    await turns()
    assert seen == ["waiting"]
    return ref, gate, seen, asking


# -- messages and answers


async def test_ask_returns_what_receive_returned() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)

        assert await ref.ask("hello") == "hello"
        assert await ref.ask(None) is None


async def test_messages_of_one_sender_are_handled_in_order() -> None:
    async with ActorSystem() as system:
        seen: list[Any] = []
        ref = await system.spawn(Gate, seen)
        for number in range(300):
            ref.tell(number)
        await ref.ask("last")

    assert seen == [*range(300), "last"]


async def test_ask_raises_what_receive_raised() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)
        error = KeyError("k")

        with pytest.raises(KeyError) as caught:
            await ref.ask(error)

        assert caught.value is error
        assert await ref.ask("still there") == "still there"


@pytest.mark.parametrize("error", [AccelError("again"), ValueError("again")])
async def test_an_error_that_is_raised_again_is_another_instance_for_each_caller(error: Exception) -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo, restart=RestartStrategy(max_restarts=9, backoff=(0, 0)))

        caught = await asyncio.gather(*(ref.ask(error) for _ in range(3)), return_exceptions=True)

    assert {type(instance) for instance in caught} == {type(error)}
    assert all("again" in str(instance) for instance in caught)
    assert len({id(instance) for instance in caught}) == 3


async def test_an_error_whose_class_cannot_be_copied_still_reaches_every_caller() -> None:
    class PickyError(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(one + two)

    async with ActorSystem() as system:
        ref = await system.spawn(Echo, restart=RestartStrategy(max_restarts=9, backoff=(0, 0)))
        error = PickyError("a", "b")

        for _ in range(2):
            with pytest.raises(PickyError, match="ab"):
                await ref.ask(error)


async def test_tell_raises_when_the_mailbox_is_full_and_the_message_in_hand_does_not_count() -> None:
    async with ActorSystem() as system:
        ref, gate, seen, asking = await blocked(system, mailbox_size=2)
        ref.tell(1)
        ref.tell(2)

        with pytest.raises(MailboxFullError):
            ref.tell(3)

        gate.set()
        assert await asking == "opened"
        await ref.ask("end")
        assert seen == ["waiting", 1, 2, "end"]


async def test_send_and_ask_wait_for_room_in_order() -> None:
    async with ActorSystem() as system:
        ref, gate, seen, asking = await blocked(system, mailbox_size=1)
        ref.tell(0)
        sending = asyncio.create_task(ref.send(1))
        await turns()
        second = asyncio.create_task(ref.ask(2))
        await turns()
        assert not sending.done()
        assert ref.statistics().mailbox.waiting_putters == 2

        gate.set()
        await asyncio.gather(asking, sending)

        assert await second == 2
        assert seen == ["waiting", 0, 1, 2]


async def test_asking_oneself_is_refused() -> None:
    class Selfish(Actor[str, str]):
        async def receive(self, message: str, context: ActorContext) -> str:
            result: str = await context.self_ref.ask("forever")
            return result

    async with ActorSystem() as system:
        ref = await system.spawn(Selfish)

        with pytest.raises(InvalidArgumentError, match="asks itself"):
            await ref.ask("go")


async def test_an_actor_can_tell_itself_and_the_loop_still_gets_its_turns() -> None:
    class Eternal(Actor[int, None]):
        async def receive(self, message: int, context: ActorContext) -> None:
            context.self_ref.tell(message + 1)

    async with ActorSystem(close_timeout=0) as system:
        ref = await system.spawn(Eternal)
        ref.tell(0)
        await turns(20)

        assert ref.statistics().mailbox.accepted > 100
        await ref.stop(drain=False)


# -- deadlines and cancelling


async def test_a_message_whose_deadline_passed_is_not_delivered() -> None:
    async with ActorSystem() as system:
        ref, gate, seen, asking = await blocked(system)

        with pytest.raises(DeadlineExceededError) as caught:
            await ref.ask("late", timeout=0.001)

        assert isinstance(caught.value, TimeoutError)
        assert ref.statistics().mailbox.depth == 0
        gate.set()
        await asking
        await ref.ask("end")
        assert seen == ["waiting", "end"]


async def test_a_deadline_also_ends_the_wait_for_room() -> None:
    async with ActorSystem() as system:
        ref, gate, seen, asking = await blocked(system, mailbox_size=1)
        ref.tell("fills")

        with pytest.raises(DeadlineExceededError):
            await ref.ask("late", timeout=0.001)

        assert ref.statistics().mailbox.waiting_putters == 0
        gate.set()
        await asking
        await ref.ask("end")
        assert seen == ["waiting", "fills", "end"]


async def test_a_message_in_hand_is_handled_to_its_end_after_the_deadline() -> None:
    async with ActorSystem() as system:
        gate, seen = asyncio.Event(), list[Any]()
        ref = await system.spawn(Gate, seen)

        with pytest.raises(DeadlineExceededError):
            await ref.ask(gate, timeout=0.001)
        gate.set()
        await ref.ask("end")

        assert seen == ["waiting", "end"]


@pytest.mark.parametrize("timeout", [0, -1.0])
async def test_a_timeout_of_nothing_sends_nothing(timeout: float) -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)

        with pytest.raises(DeadlineExceededError):
            await ref.ask("x", timeout=timeout)

        assert ref.statistics().mailbox.accepted == 0


async def test_a_timeout_that_is_no_number_is_refused() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)

        with pytest.raises(InvalidArgumentError):
            await ref.ask("x", timeout=float("nan"))


async def test_an_answer_in_time_is_returned_and_the_deadline_is_seen_by_the_actor() -> None:
    class Tells(Actor[str, float | None]):
        async def receive(self, message: str, context: ActorContext) -> float | None:
            return context.deadline

    async with ActorSystem() as system:
        ref = await system.spawn(Tells)
        before = system.loop.time()
        deadline = await ref.ask("when", timeout=50)

        assert deadline is not None
        assert before + 50 <= deadline <= system.loop.time() + 50
        assert await ref.ask("when") is None


async def test_a_cancelled_ask_is_taken_back_from_the_queue() -> None:
    async with ActorSystem() as system:
        ref, gate, seen, asking = await blocked(system, mailbox_size=1)
        dropped = asyncio.create_task(ref.ask("dropped"))
        await turns()
        waiting = asyncio.create_task(ref.ask("kept"))
        await turns()

        dropped.cancel()
        gate.set()

        assert await waiting == "kept"
        await asking
        assert dropped.cancelled()
        assert seen == ["waiting", "kept"]


async def test_an_ask_cancelled_before_the_actor_looked_is_not_delivered() -> None:
    async with ActorSystem() as system:
        seen: list[Any] = []
        ref = await system.spawn(Gate, seen)
        asking = asyncio.create_task(ref.ask("dropped"))
        await asyncio.sleep(0)
        assert ref.statistics().mailbox.depth == 1

        asking.cancel()
        await ref.ask("end")

        assert seen == ["end"]


async def test_a_cancelled_ask_with_a_timeout_is_taken_back_too() -> None:
    async with ActorSystem() as system:
        ref, gate, seen, asking = await blocked(system)
        dropped = asyncio.create_task(ref.ask("dropped", timeout=1000))
        await turns()
        dropped.cancel()
        await asyncio.wait({dropped})

        assert ref.statistics().mailbox.depth == 0
        gate.set()
        await asking
        assert seen == ["waiting"]


async def test_cancelling_the_one_who_asked_does_not_cancel_the_work_in_hand() -> None:
    async with ActorSystem() as system:
        ref, gate, seen, asking = await blocked(system)
        asking.cancel()
        await asyncio.wait({asking})
        gate.set()
        await ref.ask("end")

        assert seen == ["waiting", "end"]


async def test_a_cancel_in_the_same_turn_as_an_error_leaves_nothing_unretrieved(caplog: pytest.LogCaptureFixture) -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)
        asking = asyncio.create_task(ref.ask(AccelError("unseen")))
        while not ref.statistics().failures:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        del asking
        gc.collect()

    assert "never retrieved" not in caplog.text


# -- contexts


class Reads(Actor[str, str]):
    """Answers with the context variable, before and after a suspension; sets it in between."""

    async def receive(self, message: str, context: ActorContext) -> str:
        before = user.get()
        await asyncio.sleep(0)
        middle = user.get()
        user.set("the actor")
        return f"{before} {middle}"


class ReadsItsOwn(Reads):
    carries_context = False


async def test_receive_sees_the_context_of_the_sender_and_changes_only_a_copy() -> None:
    async with ActorSystem() as system:
        user.set("spawner")
        ref = await system.spawn(Reads)
        user.set("alice")

        assert await ref.ask("who") == "alice alice"
        assert user.get() == "alice"
        user.set("bob")
        assert await ref.ask("who") == "bob bob"


async def test_an_actor_that_opts_out_starts_with_an_empty_context() -> None:
    user.set("spawner")
    async with ActorSystem() as system:
        ref = await system.spawn(ReadsItsOwn)

        assert await ref.ask("who") == "nobody nobody"


async def test_a_plain_message_put_into_the_mailbox_runs_in_an_empty_context() -> None:
    seen: list[str] = []

    class Records(Actor[str, None]):
        async def receive(self, message: str, context: ActorContext) -> None:
            seen.append(user.get())
            user.set(message)

    async with ActorSystem() as system:
        user.set("alice")
        ref = await system.spawn(Records)
        ref.mailbox.put_nowait("one")
        ref.mailbox.put_nowait("two")
        await ref.stop()

    assert seen == ["nobody", "nobody"]


async def test_cancelling_inside_a_carried_context_reaches_receive() -> None:
    class TimesOut(Actor[None, str]):
        async def receive(self, message: None, context: ActorContext) -> str:
            try:
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            except TimeoutError:
                return user.get()
            return "not reached"

    async with ActorSystem() as system:
        ref = await system.spawn(TimesOut)
        user.set("carol")

        assert await ref.ask(None) == "carol"
        assert ref.statistics().failures == 0


# -- hooks


class Hooked(Actor[Any, Any]):
    def __init__(self, log: list[str], broken: str = "") -> None:
        self.log = log
        self.broken = broken

    def note(self, what: str) -> None:
        self.log.append(what)
        if what == self.broken:
            raise ValueError(what)

    async def receive(self, message: Any, context: ActorContext) -> Any:
        self.note("receive")
        if isinstance(message, BaseException):
            raise message

    async def started(self, context: ActorContext) -> None:
        self.note("started")

    async def stopped(self, context: ActorContext) -> None:
        self.note("stopped")

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        self.note("restarting")


async def test_hooks_run_in_order() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        ref = await system.spawn(Hooked, log)
        with pytest.raises(ValueError, match="boom"):
            await ref.ask(ValueError("boom"))
        await ref.stop()

    assert log == ["started", "receive", "restarting", "started", "stopped"]


@pytest.mark.parametrize("broken", ["stopped", "restarting"])
async def test_a_hook_that_raises_is_logged_and_changes_nothing(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        ref = await system.spawn(Hooked, log, broken)
        ref.tell(ValueError("boom"))
        await ref.stop()

    assert log == ["started", "receive", "restarting", "started", "stopped"]
    assert await ref.wait_stopped() is None
    assert "actor_hook_failed" in caplog.text


# -- stopping


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


class Stubborn(Actor[Any, str]):
    """Finishes its work although it is cancelled, also its start if it has to wait for that, and its end."""

    def __init__(self, log: list[str], *waits: str) -> None:
        self.log = log
        self.waits = waits

    async def persist(self, what: str) -> None:
        if what in self.waits:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.log.append(what)

    async def started(self, context: ActorContext) -> None:
        await self.persist("started")

    async def stopped(self, context: ActorContext) -> None:
        await self.persist("stopped")
        self.log.append("ended")

    async def receive(self, message: Any, context: ActorContext) -> str:
        await self.persist("receive")
        return "finished all the same"


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


# -- watching


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


# -- what is kept alive


class Blob:
    """Something whose end can be seen."""


async def drops(ref: ActorRef[Any, Any], message: Any) -> weakref.ref[Any]:
    gone = weakref.ref(message)
    try:
        await ref.ask(message)
    except ValueError as error:
        gone = weakref.ref(error.args[0])
    return gone


@pytest.mark.parametrize("carries", [True, False])
async def test_message_and_result_are_dropped_before_the_next_wait(carries: bool) -> None:
    class Holder(Echo):
        carries_context = carries

    async with ActorSystem() as system:
        ref = await system.spawn(Holder)
        gone = await drops(ref, Blob())
        await turns()  # the loop itself holds the future whose wake-up it is running
        gc.collect()

        assert gone() is None


@pytest.mark.parametrize("suspends", [True, False])
async def test_an_error_is_dropped_without_the_collector(suspends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("accel"), "disabled", True)  # pytest keeps all records

    class Raises(Actor[Blob, None]):
        async def receive(self, message: Blob, context: ActorContext) -> None:
            if suspends:
                await asyncio.sleep(0)
            raise ValueError(message)

    async with ActorSystem() as system:
        ref = await system.spawn(Raises, restart=RestartStrategy(max_restarts=9, backoff=(0, 0)))
        gc.collect()
        gc.disable()
        try:
            gone = await drops(ref, Blob())
            await turns()
            assert gone() is None
        finally:
            gc.enable()


# -- failing from outside


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


# -- refs


async def test_a_ref_tells_who_it_is_and_is_itself_when_copied() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo, name="echo")

        assert (ref.name, ref.path, ref.is_alive, ref.state) == ("echo", "echo", True, ActorState.RUNNING)
        assert repr(ref) == "<ActorRef 'echo' running>"
        assert copy.copy(ref) is ref
        assert copy.deepcopy([ref])[0] is ref
        with pytest.raises(TypeError, match="does not pickle"):
            pickle.dumps(ref)


async def test_a_context_knows_its_surroundings() -> None:
    class Looks(Actor[str, Any]):
        async def receive(self, message: str, context: ActorContext) -> Any:
            child = await context.spawn(Looks, name=message) if message else None
            return context, child

    async with ActorSystem() as system:
        ref = await system.spawn(Looks, name="top")
        context, child = await ref.ask("below")
        inner, _ = await child.ask("")

        assert context.self_ref is ref
        assert (context.parent, inner.parent) == (None, ref)
        assert context.children == (child,)
        assert (context.system, context.loop) == (system, asyncio.get_running_loop())
        assert child.path == "top/below"
        assert repr(inner) == "<ActorContext 'top/below'>"
