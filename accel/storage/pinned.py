"""Pinned host memory of a device, over all its generations: bounded, and given out in order."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import DeadlineExceededError, OutOfMemoryError
from accel.memory import HostArena, HostRegistrar, memory_size
from accel.storage.closing import Closing, close_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.actors import ActorSystem
    from accel.backend import AccelDevice, SlabMemory
    from accel.dtype import DType
    from accel.memory import Block, MemfdSlab

__all__ = ["PinnedInfo", "PinnedMemory"]

_LIMIT = 4 << 30
"""Bytes of the default limit, or less on a small machine."""

_MAX_CHUNK, _MIN_CHUNK, _CHUNKS = 32 << 20, 64 << 10, 4
"""Bytes of the largest chunk in which an array moves, beyond which nothing gets faster, and of the
smallest one; and how many of the largest the limit has room for at least."""


@dataclass(frozen=True, slots=True)
class PinnedInfo:
    """Host memory under ``pinned_limit``, in bytes.

    It holds the arrays of :meth:`accel.Device.pinned` and, on a process host, the arrays that
    ``put`` and ``get`` move.

    Parameters
    ----------
    used
        Bytes of live arrays and of transfers in flight.
    reserved
        Page-locked bytes.
    limit
        The ``pinned_limit``.
    waiting
        Number of calls that wait for room.
    """

    used: int
    reserved: int
    limit: int
    waiting: int


class _Lease:
    """The base of a pinned array, which numpy keeps alive: frees the array's piece of the arena."""

    __slots__ = ("__array_interface__", "_arena", "_piece", "_view")

    def __init__(self, arena: HostArena, piece: Block) -> None:
        slab: MemfdSlab = piece.slab  # type: ignore[assignment]  # an arena's slabs are its own
        self._arena = arena
        self._piece = piece
        self._view = slab.view()  # keeps the mapping, also when the arena is closed
        self.__array_interface__ = {"shape": (piece.nbytes,), "typestr": "|u1", "data": (piece.address, False), "version": 3}

    def __del__(self) -> None:
        self._arena.free(self._piece)


class PinnedMemory:
    """The pinned arrays of one opened device.

    Used on the loop's thread; arrays are dropped on any.

    Parameters
    ----------
    name, loop, system
        The device.
    limit
        The most bytes that may be locked; ``None`` leaves it to the size of the machine, or of this
        process's control group.

    Attributes
    ----------
    max_chunk : int
        Bytes of the largest chunk in which an array that is not pinned moves; smaller ones move as
        a whole.
    block_listeners : set of callable
        Called on the loop with the number of a block that was closed: processes that have mapped it
        are to unmap it.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, system: ActorSystem, limit: int | None) -> None:
        self.arena = HostArena(_default_limit() if limit is None else limit, device=name)
        # A part of the limit, as a multiple of the smallest chunk.
        self.max_chunk = min(_MAX_CHUNK, max(self.arena.limit // _CHUNKS // _MIN_CHUNK, 1) * _MIN_CHUNK)
        self._name = name
        self._loop = loop
        self._system = system
        self._turns = asyncio.Lock()  # of calls that wait for room: first come, first served
        self._waiting = 0  # calls that wait for room, with the one whose turn it is
        self._room: asyncio.Future[None] | None = None  # of the call whose turn it is
        self._closing: Closing[SlabMemory] = Closing(system)
        self.block_listeners: set[Callable[[int], object]] = set()
        self.arena.on_block_closed = self._on_block_closed  # until aclose()

    async def attach(self, device: AccelDevice) -> None:
        """Register the blocks there are, and those to come, with the context of a new generation.

        Do nothing for a backend that registers no host memory.
        """
        if isinstance(device, HostRegistrar):
            await self._system.run_blocking(self.arena.attach, device)

    async def array(
        self, shape: tuple[int, ...], dtype: DType, timeout: float | None, check_open: Callable[[], None]
    ) -> np.ndarray[Any, Any]:
        """Return a new array; see :meth:`accel.Device.pinned`.

        ``check_open`` raises once the device is lost or closed: it is called before each wait for
        room. The array's memory is a piece of the arena until its last view is dropped.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype.numpy)
        piece = self._take_free(nbytes)
        if piece is None:
            piece = await self._wait_piece(nbytes, timeout, check_open)
        return np.asarray(_Lease(self.arena, piece)).view(dtype.numpy).reshape(shape)

    async def _wait_piece(self, nbytes: int, timeout: float | None, check_open: Callable[[], None]) -> Block:
        """Wait for a piece of ``nbytes`` after the calls before, for ``timeout`` seconds at most.

        Raises :class:`DeadlineExceededError` after that, and what :meth:`_grow_or_wait` raises.
        """
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout):
                async with self._turns:
                    return await self._grow_or_wait(nbytes, nbytes, check_open)
        except TimeoutError:
            used = self.arena.statistics()
            raise DeadlineExceededError(
                f"no room for {nbytes} bytes of pinned memory within {timeout:g} s: {used.used} of {used.limit} bytes are in use",
                op="pinned",
                device=self._name,
                remedy="Drop pinned arrays, or open the device with a higher pinned_limit.",
            ) from None
        finally:
            self._waiting -= 1

    def _take_free(self, nbytes: int) -> Block | None:
        """Return a free piece; ``None`` if there is none, or other calls wait: they come first."""
        # The count is asked, not the lock, which is free for a moment between two waiters.
        return None if self._waiting else self.arena.take(nbytes)

    def allocate_chunk(self, nbytes: int) -> Block | None:
        """Return a piece that takes a whole array, without waiting.

        ``None`` if there is no room, or the array is so large that it moves in chunks: the caller
        then waits for room by :meth:`wait_chunk`.
        """
        return self._take_free(nbytes) if nbytes <= self.max_chunk else None

    async def wait_chunk(self, nbytes: int, check_open: Callable[[], None]) -> Block:
        """Wait for a piece for an array that moves, or for its next chunk. The caller frees it.

        Calls are served in order, together with those of :meth:`array`.

        The piece has at most ``nbytes``, and at most :attr:`max_chunk`. Where there is less room it
        has less: so a transfer that holds nothing makes progress beside all others.

        Raises
        ------
        OutOfMemoryError
            If the limit is too small for the smallest chunk, or the system has no more memory and
            none is held that will come back.
        """
        most = min(nbytes, self.max_chunk)
        self._waiting += 1
        try:
            async with self._turns:
                return await self._grow_or_wait(most, min(most, _MIN_CHUNK), check_open)
        finally:
            self._waiting -= 1

    async def _grow_or_wait(self, max_nbytes: int, min_nbytes: int, check_open: Callable[[], None]) -> Block:
        """Return a piece of free memory, or of a new block, or else wait until one is freed.

        Its size is ``max_nbytes``, or else a half of it, a quarter, and so on, down to
        ``min_nbytes``: the first for which there is room. Only the call whose turn it is runs this:
        meanwhile the arena wakes it when a piece is freed. Raises what ``check_open`` raises, and
        :class:`OutOfMemoryError`.
        """
        arena, sizes, may_grow = self.arena, _halves(max_nbytes, min_nbytes), True
        try:
            while True:
                # Blocks that are being closed count against the limit until they are.
                await self._closing.wait_closed()
                check_open()
                room = self._room = self._loop.create_future()
                arena.on_room = partial(self._on_room, room)  # before take: no freed piece is missed
                request = None
                for nbytes in sizes:
                    piece = arena.take(nbytes)
                    if piece is not None:
                        return piece
                    request = arena.request(nbytes) if may_grow else None
                    if request is not None:
                        break
                if request is None:  # no size has room, and no block can be made
                    await room
                    may_grow = True
                    continue
                try:
                    await self._system.run_blocking(arena.fulfil, request)
                except BaseException as error:
                    self._closing.add(arena.withdraw(request))  # it may never have begun
                    if not isinstance(error, OutOfMemoryError) or min_nbytes == max_nbytes or not arena.statistics().used:
                        raise
                    may_grow = False  # until a piece is freed: the system has no more memory now
        finally:
            arena.on_room = self._room = None

    def trim(self) -> None:
        """Close, off the loop, blocks that are free, but for one for the next array.

        Called after a large transfer.
        """
        self._closing.add(self.arena.trim())

    def on_device_ended(self) -> None:
        """Wake the call whose turn it is: the device has ended, and its ``check_open`` raises.

        The calls after it then get their turns, and raise too.
        """
        if self._room is not None:
            _wake(self._room)

    def _on_room(self, room: asyncio.Future[None]) -> None:
        """Wake the call that waits for room. The arena calls this on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
            self._loop.call_soon_threadsafe(_wake, room)

    def _on_block_closed(self, number: int) -> None:
        """Notify the listeners on the loop. The arena calls this on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._notify_closed, number)

    def _notify_closed(self, number: int) -> None:
        """Call the listeners with the number of a block that was closed."""
        for listener in tuple(self.block_listeners):
            listener(number)

    def info(self) -> PinnedInfo:
        """Return the state in numbers. Any thread may ask."""
        statistics = self.arena.statistics()
        return PinnedInfo(statistics.used, statistics.reserved, statistics.limit, self._waiting)

    async def aclose(self) -> None:
        """Close the arena: memory that no array uses now; what arrays use, when they are dropped.

        If this is cancelled, or the system has no thread left, what is still open is closed on the
        loop, which may block, and that is raised.
        """
        self.arena.on_block_closed = None  # its listeners have ended
        try:
            await self._closing.wait_closed()
            await self._system.run_blocking(self.arena.close)
        finally:  # what a cancellation, or a system without threads, has left
            close_all(self._closing.left)
            self.arena.close()


def _halves(most: int, least: int) -> list[int]:
    """Return ``most``, its half, and so on; the last one is ``least``."""
    sizes = [most]
    while sizes[-1] > least:
        sizes.append(max(sizes[-1] // 2, least))
    return sizes


def _wake(future: asyncio.Future[None]) -> None:
    """End the wait for a future, unless it has ended."""
    if not future.done():
        future.set_result(None)


def _default_limit() -> int:
    """Return the bytes that may be locked if no limit is given."""
    size = memory_size()
    return min(_LIMIT, size // 4) if size else _LIMIT
