"""The durable memory of one context: the slabs that hold it, and buffers of earlier contexts.

Durable and other buffers share slabs. One that holds a durable buffer is held by the device's
keeper too; the next context maps it again, where all of it that was not durable is free. So durable
memory needs no limit of its own, and no slab stands half empty for it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from accel.actors.acquire import acquire
from accel.backend import ImportsSlabs
from accel.errors import DriverError, UnsupportedError
from accel.storage.closing import Closing, close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.actors import ActorSystem
    from accel.backend import HeldSlab, SlabMemory
    from accel.memory import Block
    from accel.ref import AccelRef
    from accel.storage.buffers import Buffers
    from accel.storage.durable import DurableKeeper, KeptSlab

__all__ = ["DurableSlabs", "map_slabs"]


def map_slabs(device: object, slabs: Iterable[KeptSlab]) -> dict[int, HeldSlab]:
    """Map slabs that another context made, and return them by number. May block.

    Raises
    ------
    UnsupportedError
        If the backend cannot.
    AccelError
        If one cannot be mapped; then none is.
    """
    mapped: dict[int, HeldSlab] = {}
    try:
        for slab in slabs:
            if not isinstance(device, ImportsSlabs):
                raise UnsupportedError("this backend maps no slab of another context")  # noqa: TRY301
            mapped[slab.number] = device.import_slab(slab.fd, slab.nbytes)
    except BaseException:
        close_all(mapped.values())
        raise
    return mapped


class DurableSlabs:
    """The durable buffers of one context: tells the device's keeper of them and of their slabs.

    Parameters
    ----------
    name
        Of the device.
    system
        Runs what blocks.
    keeper
        Keeps descriptors of the slabs, over the end of the context.
    device
        The backend's context.
    request_trim
        Has :meth:`trim` called whenever work has ended, while there are idle slabs.

    Attributes
    ----------
    is_offered : bool
        Whether the backend's memory can outlive its context.
    buffers : set of int
        Numbers of the durable buffers.
    idle : set of SlabMemory
        Slabs without durable buffers any more, to be closed once nothing is in them or uses them.
    mapped_ahead : dict
        Number -> slab of another context, that is mapped and not bound to this one's allocator yet.
    """

    def __init__(self, name: str, system: ActorSystem, keeper: DurableKeeper, device: object, request_trim: Callable[[], None]) -> None:
        self._request_trim = request_trim
        self._name = name
        self._system = system
        self._keeper = keeper
        self._device = device
        self._numbers: dict[SlabMemory, int] = {}  # the keeper's, of the slabs that it keeps
        self._buffer_counts: dict[SlabMemory, int] = {}  # durable buffers in each of these slabs
        # Buffer -> (number of its slab, offset), of the slabs that are mapped ahead.
        self._ahead_places: dict[int, tuple[int, int]] = {}
        self._closing: Closing[SlabMemory] = Closing(system)
        self.is_offered = isinstance(device, ImportsSlabs)
        self.buffers: set[int] = set()
        self.idle: set[SlabMemory] = set()
        self.mapped_ahead: dict[int, HeldSlab] = {}

    def add_buffer(self, buffers: Buffers, ref: AccelRef, block: Block) -> None:
        """Tell the keeper of a new buffer, and before that of its slab, if that is new too.

        The op that makes the buffer ends after that. If the keeper refuses the buffer, it keeps the
        slab all the same.

        Raises
        ------
        UnsupportedError
            If the slab cannot outlive this process.
        AccelError
            If its descriptor cannot be given away.
        """
        slab = cast("HeldSlab", block.slab)
        number = self._numbers.get(slab)
        if number is None:
            if getattr(slab, "fd", -1) < 0:
                raise UnsupportedError(
                    "this system has no memory that outlives its process", device=self._name, remedy="Leave durable out."
                )
            if len(self._numbers) >= self._keeper.most_slabs:
                raise DriverError(
                    f"durable buffers of {self._name} are in {len(self._numbers)} slabs, and each keeps a descriptor: there may be no more",
                    code="EMFILE",
                    library="os",
                    device=self._name,
                    retryable=True,
                    remedy="Raise `ulimit -n`, half of which they may take, or drop durable buffers, or make fewer and larger ones.",
                )
            number = self._numbers[slab] = self._keeper.add_slab(slab)
            self._buffer_counts[slab] = 0
            self.idle.discard(slab)
        self._keeper.add_buffer(ref, number, block.offset, block.size)
        self._add_entry(buffers, ref.buffer, slab)

    def _add_entry(self, buffers: Buffers, buffer: int, slab: SlabMemory) -> None:
        """Count a buffer of a slab, and have :meth:`_free` called when the buffer is freed."""
        self.buffers.add(buffer)
        self._buffer_counts[slab] += 1
        buffers.free_hooks[buffer] = partial(self._free, buffers, buffer)

    def _free(self, buffers: Buffers, buffer: int, block: Block) -> None:
        """Free the block of a durable buffer, as its hook in :attr:`Buffers.free_hooks`.

        After the last durable buffer of a slab the keeper releases the slab. It is closed if
        nothing else is in it, else :meth:`trim` is called again when work has ended.
        """
        self.buffers.discard(buffer)
        slab = block.slab  # before the block is freed: then it is in none
        buffers.allocator.free(block)
        self._keeper.remove_buffer(buffer)
        self._buffer_counts[slab] -= 1
        if not self._buffer_counts[slab]:
            del self._buffer_counts[slab]
            self._keeper.release_slab(self._numbers.pop(slab))
            self.idle.add(slab)
            self.trim(buffers)
            if self.idle:
                self._request_trim()

    def trim(self, buffers: Buffers) -> None:
        """Close, off the loop, slabs that had durable buffers and hold nothing any more.

        Called when the last durable buffer of one was freed, and when work has ended. Those with
        uses that are not over stay in :attr:`idle` for the next call.
        """
        unused, in_use = buffers.allocator.trim_these(self.idle)
        self.idle = set(in_use)
        self._closing.add(unused)

    async def aclose(self) -> None:
        """Wait until the slabs that are being closed are closed; :meth:`close` closes the rest."""
        await self._closing.wait_closed()

    def close(self) -> None:
        """Close the slabs that are being closed, or were mapped and not bound. May block."""
        close_all([*self._closing.left, *self.mapped_ahead.values()])
        self.mapped_ahead.clear()

    # -- slabs of earlier contexts

    def bind(self, buffers: Buffers, slab_info: KeptSlab) -> HeldSlab:
        """Add a mapped slab of an earlier context to the allocator, with its durable buffers.

        They are at the same offsets; the rest of the slab is free. Returns the slab, which was in
        :attr:`mapped_ahead`.

        Raises
        ------
        InvalidArgumentError
            If the buffers overlap, or are not within the slab; it is still mapped ahead then.
        """
        slab = self.mapped_ahead[slab_info.number]
        restored = buffers.allocator.restore(slab, [(offset, nbytes, size) for _, offset, nbytes, size in slab_info.blocks])
        del self.mapped_ahead[slab_info.number]
        self._numbers[slab] = slab_info.number
        self._buffer_counts[slab] = 0
        for (buffer, *_), block in zip(slab_info.blocks, restored, strict=True):
            buffers.blocks[buffer] = block
            self._add_entry(buffers, buffer, slab)
        return slab

    async def map_ahead(self, slab_info: KeptSlab) -> None:
        """Map a slab that another context still uses, so that libraries may read buffers in it.

        :meth:`bind` adds it to the allocator later; until then nothing is allocated in it.

        Parameters
        ----------
        slab_info
            The slab, with the buffers that are read. One that is mapped stays so, and has these
            from now on.

        Raises
        ------
        UnsupportedError, AccelError
            As :func:`map_slabs` does.
        """
        if slab_info.number not in self.mapped_ahead:
            mapped = await acquire(self._system, partial(map_slabs, self._device, (slab_info,)), lambda mapped: close_all(mapped.values()))
            self.mapped_ahead.update(mapped)
        self._forget_places(slab_info.number)
        self._ahead_places.update((buffer, (slab_info.number, offset)) for buffer, offset, _, _ in slab_info.blocks)

    async def unmap(self, number: int) -> None:
        """Unmap a slab that was mapped ahead, is not bound, and is read by nothing any more.

        Do nothing for one that is bound or was unmapped before.
        """
        slab = self.mapped_ahead.pop(number, None)
        self._forget_places(number)
        if slab is not None:
            await self._system.run_blocking(slab.close)

    def _forget_places(self, number: int) -> None:
        """Forget where the buffers of one slab are that was mapped ahead."""
        self._ahead_places = {buffer: place for buffer, place in self._ahead_places.items() if place[0] != number}

    def address(self, buffers: Buffers, buffer: int) -> int | None:
        """Return the address of a buffer, also of one in a slab that is only mapped ahead.

        ``None`` if this context has it in neither. Thread-safe.
        """
        block = buffers.blocks.get(buffer)
        if block is not None:
            return block.address
        number, offset = self._ahead_places.get(buffer, (None, 0))
        slab = None if number is None else self.mapped_ahead.get(number)
        return None if slab is None else slab.address + offset
