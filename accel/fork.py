"""What a forked child must not keep: memory, sockets, timers and processes of its parent, which it holds by copies of the descriptors.

A fork copies every descriptor and every shared mapping. As long as it lives, memory that the parent gives back is not free, and what the fork does with a
copy of a timer, a socket or a process's descriptor is done to the parent's. So each object that owns such a thing registers here, and is told in the child,
right after the fork, before any other code runs there.

The other way round, the handlers of a library may stop what it does in the parent: OpenBLAS ends its threads before a fork, and a product that they are
computing never ends. So what computes registers here too, and is paused around each fork.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Final, Protocol

__all__ = ["NO_FORK", "PAUSE", "DeviceFiles", "Inherited", "Pausable", "close_after_fork", "pause_around_fork"]

PAUSE: Final = 10.0
"""Seconds that a fork waits for what computes in this process."""


class Inherited(Protocol):
    """What owns descriptors or shared mappings."""

    def close_inherited(self) -> None:
        """Close them, in a forked child, where no other thread runs.

        It closes descriptors and unmaps memory, and notes that this object is of no use here. It takes no lock, since a thread that the fork does not have
        may hold it, and does nothing that the parent feels: no signal, no write, no call of a driver, of the event loop's selector, or of a timer.
        """


class Pausable(Protocol):
    """What computes on threads of this process."""

    def pause(self, deadline: float) -> None:
        """Begin nothing more, and wait until what runs has ended, or for the deadline on the clock of ``time.monotonic``. Called by the thread that forks."""

    def resume(self) -> None:
        """Go on; in the child too, where there is nothing that runs."""


class DeviceFiles:
    """Files by which a driver holds devices for a device's process, closed in what a library forks there.

    A device keeps all that a dead process had on it until the last copy of these descriptors is closed. A driver is of no use in a fork.

    Parameters
    ----------
    prefixes
        Beginnings of their names, such as ``"/dev/nvidia"``.
    """

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self._prefixes = prefixes
        close_after_fork(self)

    def close_inherited(self) -> None:
        """See :class:`Inherited`."""
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}").startswith(self._prefixes):
                    os.close(int(name))
            except OSError:  # the descriptor that listed the folder
                continue


_registered: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()


def close_after_fork(resource: Inherited) -> None:
    """Have ``resource.close_inherited()`` called in every child that this process forks from now on. It is held weakly."""
    _registered.add(resource)


_pausable: Final[weakref.WeakSet[Pausable]] = weakref.WeakSet()
_paused: Final[list[Pausable]] = []
NO_FORK: Final = threading.RLock()
"""Held around a fork: what holds it keeps others from forking, and is kept from what must not begin meanwhile."""


def pause_around_fork(resource: Pausable) -> None:
    """Have ``resource`` paused around every fork of this process from now on. It is held weakly."""
    with NO_FORK:
        _pausable.add(resource)


def _pause_all() -> None:
    NO_FORK.acquire()
    deadline = time.monotonic() + PAUSE
    for each in tuple(_pausable):
        _paused.append(each)
        each.pause(deadline)


def _resume_all() -> None:
    while _paused:
        _paused.pop().resume()
    NO_FORK.release()


def _forked() -> None:
    _resume_all()
    _pausable.clear()
    _close_all()


def _close_all() -> None:
    failures = []
    # Files of a driver last: a slab's own descriptor may be one of them.
    for resource in sorted(_registered, key=lambda each: isinstance(each, DeviceFiles)):
        try:
            resource.close_inherited()
        except Exception as error:  # the others are to be closed all the same
            failures.append(error)
    _registered.clear()
    if failures:
        raise ExceptionGroup("resources of the parent could not be closed in a forked child", failures)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause_all, after_in_parent=_resume_all, after_in_child=_forked)
