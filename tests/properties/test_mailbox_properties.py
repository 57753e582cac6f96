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
    """Putters and getters are tasks on a loop of the test's own; a rule may let them run, so wake-ups and cancellations interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.numbers = iter(range(10**9))
        self.offered: list[int] = []  # ordinary messages, in the order in which they were offered and not known to be refused
        self.system: list[int] = []
        self.received: list[int] = []
        self.gone: set[int] = set()  # discarded, refused, or cancelled before they were in
        self.putters: list[tuple[int, asyncio.Task[None]]] = []
        self.getters: list[asyncio.Task[int]] = []

    @initialize(capacity=st.integers(1, 4))
    def start(self, capacity: int) -> None:
        self.mailbox: Mailbox[Any] = Mailbox(capacity, loop=self.loop)

    def spin(self, turns: int) -> None:
        async def some() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some())
        self.collect()

    def collect(self) -> None:
        for number, task in [pair for pair in self.putters if pair[1].done()]:
            if task.cancelled():
                self.gone.add(number)
            elif error := task.exception():
                assert isinstance(error, ActorStoppedError)
                assert self.mailbox.is_closed
                self.gone.add(number)
        for getter in [task for task in self.getters if task.done()]:
            if not getter.cancelled() and (error := getter.exception()):
                assert isinstance(error, ActorStoppedError)
                assert self.mailbox.is_closed
        self.putters = [pair for pair in self.putters if not pair[1].done()]
        self.getters = [task for task in self.getters if not task.done()]

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

    @rule()
    def put(self) -> None:
        number = next(self.numbers)
        self.offered.append(number)
        self.putters.append((number, self.loop.create_task(self.mailbox.put(number))))
        self.spin(1)

    @rule()
    def get(self) -> None:
        async def getting() -> int:
            number: int = await self.mailbox.get()
            self.received.append(number)
            return number

        self.getters.append(self.loop.create_task(getting()))
        self.spin(1)

    @rule()
    def take(self) -> None:
        item = self.mailbox.take()
        if item is ENDED:
            assert self.mailbox.is_closed
        elif item is not NOTHING:
            self.received.append(item)

    @precondition(lambda self: self.putters)
    @rule(data=st.data())
    def cancel_a_putter(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.putters))[1].cancel()

    @precondition(lambda self: self.getters)
    @rule(data=st.data())
    def cancel_a_getter(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.getters)).cancel()

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.offered))
        if self.mailbox.discard(number):
            assert number not in self.received
            assert number not in self.gone
            self.gone.add(number)

    @rule(turns=st.integers(1, 3))
    def run(self, turns: int) -> None:
        self.spin(turns)

    @precondition(lambda self: len(self.offered) > 8)
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
            for _ in range(len(self.offered) + len(self.system) + 2):
                self.take()
                self.spin(3)
            assert not self.putters, "a putter was left waiting with room in the mailbox"
            assert sorted([*self.received, *self.gone]) == sorted([*self.offered, *self.system])
            self.mailbox.close()
            self.spin(3)
            assert not self.getters, "a getter was not told that the mailbox closed"
        finally:
            self.loop.close()


TestMailbox = MailboxMachine.TestCase
TestMailbox.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
