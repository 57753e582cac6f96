"""Slabs on their way: the only part of allocating that blocks, and so the only one that runs off the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import SlabMemory

__all__ = ["SlabRequest"]


class SlabRequest:
    """A slab that an allocator needs. Made by :meth:`Allocator.request_slab`, and then adopted or cancelled.

    Attributes
    ----------
    nbytes : int
        Size to ask the device for.
    least : int
        Size that is enough for the block at hand.
    release : list of SlabMemory
        Idle slabs, already taken out of the allocator, that make room by being closed first.
    """

    __slots__ = ("_create_slab", "least", "nbytes", "release")

    def __init__(self, create_slab: Callable[[int], SlabMemory], nbytes: int, least: int, release: list[SlabMemory]) -> None:
        self._create_slab = create_slab
        self.nbytes = nbytes
        self.least = least
        self.release = release

    def __repr__(self) -> str:
        return f"<SlabRequest {self.nbytes} bytes, at least {self.least}, after closing {len(self.release)} slabs>"

    def create(self) -> SlabMemory:
        """Close what is to be released and create the slab; with too little room on the device, a smaller one. Blocks; runs on any thread.

        It touches nothing of the allocator's. An await of it that is cancelled must let it end before the request is adopted or cancelled.

        Raises
        ------
        OutOfMemoryError
            If the device has no piece of ``least`` bytes; from the backend.
        """
        while self.release:
            self.release.pop().close()
        size = self.nbytes
        while True:
            try:
                return self._create_slab(size)
            except OutOfMemoryError:
                if size <= self.least:
                    raise
                # `least` divides neither evenly: the last try is exactly that.
                size = max(size // 2 // 4096 * 4096, self.least)
