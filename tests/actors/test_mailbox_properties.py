"""A random life of a mailbox against a plain model: order, bounds, places in line, nothing lost and nothing doubled."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from accel.actors import Mailbox
from accel.actors.mailbox import ENDED, NOTHING
from accel.errors import ActorStoppedError, MailboxFullError


class MailboxMachine(RuleBasedStateMachine):
    """Putters and the reader are tasks on a loop of the test's own; a rule may let them run, so wake-ups and cancellations interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.numbers = iter(range(10**9))
        self.offered: list[int] = []  # ordinary messages, in the order in which they were offered and not known to be refused
        self.system: list[int] = []
        self.received: list[int] = []
        self.gone: set[int] = set()  # discarded, refused, or cancelled before they were in
        self.putters: list[tuple[list[int], asyncio.Task[None]]] = []  # the number comes with the first step
        self.getter: asyncio.Task[None] | None = None

    @initialize(capacity=st.integers(1, 3))
    def start(self, capacity: int) -> None:
        self.mailbox: Mailbox[Any] = Mailbox(capacity, loop=self.loop)

    def spin(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()  # exactly one turn
        self.collect()

    def collect(self) -> None:
        for numbers, task in [pair for pair in self.putters if pair[1].done()]:
            if task.cancelled():
                self.gone.update(numbers)
            elif error := task.exception():
                assert isinstance(error, ActorStoppedError)
                assert self.mailbox.is_closed
                self.gone.update(numbers)
        if self.getter is not None and self.getter.done():
            assert self.getter.cancelled() or self.getter.exception() is None
            self.getter = None
        self.putters = [pair for pair in self.putters if not pair[1].done()]

    @rule()
    def put_nowait(self) -> None:
        number = next(self.numbers)
        waiting = self.mailbox.statistics().waiting_putters
        try:
            self.mailbox.put_nowait(number)
        except MailboxFullError:
            assert waiting or len(self.mailbox) == self.mailbox.capacity
            self.gone.add(number)
        except ActorStoppedError:
            assert self.mailbox.is_closed
            self.gone.add(number)
        else:
            assert not waiting
        self.offered.append(number)

    @rule()
    def put_system(self) -> None:
        number = -next(self.numbers) - 1
        self.mailbox.put_system(number)
        self.system.append(number)

    @rule(count=st.integers(1, 3), turns=st.integers(0, 1))
    def put(self, count: int, turns: int) -> None:
        async def putting(numbers: list[int]) -> None:
            numbers.append(next(self.numbers))
            self.offered.extend(numbers)
            await self.mailbox.put(numbers[0])

        for _ in range(count):
            numbers: list[int] = []
            self.putters.append((numbers, self.loop.create_task(putting(numbers))))
        self.spin(turns)

    @precondition(lambda self: self.getter is None)
    @rule(turns=st.integers(0, 1))
    def get(self, turns: int) -> None:
        async def getting() -> None:
            while (item := self.mailbox.take()) is NOTHING:
                await self.mailbox.waiter()
            if item is ENDED:
                assert self.mailbox.is_closed
            else:
                self.received.append(item)

        self.getter = self.loop.create_task(getting())
        self.spin(turns)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        for _ in range(count):
            item = self.mailbox.take()
            if item is ENDED:
                assert self.mailbox.is_closed
            elif item is not NOTHING:
                self.received.append(item)

    @precondition(lambda self: self.putters)
    @rule(data=st.data(), takes=st.integers(0, 2))
    def wake_and_cancel_a_putter(self, data: st.DataObject, takes: int) -> None:
        self.take(takes)
        data.draw(st.sampled_from(self.putters[:2]))[1].cancel()

    @precondition(lambda self: self.getter is not None)
    @rule(wakes=st.booleans())
    def wake_and_cancel_the_reader(self, wakes: bool) -> None:
        if wakes:
            self.put_nowait()
        if self.getter is not None:
            self.getter.cancel()

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.offered))
        if self.mailbox.discard(number):
            assert number not in self.received
            assert number not in self.gone
            self.gone.add(number)

    @rule()
    def run(self) -> None:
        self.spin(1)

    @rule()
    def settle(self) -> None:
        self.spin(2 * len(self.putters) + 6)
        statistics = self.mailbox.statistics()
        assert not statistics.waiting_putters or statistics.depth == statistics.capacity, "a putter waits beside free room"
        assert len(self.putters) == statistics.waiting_putters
        assert self.getter is None or self.mailbox.take() is NOTHING, "the reader waits beside a message"

    @precondition(lambda self: len(self.offered) > 20)
    @rule()
    def close(self) -> None:
        self.mailbox.close()

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "mailbox"):
            return
        statistics = self.mailbox.statistics()
        assert 0 <= statistics.depth <= statistics.capacity
        assert statistics.high_water <= statistics.capacity
        assert statistics.waiting_putters >= 0
        ordinary = [number for number in self.received if number >= 0]
        assert statistics.accepted == len(ordinary) + statistics.discarded + statistics.depth

    @invariant()
    def in_order(self) -> None:
        ordinary = [number for number in self.received if number >= 0]
        assert ordinary == sorted(set(ordinary))
        system = [number for number in self.received if number < 0]
        assert system == self.system[: len(system)]

    def teardown(self) -> None:
        try:
            for _ in range(len(self.offered) + len(self.system) + len(self.putters) + 2):
                self.take(1)
                self.spin(3)
            assert not self.putters, "a putter was left waiting with room in the mailbox"
            assert sorted([*self.received, *self.gone]) == sorted([*self.offered, *self.system])
            self.mailbox.close()
            self.spin(3)
            assert self.getter is None, "the reader was not told that the mailbox closed"
        finally:
            self.loop.close()


TestMailbox = MailboxMachine.TestCase
TestMailbox.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
