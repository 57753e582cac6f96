"""Creating a resource on a worker thread, which is disposed of if its waiter is cancelled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from accel.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.actors.system import ActorSystem

__all__ = ["acquire"]

T = TypeVar("T")


class _Handover(Generic[T]):
    """Hands a resource over from the thread that makes it to the task that waits for it.

    The task may be cancelled at any moment. The lock decides who owns the resource then: the task,
    if it was made before :meth:`give_up`, else the thread, which disposes of it.
    """

    def __init__(self, make: Callable[[], T], dispose: Callable[[T], object]) -> None:
        self._make = make
        self._dispose = dispose
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._is_unwanted = False

    def make(self) -> T:
        """Make the resource, on the worker thread; dispose of it if the task has given up."""
        made = self._make()
        with self._lock:
            if not self._is_unwanted:
                self._made.append(made)
                return made
        self._dispose(made)
        raise ClosedError("what was made is not waited for any more")

    def give_up(self) -> list[T]:
        """Return the resource for the caller to dispose of, if it was made; else the thread does."""
        with self._lock:
            self._is_unwanted = True
            return self._made


async def acquire(system: ActorSystem, make: Callable[[], T], dispose: Callable[[T], object]) -> T:
    """Run ``make`` on a worker thread and return what it made.

    If this is cancelled, what was made or will be is given to ``dispose``, on a worker thread too.
    """
    handover = _Handover(make, dispose)
    try:
        return await system.run_blocking(handover.make)
    except BaseException:
        for made in handover.give_up():
            await system.run_blocking(dispose, made)
        raise
