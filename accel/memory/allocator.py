"""The allocator of device memory: blocks cut from slabs, reused in stream order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from accel.errors import ClosedError, InvalidArgumentError, OutOfMemoryError, StaleRefError
from accel.memory.growth import SlabRequest
from accel.memory.reuse import FreeMemory
from accel.memory.space import ALIGNMENT, LIVE, RESTING, Slab, round_up
from accel.memory.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from accel.backend import SlabMemory
    from accel.memory.space import Chunk
    from accel.memory.usage import Dependency, Timeline

__all__ = ["Allocator", "Block", "SlabRequest", "restore_blocks"]

_BEYOND = 1 << 56
"""Bytes that no memory has, and that a backend's numbers need not hold."""


class _FreedUsage(Usage):
    """The usage of freed blocks: it detects their use without a check on the way of every op."""

    __slots__ = ()

    def read(self, timeline: Timeline, seq: int, dependencies: list[Dependency]) -> NoReturn:
        raise StaleRefError(f"a freed block was read by {timeline!r}", reason="freed")

    def write(self, timeline: Timeline, seq: int, dependencies: list[Dependency]) -> NoReturn:
        raise StaleRefError(f"a freed block was written by {timeline!r}", reason="freed")


_FREED: Final = _FreedUsage()


class Block:
    """A piece of a slab, from its allocation until it is freed.

    Made by an :class:`~accel.memory.Allocator` only.

    Attributes
    ----------
    address : int
        Where it starts; aligned to 256 bytes. 0 once the block is freed.
    nbytes : int
        Bytes asked for.
    size : int
        Bytes reserved, from ``address``.
    usage : Usage
        Its uses. A reused block starts with the pending uses of the memory's earlier blocks.
        Once the block is freed, recording a use raises :class:`~accel.StaleRefError` with the
        reason ``"freed"``; so take it from the block each time.
    """

    __slots__ = ("_chunk", "address", "nbytes", "size", "usage")

    def __init__(self, chunk: Chunk, nbytes: int) -> None:
        self._chunk: Chunk | None = chunk
        self.address = chunk.address
        self.nbytes = nbytes
        self.size = chunk.size
        self.usage = chunk.usage

    def __repr__(self) -> str:
        where = "freed" if self._chunk is None else f"at {self.address:#x}"
        return f"<Block {self.nbytes} bytes (of {self.size}) {where}>"

    @property
    def slab(self) -> SlabMemory:
        """The slab that holds the block."""
        return self._live_chunk().slab.memory

    @property
    def offset(self) -> int:
        """Bytes from the start of the slab."""
        chunk = self._live_chunk()
        return chunk.address - chunk.slab.memory.address

    def _live_chunk(self) -> Chunk:
        """Return the block's chunk; raise once the block is freed."""
        if self._chunk is None:
            raise StaleRefError("a freed block has no place in a slab", reason="freed")
        return self._chunk


class Allocator:
    """Cuts blocks from slabs.

    Single-threaded and never blocking: creating and closing slabs is left to the caller, off the
    loop.

    ::

        while (block := allocator.allocate(nbytes, timeline)) is None:
            request = allocator.request_slab(nbytes)       # OutOfMemoryError beyond the limit
            try:
                slab = await run_blocking(request.create)  # only this part runs on another thread
                allocator.adopt(request, slab)
            except BaseException:
                close_off_the_loop(allocator.cancel(request))
                raise

    Parameters
    ----------
    create_slab
        Creates a slab of at least the given number of bytes, such as ``AccelDevice.create_slab``.
        Called by :meth:`SlabRequest.create` only.
    device
        Name of the device, for errors.
    limit
        What the sum of the slabs must not exceed, in bytes; ``None`` leaves it to the device.
    slab_bytes
        Size of an ordinary slab. A larger block gets a slab of its own.
    granularity
        Slabs are multiples of it.

    Notes
    -----
    **Stream-ordered reuse.** Blocks are freed while the device may still work on them. A freed
    block rests as it is, with its pending uses, and is given out again at once to a new block of
    the same size if those uses are over, or are all on the timeline that asks (stream order
    keeps the later work later). Otherwise clean memory is preferred, and when that has no room, what
    rests and is idle is merged. When there is no other room, memory with uses pending elsewhere is
    reused all the same: the new block's :class:`Usage` *inherits* the pending uses, so that its
    first writer is told to wait for them like for any other dependency. So no buffer is overwritten
    under a running kernel, and the host never waits for that.

    **Waste.** A block reserves less than 12.5 % more than asked for, rounded up to 256 bytes.
    What rests is merged before the allocator asks for another slab, if all that is free is enough.
    """

    def __init__(
        self,
        create_slab: Callable[[int], SlabMemory],
        *,
        device: str | None = None,
        limit: int | None = None,
        slab_bytes: int = 64 << 20,
        granularity: int = 2 << 20,
    ) -> None:
        if slab_bytes <= 0 or granularity <= 0 or granularity % ALIGNMENT or (limit is not None and limit < 0):
            raise InvalidArgumentError(
                f"slab_bytes={slab_bytes}, granularity={granularity} and limit={limit} do not go together",
                remedy=f"Sizes are positive, and the granularity is a multiple of {ALIGNMENT}.",
            )
        self.device = device
        self.limit = limit
        self.slab_bytes = -(-slab_bytes // granularity) * granularity
        self.granularity = granularity
        self.used = 0
        """Bytes reserved for live blocks."""
        self.reserved = 0
        """Sum of the slabs."""
        self.peak = 0
        """The largest sum so far."""
        self._create_slab = create_slab
        self._requests: set[SlabRequest] = set()
        self._memory = FreeMemory()
        self._closed = False

    # -- blocks

    def allocate(self, nbytes: int, timeline: Timeline | None = None) -> Block | None:
        """Return a block from the slabs there are, or ``None`` if that takes another slab.

        Parameters
        ----------
        nbytes
            Size; 0 is a block of its own too.
        timeline
            Where the block will be used first, if that is known: memory freed there is reused
            without waiting.

        Raises
        ------
        InvalidArgumentError
            If ``nbytes`` is negative.
        ClosedError
            After :meth:`take_all`.
        """
        if self._closed:
            raise ClosedError("the allocator is closed", device=self.device)
        size = round_up(nbytes)
        resting = self._memory.resting.get(size)
        # Nearly always the one of this size that was freed last will do.
        if resting and resting[-1].usage.is_idle_for(timeline):
            chunk: Chunk | None = resting.pop()
        else:
            chunk = self._memory.allocate(size, timeline)
        if chunk is None:
            return None
        chunk.state = LIVE
        self.used += size
        return Block(chunk, nbytes)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)

    def free(self, block: Block) -> None:
        """Give a block back. Its recorded uses may be pending; record all of them before.

        After :meth:`take_all` it only marks the block.

        Raises
        ------
        InvalidArgumentError
            If the block was freed before, or belongs to another allocator.
        """
        chunk = block._chunk  # noqa: SLF001 - a block is the allocator's own half
        if chunk is None:
            raise InvalidArgumentError(
                f"{block!r} was freed twice", device=self.device, remedy="A block has one owner, which frees it once."
            )
        if chunk.slab.owner is not self:
            raise InvalidArgumentError(f"{block!r} belongs to another allocator", device=self.device)
        chunk.usage = block.usage
        block._chunk = None  # noqa: SLF001
        block.usage = _FREED
        block.address = 0
        self.used -= chunk.size
        if not self._closed:
            chunk.state = RESTING
            self._memory.resting[chunk.size].append(chunk)

    # -- growing and shrinking

    def request_slab(self, nbytes: int, *, last_resort: bool = False) -> SlabRequest:
        """Plan the slab that :meth:`allocate` needs for ``nbytes``.

        It counts against the limit until it is adopted or cancelled.

        Parameters
        ----------
        nbytes
            Size of the block.
        last_resort
            Let the request give back every idle slab before, for a device that had no room without
            a limit saying so.

        Raises
        ------
        OutOfMemoryError
            If the limit does not allow it, even if all idle slabs are given back.
        ClosedError
            After :meth:`take_all`.
        """
        if self._closed:
            raise ClosedError("the allocator is closed", device=self.device)
        if nbytes >= _BEYOND:
            raise self.out_of_memory(nbytes)
        least = -(-round_up(nbytes) // self.granularity) * self.granularity
        release: list[Slab] = []
        room = self._bytes_left()
        if last_resort or (room is not None and room < least):
            release = self._empty_slabs()
            if room is not None:
                if not last_resort:
                    release = _fewest(release, least - room)
                room += sum(slab.memory.nbytes for slab in release)
                if room < least:
                    raise self.out_of_memory(nbytes)
        size = max(self.slab_bytes, least)
        if room is not None:
            size = min(size, room // self.granularity * self.granularity)
        request = SlabRequest(self._create_slab, size, least, [self._remove(slab) for slab in release])
        self._requests.add(request)
        return request

    def adopt(self, request: SlabRequest, slab: SlabMemory) -> None:
        """Add the slab that ``request`` created.

        If that raises, the slab is among what :meth:`cancel` returns.

        Raises
        ------
        ClosedError
            After :meth:`take_all`.
        InvalidArgumentError
            If the slab is too small or its address is not aligned, or the request is not open.
        """
        if self._closed:
            raise ClosedError("the allocator is closed", device=self.device)
        if request not in self._requests:
            raise InvalidArgumentError("this request for a slab was adopted or cancelled before", device=self.device)
        if slab.address % ALIGNMENT or slab.nbytes < request.least:
            raise InvalidArgumentError(f"{slab!r} is not aligned to {ALIGNMENT} bytes, or too small", device=self.device)
        self._requests.discard(request)
        request.on_adopted()
        self._reserve(slab.nbytes)
        found = Slab(slab, self)
        self._memory.add_slab(found, (found.first,))

    def restore(self, slab: SlabMemory, blocks: Iterable[tuple[int, int, int]]) -> list[Block]:
        """Add a slab that was another allocator's, with what is left in it; the rest of it is free.

        Parameters
        ----------
        slab
            The same memory, mapped anew.
        blocks
            For each block its offset in the slab, the bytes asked for, and the bytes reserved.

        Returns
        -------
        list of Block
            In the order of ``blocks``.

        Raises
        ------
        ClosedError
            After :meth:`take_all`.
        InvalidArgumentError
            If the blocks overlap, or do not lie in the slab.
        """
        if self._closed:
            raise ClosedError("the allocator is closed", device=self.device)
        restored_slab = Slab(slab, self)
        restored, clean = restore_blocks(restored_slab, blocks)
        self._memory.add_slab(restored_slab, clean)
        self._reserve(slab.nbytes)
        self.used += sum(block.size for block in restored)
        return restored

    def cancel(self, request: SlabRequest) -> list[SlabMemory]:
        """Withdraw a request that is not adopted, at any moment. Idempotent.

        A slab that is just being created is closed by the thread that creates it.

        Returns
        -------
        list of SlabMemory
            For the caller to close, off the loop: the slab if it is there already, and what should
            have been closed before it and was not.
        """
        self._requests.discard(request)
        return request.withdraw()

    def trim(self, *, everything: bool = False) -> list[SlabMemory]:
        """Remove the slabs that are wholly free and idle, for the caller to close off the loop.

        Parameters
        ----------
        everything
            Remove all of them. Otherwise one slab of the ordinary size stays, if there is one, for
            the next block.
        """
        empty = self._empty_slabs()
        if not everything:
            stays = next((slab for slab in empty if slab.memory.nbytes <= self.slab_bytes), None)
            empty = [slab for slab in empty if slab is not stays]
        return [self._remove(slab) for slab in empty]

    def trim_these(self, slabs: Collection[SlabMemory]) -> tuple[list[SlabMemory], list[SlabMemory]]:
        """Remove those of ``slabs`` that are free and idle, for the caller to close off the loop.

        Returns
        -------
        tuple of lists
            Those, and the ones that will be so when the pending uses of what was freed in them are
            over.
        """
        self._memory.clean_idle()
        found = [slab for slab in self._memory.slabs if slab.memory in slabs and not slab.has_live()]
        waiting = [slab.memory for slab in found if not slab.is_empty()]
        return [self._remove(slab) for slab in found if slab.is_empty()], waiting

    def take_all(self) -> list[SlabMemory]:
        """Remove all slabs, live blocks or not, for the caller to close: the context ends.

        The allocator is closed. Idempotent.
        """
        self._closed = True
        slabs = self.slabs()
        self._memory = FreeMemory()
        self._requests.clear()
        self.reserved = 0
        return slabs

    def allocate_blocking(self, nbytes: int, timeline: Timeline | None = None) -> Block:
        """Allocate, creating a slab if it takes one. Blocks: for tests and tools.

        Raises
        ------
        OutOfMemoryError
            If the limit or the device does not allow it.
        """
        last_resort = False
        while (block := self.allocate(nbytes, timeline)) is None:
            request = self.request_slab(nbytes, last_resort=last_resort)
            try:
                slab = request.create()
            except OutOfMemoryError as error:
                if last_resort:
                    raise self.out_of_memory(nbytes) from error
                last_resort = True
                self.cancel(request)
            else:
                self.adopt(request, slab)
        return block

    # -- state

    def slabs(self) -> list[SlabMemory]:
        """Return the slabs, oldest first."""
        return [slab.memory for slab in self._memory.slabs]

    def out_of_memory(self, nbytes: int) -> OutOfMemoryError:
        """Return the error that says that there is no room for ``nbytes``."""
        limit = "" if self.limit is None else f" of at most {self.limit}"
        return OutOfMemoryError(
            f"no room for {nbytes} bytes: {self.used} bytes are in use, {self.reserved} are reserved{limit}",
            requested=nbytes,
            used=self.used,
            reserved=self.reserved,
            limit=self.limit,
            device=self.device,
        )

    def _bytes_left(self) -> int | None:
        """Return the bytes of slabs that the limit still allows; ``None`` without a limit."""
        if self.limit is None:
            return None
        return self.limit - self.reserved - sum(request.nbytes for request in self._requests)

    def _empty_slabs(self) -> list[Slab]:
        """Return the slabs that are wholly free and whose uses are over."""
        self._memory.clean_idle()
        return [slab for slab in self._memory.slabs if slab.is_empty()]

    def _remove(self, slab: Slab) -> SlabMemory:
        """Remove an empty slab, and return its memory for the caller to close."""
        self._memory.remove_slab(slab)
        self.reserved -= slab.memory.nbytes
        return slab.memory


def _fewest(slabs: list[Slab], nbytes: int) -> list[Slab]:
    """Return as few of ``slabs`` as have ``nbytes`` together, or all."""
    chosen: list[Slab] = []
    for slab in sorted(slabs, key=lambda slab: slab.memory.nbytes, reverse=True):
        if nbytes <= 0:
            break
        chosen.append(slab)
        nbytes -= slab.memory.nbytes
    return chosen


def restore_blocks(slab: Slab, blocks: Iterable[tuple[int, int, int]]) -> tuple[list[Block], list[Chunk]]:
    """Cut a new slab, clean and in no bin, into live blocks and the clean chunks between them.

    Parameters
    ----------
    slab
        All of it is clean.
    blocks
        For each block its offset, the bytes asked for and the bytes reserved.

    Returns
    -------
    tuple
        The blocks, in the order given, and the clean chunks.

    Raises
    ------
    InvalidArgumentError
        If they overlap, or are not where a block can be.
    """
    wanted = list(blocks)
    made: dict[int, Block] = {}
    clean: list[Chunk] = []
    rest: Chunk | None = slab.first
    for at in sorted(range(len(wanted)), key=lambda index: wanted[index][0]):
        offset, nbytes, size = wanted[at]
        start = slab.first.slab.memory.address + offset
        if (
            rest is None
            or offset % ALIGNMENT
            or size % ALIGNMENT
            or not 0 <= nbytes <= size
            or not rest.address <= start <= rest.address + rest.size - size
        ):
            raise InvalidArgumentError(f"there is no room for a block of {size} bytes at {offset} of {slab.memory!r}")
        if start > rest.address:
            clean.append(rest)
            rest = rest.split(start - rest.address)
        chunk, rest = rest, rest.split(size) if rest.size > size else None
        chunk.state = LIVE
        made[at] = Block(chunk, nbytes)
    if rest is not None:
        clean.append(rest)
    return [made[at] for at in range(len(wanted))], clean
