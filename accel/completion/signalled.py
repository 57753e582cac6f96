"""Waiting to be woken: queues of marks that are looked at when something says that one may have ended, and from time to time besides."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from accel.completion.strategy import Ended, LaneWatcher, put_in_line, take_ended
from accel.completion.timer import create_timer
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable

    from accel.completion.strategy import Pending

__all__ = ["NotifiedWatcher", "SignalledWatcher", "check_watch_interval"]


def check_watch_interval(seconds: float) -> None:
    """Raise unless ``seconds`` is a time to wait.

    Raises
    ------
    InvalidArgumentError
    """
    if not 0 < seconds < float("inf"):
        raise InvalidArgumentError(f"watch_interval={seconds!r} is not a time to wait", remedy="Use more than 0 seconds.")


class SignalledWatcher(LaneWatcher):
    """Looks at the oldest marks when it is signalled, and once per ``watch_interval``: after a fault no signal comes.

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
        self._lanes: dict[Hashable, deque[Pending]] = {}
        self._timer = create_timer(loop, self._on_timer)
        self._is_armed = False

    def watch(self, pending: Pending) -> None:
        """Watch a mark until it ends."""
        self._admit()
        queue = self._lanes.get(pending.lane)
        if queue is None:
            queue = self._lanes[pending.lane] = deque()
        put_in_line(queue, pending)
        self._arm()
        self._ask_for_signal(pending)

    @abstractmethod
    def _ask_for_signal(self, pending: Pending) -> None:
        """See that :meth:`_look_at_all` is called, on the loop, once ``pending`` has ended without a fault."""

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            self._timer.arm(self._watch_interval)

    def _on_timer(self) -> None:
        self._is_armed = False
        self._look_at_all()

    def _look_at_all(self) -> None:
        if not self._pending:  # a signal that comes after the timer has found what it tells of
            return
        self._looks += 1
        ended: list[Ended] = []
        for queue in self._lanes.values():
            take_ended(queue, ended)
        if self._pending > len(ended):
            self._arm()
        elif self._is_armed:
            self._is_armed = False
            self._timer.disarm()
        self._settle(ended)

    def _take_all(self) -> list[Pending]:
        taken = [pending for queue in self._lanes.values() for pending in queue]
        self._lanes.clear()
        return taken

    async def _release(self, *, abandon: bool) -> None:
        self._timer.close()


class NotifiedWatcher(SignalledWatcher):
    """For devices whose work runs on this machine's own processor, on threads of this process: the thread that did the work wakes the loop.

    Spinning would take from the work what it waits for, and a side stream would be one more thread to switch to. The watcher itself is the host
    function (see :class:`~accel.backend.HostFunction`) that the marks' own streams call; it is Python code, so it is for such devices only.
    """

    address = 0
    argument = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, watch_interval: float) -> None:
        super().__init__(loop, watch_interval)
        self._is_called = False

    def __call__(self) -> None:
        """Have the loop look, unless it is about to anyway. Called on the stream's thread."""
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._on_call)

    def _on_call(self) -> None:
        self._is_called = False  # before looking: what ends from now on needs another call
        if not self._released:
            self._look_at_all()

    def _ask_for_signal(self, pending: Pending) -> None:
        try:
            pending.stream.launch_host_function(self)
        except Exception:  # a poisoned context takes no more work, or there is no thread for it: the mark says so when it is looked at
            self()
