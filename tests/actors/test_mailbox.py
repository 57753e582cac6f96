"""The mailbox: order, bounds, places in line, taking back, closing, counting."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TypeVar

import pytest

from accel.actors import Mailbox
from accel.actors.mailbox import ENDED, NOTHING
from accel.errors import ActorStoppedError, InvalidArgumentError, MailboxFullError
from tests.actor_support import Time, turns

M = TypeVar("M")


async def get(mailbox: Mailbox[M]) -> M:
    """Read as an actor's task does."""
    while (item := mailbox.take()) is NOTHING:
        await mailbox.waiter()
    if item is ENDED:
        raise EOFError
    message: M = item
    return message


@pytest.mark.parametrize("capacity", [0, -1, 1.5, "3", None, True])
def test_a_capacity_that_is_no_positive_integer_is_refused(capacity: object) -> None:
    with pytest.raises(InvalidArgumentError, match="capacity"):
        Mailbox(capacity)  # type: ignore[arg-type]


def test_put_nowait_refuses_when_full_and_counts_it() -> None:
    mailbox: Mailbox[str] = Mailbox(1, name="small")
    mailbox.put_nowait("a")

    assert not mailbox.has_room
    with pytest.raises(MailboxFullError, match="small"):
        mailbox.put_nowait("b")

    assert mailbox.statistics().rejected == 1
    assert len(mailbox) == 1


def test_none_is_a_message() -> None:
    mailbox: Mailbox[None] = Mailbox(1)
    assert mailbox.take() is NOTHING
    mailbox.put_nowait(None)

    assert mailbox.take() is None
    assert mailbox.take() is NOTHING


def test_system_messages_overtake_and_need_no_room() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    mailbox.put_nowait("ordinary")
    mailbox.put_system("first")
    mailbox.put_system("second")

    assert len(mailbox) == 1
    assert [mailbox.take() for _ in range(3)] == ["first", "second", "ordinary"]


async def test_a_putter_that_finds_others_waiting_gets_the_room_behind_them() -> None:
    mailbox: Mailbox[int] = Mailbox(4)
    for number in range(4):
        mailbox.put_nowait(number)
    early = asyncio.create_task(mailbox.put(4))
    await turns()
    late = asyncio.create_task(mailbox.put(5))  # runs after the early one was woken, and before it has run
    for _ in range(4):
        mailbox.take()

    await asyncio.wait_for(asyncio.gather(early, late), 30)

    assert [mailbox.take(), mailbox.take()] == [4, 5]


async def test_discard_takes_a_message_back_by_identity_and_frees_its_place() -> None:
    mailbox: Mailbox[list[int]] = Mailbox(2)
    one, twin = [1], [1]
    mailbox.put_nowait(one)
    mailbox.put_nowait(twin)
    putter = asyncio.create_task(mailbox.put([2]))
    await turns()

    assert mailbox.discard(twin)
    await asyncio.wait_for(putter, 30)

    assert mailbox.take() is one
    assert mailbox.take() == [2]
    assert not mailbox.discard(one)
    assert mailbox.statistics().discarded == 1


async def test_close_refuses_puts_and_tells_those_who_wait() -> None:
    mailbox: Mailbox[str] = Mailbox(1, name="closing")
    mailbox.put_nowait("a")
    putters = [asyncio.create_task(mailbox.put(text)) for text in "bc"]
    await turns()
    cause = ValueError("why")

    mailbox.close(cause)
    mailbox.close()

    errors = await asyncio.gather(*putters, return_exceptions=True)
    assert [type(error) for error in errors] == [ActorStoppedError, ActorStoppedError]
    assert errors[0] is not errors[1]
    assert all(isinstance(error, BaseException) and error.__cause__ is cause for error in errors)
    with pytest.raises(ActorStoppedError, match="closing"):
        mailbox.put_nowait("d")
    with pytest.raises(ActorStoppedError):
        await mailbox.put("e")
    assert mailbox.statistics().rejected == 0


async def test_a_putter_woken_before_the_close_but_running_after_it_is_refused() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    mailbox.put_nowait("a")
    putter = asyncio.create_task(mailbox.put("b"))
    await turns()
    mailbox.take()
    mailbox.close()

    with pytest.raises(ActorStoppedError):
        await putter
    assert mailbox.statistics().waiting_putters == 0


def test_drain_takes_all_out_and_makes_room() -> None:
    mailbox: Mailbox[str] = Mailbox(2)
    mailbox.put_nowait("a")
    mailbox.put_nowait("b")
    mailbox.put_system("s")

    assert mailbox.drain() == ["s", "a", "b"]
    assert mailbox.drain() == []
    assert mailbox.has_room


def test_statistics_tell_depth_high_water_and_the_age_of_the_oldest() -> None:
    clock = Time()
    mailbox: Mailbox[str] = Mailbox(4, clock=clock)
    assert mailbox.oldest_age() == 0.0
    mailbox.put_nowait("a")
    clock.now += 2.0
    mailbox.put_nowait("b")
    clock.now += 1.0

    first = mailbox.statistics()
    mailbox.take()
    second = mailbox.statistics()

    assert (first.depth, first.capacity, first.accepted, first.high_water, first.oldest_age) == (2, 4, 2, 2, 3.0)
    assert (second.depth, second.accepted, second.high_water, second.oldest_age) == (1, 2, 2, 1.0)


def test_repr_tells_the_state() -> None:
    mailbox: Mailbox[str] = Mailbox(4, name="m")
    mailbox.put_nowait("a")

    assert repr(mailbox) == "<Mailbox 'm' open 1/4 waiting_putters=0>"


async def test_a_taken_message_is_not_kept_alive() -> None:
    class Message:
        pass

    mailbox: Mailbox[Message] = Mailbox(1)
    mailbox.put_nowait(Message())
    alive = weakref.ref(mailbox.take())
    gc.collect()

    assert alive() is None


async def test_a_coroutine_thrown_away_while_it_waits_leaves_no_trace() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    mailbox.put_nowait("a")
    putting = mailbox.put("b")
    putting.send(None)
    putting.close()
    assert mailbox.statistics().waiting_putters == 0

    mailbox.take()
    getting = get(mailbox)
    getting.send(None)
    getting.close()
    mailbox.put_nowait("c")

    assert await get(mailbox) == "c"
