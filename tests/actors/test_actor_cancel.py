"""Asking with a deadline, cancelling an ask, and the context variables that a message carries."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from typing import Any

import pytest

from accel.actors import Actor, ActorContext, ActorSystem
from accel.errors import (
    AccelError,
    DeadlineExceededError,
    InvalidArgumentError,
)
from tests.actor_support import Echo, Gate, blocked, turns

user = contextvars.ContextVar("user", default="nobody")


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


@pytest.mark.parametrize("timeout", ["1", True, [1], 1j, float("nan")])
async def test_a_timeout_that_is_no_number_is_refused(timeout: Any) -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)
        with pytest.raises(InvalidArgumentError, match="timeout"):
            await ref.ask("x", timeout=timeout)


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
        assert await ref.ask("who", timeout=10) == "bob bob"


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
