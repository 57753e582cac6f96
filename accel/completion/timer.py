"""A timer of an event loop that keeps times below a millisecond, where the system has one."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import TYPE_CHECKING, Protocol

from accel.fork import close_after_fork

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["LoopTimer", "Timer", "TimerfdTimer", "create_timer"]

_SHORTEST = 1e-9  # a timerfd takes 0 for "disarm"


class Timer(Protocol):
    """Calls its callback on the loop once the delay it was armed with is over."""

    def arm(self, delay: float, every: float = 0.0) -> None:
        """Call back in ``delay`` seconds, and, unless that is 0, each ``every`` seconds from then on; an earlier arming is forgotten."""

    def disarm(self) -> None:
        """Forget the arming."""

    def close(self) -> None:
        """Give the timer's resources back. Idempotent."""


class LoopTimer:
    """The loop's own timer. asyncio's and uvloop's keep whole milliseconds only."""

    __slots__ = ("_callback", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, delay: float, every: float = 0.0) -> None:
        """Call back in ``delay`` seconds, and perhaps each ``every`` seconds from then on."""
        self.disarm()
        self._handle = self._loop.call_later(delay, self._rings, every)

    def disarm(self) -> None:
        """Forget the arming."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Forget the arming."""
        self.disarm()

    def _rings(self, every: float) -> None:
        self._handle = self._loop.call_later(every, self._rings, every) if every else None
        self._callback()


class TimerfdTimer:
    """A Linux timerfd, which the loop's selector watches like a socket.

    Raises
    ------
    OSError
        If the system gives none.
    NotImplementedError
        If the loop cannot watch descriptors.
    """

    __slots__ = ("__weakref__", "_callback", "_fd", "_loop", "_set")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._fd, self._set = _open_timerfd()
        try:
            loop.add_reader(self._fd, self._expired)
        except BaseException:
            os.close(self._fd)
            raise
        close_after_fork(self)

    def arm(self, delay: float, every: float = 0.0) -> None:
        """Call back in ``delay`` seconds, and perhaps each ``every`` seconds from then on, which takes no call as arming anew would."""
        self._set(max(delay, _SHORTEST), every)

    def disarm(self) -> None:
        """Forget the arming."""
        self._set(0.0, 0.0)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def close_inherited(self) -> None:
        """Close the descriptor in a forked child, and nothing more: the timer itself is the parent's too."""
        fd, self._fd = self._fd, -1
        self._set = _set_nothing
        if fd >= 0:
            os.close(fd)

    def _expired(self) -> None:
        if self._fd < 0:  # a fork shares the loop's selector with its parent, whose timer this is
            return
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # armed anew between the loop's look and this call
        self._callback()


def _set_nothing(delay: float, every: float) -> None:
    """Stand in for setting a timer that is the parent's."""


def create_timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Timer:
    """Return the most precise timer that the system and the loop have."""
    try:
        return TimerfdTimer(loop, callback)
    except (OSError, NotImplementedError, AttributeError):
        return LoopTimer(loop, callback)


if sys.version_info >= (3, 13):

    def _open_timerfd() -> tuple[int, Callable[[float, float], object]]:
        fd = os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)
        return fd, lambda delay, every: os.timerfd_settime(fd, initial=delay, interval=every)

else:

    class _Timespec(ctypes.Structure):
        _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))

    class _Itimerspec(ctypes.Structure):
        _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))

    def _open_timerfd() -> tuple[int, Callable[[float, float], object]]:
        # Neither call blocks, so they keep the GIL: giving it up could cost 5 ms.
        libc = ctypes.PyDLL(None, use_errno=True)
        fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        settime = libc.timerfd_settime
        settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        specification = _Itimerspec()
        address = ctypes.addressof(specification)
        value, interval = specification.it_value, specification.it_interval

        def set_times(delay: float, every: float) -> object:
            for field, span in ((value, delay), (interval, every)):
                seconds = int(span)
                field.tv_sec = seconds
                field.tv_nsec = int((span - seconds) * 1e9)
            return settime(fd, 0, address, None)

        return fd, set_times
