"""Requests for slabs: creating one is the only part of allocating that blocks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from accel.errors import ClosedError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import SlabMemory

__all__ = ["SlabRequest"]


class SlabRequest:
    """A slab that an allocator needs.

    Made by :meth:`Allocator.request_slab`, and then adopted or cancelled.

    Attributes
    ----------
    nbytes : int
        Size to ask the device for.
    least : int
        Size that is enough for the block at hand.
    release : list of SlabMemory
        Idle slabs, already taken out of the allocator, that make room by being closed first.
    """

    __slots__ = ("_create_slab", "_lock", "_made", "_withdrawn", "least", "nbytes", "release")

    def __init__(self, create_slab: Callable[[int], SlabMemory], nbytes: int, least: int, release: list[SlabMemory]) -> None:
        self._create_slab = create_slab
        self._lock = threading.Lock()
        self._made: SlabMemory | None = None
        self._withdrawn = False
        self.nbytes = nbytes
        self.least = least
        self.release = release

    def __repr__(self) -> str:
        return f"<SlabRequest {self.nbytes} bytes, at least {self.least}, after closing {len(self.release)} slabs>"

    def create(self) -> SlabMemory:
        """Close the idle slabs of the request, and create the slab; a smaller one if room is short.

        Blocks; runs on any thread.

        It touches no state of the allocator. The request may be cancelled at any moment, also
        while this runs: then it closes what it made.

        Raises
        ------
        OutOfMemoryError
            If the device has no piece of ``least`` bytes; from the backend.
        ClosedError
            If the request was cancelled.
        """
        while (idle := self._next_release()) is not None:
            idle.close()
        slab = None if self._withdrawn else self._create()
        with self._lock:  # either withdraw() finds the slab, or this closes it
            withdrawn = self._withdrawn
            if not withdrawn:
                self._made = slab
        if slab is not None and not withdrawn:
            return slab
        if slab is not None:
            slab.close()
        raise ClosedError("the request for a slab was cancelled", remedy="No task waits for it: ignore this.")

    def on_adopted(self) -> None:
        """Forget the slab, which the allocator has now: nothing is left to close."""
        self._made = None

    def withdraw(self) -> list[SlabMemory]:
        """End the request and return the slabs that are left to close. For the allocator."""
        with self._lock:
            self._withdrawn = True
            left, self.release = self.release, []
            if self._made is not None:
                left.append(self._made)
                self._made = None
        return left

    def _next_release(self) -> SlabMemory | None:
        """Return the next slab to close before the new one is created. Thread-safe."""
        with self._lock:
            return self.release.pop() if self.release else None

    def _create(self) -> SlabMemory:
        """Create the slab, at half the size each time that the device has no room for it."""
        size = self.nbytes
        while True:
            try:
                return self._create_slab(size)
            except OutOfMemoryError:
                if size <= self.least:
                    raise
                # Halving seldom hits `least`: the last try is exactly that.
                size = max(size // 2 // 4096 * 4096, self.least)
