"""How the parent of a process host waits for a long op: half asleep, and awake when the end is near. On a clock that goes, and a loop that turns, as told."""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from accel.remote import attention
from accel.remote.attention import Pacing
from tests.device_support import until

if TYPE_CHECKING:
    from collections.abc import Callable

TURN, LATE = 10e-6, 60e-6
"""Seconds of a turn of the loop, and by which a timer may be late."""


class World:
    """A loop, its clocks and its timers: what :class:`Pacing` sees of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.seed = 1000.0, random.randrange(1 << 32)
        self.random = random.Random(self.seed)
        self.asleep = 0.0
        self.naps: list[float] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._callback: Callable[[], None] | None = None
        self._rings: float | None = None
        monkeypatch.setattr(attention, "_FEW", 1)
        monkeypatch.setattr(attention, "perf_counter", lambda: self.now)
        monkeypatch.setattr(attention, "create_timer", self._create_timer)
        self.pacing = Pacing(self, lambda: None)  # type: ignore[arg-type]  # a loop, as far as it is used

    # -- as a loop

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def time(self) -> float:
        """Go by whole milliseconds, as uvloop does."""
        return round(self.now, 3)

    # -- as a timer

    def _create_timer(self, loop: Any, callback: Callable[[], None]) -> World:
        assert self._callback is None, "one timer is enough"
        self._callback = callback
        return self

    def arm(self, delay: float) -> None:
        self._rings = self.now + delay
        self.naps.append(delay)

    def disarm(self) -> None:
        self._rings = None

    def close(self) -> None:
        self._rings = self._callback = None

    # -- what the tests do

    @property
    def is_armed(self) -> bool:
        return self._rings is not None

    def op(self, seconds: float) -> bool:
        """Send one op that takes so long, and return whether the parent was awake at its end."""
        self.pacing.sent(1, is_first=True, is_attended=False)
        self._pass(self.now + seconds)
        awake = self.pacing.is_awake
        self.pacing.idle()
        assert not self.is_armed
        self._pass(self.now + 1e-3)
        return awake

    def often(self, seconds: float) -> float:
        """Return of how many ops, of all, the end found the parent awake, where they take that long, and up to 50 us more."""
        return sum(self.op(seconds + self.random.uniform(0, 50e-6)) for _ in range(30)) / 30

    def _pass(self, end: float) -> None:
        """Let the time go on: a turn with something to do, or a sleep until the timer rings, which may be late, or until the end."""
        while self.now < end:
            if self._soon:
                for _ in range(len(self._soon)):
                    self._soon.popleft()()
                self.now += TURN
            elif self._rings is not None and self._rings < end:
                self.asleep += self._rings - self.now
                self.now, self._rings = self._rings + self.random.uniform(0, LATE), None
                assert self._callback is not None
                self._callback()
            else:
                self.asleep += end - self.now
                self.now = end


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize("seconds", [0.6e-3, 1e-3, 3e-3, 8e-3, 19e-3])
def test_the_end_of_a_steady_op_finds_the_parent_awake(world: World, seconds: float) -> None:
    world.often(seconds)  # learns
    world.naps.clear()
    world.asleep = 0.0
    assert world.often(seconds) == 1.0, world.seed
    assert max(world.naps, default=0.0) <= 0.5e-3, "a processor that sleeps longer is late"
    assert world.asleep >= 30 * (seconds - 0.6e-3), "it is awake when the end is near, and not before"
    assert not world.pacing.is_awake


def test_a_short_op_is_waited_for_awake(world: World) -> None:
    world.often(0.2e-3)
    world.naps.clear()
    assert world.often(0.2e-3) == 1.0, world.seed
    assert world.naps == []


def test_a_very_long_op_is_not_stayed_half_awake_for(world: World) -> None:
    world.often(0.1)
    world.naps.clear()
    assert world.often(0.1) == 0.0, world.seed
    assert world.naps == []


def test_an_op_that_becomes_shorter_is_learned(world: World) -> None:
    world.often(8e-3)
    world.often(1e-3)
    assert world.often(1e-3) == 1.0, world.seed


async def test_the_real_timer_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FEW", 1)
    before = len(os.listdir("/proc/self/fd"))
    pacing = Pacing(asyncio.get_running_loop(), lambda: None)
    pacing._usual = 3e-3
    pacing.sent(1, is_first=True, is_attended=False)
    assert pacing._is_napping
    await until(lambda: not pacing._is_napping, "the timer rang")
    pacing.idle()
    assert not pacing.is_awake
    pacing.end()
    pacing.end()
    assert len(os.listdir("/proc/self/fd")) == before
