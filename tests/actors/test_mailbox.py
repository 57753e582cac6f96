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

M = TypeVar("M")


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def get(mailbox: Mailbox[M]) -> M:
    """Read as an actor's task does."""
    while (item := mailbox.take()) is NOTHING:
        await mailbox.waiter()
    if item is ENDED:
        raise EOFError
    message: M = item
    return message


def test_messages_come_out_in_the_order_they_went_in() -> None:
    mailbox: Mailbox[int] = Mailbox(5)
    for number in range(5):
        mailbox.put_nowait(number)

    assert [mailbox.take() for _ in range(5)] == list(range(5))
    assert mailbox.take() is NOTHING


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


def test_a_message_that_was_taken_does_not_count() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    mailbox.put_nowait("a")
    assert mailbox.take() == "a"

    mailbox.put_nowait("b")

    assert mailbox.statistics().depth == 1


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


async def test_get_waits_for_a_put() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    getter = asyncio.create_task(get(mailbox))
    await turns()
    assert not getter.done()

    mailbox.put_nowait("a")

    assert await getter == "a"


async def test_get_is_woken_by_a_system_message() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    getter = asyncio.create_task(get(mailbox))
    await turns()

    mailbox.put_system("a")

    assert await getter == "a"


async def test_a_cancelled_getter_leaves_the_message() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    getter = asyncio.create_task(get(mailbox))
    await turns()
    mailbox.put_nowait("a")
    getter.cancel()
    await asyncio.wait({getter})

    assert mailbox.take() == "a"


async def test_putters_get_their_places_in_the_order_they_came() -> None:
    mailbox: Mailbox[int] = Mailbox(1)
    await mailbox.put(0)
    putters = [asyncio.create_task(mailbox.put(number)) for number in range(1, 5)]
    await turns()
    assert mailbox.statistics().waiting_putters == 4

    received = [await get(mailbox) for _ in range(5)]

    assert received == [0, 1, 2, 3, 4]
    await asyncio.gather(*putters)
    assert mailbox.statistics().waiting_putters == 0


async def test_a_newcomer_does_not_overtake_a_putter_that_was_woken_but_has_not_run() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    mailbox.put_nowait("a")
    putter = asyncio.create_task(mailbox.put("b"))
    await turns()

    assert mailbox.take() == "a"
    assert not mailbox.has_room
    with pytest.raises(MailboxFullError):
        mailbox.put_nowait("newcomer")

    await putter
    assert mailbox.take() == "b"


async def test_a_cancelled_putter_that_was_woken_passes_its_place_on() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    mailbox.put_nowait("a")
    first = asyncio.create_task(mailbox.put("b"))
    second = asyncio.create_task(mailbox.put("c"))
    await turns()

    assert mailbox.take() == "a"  # wakes the first
    first.cancel()
    await asyncio.wait_for(second, 5)

    assert mailbox.take() == "c"
    assert first.cancelled()
    assert mailbox.has_room


async def test_a_putter_cancelled_while_it_waits_leaves_no_trace() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    mailbox.put_nowait("a")
    putter = asyncio.create_task(mailbox.put("b"))
    await turns()
    putter.cancel()
    assert mailbox.take() == "a"
    await asyncio.wait({putter})

    statistics = mailbox.statistics()

    assert (statistics.waiting_putters, statistics.depth, statistics.accepted) == (0, 0, 1)
    assert mailbox.has_room


async def test_a_putter_that_finds_others_waiting_gets_the_room_behind_them() -> None:
    mailbox: Mailbox[int] = Mailbox(4)
    for number in range(4):
        mailbox.put_nowait(number)
    early = asyncio.create_task(mailbox.put(4))
    await turns()
    late = asyncio.create_task(mailbox.put(5))  # runs after the early one was woken, and before it has run
    for _ in range(4):
        mailbox.take()

    await asyncio.wait_for(asyncio.gather(early, late), 5)

    assert [mailbox.take(), mailbox.take()] == [4, 5]


async def test_discard_takes_a_message_back_by_identity_and_frees_its_place() -> None:
    mailbox: Mailbox[list[int]] = Mailbox(2)
    one, twin = [1], [1]
    mailbox.put_nowait(one)
    mailbox.put_nowait(twin)
    putter = asyncio.create_task(mailbox.put([2]))
    await turns()

    assert mailbox.discard(twin)
    await asyncio.wait_for(putter, 5)

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


async def test_what_is_queued_can_still_be_taken_after_close() -> None:
    mailbox: Mailbox[str] = Mailbox(2)
    mailbox.put_nowait("a")
    mailbox.close()
    mailbox.put_system("s")

    assert mailbox.is_closed
    assert await get(mailbox) == "s"
    assert await get(mailbox) == "a"
    assert mailbox.take() is ENDED


async def test_close_wakes_the_reader() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    getter = asyncio.create_task(get(mailbox))
    await turns()

    mailbox.close()

    with pytest.raises(EOFError):
        await asyncio.wait_for(getter, 5)


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
    clock = Clock()
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
