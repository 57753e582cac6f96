"""Host memory that a device reads and writes: mapped and registered blocks, cut into pieces.

Memory that a driver hands out itself goes with its context, and touching it then ends the process.
A mapping of our own stays readable after any fault of the device; that it is registered only makes
it fast. Each block is held by a descriptor, so that another process can map the same memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from accel.errors import AccelError, ClosedError, OutOfMemoryError
from accel.fork import close_after_fork
from accel.memory.allocator import Allocator, Block
from accel.memory.slab import MemfdSlab
from accel.memory.space import round_up
from accel.shortage import raise_shortage

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from accel.backend import SlabMemory
    from accel.memory.growth import SlabRequest

__all__ = ["ArenaStatistics", "HostArena", "HostBlock", "HostRegistrar", "HostRegistration"]


class HostRegistration(Protocol):
    """Host memory that a context knows of, until it is closed."""

    def close(self) -> None:
        """End it, as soon as nothing that was abandoned can use the memory.

        After a fault, without touching the driver. May block. Idempotent.
        """


@runtime_checkable
class HostRegistrar(Protocol):
    """Optional part of a context, besides :class:`accel.AccelDevice`: page-locks host memory.

    For devices that move registered memory faster than other memory.
    """

    def register_host(self, address: int, nbytes: int) -> HostRegistration:
        """Page-lock whole pages of a mapping, so that copies from and to it are fast. May block.

        Raises
        ------
        OutOfMemoryError
            If no more memory can be locked.
        AccelError
            The context's fault, or :class:`~accel.ClosedError`; the memory is then used as it is.
        """


class HostBlock(MemfdSlab):
    """One block of an arena.

    Attributes
    ----------
    number : int
        Which block of its arena it is, from 1; never used again.
    registration : HostRegistration or None
        Ends the registration when it is closed; ``None`` while no device has the block.
    registrar : HostRegistrar or None
        The context that it is registered with.
    is_open : bool
        Whether it has not been closed.

    Parameters
    ----------
    nbytes
        Its size.
    lock
        Held while the block is registered, unregistered or closed.
    on_closed
        Called with its number once it is closed, on any thread.
    """

    __slots__ = ("_duplicating", "_lock", "_on_closed", "is_open", "number", "registrar", "registration")

    def __init__(
        self, nbytes: int, lock: AbstractContextManager[Any] | None = None, on_closed: Callable[[int], object] = lambda number: None
    ) -> None:
        self.registration: HostRegistration | None = None
        self.registrar: HostRegistrar | None = None
        self.number = 0
        self.is_open = True
        self._lock = lock or threading.RLock()
        self._on_closed = on_closed
        # Else a descriptor could be duplicated while it is closed, or another one that got its
        # number.
        self._duplicating = threading.Lock()
        super().__init__(nbytes, name="accel-host")

    def register(self, registrar: HostRegistrar) -> None:
        """Register the block with a context. May block; raises what the backend does."""
        self.registration = registrar.register_host(self.address, self.nbytes)
        self.registrar = registrar

    def unregister(self) -> None:
        """End the registration of the block, which the device uses no more. May block."""
        registration, self.registration, self.registrar = self.registration, None, None
        if registration is not None:
            registration.close()

    def duplicate(self) -> int | None:
        """Return a new descriptor of the memory, for the caller to close. Any thread may ask.

        ``None`` if the block was closed.

        Raises
        ------
        OutOfMemoryError
            Descriptors ran out.
        """
        try:
            with self._duplicating:
                return os.dup(self.fd) if self.fd >= 0 else None
        except OSError as error:
            raise_shortage(error, "the descriptor of a block of host memory cannot be duplicated")
            raise

    def close_inherited(self) -> None:
        """Unmap it in a forked child. It is registered in the parent, which alone ends that."""
        self.is_open = False
        self.registration = self.registrar = None
        self._lock, self._duplicating = contextlib.nullcontext(), threading.Lock()
        super().close_inherited()

    def close(self) -> None:
        """Unregister and unmap it; arrays over it keep the mapping until they are gone.

        May block. Idempotent.
        """
        with self._lock:
            was_open, self.is_open = self.is_open, False
            self.unregister()
            with self._duplicating:
                super().close()
        if was_open:
            self._on_closed(self.number)


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """The state of an arena at one moment, in bytes.

    Parameters
    ----------
    used
        Held by pieces that are not freed.
    reserved
        Sum of the blocks.
    limit
        What ``reserved`` does not exceed.
    """

    used: int
    reserved: int
    limit: int


class HostArena:
    """Cuts pieces from page-locked blocks. Any thread may call it; only what says so may block.

    Parameters
    ----------
    limit
        What the sum of the blocks must not exceed, in bytes.
    registrar
        The context that blocks are registered with, if there is one already; see :meth:`attach`.
    block_bytes
        Size of an ordinary block. A larger piece gets a block of its own.
    device
        Name of the device, for errors.

    Attributes
    ----------
    on_block_closed : callable or None
        Called with the number of a block that was closed, on any thread: what has mapped its
        descriptor may let go of it.
    on_room : callable or None
        Called, on any thread, after a piece was freed or a request ended: perhaps inside the
        garbage collector, so it must take no lock. A waiter for room sets it, and asks once more
        before it waits.

    Notes
    -----
    A free piece's memory is given out again at once: a piece is freed once the device is through
    with it. Blocks stay for the next piece. Those that are wholly free go when the limit forbids a
    block that is needed, or at :meth:`close`.
    """

    def __init__(
        self, limit: int, *, registrar: HostRegistrar | None = None, block_bytes: int = 32 << 20, device: str | None = None
    ) -> None:
        self.limit = limit
        self.on_room: Callable[[], object] | None = None
        self.on_block_closed: Callable[[int], object] | None = None
        self._device = device
        # Pages are the unit of registering; with a small limit an ordinary block must fit under it.
        self._allocator = Allocator(
            self._create_block, device=device, limit=limit, slab_bytes=max(1, min(block_bytes, limit)), granularity=HostArena.granularity
        )
        self._lock = threading.Lock()
        self._freed: deque[Block] = deque()
        self._registering = threading.RLock()  # taken before the other one, where both are
        self._registrar = registrar
        self._blocks: dict[HostBlock, None] = {}
        self._numbers = itertools.count(1)
        self._is_closed = False
        close_after_fork(self)

    granularity = 1 << 16
    """The size of a block in bytes is a multiple of it."""

    # -- pieces

    def take(self, nbytes: int) -> Block | None:
        """Return a piece of the blocks there are; ``None`` if there is no room.

        Aligned to 256 bytes.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        """
        with self._lock:
            self._drain()
            return self._allocator.allocate(nbytes)

    def free(self, piece: Block) -> None:
        """Give a piece back, which the device uses no more.

        Takes no lock: it may be called in any thread, inside the garbage collector, after the end.
        """
        self._freed.append(piece)
        self._notify_room()

    def grow(self, nbytes: int) -> Block | None:
        """Return a piece, with a new block if need be; ``None`` if the limit forbids it. May block.

        Raises
        ------
        OutOfMemoryError
            If the piece could never fit, or the system has no more memory that can be locked.
        ClosedError
            After :meth:`close`.
        """
        while (piece := self.take(nbytes)) is None:
            request = self.request(nbytes)
            if request is None:
                return None
            self.fulfil(request)
        return piece

    def request(self, nbytes: int) -> SlabRequest | None:
        """Plan the block that :meth:`take` needs: for :meth:`fulfil`, or for :meth:`withdraw`.

        ``None`` if the limit forbids it now.

        Raises
        ------
        OutOfMemoryError
            If the piece could never fit.
        ClosedError
            After :meth:`close`.
        """
        with self._lock:
            try:
                return self._allocator.request_slab(nbytes)
            except OutOfMemoryError as error:
                if -(-round_up(nbytes) // self.granularity) * self.granularity <= self.limit:
                    return None
                raise OutOfMemoryError(
                    f"{nbytes} bytes of pinned memory are more than the limit of {self.limit}",
                    requested=nbytes,
                    limit=self.limit,
                    device=self._device,
                    remedy="Open the device with a higher pinned_limit, or use smaller arrays.",
                ) from error

    def fulfil(self, request: SlabRequest) -> None:
        """Make the block that was planned. May block. If it raises, the request is over."""
        try:
            block = request.create()
            with self._lock:
                self._allocator.adopt(request, block)
        except BaseException:
            for made in self.withdraw(request):
                made.close()
            raise
        finally:
            self._notify_room()

    def withdraw(self, request: SlabRequest) -> list[SlabMemory]:
        """Withdraw a request, without blocking, and return what the caller has to close.

        Idempotent.
        """
        with self._lock:
            return self._allocator.cancel(request)

    def trim(self) -> list[SlabMemory]:
        """Remove the blocks that are wholly free, for the caller to close off the loop.

        One of the ordinary size stays.
        """
        with self._lock:
            self._drain()
            return self._allocator.trim()

    # -- the device

    def attach(self, registrar: HostRegistrar | None) -> None:
        """Register all blocks, those to come too, with a context. May block.

        A block that an earlier context still has is registered once that has let go of it; see
        :meth:`detach`.

        Raises
        ------
        AccelError
            From the backend. The blocks stay; those that were not registered are slower.
        """
        with self._registering:
            self._registrar = registrar
            for block in tuple(self._blocks):
                if registrar is not None and block.is_open and block.registration is None:
                    block.register(registrar)

    def detach(self, registrar: object) -> None:
        """Unregister all blocks from a context; its streams have ended, or wait for nothing more.

        Pieces stay. May block. Idempotent.

        The next context may be attached already: it keeps the blocks that it has, and gets the
        rest.
        """
        with self._registering:
            if self._registrar is registrar:
                self._registrar = None
            for block in [block for block in self._blocks if block.registrar is registrar]:
                block.unregister()
                if self._registrar is not None and block.is_open:
                    with contextlib.suppress(AccelError):  # then it is slower
                        block.register(self._registrar)

    def close(self) -> None:
        """Give everything back; memory that arrays still show goes with them.

        May block. Idempotent.
        """
        with self._lock:
            self._is_closed = True
            slabs = self._allocator.take_all()
            self._drain()
        for slab in slabs:
            slab.close()
        with self._registering:
            self._blocks.clear()
            self._registrar = None

    def close_inherited(self) -> None:
        """See :class:`accel.fork.Inherited`. The blocks unmap themselves."""
        # A thread that the child does not have may hold them.
        self._lock, self._registering = threading.Lock(), threading.RLock()
        self._is_closed = True
        self._registrar = self.on_room = self.on_block_closed = None

    def blocks(self) -> list[HostBlock]:
        """Return the blocks there are, oldest first."""
        return [block for block in tuple(self._blocks) if block.fd >= 0]

    # -- state

    def statistics(self) -> ArenaStatistics:
        """Return the state in numbers."""
        with self._lock:
            self._drain()
            return ArenaStatistics(self._allocator.used, self._allocator.reserved, self.limit)

    def _notify_room(self) -> None:
        """Call :attr:`on_room`, if it is set: there may be room for a waiter."""
        on_room = self.on_room
        if on_room is not None:
            on_room()

    def _report_block_closed(self, number: int) -> None:
        """Call :attr:`on_block_closed`, if it is set."""
        callback = self.on_block_closed
        if callback is not None:
            callback(number)

    def _drain(self) -> None:
        """Give pieces that were freed back to the allocator. The lock is held."""
        freed = self._freed
        while freed:
            self._allocator.free(freed.popleft())

    def _create_block(self, nbytes: int) -> HostBlock:
        """Create a block and register it."""
        with self._registering:
            # Blocks that were closed since, to make room, are forgotten.
            self._blocks = {block: None for block in self._blocks if block.is_open}
            if self._is_closed:
                raise ClosedError("the arena is closed", device=self._device)
            block = HostBlock(nbytes, self._registering, self._report_block_closed)
            block.number = next(self._numbers)
            try:
                if self._registrar is not None:
                    block.register(self._registrar)
            except BaseException as error:
                # A context that is dying takes no more memory; the block is good for the next one.
                if not (isinstance(error, AccelError) and (error.is_fault or isinstance(error, ClosedError))):
                    block.close()
                    raise
            self._blocks[block] = None
            return block
