"""The memory of one context: where each buffer is, how memory is allocated, and how it is freed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from accel.backend import TakesWorkspace
from accel.errors import OutOfMemoryError, StaleRefError
from accel.storage.closing import Closing, close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accel.actors import ActorSystem
    from accel.backend import AccelStream, SlabMemory
    from accel.memory import Allocator, Block, Usage
    from accel.memory.usage import Timeline
    from accel.ops.base import Spec
    from accel.ref import AccelRef
    from accel.storage.memory_back import MemoryBack
    from accel.storage.refs import Refs

__all__ = ["Buffers", "Held"]


class DurableMemory(Protocol):
    """The durable part of a context's memory; see :class:`.durable_slabs.DurableSlabs`."""

    idle: set[SlabMemory]

    def add_buffer(self, buffers: Buffers, ref: AccelRef, block: Block) -> None:
        """Add a new buffer."""

    def trim(self, buffers: Buffers) -> None:
        """Close slabs that hold nothing any more."""

    def close(self) -> None:
        """Close what is left. May block."""


class Held:
    """A resource that has a buffer's number and uses, but no memory of the allocator: a graph.

    Attributes
    ----------
    address : int
        For kernels; 0 where there is none.
    usage : Usage
        Its uses.
    """

    __slots__ = ("_release", "address", "usage")

    def __init__(self, usage: Usage, release: Callable[[], object] | None, address: int = 0) -> None:
        self.usage = usage
        self.address = address
        self._release = release

    def close(self) -> None:
        """Release the resource. May block. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Buffers:
    """Buffers by number, over the context's allocator.

    Parameters
    ----------
    refs
        The device's refs.
    system
        Runs what blocks.
    memory_back
        Asks for slabs.
    allocator
        Cuts blocks from slabs.
    generation
        Of the context.
    check_alive
        Raises once the context has faulted.
    durables
        Notes what outlives the context.
    reclaim
        Frees memory that other lanes hold and do not need now, for the lane that it is given;
        returns whether there was any.

    Attributes
    ----------
    blocks : dict of int to Block
        Where each buffer is.
    lent : int
        Bytes that lanes have as workspaces.
    special : dict of int to callable
        How buffers are freed that are not simply the allocator's; see
        :class:`~accel.sharing.sharing.Sharing`.
    """

    __slots__ = (
        "_check_alive", "_generation", "_held", "_idle", "_memory_back", "_reclaim", "_refs", "_resting", "_system", "_unused", "_workspaces",
        "allocator", "blocks", "durables", "lent", "special",
    )  # fmt: skip

    def __init__(
        self,
        refs: Refs,
        system: ActorSystem,
        memory_back: MemoryBack,
        allocator: Allocator,
        generation: int,
        check_alive: Callable[[], None],
        durables: DurableMemory,
        reclaim: Callable[[Timeline], bool],
    ) -> None:
        self.durables = durables
        self._refs = refs
        self._system = system
        self._memory_back = memory_back
        self._generation = generation
        self._check_alive = check_alive
        self.allocator = allocator
        self.blocks: dict[int, Block | Held] = {}
        self.special: dict[int, Callable[[Block], None]] = {}
        self.lent = 0
        self._reclaim = reclaim
        self._workspaces: dict[Timeline, list[Block]] = {}
        self._held = 0  # resources in `blocks`
        self._resting: list[Held] = []  # freed, and still in use
        self._unused: Closing[Held] = Closing(system)  # freed, and to be released
        self._idle: Closing[SlabMemory] = Closing(system)  # removed from the allocator

    def block(self, ref: AccelRef) -> Block | Held:
        """Return where a buffer is.

        Raises
        ------
        StaleRefError
            If it is not there any more.
        """
        block = self.blocks.get(ref.buffer)
        if block is None:
            raise StaleRefError(f"{ref!r} is not in memory any more", reason="freed", device=self._refs.name, generation=self._generation)
        return block

    def address(self, ref: AccelRef) -> int:
        """Return where a buffer's elements start; raises as :meth:`block` does."""
        return self.block(ref).address + ref.offset

    def hold(self, ref: AccelRef, usage: Usage, release: Callable[[], object] | None) -> None:
        """Hold a resource under the number of ``ref``.

        Parameters
        ----------
        ref
            When it is dropped, or freed, ``release`` is called, once all uses are over.
        usage
            Its uses.
        release
            Releases it; may block, and is called on another thread. Not called after a fault.
        """
        self.blocks[ref.buffer] = Held(usage, release)
        self._held += 1

    def place(self, refs: Sequence[AccelRef], lane: Timeline) -> bool:
        """Allocate memory for buffers that have none; ``False``, for none of them, without room."""
        for ref in refs:
            block = self.allocator.allocate(ref.nbytes, lane)
            if block is None:
                self._give_up(refs)
                return False
            self.blocks[ref.buffer] = block
            if ref.durable:
                try:
                    self.durables.add_buffer(self, ref, block)
                except BaseException:
                    self._give_up(refs)
                    raise
        return True

    def _give_up(self, refs: Iterable[AccelRef]) -> None:
        """Free what :meth:`place` has allocated for buffers that it could not place together."""
        self._refs.dropped.extend([ref.buffer for ref in refs])
        self.apply_frees()

    async def provide(self, specs: Iterable[Spec], lane: Timeline) -> None:
        """See that :meth:`place` finds room for ``specs``, with another slab if need be.

        Raises
        ------
        OutOfMemoryError
            If the limit or the device has none.
        """
        held: list[Block] = []
        try:
            for spec in specs:
                block = await self._grow(spec.nbytes, lane)
                held.append(block)
        finally:
            # Nothing else allocates before the op is bound, so what was free once is free then.
            for block in held:
                self.allocator.free(block)

    async def provide_workspaces(self, lane: Timeline, stream: AccelStream, library: str) -> None:
        """Give the stream of a lane the workspaces that ops of a library use there.

        Raises
        ------
        OutOfMemoryError
            If the limit or the device has no room.
        """
        while isinstance(stream, TakesWorkspace) and (nbytes := stream.workspace_wanted(library)):
            block = await self._grow(nbytes, lane)
            if not stream.workspace_wanted(library):  # it was given meanwhile
                self.allocator.free(block)
                break
            self.lent += block.size
            self._workspaces.setdefault(lane, []).append(block)
            stream.use_workspace(block.address, nbytes)

    def release_workspaces(self, lane: Timeline) -> bool:
        """Free the workspaces of a lane, in which nothing runs; return whether it had any.

        Its stream must use them no more.
        """
        blocks = self._workspaces.pop(lane, [])
        for block in blocks:
            self.lent -= block.size
            self.allocator.free(block)
        return bool(blocks)

    async def _grow(self, nbytes: int, lane: Timeline) -> Block:
        """Allocate, in the end with the memory of the workspaces of idle lanes."""
        while True:
            try:
                return await self._grow_slabs(nbytes, lane)
            except OutOfMemoryError:
                if not self._reclaim(lane):
                    raise

    async def _grow_slabs(self, nbytes: int, lane: Timeline) -> Block:
        """Allocate, with another slab if need be, which is created off the loop.

        Before that, dropped refs are freed; in the end, idle slabs are closed to make room.
        """
        allocator, run_blocking = self.allocator, self._system.run_blocking
        self.apply_frees()
        last_resort = False
        while (block := allocator.allocate(nbytes, lane)) is None:
            request = allocator.request_slab(nbytes, last_resort=last_resort)
            try:
                slab = await run_blocking(self._memory_back.retry_on_oom, request.create)
                self._check_alive()
                allocator.adopt(request, slab)
            except BaseException as error:
                # Slabs that were removed or created for the request; unmapping may block.
                await run_blocking(close_all, allocator.cancel(request))
                if not isinstance(error, OutOfMemoryError):
                    raise
                if last_resort and error.library != "os":
                    raise allocator.out_of_memory(nbytes) from error
                if last_resort:  # the system is short of something else: closing slabs did not help
                    raise
                last_resort = True
        return block

    def apply_frees(self, most: int | None = None) -> None:
        """Free the memory of dropped refs, of ``most`` at most.

        Its next user waits for streams that still use it. A buffer that is not there is not of this
        context, or was freed before.
        """
        dropped = self._refs.dropped
        for _ in range(len(dropped) if most is None else min(most, len(dropped))):
            buffer = dropped.popleft()
            block = self.blocks.pop(buffer, None)
            if block is None:
                continue
            if isinstance(block, Held):
                self._held -= 1
                self._resting.append(block)
            elif buffer in self.special:
                self.special.pop(buffer)(block)
            else:
                self.allocator.free(block)
        if self._resting:
            self._sweep()

    def release_idle(self) -> None:
        """Close all slabs that are wholly free and idle: another library found no memory."""
        self.apply_frees()
        self._idle.add(self.allocator.trim(everything=True))

    @property
    def leaving_nbytes(self) -> int:
        """Bytes of slabs that were removed from the allocator and are not closed yet."""
        return sum(slab.nbytes for slab in self._idle.left)

    def settle(self) -> bool:
        """Apply frees when work has ended, for what is held may rest until then.

        Return whether anything still is, or may come to.
        """
        self.apply_frees()
        if self.durables.idle:
            self.durables.trim(self)
        return bool(self._held or self._resting or self.durables.idle)

    def _sweep(self) -> None:
        """Release resting resources of which all uses are over: on another thread, it may block."""
        over = [held for held in self._resting if held.usage.is_idle()]
        if over:
            self._resting = [held for held in self._resting if held not in over]
            self._unused.add(over)

    async def aclose(self) -> None:
        """Wait until what is being released is so."""
        await self._unused.wait_closed()
        await self._idle.wait_closed()

    def close(self, *, abandon: bool) -> None:
        """Give back what is held and no memory of the allocator's.

        The streams have ended, or are abandoned. May block.
        """
        kept = [block for block in self.blocks.values() if isinstance(block, Held)]
        held, self._resting = [*self._unused.left, *self._resting, *kept], []
        if not abandon:
            close_all(held)
        close_all(self._idle.left)
        self.durables.close()
