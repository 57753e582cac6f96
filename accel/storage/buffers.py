"""The memory of one context: where each buffer is, how memory is allocated, and how it is freed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from accel.backend import TakesWorkspace
from accel.dtype import DType
from accel.errors import OutOfMemoryError, StaleRefError
from accel.memory import Usage
from accel.ops.base import Spec
from accel.storage.closing import Closing, close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accel.actors import ActorSystem
    from accel.backend import AccelStream, SlabMemory
    from accel.memory import Allocator, Block
    from accel.memory.usage import Timeline
    from accel.ref import AccelRef
    from accel.storage.oom_retry import OomRetry
    from accel.storage.refs import Refs

__all__ = ["Buffers", "HeldResource"]


class DurableMemory(Protocol):
    """The durable part of a context's memory; see :class:`.durable_slabs.DurableSlabs`."""

    idle: set[SlabMemory]

    def add_buffer(self, buffers: Buffers, ref: AccelRef, block: Block) -> None:
        """Add a new buffer."""

    def trim(self, buffers: Buffers) -> None:
        """Close slabs that hold nothing any more."""

    def close(self) -> None:
        """Close what is left. May block."""


class HeldResource:
    """A resource that is freed as a buffer is, but has no memory of the allocator: a graph.

    Parameters
    ----------
    usage
        Its uses, after which it may be released.
    release
        Releases it; may block, and is called on another thread. Not called after a fault.
    inputs, outputs
        The graph's own buffers whose contents a replay reads, and those that it writes.

    Attributes
    ----------
    address : int
        The address that kernels get for it: 0.
    """

    __slots__ = ("_release", "address", "inputs", "outputs", "usage")

    def __init__(
        self,
        usage: Usage,
        release: Callable[[], object] | None,
        inputs: frozenset[int] = frozenset(),
        outputs: frozenset[int] = frozenset(),
    ) -> None:
        self.usage = usage
        self.inputs = inputs
        self.outputs = outputs
        self.address = 0
        self._release = release

    def close(self) -> None:
        """Release the resource. May block. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Buffers:
    """The buffers of one context, by number: allocates, finds and frees them.

    Parameters
    ----------
    refs
        The device's refs.
    system
        Runs what blocks.
    oom_retry
        Creates slabs, with the patience that the memory of an ended process needs.
    allocator
        Cuts blocks from slabs.
    generation
        Of the context.
    check_alive
        Raises once the context has faulted.
    durables
        The durable part of the memory, which outlives the context.
    reclaim
        Frees memory that lanes other than the given one hold and do not need now; returns whether
        there was any.

    Attributes
    ----------
    blocks : dict of int to Block
        Where each buffer is.
    workspace_nbytes : int
        Bytes of the workspaces of all lanes.
    free_hooks : dict of int to callable
        Number of a buffer -> what frees its block, instead of the allocator: for durable and shared
        buffers.
    """

    __slots__ = (
        "_captured", "_check_alive", "_closing_resources", "_closing_slabs", "_freed_in_use", "_generation", "_held_count", "_oom_retry", "_reclaim",
        "_refs", "_system", "_workspaces", "allocator", "blocks", "durables", "free_hooks", "workspace_nbytes",
    )  # fmt: skip

    def __init__(
        self,
        refs: Refs,
        system: ActorSystem,
        oom_retry: OomRetry,
        allocator: Allocator,
        generation: int,
        check_alive: Callable[[], None],
        durables: DurableMemory,
        reclaim: Callable[[Timeline], bool],
    ) -> None:
        self.durables = durables
        self._refs = refs
        self._system = system
        self._oom_retry = oom_retry
        self._generation = generation
        self._check_alive = check_alive
        self.allocator = allocator
        self.blocks: dict[int, Block | HeldResource] = {}
        self.free_hooks: dict[int, Callable[[Block], None]] = {}
        self.workspace_nbytes = 0
        self._reclaim = reclaim
        self._workspaces: dict[Timeline, list[Block]] = {}  # of each lane
        self._held_count = 0  # resources in `blocks`
        self._freed_in_use: list[HeldResource] = []  # freed, with uses that are not over
        self._closing_resources: Closing[HeldResource] = Closing(system)
        self._closing_slabs: Closing[SlabMemory] = Closing(system)  # removed from the allocator
        self._captured: AccelRef | None = None  # see captured_workspaces()

    def block(self, ref: AccelRef) -> Block | HeldResource:
        """Return the block of a buffer, or the resource that is held under its number: of a graph.

        Callers have checked the ref's generation: what is not there was freed.

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

    def hold(self, ref: AccelRef, resource: HeldResource) -> None:
        """Hold a resource under the number of ``ref``, whose life it shares.

        When the ref is dropped, or freed, it is released, once all uses are over.
        """
        self.blocks[ref.buffer] = resource
        self._held_count += 1

    def captured_workspaces(self) -> AccelRef:
        """Return the ref that stands for the workspaces of the lane in which graphs are captured.

        A replay uses them in whichever lane it runs. So each replay counts as a write of this ref,
        and comes after the replays before it.
        """
        if self._captured is None:
            self._captured = self._refs.make((Spec((0,), DType.UINT8),), self._generation)[0]
            # Not by `hold`, which counts what is to be released: this lives as long as the context.
            self.blocks[self._captured.buffer] = HeldResource(Usage(), None)
        return self._captured

    def allocate(self, refs: Sequence[AccelRef], lane: Timeline) -> bool:
        """Allocate memory for new buffers, and return whether there was room for all of them.

        Without room, and if a durable one raises, none is allocated. Never waits:
        :meth:`ensure_room` makes room.
        """
        for ref in refs:
            block = self.allocator.allocate(ref.nbytes, lane)
            if block is None:
                self._undo_allocation(refs)
                return False
            self.blocks[ref.buffer] = block
            if ref.durable:
                try:
                    self.durables.add_buffer(self, ref, block)
                except BaseException:
                    self._undo_allocation(refs)
                    raise
        return True

    def _undo_allocation(self, refs: Iterable[AccelRef]) -> None:
        """Free what a failed :meth:`allocate` has allocated: the first few of ``refs``.

        They go the way of dropped refs, so that the hooks of durable ones run and those without a
        block are passed over. Refs that were dropped before are freed too. The queue is empty
        afterwards, so that a retry with the same refs is not freed.
        """
        self._refs.dropped.extend([ref.buffer for ref in refs])
        self.apply_frees()

    async def ensure_room(self, specs: Iterable[Spec], lane: Timeline) -> None:
        """Make room so that the caller's next :meth:`allocate` of ``specs`` succeeds.

        Adds slabs if need be, frees dropped refs, and may have other lanes give up memory. The
        caller allocates before its next ``await``, else the room may be gone.

        Raises
        ------
        OutOfMemoryError
            If the limit or the device has none.
        """
        blocks: list[Block] = []
        try:
            for spec in specs:
                block = await self._allocate_or_reclaim(spec.nbytes, lane)
                blocks.append(block)
        finally:
            # Nothing else allocates before the caller does, so the room is still there then.
            for block in blocks:
                self.allocator.free(block)

    async def provide_workspaces(self, lane: Timeline, stream: AccelStream, library: str) -> None:
        """Give the stream of a lane the workspaces that ops of a library still lack there.

        They are the lane's until :meth:`release_workspaces`, and count in :attr:`workspace_nbytes`.

        Raises
        ------
        OutOfMemoryError
            If the limit or the device has no room.
        """
        while isinstance(stream, TakesWorkspace) and (nbytes := stream.workspace_wanted(library)):
            block = await self._allocate_or_reclaim(nbytes, lane)
            if stream.workspace_wanted(library) != nbytes:  # it was given meanwhile: look again
                self.allocator.free(block)
                continue
            self.workspace_nbytes += block.size
            self._workspaces.setdefault(lane, []).append(block)
            stream.use_workspace(block.address, nbytes)

    def release_workspaces(self, lane: Timeline) -> bool:
        """Free the workspaces of a lane, in which nothing runs; return whether it had any.

        Right after that the caller has the stream forget them: ``stream.release_workspaces()``.
        """
        blocks = self._workspaces.pop(lane, [])
        for block in blocks:
            self.workspace_nbytes -= block.size
            self.allocator.free(block)
        return bool(blocks)

    async def _allocate_or_reclaim(self, nbytes: int, lane: Timeline) -> Block:
        """Allocate a block; if that fails, have other lanes give up the memory that they only hold.

        Raises :class:`OutOfMemoryError` once there is nothing left to reclaim.
        """
        while True:
            try:
                return await self._allocate_or_grow(nbytes, lane)
            except OutOfMemoryError:
                if not self._reclaim(lane):
                    raise

    async def _allocate_or_grow(self, nbytes: int, lane: Timeline) -> Block:
        """Allocate a block, if need be from a new slab, which is created off the loop.

        Before that, dropped refs are freed. If no slab can be created, idle slabs are closed, and
        one is requested once more, as the last resort. Raises :class:`OutOfMemoryError` after that,
        and the fault if the context has faulted meanwhile.
        """
        allocator = self.allocator
        self.apply_frees()
        last_resort = False
        while (block := allocator.allocate(nbytes, lane)) is None:
            request = allocator.request_slab(nbytes, last_resort=last_resort)
            try:
                slab = await self._system.run_blocking(self._oom_retry.retry_on_oom, request.create)
                self._check_alive()
                allocator.adopt(request, slab)
            except BaseException as error:
                # Close the slabs that were removed or created for the request: their memory is free
                # for the next request then. They are closed also if this wait is cancelled.
                self._closing_slabs.add(allocator.cancel(request))
                await self._closing_slabs.wait_closed()
                if not isinstance(error, OutOfMemoryError):
                    raise
                if last_resort and error.library != "os":
                    raise allocator.out_of_memory(nbytes) from error
                if last_resort:  # the system is short of something else: closing slabs did not help
                    raise
                last_resort = True
        return block

    def apply_frees(self, max_count: int | None = None) -> None:
        """Free the memory of dropped refs, of ``max_count`` at most.

        The next use of the memory waits for streams that still use it. Resources among them, and
        those freed before, are released if their uses are over, else kept for a later call.
        """
        dropped = self._refs.dropped
        for _ in range(len(dropped) if max_count is None else min(max_count, len(dropped))):
            buffer = dropped.popleft()
            block = self.blocks.pop(buffer, None)
            if block is None:  # of another context, or freed before
                continue
            if isinstance(block, HeldResource):
                self._held_count -= 1
                self._freed_in_use.append(block)
            elif buffer in self.free_hooks:
                self.free_hooks.pop(buffer)(block)
            else:
                self.allocator.free(block)
        if self._freed_in_use:
            self._release_ended()

    def close_idle_slabs(self) -> None:
        """Close, off the loop, all slabs that are wholly free and idle. Returns at once.

        Called when an op has run out of device memory, as in a library of the vendor: what is idle
        here is then free for it.
        """
        self.apply_frees()
        self._closing_slabs.add(self.allocator.trim(everything=True))

    @property
    def closing_nbytes(self) -> int:
        """Bytes of slabs that were removed from the allocator and are not closed yet."""
        return sum(slab.nbytes for slab in self._closing_slabs.left)

    def release_unused(self) -> bool:
        """Free the memory of dropped refs, and release what was freed while work used it.

        Called when work has ended. Return whether it has to be called again when more work has
        ended: a resource is held, or something waits for the end of its uses.
        """
        self.apply_frees()
        if self.durables.idle:
            self.durables.trim(self)
        return bool(self._held_count or self._freed_in_use or self.durables.idle)

    def _release_ended(self) -> None:
        """Release, off the loop, the freed resources whose uses are over by now."""
        ended = [held for held in self._freed_in_use if held.usage.is_idle()]
        if ended:
            self._freed_in_use = [held for held in self._freed_in_use if held not in ended]
            self._closing_resources.add(ended)

    async def aclose(self) -> None:
        """Wait until the resources and slabs that are being closed are closed."""
        await self._closing_resources.wait_closed()
        await self._closing_slabs.wait_closed()

    def close(self, *, abandon: bool) -> None:
        """Release all resources, and close what was being closed; the caller closes the slabs.

        Called last, at the end of the context. The streams have ended, unless ``abandon``: then the
        resources are left as they are. An error of one keeps no other from being closed. May block.
        """
        in_blocks = [block for block in self.blocks.values() if isinstance(block, HeldResource)]
        held, self._freed_in_use = [*self._closing_resources.left, *self._freed_in_use, *in_blocks], []
        close_all([*(() if abandon else held), *self._closing_slabs.left, self.durables])
