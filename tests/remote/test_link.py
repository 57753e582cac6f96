"""What a link counts of its child, which other threads read too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accel.remote.link import Link
from accel.remote.messages import Kind

CLOSED, OPEN = b"\0", b"\1"


def test_busy_seconds_are_of_one_moment_although_the_child_goes_on_meanwhile() -> None:
    now = [10.0]
    link = Link(SimpleNamespace(loop=SimpleNamespace(time=lambda: now[0])), SimpleNamespace())  # type: ignore[arg-type]
    link.watchdog = SimpleNamespace(is_heard=False)  # type: ignore[assignment]

    def say(data: bytes, seconds: float) -> None:
        now[0] = seconds
        link._on_message(Kind.BUSY, data, [])

    say(OPEN, 10.0)
    assert link.is_busy
    now[0] = 15.0

    def time_while_messages_come() -> float:
        """Return the time for a reader on another thread, between whose steps the loop's thread handles messages."""
        link._core.loop.time = lambda: now[0]  # type: ignore[method-assign]
        say(CLOSED, 15.0)
        say(OPEN, 15.0)
        return 15.0

    core: Any = link._core
    core.loop.time = time_while_messages_come
    assert link.busy_seconds() == 5.0
    assert link.is_busy
    say(CLOSED, 16.0)
    assert (link.busy_seconds(), link.is_busy) == (6.0, False)
