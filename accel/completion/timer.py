"""A timer of an event loop that keeps times below a millisecond, where the system has one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from typing import TYPE_CHECKING

from accel.fork import close_after_fork

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["LoopTimer", "TimerfdTimer", "create_timer"]

_SHORTEST = 1e-9  # seconds; a timerfd takes 0 for "disarm"


class LoopTimer:
    """The loop's own timer. asyncio's and uvloop's keep whole milliseconds only."""

    __slots__ = ("_callback", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, delay: float) -> None:
        """Call back once, in ``delay`` seconds.

        This replaces an earlier arming, unless that has just expired.
        """
        self.disarm()
        self._handle = self._loop.call_later(delay, self._expired)

    def disarm(self) -> None:
        """Cancel the arming."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Cancel the arming."""
        self.disarm()

    def _expired(self) -> None:
        """Call back; called by the loop."""
        self._handle = None
        self._callback()


class TimerfdTimer:
    """A Linux timerfd, which the loop's selector watches like a socket until :meth:`close`.

    Raises
    ------
    OSError
        If the system gives none.
    AttributeError
        If the C library has no timerfd.
    NotImplementedError
        If the loop cannot watch descriptors.
    """

    __slots__ = ("__weakref__", "_callback", "_fd", "_is_set", "_loop", "_set_time")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._is_set = False  # armed or disarmed since the last expiry
        self._fd, self._set_time = _open_timerfd()  # the descriptor is -1 once it is closed
        try:
            loop.add_reader(self._fd, self._expired)
        except BaseException:
            os.close(self._fd)
            raise
        close_after_fork(self)

    def arm(self, delay: float) -> None:
        """Call back once, in ``delay`` seconds. This replaces an earlier arming."""
        self._is_set = True
        self._set_time(max(delay, _SHORTEST))

    def disarm(self) -> None:
        """Cancel the arming."""
        self._is_set = True
        self._set_time(0.0)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def close_inherited(self) -> None:
        """Close the descriptor in a forked child.

        The timer is the parent's as well: from now on arming and disarming do nothing here.
        """
        fd, self._fd = self._fd, -1
        self._set_time = lambda delay: None
        if fd >= 0:
            os.close(fd)

    def _expired(self) -> None:
        """Call back, and clear the expiry; called by the loop when the descriptor is readable."""
        if self._fd < 0:  # a forked child shares the selector with its parent, which owns the timer
            return
        self._is_set = False
        self._callback()
        # The descriptor stays readable until the timer's count of expiries is cleared. Setting the
        # timer has cleared it; where the callback has not set it, reading clears it.
        if not self._is_set and self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)


def create_timer(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> LoopTimer | TimerfdTimer:
    """Return the most precise timer that the system and the loop have, disarmed."""
    try:
        return TimerfdTimer(loop, callback)
    except (OSError, NotImplementedError, AttributeError):
        return LoopTimer(loop, callback)


if sys.version_info >= (3, 13):

    def _open_timerfd() -> tuple[int, Callable[[float], object]]:
        """Return the descriptor of a new timer, and a function that sets it to a delay."""
        fd = os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)
        return fd, lambda delay: os.timerfd_settime(fd, initial=delay)

else:

    class _Timespec(ctypes.Structure):
        _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))

    class _Itimerspec(ctypes.Structure):
        _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))

    def _open_timerfd() -> tuple[int, Callable[[float], object]]:
        """Return the descriptor of a new timer, and a function that sets it to a delay."""
        # Neither call blocks, so they keep the GIL: releasing it can cost a switch interval of 5
        # ms.
        libc = ctypes.PyDLL(None, use_errno=True)
        fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        settime = libc.timerfd_settime
        settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        specification = _Itimerspec()
        address = ctypes.addressof(specification)
        value = specification.it_value

        def set_time(delay: float) -> object:
            """Set the timer by the one structure that all calls reuse."""
            seconds = int(delay)
            value.tv_sec = seconds
            value.tv_nsec = int((delay - seconds) * 1e9)
            return settime(fd, 0, address, None)

        return fd, set_time
