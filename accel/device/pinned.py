"""Pinned arrays: host memory that one device copies at full speed, over all its generations, bounded, with waiting in order."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.device.buffers import close_all
from accel.device.info import PinnedInfo
from accel.errors import ClosedError, DeadlineExceededError
from accel.memory import HostArena, HostRegistrar

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.actors import ActorSystem
    from accel.backend import AccelDevice, SlabMemory
    from accel.dtype import DType
    from accel.memory import Block, MemfdSlab

__all__ = ["PinnedMemory"]

_LIMIT = 4 << 30


class _Lease:
    """What a pinned array shows: a piece of an arena, given back when the last view of it has gone, in whatever thread that is."""

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
    """The pinned arrays of one opened device. Only the loop's thread calls it; arrays may go in any.

    Parameters
    ----------
    name, loop, system
        The device.
    limit
        The most bytes that may be locked; ``None`` leaves it to the machine's size.

    Attributes
    ----------
    on_gone : set of callable
        Called on the loop with the number of a block that is gone: other processes that have mapped it are told so.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, system: ActorSystem, limit: int | None) -> None:
        self.arena = HostArena(_default_limit() if limit is None else limit, device=name)
        self._name = name
        self._loop = loop
        self._system = system
        self._turn = asyncio.Lock()  # first come, first served
        self._waiting = 0
        self._room: asyncio.Future[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.on_gone: set[Callable[[int], object]] = set()
        self.arena.on_gone = self._gone

    async def attach(self, device: AccelDevice) -> None:
        """Let a new context know of the memory there is, and of what will come."""
        if isinstance(device, HostRegistrar):
            await self._system.run_blocking(self.arena.attach, device)

    async def array(self, shape: tuple[int, ...], dtype: DType, timeout: float | None, check: Callable[[], None]) -> np.ndarray[Any, Any]:
        """Return a new array; see :meth:`accel.Device.pinned`. ``check`` raises once there is no device to wait for."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype.numpy)
        # Not the lock: between two of those who wait, nobody has it.
        piece = None if self._waiting else self.arena.take(nbytes)
        if piece is None:
            piece = await self._wait(nbytes, timeout, check)
        return np.asarray(_Lease(self.arena, piece)).view(dtype.numpy).reshape(shape)

    async def _wait(self, nbytes: int, timeout: float | None, check: Callable[[], None]) -> Block:
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout):
                async with self._turn:
                    return await self._provide(nbytes, check)
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

    async def _provide(self, nbytes: int, check: Callable[[], None]) -> Block:
        """Return a piece when it is this call's turn: from what is there, from a new block, or once something was freed."""
        arena = self.arena
        try:
            while True:
                while self._closing:  # until then it counts, although the arena has let go of it
                    await asyncio.wait(self._closing)
                check()
                room = self._room = self._loop.create_future()
                arena.on_room = partial(self._tell, room)  # before the look, so that nothing is missed
                piece = arena.take(nbytes)
                if piece is not None:
                    return piece
                request = arena.request(nbytes)
                if request is None:
                    await room
                    continue
                try:
                    await self._system.run_blocking(arena.fulfil, request)
                except BaseException:
                    self._close_beside(arena.withdraw(request))  # it may never have begun
                    raise
        finally:
            arena.on_room = self._room = None

    def _close_beside(self, left: list[SlabMemory]) -> None:
        """Unmap blocks on another thread: that waits for the driver. Who is cancelled does not wait for it."""
        if left:
            task = self._loop.create_task(self._close(left))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close(self, left: list[SlabMemory]) -> None:
        try:
            await self._system.run_blocking(close_all, left)
        except ClosedError:  # the system ends, and has no thread for it any more
            close_all(left)

    def ended(self) -> None:
        """Let who waits look whether there still is a device."""
        if self._room is not None:
            _settle(self._room)

    def _tell(self, room: asyncio.Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
            self._loop.call_soon_threadsafe(_settle, room)

    def _gone(self, number: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell_gone, number)

    def _tell_gone(self, number: int) -> None:
        for tell in tuple(self.on_gone):
            tell(number)

    def info(self) -> PinnedInfo:
        """Return the state in numbers. Any thread may ask."""
        found = self.arena.statistics()
        return PinnedInfo(found.used, found.reserved, found.limit, self._waiting)

    async def aclose(self) -> None:
        """Give the memory back that no array shows; the rest goes with its arrays."""
        self.arena.on_gone = None  # whoever was to be told has ended
        try:
            while self._closing:
                await asyncio.wait(self._closing)
            await self._system.run_blocking(self.arena.close)
        finally:
            self.arena.close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _default_limit() -> int:
    try:
        return min(_LIMIT, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    except (ValueError, OSError):
        return _LIMIT
