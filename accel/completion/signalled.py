"""Watchers that are signalled by the work's end; besides, they query the oldest marks at times."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import TYPE_CHECKING

from accel.completion.strategy import Ended, LaneMarks, LaneWatcher, pop_ended
from accel.completion.timer import create_timer

if TYPE_CHECKING:
    import asyncio

    from accel.completion.strategy import Mark

__all__ = ["NotifiedWatcher", "SignalledWatcher"]


class SignalledWatcher(LaneWatcher[LaneMarks]):
    """Queries the oldest marks at each signal, and at intervals, as no signal comes after a fault.

    Parameters
    ----------
    loop
        The loop on which marks end.
    watch_interval
        Seconds between two queries without a signal.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, watch_interval: float) -> None:
        super().__init__(loop, LaneMarks, self._add_mark)
        self._watch_interval = watch_interval
        self._timer = create_timer(loop, self._on_timer)
        self._is_armed = False  # whether the timer will call back
        self._is_signalled = False  # whether a _poll is scheduled by a signal

    def signal(self) -> None:
        """Have the loop query the marks, unless that is scheduled already. Thread-safe."""
        if not self._is_signalled:
            self._is_signalled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no waiter is left
                self._loop.call_soon_threadsafe(self._poll)

    def _add_mark(self, lane: LaneMarks, mark: Mark) -> None:
        """Append a mark to its lane, request its signal, and start the timer if it is not armed."""
        lane.marks.append(mark)
        if not self._is_armed:
            self._arm()
        self._request_signal(mark)

    @abstractmethod
    def _request_signal(self, mark: Mark) -> None:
        """Have :meth:`signal` called once ``mark`` has ended without a fault."""

    def _arm(self) -> None:
        """Start the timer of the queries that find marks without a signal: after a fault."""
        self._is_armed = True
        self._timer.arm(self._watch_interval)

    def _on_timer(self) -> None:
        """Query the marks; called by the timer."""
        self._is_armed = False
        self._poll()

    def _poll(self) -> None:
        """Query the oldest marks of all lanes, and end those that are passed or raise.

        Called after a signal and by the timer, which is armed again while marks are left.
        """
        self._is_signalled = False  # first: a mark that ends from now on needs another signal
        if not self._pending:  # the timer or another signal came before
            return
        ended: list[Ended] = []
        for lane in self._lanes.values():
            ended += pop_ended(lane.marks)
        if self._pending > len(ended) and not self._is_armed:
            self._arm()
        self._end_marks(ended)

    async def _release(self, *, abandon: bool) -> None:
        """See :meth:`LaneWatcher._release`."""
        self._timer.close()


class NotifiedWatcher(SignalledWatcher):
    """For devices that compute on threads of this process: the thread that did the work signals.

    Polling would take the processor from the work, and a side stream would be one more thread to
    switch to. The watcher itself is the host function (see :class:`~accel.backend.HostFunction`)
    that the marks' own streams call; it is Python code, so it is for such devices only.
    """

    address = 0  # no C function: such a device calls the object
    argument = 0

    __call__ = SignalledWatcher.signal

    def _request_signal(self, mark: Mark) -> None:
        """Have the mark's stream call this watcher after the mark's work."""
        try:
            mark.stream.launch_host_function(self)
        except Exception:  # a fault since the mark was recorded: the stream takes no more work
            self.signal()  # the loop then queries the mark, which is passed or raises why
