"""Loans: buffers that another device reads where they are, and what that does to their writers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from accel.fork import close_after_fork
from accel.memory.usage import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LentRead", "Loan"]


class LentRead(Timeline):
    """The read of a lent buffer, as a timeline: ops that write the buffer are enqueued after it."""

    __slots__ = ("_has_ended",)

    def __init__(self) -> None:
        super().__init__("lent")
        self.issue()
        self._has_ended = asyncio.Event()

    async def wait_enqueued(self, seq: int) -> None:
        """Wait for the end of the read: no stream of this device can wait for it."""
        await self._has_ended.wait()

    def end(self) -> None:
        """End the read."""
        self.enqueued = self.completed = self.issued
        self._has_ended.set()


class Loan:
    """A buffer that another device reads in place, until :meth:`end`, or until this is dropped.

    Parameters
    ----------
    loop
        The loop of the device.
    generation
        Of the context that lends.
    nbytes
        Of the buffer.
    mapped
        Numbers of slabs that the other device has mapped, and needs no descriptor of.
    is_settled
        Whether no write of the buffer was in flight when the loan was sent: what is in the buffer
        then stays there until the end of the loan.

    Attributes
    ----------
    generation, nbytes, mapped, is_settled
        See the parameters.
    slab : int
        Number of the slab that the buffer is in, among those of its context that were lent.
    slab_nbytes, offset : int
        The size of the slab, and where the buffer begins in it.
    fd : int
        Descriptor of the slab, the loan's own; -1 for a mapped one, before :meth:`place`, and after
        the end.
    """

    __slots__ = ("__weakref__", "_loop", "_on_end", "fd", "generation", "is_settled", "mapped", "nbytes", "offset", "slab", "slab_nbytes")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, generation: int, nbytes: int, mapped: tuple[int, ...] = (), *, is_settled: bool = False
    ) -> None:
        self.fd = -1
        self.generation = generation
        self.nbytes = nbytes
        self.mapped = mapped
        self.is_settled = is_settled
        self.slab = self.slab_nbytes = self.offset = 0
        self._loop = loop
        self._on_end: Callable[[], object] | None = None
        close_after_fork(self)

    def place(self, slab: int, slab_nbytes: int, offset: int, fd: int, on_end: Callable[[], object]) -> None:
        """Set where the buffer is, and what ends the read. The loan owns ``fd`` from now on.

        Raises
        ------
        ValueError
            If the buffer is not within the slab, or was placed before; or a descriptor is missing.
        """
        if self.is_placed or offset + self.nbytes > slab_nbytes or (fd < 0) is not (slab in self.mapped):
            raise ValueError(f"a lent buffer of {self.nbytes} bytes is at {offset} of slab {slab} of {slab_nbytes} bytes, descriptor {fd}")
        self.slab, self.slab_nbytes, self.offset, self.fd, self._on_end = slab, slab_nbytes, offset, fd, on_end

    @property
    def is_placed(self) -> bool:
        """Whether it is known where the buffer is, and the read has not ended."""
        return self._on_end is not None

    def end(self) -> None:
        """End the read, and close the descriptor. Idempotent."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self.close_inherited()
            on_end()

    def close_inherited(self) -> None:
        """Close the descriptor; see :class:`accel.fork.Inherited`."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Any thread, any moment: the end wakes tasks, which only the loop may do.
        self.close_inherited()
        if self._on_end is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_end)
