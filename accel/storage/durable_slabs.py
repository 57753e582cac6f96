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


def map_slabs(device: object, kept: Iterable[KeptSlab]) -> dict[int, HeldSlab]:
    """Map slabs of another context, and return them by number. May block.

    Raises
    ------
    UnsupportedError
        If the backend cannot.
    AccelError
        What keeps it from mapping one; then none is mapped.
    """
    mapped: dict[int, HeldSlab] = {}
    try:
        for slab in kept:
            if not isinstance(device, ImportsSlabs):
                raise UnsupportedError("this backend maps no slab of another context")  # noqa: TRY301
            mapped[slab.number] = device.import_slab(slab.fd, slab.nbytes)
    except BaseException:
        close_all(mapped.values())
        raise
    return mapped


class DurableSlabs:
    """Tells the device's keeper of durable slabs and buffers, and closes slabs that hold nothing.

    Parameters
    ----------
    name
        Of the device.
    system
        Runs what blocks.
    keeper
        Told of durable memory.
    device
        The backend's context.
    wait_for_ends
        Has :meth:`trim` called whenever work has ended, while a slab is idle.

    Attributes
    ----------
    buffers : set of int
        Numbers of the durable buffers.
    idle : set of SlabMemory
        Slabs that had durable buffers, and may be free once the last uses of them are over.
    ahead : dict
        Number -> slab of an earlier context, that is mapped and not bound yet.
    """

    def __init__(self, name: str, system: ActorSystem, keeper: DurableKeeper, device: object, wait_for_ends: Callable[[], None]) -> None:
        self._wait_for_ends = wait_for_ends
        self._name = name
        self._system = system
        self._keeper = keeper
        self._device = device
        self._numbers: dict[SlabMemory, int] = {}
        self._living: dict[SlabMemory, int] = {}  # how many buffers are in each
        self._places: dict[int, tuple[int, int]] = {}  # of buffers there: slab's number, offset
        self._closing: Closing[SlabMemory] = Closing(system)
        self.buffers: set[int] = set()
        self.idle: set[SlabMemory] = set()
        self.ahead: dict[int, HeldSlab] = {}

    @property
    def is_offered(self) -> bool:
        """Whether the backend's memory can outlive its context."""
        return isinstance(self._device, ImportsSlabs)

    def add_buffer(self, buffers: Buffers, ref: AccelRef, block: Block) -> None:
        """Tell the keeper of a new buffer, and before that of its slab, if that is new too.

        The op that makes the buffer is answered after that.

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
            self._living[slab] = 0
            self.idle.discard(slab)
        self._keeper.add_buffer(ref, number, block.offset, block.size)
        self._adopt(buffers, ref.buffer, slab)

    def _adopt(self, buffers: Buffers, buffer: int, slab: SlabMemory) -> None:
        self.buffers.add(buffer)
        self._living[slab] += 1
        buffers.special[buffer] = partial(self._free, buffers, buffer)

    def _free(self, buffers: Buffers, buffer: int, block: Block) -> None:
        """Free a block.

        A slab without other durable buffers is kept no more, and closed if it holds nothing else.
        """
        self.buffers.discard(buffer)
        slab = block.slab
        buffers.allocator.free(block)
        self._keeper.remove_buffer(buffer)
        self._living[slab] -= 1
        if not self._living[slab]:
            del self._living[slab]
            self._keeper.release_slab(self._numbers.pop(slab))
            self.idle.add(slab)
            self.trim(buffers)
            if self.idle:
                self._wait_for_ends()

    def trim(self, buffers: Buffers) -> None:
        """Close, off the loop, slabs that had durable buffers and hold nothing any more.

        Those that wait for the end of last uses are left for later.
        """
        slabs, waiting = buffers.allocator.trim_these(self.idle)
        self.idle = set(waiting)
        self._closing.add(slabs)

    async def aclose(self) -> None:
        """Wait until what is being closed is so."""
        await self._closing.wait_closed()

    def close(self) -> None:
        """Close what is left. May block."""
        close_all([*self._closing.left, *self.ahead.values()])
        self.ahead.clear()

    # -- slabs of earlier contexts

    def bind(self, buffers: Buffers, kept: KeptSlab) -> HeldSlab:
        """Make a slab of an earlier context, which is mapped, this one's: its buffers are where they were.

        Raises
        ------
        InvalidArgumentError
            If they cannot be there.
        """
        slab = self.ahead[kept.number]
        found = buffers.allocator.restore(slab, [(offset, wanted, size) for _, offset, wanted, size in kept.blocks])
        del self.ahead[kept.number]
        self._numbers[slab] = kept.number
        self._living[slab] = 0
        for (buffer, *_), block in zip(kept.blocks, found, strict=True):
            buffers.blocks[buffer] = block
            self._adopt(buffers, buffer, slab)
        return slab

    async def map_ahead(self, kept: KeptSlab) -> None:
        """Map a slab that another context uses, for libraries that read buffers there.

        :meth:`bind` makes it this context's: until then nothing is cut from it.

        Parameters
        ----------
        kept
            The slab, with the buffers that are read. One that is mapped stays so, and has these
            from now on.

        Raises
        ------
        UnsupportedError, AccelError
            As :func:`map_slabs` does.
        """
        if kept.number not in self.ahead:
            mapped = await acquire(self._system, partial(map_slabs, self._device, (kept,)), lambda mapped: close_all(mapped.values()))
            self.ahead.update(mapped)
        self._forget(kept.number)
        self._places.update((buffer, (kept.number, offset)) for buffer, offset, _, _ in kept.blocks)

    async def unmap(self, number: int) -> None:
        """Unmap a slab that was mapped ahead and is not bound; nothing reads there any more."""
        slab = self.ahead.pop(number, None)
        self._forget(number)
        if slab is not None:
            await self._system.run_blocking(slab.close)

    def _forget(self, number: int) -> None:
        self._places = {buffer: place for buffer, place in self._places.items() if place[0] != number}

    def address(self, buffers: Buffers, buffer: int) -> int | None:
        """Return where a durable buffer is, bound or mapped ahead. Any thread may ask."""
        block = buffers.blocks.get(buffer)
        if block is not None:
            return block.address
        number, offset = self._places.get(buffer, (None, 0))
        slab = None if number is None else self.ahead.get(number)
        return None if slab is None else slab.address + offset
