"""Actors: messages and answers, hooks, refs, and what the loop keeps alive."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import weakref
from typing import Any

import pytest

from accel.actors import Actor, ActorContext, ActorRef, ActorState, ActorSystem, RestartStrategy
from accel.errors import (
    AccelError,
    InvalidArgumentError,
    MailboxFullError,
)
from tests.actor_support import Echo, Gate, Hooked, blocked, turns


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


@pytest.mark.parametrize("broken", ["", "stopped", "restarting"])
async def test_hooks_run_in_order_and_one_that_raises_is_logged_and_changes_nothing(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        ref = await system.spawn(Hooked, log, broken)
        ref.tell(ValueError("boom"))
        await ref.stop()

    assert log == ["started", "receive", "restarting", "started", "stopped"]
    assert await ref.wait_stopped() is None
    assert ("actor_hook_failed" in caplog.text) is bool(broken)


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
