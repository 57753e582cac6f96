"""Memory that a device shares with other libraries: exported, imported, managed; and its release.

Other libraries enqueue work on such memory at any moment, without notice. So every op on it waits
for all work that was enqueued on the device by then in this process. A stream can wait for that
without knowing the other streams.
"""

from __future__ import annotations

import itertools
import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from accel import dlpack
from accel._log import get_logger
from accel.actors.acquire import acquire
from accel.backend import ImportsSlabs
from accel.engine.captures import captures_of
from accel.engine.launches import LaneMark
from accel.engine.loans import LentRead, Loan
from accel.engine.stream_clock import StreamClock
from accel.errors import AccelError, InvalidArgumentError, UnsupportedError
from accel.exchange import SharesMemory
from accel.memory import Block, ExternalBlock, ExternalWork, SharedUsage, Usage
from accel.memory.space import ALIGNMENT, BASE
from accel.ops import Spec
from accel.ref import AccelRef, ForeignRef, ManagedRef, RefView
from accel.sharing.deferred_release import DeferredRelease
from accel.sharing.exports import BufferExports, Keepalive, Sharers, close_when_dropped
from accel.shortage import raise_shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.backend import AccelStream, HeldSlab, SlabMemory
    from accel.dtype import DType
    from accel.engine.captures import Captures
    from accel.engine.context import Context
    from accel.engine.stream_clock import EventPool
    from accel.exchange import Exchange

__all__ = ["Sharing"]

logger = get_logger()

ExternalRef = TypeVar("ExternalRef", bound=AccelRef)


class Sharing:
    """Shares the memory of one context with other libraries of this process.

    Used on the loop's thread only.

    Parameters
    ----------
    context
        The context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._exchange: Exchange | None = None
        self._exports: dict[int, BufferExports] = {}  # of exported buffers
        self._external_blocks: dict[int, ExternalBlock] = {}  # of imported and managed buffers
        self._releases: DeferredRelease | None = None  # made with the first external block
        # The number by which each slab with a lent buffer is known to the borrowers.
        self._lent_slabs: weakref.WeakKeyDictionary[SlabMemory, int] = weakref.WeakKeyDictionary()
        self._slab_numbers = itertools.count()

    # -- opening, at the first use

    def _open_exchange(self) -> Exchange:
        """Return the backend's exchange, which exports and imports memory.

        The first call makes it, and the lane and the timeline that stand for the work of other
        libraries; before, nothing of the context is shared.

        Raises
        ------
        UnsupportedError
            If the backend shares no memory.
        """
        exchange = self._exchange
        if exchange is None:
            context = self._context
            context.check_alive()
            device = context.device
            if not isinstance(device, SharesMemory):
                raise UnsupportedError(
                    f"{context.core.description.backend} shares no memory",
                    device=context.core.name,
                    remedy="Use device.put and device.get.",
                )
            exchange = device.create_exchange()
            self._external_lane = lane = ExternalLane(exchange.stream, context.events, captures_of(context.core))
            self._external_work = ExternalWork(lane, lane.advance, self._watch_external_work)
            self._exchange = exchange
        return exchange

    # -- exporting

    def dlpack_device(self, ref: AccelRef) -> tuple[int, int]:
        """Return DLPack's type and number of the device; raises ``BufferError`` without them."""
        self._context.core.guard()
        device = self._open_exchange().device
        if device == (0, 0):  # the backend has none
            raise BufferError(f"{ref!r} cannot be shared by DLPack; copy it: array = await device.get(ref)")
        return device

    def capsule(
        self,
        ref: AccelRef,
        stream: int | None,
        max_version: tuple[int, int] | None,
        dl_device: tuple[int, int] | None,
        copy: bool | None,
    ) -> Any:
        """Return a DLPack capsule; see :meth:`accel.AccelRef.__dlpack__`.

        The buffer is exported as long as the capsule, or the tensor made of it, lives.
        """
        device = self.dlpack_device(ref)
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"{ref!r} is on DLPack device {device}, not on {tuple(dl_device)}; copy it: array = await device.get(ref)")
        if copy:
            raise BufferError(
                f"{ref!r} is not copied by DLPack; copy it first: await device.copy(ref, await device.empty(ref.shape, ref.dtype))"
            )
        _check_stream(stream)
        block = self._block_of(ref)
        keepalive = Keepalive(ref.base if isinstance(ref, RefView) else ref)
        address, strides = block.address + ref.offset, ref.strides
        exported = dlpack.export(address, ref.shape, ref.dtype, device, keepalive, strides=strides, max_version=max_version)
        self._export(ref, block, keepalive, stream)
        return exported

    def address(self, ref: AccelRef, stream: int | None) -> tuple[int, object]:
        """Return the address of a ref, and what keeps its memory shared as long as it lives.

        See :meth:`accel.AccelRef.address`.
        """
        context = self._context
        context.core.guard()
        if self._open_exchange().device == (0, 0):
            raise UnsupportedError(
                f"the memory of {context.core.name} has no address for other libraries",
                device=context.core.name,
                remedy="Copy it: array = await device.get(ref).",
            )
        _check_stream(stream)
        block = self._block_of(ref)
        keepalive = Keepalive(ref.base if isinstance(ref, RefView) else ref)
        self._export(ref, block, keepalive, stream)
        return block.address + ref.offset, keepalive

    def _export(self, ref: AccelRef, block: Block, keepalive: Keepalive, stream: int | None) -> None:
        """Share a buffer's memory as long as ``keepalive``, held by the consumer's tensor, lives.

        The consumer's stream waits for our work on the memory, unless it is -1. Our later ops on it
        wait for the consumer's work.
        """
        if stream != -1:
            self._wait_for_pending(ref, block, partial(self._open_exchange().follow, 1 if stream is None else stream))
        self._track_exports(ref, block).keepalives.add(keepalive)

    def interface(self, ref: AccelRef) -> dict[str, Any]:
        """Return the CUDA array interface, and export the buffer until it is freed.

        Raises ``AttributeError`` where memory is not CUDA's, as objects without one do.
        """
        self._context.core.guard()
        exchange = self._open_exchange()
        if not exchange.speaks_cuda or ref.dtype.is_extended:
            why = "not in CUDA memory" if not exchange.speaks_cuda else f"{ref.dtype.value}, which the interface does not know; use DLPack"
            raise AttributeError(f"{ref!r} has no __cuda_array_interface__: it is {why}")
        block = self._block_of(ref)
        stream = exchange.stream if self._wait_for_pending(ref, block, exchange.stream.wait) else None
        self._track_exports(ref, block).is_permanent = True  # consumers do not tell their end
        return {
            "version": 3,
            "shape": ref.shape,
            "typestr": ref.dtype.numpy.str,
            "data": (block.address + ref.offset if ref.nbytes else 0, False),
            "strides": tuple([step * ref.dtype.itemsize for step in ref.strides]) if ref.is_strided else None,
            "stream": None if stream is None else stream.__cuda_stream__()[1],
        }

    def check_free(self, ref: AccelRef) -> None:
        """Raise unless ``ref`` can be freed: no other library's tensor has its memory.

        Raises
        ------
        InvalidArgumentError
        """
        exports = self._exports.get(ref.buffer)
        if exports is not None and exports.keepalives:
            raise InvalidArgumentError(
                f"{ref!r} is lent to another library", remedy="Drop its tensor, or leave the block of ref.address(), before."
            )

    def _block_of(self, ref: AccelRef) -> Block:
        """Return the block of a valid ref; raise for a stale one as an op on it does.

        It may hold what a failed op has left, which ops refuse to read.
        """
        self._context.check_alive()  # a durable ref outlives the context, its address does not
        self._context.core.refs.check(ref)
        block = self._context.buffers.block(ref)
        assert isinstance(block, Block), "users have no refs of held resources"
        return block

    def _track_exports(self, ref: AccelRef, block: Block) -> BufferExports:
        """Have ops on a buffer wait for the work of other libraries on it, from now on.

        Return its exports, which the caller adds the new one to. They decide how long ops wait:
        while a tensor lives, and for the work that was enqueued until its end.
        """
        exports = self._exports.get(ref.buffer)
        if exports is None:
            exports = self._exports[ref.buffer] = BufferExports()
            if ref.buffer not in self._external_blocks:
                # The allocator reuses the usage of a freed block: it gets an ordinary one before.
                hooks = self._context.buffers.free_hooks
                free = hooks.get(ref.buffer, self._context.buffers.allocator.free)
                hooks[ref.buffer] = partial(self._free_exported, ref.buffer, free)
        if not ref.is_foreign:  # the usage of a foreign one knows of the others' work since `wrap`
            # Give the block a usage that knows of the other libraries' work, and has `Sharers`. It
            # has one already if the buffer, or another one of its graph, was exported before.
            before = block.usage
            known = before.is_shared if isinstance(before, SharedUsage) else None
            if isinstance(known, Sharers):
                known.add(exports)
            else:
                sharers = Sharers()
                sharers.add(exports)
                shared = SharedUsage(before, self._external_work, sharers)
                for other in self._context.buffers.blocks.values():
                    if other.usage is before:  # the buffers of a graph have one usage
                        other.usage = shared
        return exports

    def merge_usages(self, usages: Sequence[Usage]) -> Usage:
        """Return a new usage for all buffers of a graph, some of which may be exported.

        The ``usages`` stay as they are; the caller gives the buffers the new one.
        """
        merged, sharers = Usage(), Sharers()
        for usage in usages:
            merged.merge(usage)
            if isinstance(usage, SharedUsage) and isinstance(usage.is_shared, Sharers):
                sharers.join(usage.is_shared)
        return SharedUsage(merged, self._external_work, sharers) if sharers() else merged

    def _wait_for_pending(self, ref: AccelRef, block: Block, wait_event: Any) -> bool:
        """Have a consumer's stream wait for our ops on a buffer that have not ended.

        ``wait_event`` has it wait for one event; it is called once for each lane that has such an
        op, unless that ends meanwhile. Return whether there was such a lane. Raises
        ``BufferError``, before anything waits, if an op is not in its stream yet.
        """
        pending = block.usage.pending(self._external_work.timeline)  # without the others' own work
        if any(lane.enqueued < seq for lane, seq in pending):
            raise BufferError(f"{ref!r} is used by ops that are not enqueued yet: await them first")
        events = self._context.events
        for lane, _ in pending:
            assert isinstance(lane, StreamClock), "the timelines of a context are its lanes"
            event = events.acquire()
            try:
                if not lane.stream.record(event):
                    wait_event(event)
            finally:
                events.release(event)  # the enqueued wait is for this recording of it
        return bool(pending)

    def _free_exported(self, buffer: int, free: Callable[[Block], None], block: Block) -> None:
        """Free the block of an exported buffer by ``free``; the hook of :meth:`_track_exports`.

        The next use of the memory waits for all work on it, also that of other libraries.
        """
        self._exports.pop(buffer, None)
        if isinstance(block.usage, SharedUsage):
            block.usage = block.usage.split()
        free(block)

    def _watch_external_work(self) -> None:
        """Watch for the end of all that other libraries have enqueued by now.

        Called by :class:`~accel.memory.ExternalWork`, whose timeline the end moves on. While a
        stream is captured, this is put off until all captures are over. After a fault nothing is
        watched.
        """
        context, lane = self._context, self._external_lane
        if context.fault is not None:
            return
        if lane.is_held:
            lane.call_after_captures(self._watch_external_work)
            return
        event = context.events.acquire()
        try:
            is_over = lane.stream.record(event)
        except AccelError:  # the next use of the memory raises it
            context.events.release(event)
            return
        mark = LaneMark(context, lane, lane.enqueued, event, "outside")
        if is_over:
            mark.complete()
        else:
            context.watcher.watch(mark)

    # -- importing

    def wrap(self, array: Any) -> AccelRef:
        """Return a ref to another library's array.

        The array is kept until the ref is dropped or freed, and its last use is over. The caller
        has waited for a live context.
        """
        if isinstance(array, AccelRef):
            is_own = array.owner is self._context.core.refs
            raise InvalidArgumentError(
                f"{array!r} is a ref already", remedy="Use it as it is." if is_own else "Copy it: await device.put(ref)."
            )
        memory = self._open_exchange().take(array)
        # Shared for good: the library may use its array whenever it likes.
        block = ExternalBlock(memory, SharedUsage(Usage(), self._external_work, lambda: True))
        block.address = memory.address or BASE  # an empty array may be nowhere
        ref = self._add_external(ForeignRef, block, memory.shape, memory.dtype)
        # The largest power of two that divides the address: kernels that read several elements at
        # once, and views, ask for it. More than that of the allocator's own blocks is of no use.
        ref.alignment = min(block.address & -block.address, ALIGNMENT)
        return ref

    async def managed(self, shape: tuple[int, ...], dtype: DType) -> AccelRef:
        """Return a ref to new managed memory; close it, and raise, if the context faults first."""
        memory = await self._create(partial(self._open_exchange().create_managed, max(1, Spec(shape, dtype).nbytes)))
        return self._add_external(ManagedRef, ExternalBlock(memory, Usage()), shape, dtype)

    async def attach(self, buffer: int, fd: int | None, nbytes: int) -> None:
        """Map the slab of another context, or of another process, as the buffer of that number.

        Parameters
        ----------
        buffer
            A new number. The end of its ref frees it, as any buffer.
        fd
            Descriptor of the slab, which is duplicated; ``None`` makes a new slab.
        nbytes
            The size of the slab.

        Raises
        ------
        UnsupportedError
            If the backend maps no slabs.
        AccelError
            If the memory cannot be mapped, or is not to be had.
        """
        context = self._context
        context.check_alive()
        device = context.device
        if not isinstance(device, ImportsSlabs):
            raise UnsupportedError(f"{context.core.description.backend} maps no memory of others", device=context.core.name)
        make: Callable[[], SlabMemory] = (
            partial(context.device.create_slab, nbytes) if fd is None else partial(device.import_slab, fd, nbytes)
        )
        self._add_block(buffer, ExternalBlock(await self._create(make), Usage()))

    async def _create(self, make: Callable[[], SlabMemory]) -> SlabMemory:
        """Make memory on a worker thread; close it, and raise, if the context faults first."""
        context, system = self._context, self._context.core.system
        memory = await acquire(system, make, lambda memory: memory.close())
        try:
            context.check_alive()
        except AccelError:
            await system.run_blocking(memory.close)
            raise
        return memory

    def _add_external(self, kind: type[ExternalRef], block: ExternalBlock, shape: tuple[int, ...], dtype: DType) -> ExternalRef:
        """Add a block that no allocator owns as a new buffer, and return its ref, of class ``kind``."""
        refs = self._context.core.refs
        ref = kind(refs, refs.next_buffer(), shape, dtype, self._context.generation)
        self._add_block(ref.buffer, block)
        return ref

    def _add_block(self, buffer: int, block: ExternalBlock) -> None:
        """Add a block that no allocator owns as the buffer of that number.

        When the buffer is freed, :meth:`_release` closes the memory.
        """
        buffers = self._context.buffers
        buffers.blocks[buffer] = block
        buffers.free_hooks[buffer] = partial(self._release, buffer)
        self._external_blocks[buffer] = block
        if self._releases is None:
            self._releases = DeferredRelease(self._context)

    # -- lending

    def lend(self, ref: AccelRef, mapped: tuple[int, ...] = ()) -> Loan:
        """Lend a buffer to another device. Ops that write the buffer wait for the end of the loan.

        Parameters
        ----------
        ref
            A ref to the whole buffer, no view of it.
        mapped
            Numbers of the slabs that the other device has mapped: no descriptor of these is sent.

        Raises
        ------
        UnsupportedError
            If no descriptor names its memory.
        OutOfMemoryError
            If the system has no descriptor left.
        """
        context, block = self._context, self._block_of(ref)
        memory = block.memory if isinstance(block, ExternalBlock) else block.slab
        if getattr(memory, "fd", -1) < 0:
            raise UnsupportedError(
                f"others cannot map the memory of {ref!r}", device=context.core.name, remedy="Copy it: await device.get(ref)."
            )
        slab = self._lent_slabs.get(memory)
        if slab is None:
            slab = self._lent_slabs[memory] = next(self._slab_numbers)
        loan, read = Loan(context.core.loop, context.generation, ref.nbytes, mapped), LentRead()
        try:
            fd = -1 if slab in mapped else os.dup(cast("HeldSlab", memory).fd)
        except OSError as error:
            raise_shortage(error, f"{ref!r} cannot be lent")
            raise
        loan.place(slab, memory.nbytes, block.address - memory.address, fd, read.end)
        block.usage.read(read, read.issued, [])
        return loan

    # -- releasing

    def _release(self, buffer: int, block: Block) -> None:
        """Close the memory of a block that no allocator owns once its uses are over.

        Called when its buffer is freed; returns at once.
        """
        assert isinstance(block, ExternalBlock), "others are the allocator's"
        self._exports.pop(buffer, None)
        del self._external_blocks[buffer]
        assert self._releases is not None, "made when the block was added"
        self._releases.release(block)

    # -- the end

    async def aclose(self) -> None:
        """Wait until the memory that is being closed is closed; :meth:`take_all` has the rest."""
        if self._releases is not None:
            await self._releases.aclose()

    def take_all(self) -> list[SlabMemory]:
        """Remove all memory from the context, slabs and the rest, for the caller to close.

        Called once, at the context's end; closes the exchange with other libraries too. Memory that
        their tensors still use is left out, with a warning: a thread closes it once they are
        dropped.
        """
        context = self._context
        blocks, fault = context.buffers.blocks, context.fault
        # Find the memory with live tensors, each piece with all of them, by the id of the piece.
        live: dict[int, tuple[SlabMemory, list[Keepalive]]] = {}
        if fault is None or not fault.is_fault:  # after a fault it cannot be reached any more
            for buffer, exports in self._exports.items():
                block, keepalives = blocks.get(buffer), list(exports.keepalives)
                if keepalives and isinstance(block, Block):
                    memory = block.memory if isinstance(block, ExternalBlock) else block.slab
                    live.setdefault(id(memory), (memory, []))[1].extend(keepalives)
        if live:
            tensors = sum(len(keepalives) for _, keepalives in live.values())
            nbytes = sum(memory.nbytes for memory, _ in live.values())
            logger.warning("exported_memory_left", device=context.core.name, tensors=tensors, nbytes=nbytes)
            close_when_dropped(live.values(), self._open_exchange().settle, context.core.name)
        memories = context.buffers.allocator.take_all()
        if self._releases is not None:
            memories += self._releases.take_all(self._external_blocks.values())
        if self._exchange is not None:
            self._exchange.close()
        return [memory for memory in memories if id(memory) not in live]


class ExternalLane(StreamClock):
    """Stands for the work of other libraries in this process.

    Its numbers are in its stream as soon as they are issued, except during a capture: a mark that is
    recorded while any stream is captured into a graph would break the capture. Ops that depend on a
    number wait until the capture has ended. Making the lane adds it to ``captures``, which call
    :meth:`on_captures_ended`.

    Parameters
    ----------
    stream, events
        As of any lane; nothing is computed there.
    captures
        Those of the device.
    """

    __slots__ = ("__weakref__", "_calls", "_captures", "_number")

    def __init__(self, stream: AccelStream, events: EventPool, captures: Captures) -> None:
        self._captures = captures
        self._calls: list[Callable[[], object]] = []
        super().__init__("outside", stream, events)
        captures.add(self)

    @property
    def is_held(self) -> bool:
        """Whether no mark can be recorded now, because a stream is captured."""
        return self._captures.count > 0

    @property
    def enqueued(self) -> int:
        """The last number that can be waited for now; 0, before all, while a stream is captured."""
        return 0 if self._captures.count else self._number

    @enqueued.setter
    def enqueued(self, seq: int) -> None:
        self._number = seq

    def call_after_captures(self, call: Callable[[], object]) -> None:
        """Have ``call`` called once all captures are over: once, also if it is given again."""
        if call not in self._calls:
            self._calls.append(call)

    def on_captures_ended(self) -> None:
        """Wake ops that wait for a number, and make the calls; called when captures are over."""
        self._wake()
        calls, self._calls = self._calls, []
        for call in calls:
            call()


def _check_stream(stream: object) -> None:
    """Raise unless ``stream`` is what DLPack allows for a CUDA consumer."""
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int) or stream < -1 or stream == 0):
        raise BufferError(f"stream is {stream!r}: give None, -1, 1, 2 or a handle")
