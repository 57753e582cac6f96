"""Memory that was given to other libraries: which tensors have it, and its release where they outlive the device."""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING

from accel._log import get_logger
from accel.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.backend import SlabMemory
    from accel.ref import AccelRef

__all__ = ["Export", "Exports", "Sharers", "close_when_dropped"]

logger = get_logger()


class Export:
    """Kept by a consumer's tensor; keeps the ref."""

    __slots__ = ("__weakref__", "ref")

    def __init__(self, ref: AccelRef) -> None:
        self.ref = ref


class Exports:
    """The tensors of other libraries that have the memory of one buffer.

    Attributes
    ----------
    capsules : WeakSet of Export
        Those that tell when they are dropped.
    is_open : bool
        Whether it was given to a library that does not say when it is done.
    """

    __slots__ = ("capsules", "is_open")

    def __init__(self) -> None:
        self.capsules: weakref.WeakSet[Export] = weakref.WeakSet()
        self.is_open = False

    def are_live(self) -> bool:
        """Return whether another library may still have it."""
        return self.is_open or len(self.capsules) > 0


class Sharers:
    """The exports of memory whose uses are tracked as one: of one buffer, or of several results of a graph."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: list[Exports] = []

    def add(self, exports: Exports) -> None:
        """Count the exports of one more buffer."""
        self._all = [*(each for each in self._all if each is not exports and each.are_live()), exports]

    def join(self, other: Sharers) -> None:
        """Count all that another has counted."""
        for exports in other._all:
            self.add(exports)

    def __call__(self) -> bool:
        """Return whether another library may still have any of it."""
        return any(each.are_live() for each in self._all)


def close_when_dropped(kept: Iterable[tuple[SlabMemory, Iterable[Export]]], settle: Callable[[], None], name: str) -> None:
    """Give memory back that tensors still show, each piece when the last of its tensors is gone and no work on it runs any more.

    Parameters
    ----------
    kept
        Pieces of memory, and what the tensors over each of them keep.
    settle
        Blocks until all work on the device is over that any library has enqueued by then; if it raises, the memory is left.
    name
        Of the device.

    Notes
    -----
    A tensor is dropped on any thread, also inside the garbage collector, where nothing can be waited for: a daemon thread sleeps until it is told, and ends
    with the last piece.
    """
    gone: SimpleQueue[int] = SimpleQueue()  # its put may interrupt anything, itself included
    left: dict[int, tuple[SlabMemory, int]] = {}
    watched: list[weakref.ref[Export]] = []
    for at, (memory, exports) in enumerate(kept):
        held = list(exports)
        watched += [weakref.ref(each, lambda _, at=at: gone.put(at)) for each in held]  # type: ignore[misc]  # mypy takes it for another callable
        left[at] = memory, len(held)
        if not held:
            left[at] = memory, 1
            gone.put(at)
    held = []

    def wait() -> None:
        while left:
            at = gone.get()
            memory, count = left.pop(at)
            if count > 1:
                left[at] = memory, count - 1
                continue
            try:
                settle()
                memory.close()
            except AccelError as error:
                logger.warning("exported_memory_left", device=name, nbytes=memory.nbytes, error=error.message)
        watched.clear()

    try:
        threading.Thread(target=wait, name=f"accel-{name}-exported", daemon=True).start()
    except RuntimeError as error:  # no thread is to be had: the tensors stay as they are, and the memory with them
        logger.warning("exported_memory_left", device=name, nbytes=sum(memory.nbytes for memory, _ in left.values()), error=error)
