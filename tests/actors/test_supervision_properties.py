"""A random life of a supervised actor against a model of its budget: who is answered what, how often it restarts, when it ends."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from accel.actors import Actor, ActorContext, ActorRef, ActorState, ActorSystem, Directive, RestartStrategy
from accel.errors import ActorStoppedError

WITHIN = 60.0


class ToldError(Exception):
    """Raised on request; carries the directive that its policy shall give."""

    def __init__(self, directive: Directive) -> None:
        super().__init__(directive.value)
        self.directive = directive


class Tally(Actor[Any, int]):
    """Counts its messages; the count shows which instance answers."""

    def __init__(self, broken: list[Exception]) -> None:
        self.count = 0
        self.broken = broken

    async def started(self, context: ActorContext) -> None:
        if self.broken:
            raise self.broken.pop()

    async def receive(self, message: Any, context: ActorContext) -> int:
        if isinstance(message, asyncio.Event):
            await message.wait()
        elif isinstance(message, Exception):
            raise message
        self.count += 1
        return self.count


class SupervisionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.delays: list[float] = []
        self.broken: list[Exception] = []
        self.recent: list[float] = []  # the model's account of restarts
        self.restarts = 0
        self.count = 0
        self.ended: BaseException | None = None
        self.alive = True

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def attempt(self, message: Any) -> Any:
        """Ask, and return the answer or what was raised."""

        async def asking() -> Any:
            return (await asyncio.gather(self.ref.ask(message), return_exceptions=True))[0]

        return self.do(asking())

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    @initialize(max_restarts=st.integers(0, 3), low=st.floats(0, 1), span=st.floats(0, 3), seed=st.integers(0, 2**32))
    def start(self, max_restarts: int, low: float, span: float, seed: int) -> None:
        self.strategy = RestartStrategy(
            max_restarts,
            WITHIN,
            (low, low + span),
            decide=lambda error: error.directive if isinstance(error, ToldError) else Directive.RESTART,
        )
        self.system = ActorSystem(clock=lambda: self.now, sleep=self.sleep, rng=random.Random(seed))
        self.do(self.system.__aenter__())
        self.ref: ActorRef[Any, int] = self.do(self.system.spawn(Tally, self.broken, mailbox_size=64, restart=self.strategy))

    def expect_restart(self, error: BaseException, delays: list[float]) -> bool:
        """Account for one more restart in the model, ``delays`` being what was slept for it. Return whether there was budget."""
        self.recent = [then for then in self.recent if self.now_at_failure - then < WITHIN]
        if len(self.recent) >= self.strategy.max_restarts:
            self.alive, self.ended = False, error
            return False
        if self.recent:
            low, high = self.strategy.backoff
            delay = delays.pop(0) if high > 0 else 0.0
            assert low <= delay <= high
            self.recent.append(self.now_at_failure)
            self.now_at_failure += delay
        else:
            self.recent.append(self.now_at_failure)
        self.restarts += 1
        self.count = 0
        return True

    def fail_with(self, error: Exception) -> None:
        self.now_at_failure = self.now
        self.delays.clear()
        failure = self.attempt(error)
        assert type(failure) is type(error)
        self.settle()

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(60):
                await asyncio.sleep(0)

        self.do(turns())

    @precondition(lambda self: self.alive)
    @rule()
    def ask(self) -> None:
        self.count += 1
        assert self.do(self.ref.ask("count")) == self.count

    @precondition(lambda self: self.alive)
    @rule(broken=st.integers(0, 2))
    def fail(self, broken: int) -> None:
        error: Exception = ToldError(Directive.RESTART)
        later = [ValueError(f"start {number}") for number in range(broken)]
        self.broken[:] = list(reversed(later))
        self.fail_with(error)
        slept = list(self.delays)
        for failure in (error, *later):
            if not self.expect_restart(failure, slept):
                break
        self.broken.clear()
        assert slept == []

    @precondition(lambda self: self.alive)
    @rule()
    def resume(self) -> None:
        self.fail_with(ToldError(Directive.RESUME))

    @precondition(lambda self: self.alive)
    @rule(directive=st.sampled_from([Directive.STOP, Directive.ESCALATE]))
    def end(self, directive: Directive) -> None:
        error = ToldError(directive)
        self.fail_with(error)
        self.alive, self.ended = False, error

    @precondition(lambda self: self.alive)
    @rule(idle=st.booleans(), queued=st.integers(0, 3))
    def fail_from_outside(self, idle: bool, queued: int) -> None:
        async def scene() -> list[Any]:
            tasks = [] if idle else [asyncio.ensure_future(self.ref.ask(asyncio.Event()))]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            tasks.extend(asyncio.ensure_future(self.ref.ask("count")) for _ in range(queued))
            assert self.ref.fail(ToldError(Directive.RESTART))
            await asyncio.sleep(0)
            return await asyncio.gather(*tasks, return_exceptions=True)

        self.now_at_failure = self.now
        self.delays.clear()
        answers = self.do(scene())
        self.settle()
        in_hand = answers[: 0 if idle else 1]
        assert all(isinstance(answer, ToldError) for answer in in_hand)
        rest = answers[len(in_hand) :]
        if self.expect_restart(ToldError(Directive.RESTART), list(self.delays)):
            assert rest == list(range(1, queued + 1))
            self.count = queued
        else:
            self.ended = self.do(self.ref.wait_stopped())
            assert all(isinstance(answer, ActorStoppedError) and answer.__cause__ is self.ended for answer in rest)

    @rule(seconds=st.floats(0, 2 * WITHIN))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.alive)
    @rule()
    def spawn_again(self) -> None:
        assert self.do(self.ref.wait_stopped()) is self.ended
        answer = self.attempt("count")
        assert isinstance(answer, ActorStoppedError)
        assert answer.__cause__ is self.ended
        self.ref = self.do(self.system.spawn(Tally, self.broken, mailbox_size=64, restart=self.strategy))
        self.recent, self.restarts, self.count, self.ended, self.alive = [], 0, 0, None, True

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "ref"):
            assert self.ref.is_alive is self.alive
            assert self.ref.statistics().restarts == self.restarts
            assert self.ref.state is (ActorState.RUNNING if self.alive else ActorState.STOPPED)

    def teardown(self) -> None:
        try:
            if hasattr(self, "ref"):
                self.do(self.system.aclose())
                assert asyncio.all_tasks(self.loop) == set()
        finally:
            self.loop.close()


TestSupervision = SupervisionMachine.TestCase
TestSupervision.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
