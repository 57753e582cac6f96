"""Watchers that a signal wakes: they query the oldest marks when a signal comes, and at a long interval besides."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from accel.completion.strategy import LaneWatcher, take_ended
from accel.completion.timer import create_timer
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable

    from accel.completion.strategy import Mark

__all__ = ["NotifiedWatcher", "SignalledWatcher", "check_watch_interval"]


def check_watch_interval(seconds: float) -> None:
    """Raise unless ``seconds`` is a time to wait.

    Raises
    ------
    InvalidArgumentError
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise InvalidArgumentError(f"watch_interval={seconds!r} is not a time to wait", remedy="Use more than 0 seconds.")


class SignalledWatcher(LaneWatcher):
    """Queries the oldest marks when it is signalled, and once per ``watch_interval``: after a fault no signal comes.

    Parameters
    ----------
    loop
        The loop on which marks end.
    watch_interval
        Seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, watch_interval: float) -> None:
        super().__init__(loop)
        self._watch_interval = watch_interval
        self._lanes: dict[Hashable, deque[Mark]] = {}
        self._timer = create_timer(loop, self._on_timer)
        self._is_armed = False

    def watch(self, mark: Mark) -> None:
        """Watch a mark until it ends."""
        self._admit()
        marks = self._lanes.get(mark.lane)
        if marks is None:
            marks = self._lanes[mark.lane] = deque()
        marks.append(mark)
        self._arm()
        self._ask_for_signal(mark)

    @abstractmethod
    def _ask_for_signal(self, mark: Mark) -> None:
        """Have :meth:`_poll` called on the loop once ``mark`` has ended without a fault."""

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            self._timer.arm(self._watch_interval)

    def _on_timer(self) -> None:
        self._is_armed = False
        self._poll()

    def _poll(self) -> None:
        if not self._pending:  # the timer or another signal came before
            return
        self._polls += 1
        ended = [each for marks in self._lanes.values() for each in take_ended(marks)]
        if self._pending > len(ended):
            self._arm()
        self._settle(ended)

    def _take_all(self) -> list[Mark]:
        taken = [mark for marks in self._lanes.values() for mark in marks]
        self._lanes.clear()
        return taken

    async def _release(self, *, abandon: bool) -> None:
        self._timer.close()


class NotifiedWatcher(SignalledWatcher):
    """For devices that compute on threads of this process: the thread that did the work wakes the loop.

    Polling would take the processor from the work, and a side stream would be one more thread to switch to. The watcher itself is the host
    function (see :class:`~accel.backend.HostFunction`) that the marks' own streams call; it is Python code, so it is for such devices only.
    """

    address = 0
    argument = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, watch_interval: float) -> None:
        super().__init__(loop, watch_interval)
        self._is_called = False

    def __call__(self) -> None:
        """Have the loop poll, unless it is about to. Called on the stream's thread."""
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no waiter is left
                self._loop.call_soon_threadsafe(self._on_call)

    def _on_call(self) -> None:
        self._is_called = False  # before the poll: a mark that ends from now on needs another call
        if not self._released:
            self._poll()

    def _ask_for_signal(self, mark: Mark) -> None:
        try:
            mark.stream.launch_host_function(self)
        except Exception:  # a poisoned context takes no more work, or there is no thread for it: the query of the mark tells
            self()
