"""The clock of the stall watch, which other threads read between two timers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accel.engine.stall import LoopClock


def test_time_that_was_counted_is_not_counted_again_before_the_next_timer() -> None:
    now = 0.0
    loop: Any = SimpleNamespace(time=lambda: now, call_at=lambda when, callback: None)
    clock = LoopClock(loop)
    clock.arm(1.0, print)
    now = 1.0
    assert clock.now() == 1.0
    clock.count()
    assert (clock.seconds, clock.now()) == (1.0, 1.0)  # Device.health() may ask now
    clock.arm(1.0, print)
    now = 1.5
    assert (clock.seconds, clock.now()) == (1.0, 1.5)
