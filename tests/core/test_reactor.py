from __future__ import annotations

import asyncio
import ctypes
import random
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import uvloop

from accel.completion import Pacing
from accel.completion.host_fn import Semaphore
from accel.completion.pacing import pause
from accel.completion.prediction import Estimate, Predictor
from accel.completion.reactor import Reactor, ReactorLane
from accel.completion.timer import LoopTimer, TimerfdTimer, create_timer
from accel.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.completion.strategy import Ended
    from accel.errors import AccelError

PACING = Pacing()
WAKE = 40e-6  # what a sleep costs the loop's core, generously
LATE = 60e-6  # how late a timer may be


def wait_through(duration: float, estimate: Estimate | None) -> tuple[float, float]:
    """Play one op against the pacing: return the time added to it, and the core time spent on waiting for it."""
    now = spent = 0.0
    turn = 10e-6
    while now < duration:
        delay = pause(now, estimate, PACING)
        spent += WAKE if delay else turn
        now += delay + LATE if delay else turn
    return now - duration, spent


def test_long_op_that_is_known_costs_little_and_is_seen_at_once() -> None:
    for duration in (5e-3, 20e-3, 1.0):
        added, spent = wait_through(duration, Estimate(duration, duration / 200))
        assert added <= 20e-6
        assert spent <= 0.15 * duration


def test_short_op_that_is_known_is_never_slept_on() -> None:
    duration = PACING.throughout
    assert all(pause(elapsed * duration, Estimate(duration, duration / 100), PACING) == 0.0 for elapsed in (0.0, 0.3, 0.6, 0.9))


@pytest.mark.parametrize("duration", [1e-5, 1e-4, 3e-4, 1e-3, 5e-3, 0.03])
def test_unknown_op_is_seen_after_a_bounded_part_of_its_time(duration: float) -> None:
    added, spent = wait_through(duration, None)
    assert added <= duration / PACING.patience + PACING.shortest + LATE
    assert spent <= max(PACING.unknown_spin + 2 * WAKE, 0.6 * duration)


def test_op_that_does_not_keep_to_the_prediction_still_adds_little() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(200):
        usual, factor = 10 ** rng.uniform(-4, -2), rng.uniform(1.0, 20.0)
        added, spent = wait_through(usual * factor, Estimate(usual, usual / 50))
        assert added <= usual * factor / PACING.patience + PACING.shortest + LATE, f"{seed=}"
        assert spent <= 4 * PACING.window + usual * factor, f"{seed=}"


def test_kind_that_has_become_fast_is_not_slept_through() -> None:
    added, _ = wait_through(1e-3, Estimate(3600.0, 0.0))
    assert added <= PACING.trust + LATE
    added, spent = wait_through(2.0, Estimate(2.0, 0.0))
    assert added <= 20e-6
    assert spent <= 2e-3


def test_kind_whose_durations_scatter_is_looked_at_on_the_way() -> None:
    for early in (0.3e-3, 1e-3, 2e-3):
        added, _ = wait_through(early, Estimate(4e-3, 2e-3))
        assert added <= early / PACING.patience + PACING.shortest + LATE


def test_predictor_follows_what_it_sees() -> None:
    predictor = Predictor(8)
    assert predictor.expect("gemm") is None
    predictor.observe("gemm", 1.0)
    assert predictor.expect("gemm") == Estimate(1.0, 0.0, 1.0)
    for _ in range(80):
        predictor.observe("gemm", 2.0)
    estimate = predictor.expect("gemm")
    assert estimate is not None
    assert estimate.mean == pytest.approx(2.0, rel=1e-3)
    assert estimate.deviation < 0.01
    predictor.observe("gemm", 4.0)
    slower = predictor.expect("gemm")
    assert slower is not None
    assert 2.0 < slower.mean < 2.5
    for _ in range(4):
        predictor.observe("gemm", 1.0)
    faster = predictor.expect("gemm")
    assert faster is not None
    assert 1.0 <= faster.mean < 1.1


def test_predictor_takes_two_alike_that_are_unlike_before_for_other_work() -> None:
    predictor = Predictor(8)
    for _ in range(50):
        predictor.observe("gemm", 1.0)
    predictor.observe("gemm", 5.0)
    predictor.observe("gemm", 5.1)
    estimate = predictor.expect("gemm")
    assert estimate is not None
    assert estimate.mean == pytest.approx(5.05)
    assert estimate.deviation == pytest.approx(0.1)


def test_predictor_does_not_follow_what_scatters() -> None:
    predictor = Predictor(8)
    for seconds in (1.0, 3.0) * 50:
        predictor.observe("gemm", seconds)
    estimate = predictor.expect("gemm")
    assert estimate is not None
    assert estimate.deviation > 0.5


def test_predictor_forgets_the_kind_not_seen_for_longest() -> None:
    predictor = Predictor(2)
    for kind in ("a", "b", "a", "c"):
        predictor.observe(kind, 1.0)
    assert predictor.expect("b") is None
    assert predictor.expect("a") is not None
    assert len(predictor) == 2


class Event:
    def __init__(self, after: int) -> None:
        self.left = after

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def stays() -> bool:
    pytest.fail("no waiter naps here")


class Mark:
    lane = stream = None

    def __init__(self, event: Event, kind: object, began: float | None = None) -> None:
        self.event = event
        self.kind = kind
        self.enqueued_at = time.perf_counter() if began is None else began

    def complete(self) -> NoReturn:
        raise AssertionError

    def fail(self, error: AccelError) -> NoReturn:
        raise AssertionError


async def test_other_callbacks_run_between_the_looks_of_a_spinning_reactor() -> None:
    loop = asyncio.get_running_loop()
    reactor = Reactor(loop, Pacing(unknown_spin=3600.0))
    ended = loop.create_future()
    between = 0

    def settle(marks: list[Ended]) -> None:
        ended.set_result(len(marks))

    reactor.add(ReactorLane(settle, stays), Mark(Event(50), "spin"))
    while not ended.done():
        between += 1
        await asyncio.sleep(0)
    assert between >= 50
    assert reactor.looks == 51
    reactor.close()
    reactor.close()


async def test_sleeping_reactor_is_woken_by_its_timer_and_by_a_shorter_op() -> None:
    loop = asyncio.get_running_loop()
    reactor = Reactor(loop, Pacing(unknown_spin=0.0, shortest=1e-3, longest=1e-3))
    ends: list[Any] = []
    over = asyncio.Event()

    def settle(marks: list[Ended]) -> None:
        ends.extend(mark.kind for mark, _ in marks)
        if len(ends) == 2:
            over.set()

    now = time.perf_counter()
    reactor.add(ReactorLane(settle, stays), Mark(Event(3), "long", now - 1.0))
    reactor.add(ReactorLane(settle, stays), Mark(Event(0), "short", now))
    await over.wait()
    assert ends == ["short", "long"]
    assert reactor.looks == 4
    reactor.close()


async def test_timer_set_for_a_long_op_is_off_when_everything_has_ended_before() -> None:
    loop = asyncio.get_running_loop()
    reactor = Reactor(loop, Pacing(unknown_spin=3600.0))
    reactor._predictor.observe("long", 3600.0)
    ends: list[Ended] = []
    over = asyncio.Event()

    def settle(marks: list[Ended]) -> None:
        ends.extend(marks)
        if len(ends) == 2:
            over.set()

    reactor.add(ReactorLane(settle, stays), Mark(Event(1), "long"))
    armed = reactor._alarm
    assert armed is not None
    reactor.add(ReactorLane(settle, stays), Mark(Event(2), "unknown"))
    await over.wait()
    assert (reactor._alarm, reactor._next_turn) == (None, None)
    reactor.close()


async def test_lane_that_is_taken_from_the_reactor_is_not_looked_at() -> None:
    reactor = Reactor(asyncio.get_running_loop(), Pacing())
    event = Event(0)
    lane = ReactorLane(lambda _: pytest.fail("told about a mark that was taken"), stays)
    mark = Mark(event, "spin")
    reactor.add(lane, mark)
    assert reactor.take(lane) == [mark]
    for _ in range(5):
        await asyncio.sleep(0)
    assert event.left == 0
    assert reactor.looks == 0
    reactor.close()


async def test_duration_of_an_op_that_ended_during_a_sleep_is_taken_from_the_middle() -> None:
    reactor = Reactor(asyncio.get_running_loop(), Pacing(window=1.0))
    settled: list[Ended] = []
    lane = ReactorLane(settled.extend, stays)
    now = time.perf_counter()
    reactor.add(lane, Mark(Event(0), "gemm", now - 10.0))
    lane.looked = now - 1.0  # the last look lies a second back: it ended 9 to 10 seconds after it began
    reactor._turn()
    assert len(settled) == 1
    estimate = reactor._predictor.expect("gemm")
    assert estimate is not None
    assert 9.4 <= estimate.mean <= 9.6
    reactor.close()


def on(loop: asyncio.AbstractEventLoop, main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


async def rung(kind: type[LoopTimer | TimerfdTimer]) -> None:
    """Wait until another timer of that kind has rung often enough for the first to have rung again."""
    calls: list[int] = []
    often = asyncio.Event()

    def callback() -> None:
        calls.append(1)
        if len(calls) == 5:
            often.set()

    timer = kind(asyncio.get_running_loop(), callback)
    timer.arm(2e-3, 2e-3)
    await often.wait()
    timer.close()


async def check_timer(kind: type[LoopTimer | TimerfdTimer]) -> None:
    fired = asyncio.Event()
    calls: list[float] = []

    def callback() -> None:
        calls.append(time.perf_counter())
        fired.set()

    timer = kind(asyncio.get_running_loop(), callback)
    began = time.perf_counter()
    timer.arm(3600.0)
    timer.arm(2e-3)  # takes the place of the hour
    await fired.wait()
    # uvloop counts from the beginning of its turn, in milliseconds, and so may be early.
    assert calls[0] - began >= (1.9e-3 if kind is TimerfdTimer else 0.0)
    timer.arm(0.0)
    timer.disarm()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(calls) == 1
    fired.clear()
    timer.arm(0.0)
    await fired.wait()
    assert len(calls) == 2
    armed = time.perf_counter()
    timer.arm(1e-3, 2e-3)
    while len(calls) < 6:
        fired.clear()
        await fired.wait()
    # Rings that come late do not put off the next ones.
    assert calls[5] - armed >= (6.9e-3 if kind is TimerfdTimer else 0.0)
    timer.arm(0.0)  # once, and no more
    count = len(calls)
    while len(calls) == count:
        fired.clear()
        await fired.wait()
    await rung(kind)
    assert len(calls) == count + 1
    timer.close()
    timer.close()


@pytest.mark.parametrize("kind", [LoopTimer, TimerfdTimer])
async def test_timer_that_is_disarmed_by_its_callback_rings_no_more(kind: type[LoopTimer | TimerfdTimer]) -> None:
    calls: list[int] = []

    def callback() -> None:
        calls.append(1)
        timer.disarm()

    timer = kind(asyncio.get_running_loop(), callback)
    timer.arm(1e-3, 1e-3)
    await rung(kind)
    assert len(calls) == 1
    timer.close()


@pytest.mark.parametrize("kind", [LoopTimer, TimerfdTimer])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_timer_fires_once_when_armed(kind: type[LoopTimer | TimerfdTimer], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    on(new_loop(), lambda: check_timer(kind))


async def test_loop_that_watches_no_descriptors_gets_its_own_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timer = create_timer(loop, lambda: None)
    assert isinstance(timer, TimerfdTimer)
    timer.close()

    def refuse(*_: object) -> NoReturn:
        raise NotImplementedError

    monkeypatch.setattr(loop, "add_reader", refuse)
    assert isinstance(create_timer(loop, lambda: None), LoopTimer)


async def test_timer_that_was_armed_anew_before_its_callback_does_not_fire() -> None:
    calls: list[int] = []
    timer = TimerfdTimer(asyncio.get_running_loop(), lambda: calls.append(1))
    timer.arm(3600.0)
    timer._expired()  # what the loop calls when it saw the old time pass
    assert calls == []
    timer.close()


def test_semaphore_is_a_c_function_that_wakes_a_thread() -> None:
    semaphore = Semaphore()
    woken = threading.Event()

    def wait() -> None:
        semaphore.wait()
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(semaphore.address)(semaphore.argument)
    assert woken.wait(10.0)
    thread.join()
    assert not semaphore.take()
    for _ in range(3):
        semaphore()
    semaphore.wait()  # takes all three
    assert not semaphore.take()


def test_system_without_semaphores_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ctypes.PyDLL(None, use_errno=True)

    class Library:
        sem_post, sem_trywait = real.sem_post, real.sem_trywait

        @staticmethod
        def sem_init(*_: object) -> int:
            return -1

    monkeypatch.setattr(ctypes, "PyDLL", lambda *_, **__: Library)
    with pytest.raises(UnsupportedError):
        Semaphore()
