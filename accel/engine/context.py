"""One generation of a device: its lanes and its memory, and the dispatch of ops to the lanes.

Everything here runs on the loop's thread; calls that may block go to ``run_blocking``.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from accel._log import get_logger
from accel.backend import ChecksAlive, CountsCommands, KnowsShortages, TakesWorkspace
from accel.engine.failures import Failures
from accel.engine.in_flight import ContextBase
from accel.engine.kernel_table import KernelTable
from accel.engine.lanes import Lanes
from accel.engine.launches import BatchedOp, LaunchGroup, OpSubmission
from accel.engine.libraries import Libraries
from accel.engine.offloaded import OffloadedCalls
from accel.engine.op_error import raise_op_error
from accel.engine.program import GraphSubmission, JoinsUsages, Replay
from accel.engine.registration import Unregistration
from accel.engine.scratch import Scratch
from accel.engine.status import PendingStatus
from accel.engine.stream_clock import EventPool
from accel.engine.submission import BatchSubmission, result_of
from accel.errors import AccelError, ClosedError
from accel.memory import Allocator
from accel.ops import Free
from accel.storage.buffers import Buffers, HeldResource
from accel.storage.closing import close_all
from accel.storage.durable_slabs import DurableSlabs
from accel.world.member import Members

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from accel.actors import ActorRef
    from accel.backend import AccelDevice, AccelStream, SlabMemory
    from accel.completion import Watcher
    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.lane import Lane
    from accel.engine.launches import BoundOp
    from accel.engine.submission import Submission
    from accel.memory import Dependency, Timeline
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef

__all__ = ["Context", "ContextSharing"]

logger = get_logger()

_CHUNK = 128
"""The most ops of a batch that are dispatched in one loop iteration: some milliseconds."""


class ContextSharing(JoinsUsages, Protocol):
    """Shares memory with other libraries; see :class:`~accel.sharing.sharing.Sharing`."""

    async def aclose(self) -> None:
        """Wait for the releases of other libraries' memory that are going on."""

    def take_all(self) -> list[SlabMemory]:
        """Take all memory out of the context, for the caller to close."""


class Context(ContextBase):
    """One generation of a device in this process.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    owner
        Decides what follows a fault.
    device
        The backend's context.
    watcher
        Tells when marks are passed.
    share
        Makes what shares memory with others; called with the context before it is complete.
    open_library
        Starts the kernel actor of a library, and returns it once the library is open.

    Attributes
    ----------
    device, watcher
        See the parameters.
    buffers, durables : Buffers, DurableSlabs
        The memory of the context, and the part of it that outlives the context.
    scratch : Scratch
        Allocates what an op needs besides its operands.
    events : EventPool
    kernels : KernelTable
    registered : dict of str to RegisteredLibrary
        The registered libraries that are open.
    lanes : Lanes
    libraries : Libraries
    offloaded : OffloadedCalls
        Calls the functions that run on worker threads and use the context.
    sharing : ContextSharing
    failures : Failures
    members : Members
        The ranks of worlds that the context is.
    opening : context manager
        Entered while a library is opened or memory is made, for which ops wait. A child reports
        such times to its parent, which then allows it more time.
    """

    def __init__(
        self,
        core: DeviceCore,
        owner: ContextOwner,
        device: AccelDevice,
        watcher: Watcher,
        share: Callable[[Context], ContextSharing],
        open_library: Callable[[Context, str], Awaitable[ActorRef[Any, None]]],
    ) -> None:
        super().__init__(core, owner)
        self.device = device
        self.watcher = watcher
        allocator = Allocator(device.create_slab, device=core.name, limit=core.options.memory_limit, granularity=device.granularity)
        self.durables = DurableSlabs(core.name, core.system, core.keeper, device, self._release_when_retired)
        self.buffers = Buffers(
            core.refs, core.system, core.oom_retry, allocator, self.generation, self.check_alive, self.durables, self._reclaim_workspaces
        )
        self.scratch = Scratch(device, allocator, core.system)
        self.events = EventPool(device)
        self.kernels = KernelTable(core, device, self.scratch)
        self._kernel_cache = self.kernels.cache
        self.registered = self.kernels.registered
        self.members = Members(device, core.system.run_blocking, self.kernels.add_part)
        self.offloaded = OffloadedCalls(self.registered)
        self.opening: AbstractContextManager[object] = nullcontext()
        self.sharing = share(self)
        self.failures = Failures(self, self.buffers, self.durables)
        self.lanes = Lanes(self, core.options.streams, lambda lane, library: self.libraries.actors[library].tell(lane))
        self.libraries = Libraries(self, self.lanes, self.kernels, partial(open_library, self))
        if isinstance(device, CountsCommands):
            self.limit = min(self.limit, device.queue_limit)
        self._chunk = max(1, min(_CHUNK, self.limit // 2))
        self._close_lock = threading.Lock()  # never released by the thread that closes the context

    # -- dispatch: called by the device's actor, one submission at a time, in order

    def dispatch_now(self, submission: OpSubmission, preferred: Lane | None = None) -> bool:
        """Dispatch one op if nothing has to be awaited; else reserve nothing and return ``False``.

        ``False``: its library is not open, or memory is lacking; :meth:`dispatch` provides it, and
        then gives the lane as ``preferred``. A ``Free`` takes effect, and ends, in this call.
        """
        buffers, op, lanes = self.buffers, submission.op, self.lanes
        if type(op) is Free:
            self.core.refs.dropped.append(op.ref.buffer)
            buffers.apply_frees()
            submission.succeed()
            return True
        if self.core.refs.dropped:
            buffers.apply_frees()
        # 1. The kernel and the lane. Kernels of a registered library are known once it is open.
        library = op.library
        lane = lanes.routes.get(library)
        if lane is None and library in self.core.registrations:
            return False
        if isinstance(op, Replay):
            op.check_libraries()  # one may be unregistered by now
        kernel = self._kernel_cache.get(type(op)) or self.kernels.find(op)
        if lane is None:
            return False
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        if library in lanes.pooled_libraries:
            transfer_lane = lanes.transfer_lanes.get(op.kind) if library == "memory" else None
            lane = transfer_lane or preferred or lanes.choose((library,), plan)
        # 2. The memory: scratch, then the buffers of the results.
        refs = plan.writes
        scratch = self.scratch
        if (plan.status is not None or (library, op.kind) in scratch.sizes) and not scratch.reserve(op, plan, lane):
            return False
        try:
            if plan.creates:
                result_refs = submission.result_refs or self.core.refs.make(plan.creates, self.generation)
                if not buffers.allocate(result_refs, lane):
                    scratch.cancel()
                    return False
                refs += result_refs
            # 3. The result, and the op's place in the lane's order.
            submission.result = result_of(op, refs, self.core.loop)
            faults = self.core.options.faults
            injected_fault = None if faults is None else faults.take(submission.name)
            submission.bind(
                self, lane, kernel, injected_fault, 1 if self.kernels.command_counts is None else self.kernels.count_commands(op, plan)
            )
            self._schedule(submission, op, lane, plan, refs)
        except BaseException:
            scratch.cancel()
            raise
        submission.outstanding = 1
        self.on_dispatched(submission, 1, submission.commands)
        lane.send(submission)
        return True

    def _schedule(self, launch: BoundOp, op: KernelOp, lane: Lane, plan: Plan, refs: Iterable[AccelRef]) -> None:
        """Give an op its sequence number, its addresses, and the work that it must wait for.

        They are set in ``launch``; for an op with a status, a :class:`PendingStatus` as its kernel.
        From then on the op is the last user of its memory; ``refs`` are the refs that it writes,
        those of its results included.

        Raises
        ------
        AccelError
            If an operand was freed, or its contents are those of a failed op.
        """
        blocks, failures = self.buffers.blocks, self.failures
        # All that may raise comes before the number is issued: the lane's clock waits for it.
        for ref in plan.reads + plan.writes:
            if ref.buffer not in blocks:
                self.buffers.block(ref)  # raises, with the reason
        if failures.reported or failures.has_invalid:
            failures.check(plan)
        status = None
        if plan.status is not None:
            status = launch.kernel = PendingStatus(plan.status, launch.kernel, lane)
            launch.is_offloaded = True if status.may_block(self.device, lane) else None
        lane.issued = seq = lane.issued + 1
        # Only if an earlier write may still fail; dropped ops have retired before their numbers end.
        if failures.is_tracking and (self.in_flight or failures.has_invalid or (plan.writes and lane.completed < seq - 1)):
            failures.track(lane, seq, plan)
        # Each usage appends the unfinished work of other lanes on its memory to the dependencies.
        dependencies: list[Dependency] = []
        inputs: list[int] = []
        outputs: list[int] = []
        for ref in plan.reads:
            block = blocks[ref.buffer]
            block.usage.read(lane, seq, dependencies)
            inputs.append(block.address + ref.offset)
        for ref in refs:
            block = blocks[ref.buffer]
            block.usage.write(lane, seq, dependencies)
            outputs.append(block.address + ref.offset)
        if plan.status is not None or (op.library, op.kind) in self.scratch.sizes:
            scratch_addresses = self.scratch.assign(op, plan, lane, seq, dependencies)
            outputs += scratch_addresses
            if status is not None:
                status.address = scratch_addresses[0]
                failures.expect_status(lane, seq, status)
        launch.inputs, launch.outputs, launch.seq, launch.dependencies = inputs, outputs, seq, dependencies

    async def dispatch(self, submission: Submission) -> None:
        """Allocate memory and issue sequence numbers for a submission, and send it to lanes.

        Waits only for a library to be opened, a new slab, or room for a large batch.

        Raises
        ------
        ContextPoisonedError
            If a fault surfaces here, in making a stream or allocating memory; it is reported.
        AccelError
            The submission's own error; or a fault, as it is, if one was reported already.
        """
        try:
            await self.apply_many_frees()
            if isinstance(submission, Unregistration):
                self.libraries.unregister(submission)
            elif isinstance(submission, BatchSubmission):
                await self._dispatch_batch(submission)
            else:
                assert isinstance(submission, OpSubmission), "there are no others"
                if isinstance(submission, GraphSubmission):
                    await self._prepare_capture(submission)
                await self._dispatch_op(submission)
        except AccelError as error:
            if self.fault is not None or not error.is_fault:  # it is reported already, or the op's alone
                raise
            self.report_fault(error)
            raise self.poisoned_error(error, submission) from None

    async def _prepare_capture(self, submission: GraphSubmission) -> None:
        """Open the libraries that the capture of a graph needs, and allocate the graph's memory.

        The capture calls the kernels of all ops in its own lane. Those of a registered library are
        known only once it is open.
        """
        registered = [op.library for op in submission.program.ops if op.library in self.core.registrations]
        for library in dict.fromkeys((*registered, submission.library)):
            await self.libraries.open(library)
        with self.opening:
            await submission.allocate(self, self.lanes.routes[submission.library])

    async def _dispatch_op(self, submission: OpSubmission) -> None:
        """Dispatch one op once its library is open and there is memory; not if it ends before."""
        op = submission.op
        preferred: Lane | None = None
        while not submission.future.done():
            # A fault during a wait ended the submissions in flight; this one is not among them.
            self.check_alive()
            if self.dispatch_now(submission, preferred):
                return
            preferred = self.lanes.routes.get(op.library)
            if preferred is None:
                await self.libraries.open(op.library)
            else:  # the library is open, so memory was lacking
                await self._provide_memory(submission, 0, op, preferred)

    async def _dispatch_batch(self, submission: BatchSubmission) -> None:
        """Dispatch the ops of a batch that were not dispatched yet, a chunk at a time.

        Once the future has ended no further op is dispatched.
        """
        ops, count = submission.ops, len(submission.ops)
        # Each library is opened once, for the first op that it has in the batch.
        for library, op in dict(zip(reversed(submission.libraries), reversed(ops), strict=True)).items():
            if self.kernels.is_known(op):  # else the op is refused in its turn
                await self.libraries.open(library)
        lane = self.lanes.choose_for_batch(submission)
        while submission.dispatched < count:
            if not submission.future.done():  # a submission that has ended may have released its ops
                command_counts = self._count_next_chunk(submission)
                await self.wait_for_room(sum(command_counts))
            if submission.future.done():
                # Nothing will make the results of the ops that are left.
                submission.free_results_from(max(submission.dispatched, submission.committed))
                return
            if self.core.refs.dropped:
                self.buffers.apply_frees()
            if not self._dispatch_chunk(submission, command_counts, lane):
                index = submission.dispatched
                try:
                    await self._provide_memory(submission, index, ops[index], lane)
                except Exception as raised:
                    raise_op_error(raised, f"finding memory for {submission.kinds[index]}", self.core.loop, op_index=index)
            elif submission.dispatched < count:
                # Some devices run the chunk in this very call: other tasks must get a turn.
                await asyncio.sleep(0)

    def dispatch_batch_now(self, submission: BatchSubmission) -> bool:
        """Dispatch the rest of a batch if nothing has to be awaited; else return ``False``.

        Where memory is lacking for an op, the ops before it are dispatched, and this returns
        ``False``: the next call, or :meth:`dispatch`, goes on at ``submission.dispatched``.
        """
        if not self.lanes.routes.keys() >= set(submission.libraries):
            return False
        command_counts = self._count_next_chunk(submission)
        if submission.dispatched + len(command_counts) < len(submission.ops) or self.commands + sum(command_counts) > self.limit:
            return False
        if self.core.refs.dropped:
            self.buffers.apply_frees()
        return self._dispatch_chunk(submission, command_counts, self.lanes.choose_for_batch(submission))

    def _dispatch_chunk(self, submission: BatchSubmission, command_counts: Sequence[int], lane: Lane) -> bool:
        """Dispatch the next ops of a batch to a lane; return whether there was memory for all.

        ``command_counts`` has the commands of each of these ops; ``submission.dispatched`` says how
        far it came. All ops of a batch go to one lane: a chain needs no waits between streams then.
        """
        start, count = submission.dispatched, len(submission.ops)
        launches: list[BatchedOp] = []
        try:
            are_all_bound = self._bind_chunk(submission, len(command_counts), lane, launches)
        except Exception as raised:
            self.scratch.cancel()
            index = start + len(launches)
            raise_op_error(raised, f"sending {submission.kinds[index]}", self.core.loop, op_index=index)
        finally:
            # Issued sequence numbers must reach the lane even if a later op could not be bound.
            if launches:
                submission.dispatched = start + len(launches)
                submission.chunks.append((lane, launches[0].seq, start, len(launches)))
                commands = sum(command_counts[: len(launches)])
                group = LaunchGroup(self, submission, lane, launches, commands, is_last=submission.dispatched == count)
                submission.outstanding += len(launches)
                self.on_dispatched(submission, len(launches), commands)
                lane.send(group)
        return are_all_bound

    def _count_next_chunk(self, submission: BatchSubmission) -> list[int]:
        """Return how many commands each op of a batch's next chunk has.

        The chunk begins at the first op that was not dispatched. Its ops have ``_chunk`` commands
        together at most; one op that has more is a chunk by itself.
        """
        ops, plans, start, count_commands = submission.ops, submission.plans, submission.dispatched, self.kernels.count_commands
        if self.kernels.command_counts is None:
            return [1] * min(self._chunk, len(ops) - start)
        commands = count_commands(ops[start], plans[start])
        command_counts = [commands]
        for index in range(start + 1, len(ops)):
            count = count_commands(ops[index], plans[index])
            commands += count
            if commands > self._chunk:
                break
            command_counts.append(count)
        return command_counts

    async def _provide_memory(self, submission: Submission, index: int, op: KernelOp, lane: Lane) -> None:
        """Make a slab with room for what op ``index`` of a submission needs, off the loop.

        Called when there was no memory for it; the caller then tries the dispatch again.
        """
        with self.opening:
            if op.library not in lane.ready_libraries:
                await self.provide_workspaces(lane, op.library)
            plans = submission.plans
            if plans:  # else the submission has ended meanwhile
                plan = plans[index]
                await self.buffers.ensure_room((*await self.scratch.specs((op,), plan), *plan.creates), lane)

    async def provide_workspaces(self, lane: Lane, library: str) -> None:
        """Give a lane the workspaces of a library, if it needs any, and count it as ready.

        Called by the library's actor, when the library opens or another lane gets it, and by the
        dispatch for an op in a lane that lacks them. Calls for one lane may overlap, as two
        libraries open. Raises as :meth:`Buffers.provide_workspaces`.
        """
        if lane.needs_workspace(library):
            # Also if this fails: batches with it then go to ready lanes, or to the first.
            self.lanes.workspace_libraries.add(library)
        await self.buffers.provide_workspaces(lane, lane.stream, library)
        lane.ready_libraries.add(library)

    def _reclaim_workspaces(self, wanting: Timeline) -> bool:
        """Free the workspaces of idle lanes, and return whether there were any.

        The buffers call it when memory is short, for an op in the lane ``wanting``.
        """
        lanes = self.lanes
        if wanting is lanes.equipping:  # workspaces are not taken from one lane for another
            return False
        released = [lane for lane in lanes.reclaimable_lanes() if lane is not wanting and self.buffers.release_workspaces(lane)]
        for lane in released:
            stream = lane.stream
            assert isinstance(stream, TakesWorkspace), "only such a stream has workspaces"
            stream.release_workspaces()
            lane.ready_libraries = {library for library in lane.ready_libraries if not lane.needs_workspace(library)}
        if released:
            lanes.stop_equipping()  # for good: the lanes would ask for them again
        return bool(released)

    def _bind_chunk(self, submission: BatchSubmission, count: int, lane: Lane, launches: list[BatchedOp]) -> bool:
        """Find the kernel and the memory of the next ``count`` ops of a batch, and schedule them.

        Each op that is bound is appended to ``launches``, also if a later one raises. Stops at the
        first op without memory, and returns whether there was memory for all.
        """
        ops, plans, outputs = submission.ops, submission.plans, submission.outputs
        buffers, kernels, scratch, faults = self.buffers, self._kernel_cache, self.scratch, self.core.options.faults
        for index in range(submission.dispatched, submission.dispatched + count):
            op, plan = ops[index], plans[index]
            kernel = kernels.get(type(op)) or self.kernels.find(op)
            refs = plan.writes
            if isinstance(op, Replay):
                op.check_libraries()  # one may be unregistered by now
            if op.library not in lane.ready_libraries:
                return False  # it lacks a workspace here, which is memory too
            if (plan.status is not None or (op.library, op.kind) in scratch.sizes) and not scratch.reserve(op, plan, lane):
                return False
            if plan.creates:
                result_refs = outputs[index]
                if not buffers.allocate(result_refs, lane):
                    scratch.cancel()
                    return False
                refs += result_refs
            injected_fault = None if faults is None else faults.take(op.kind)
            launch = BatchedOp(op, plan, kernel, injected_fault, index)
            self._schedule(launch, op, lane, plan, refs)
            launches.append(launch)
        return True

    async def open(self, library: str) -> None:
        """See :meth:`Libraries.open`."""
        await self.libraries.open(library)

    def hold(self, ref: AccelRef, resource: HeldResource) -> None:
        """Hold a resource under a buffer's number; see :meth:`~accel.storage.buffers.Buffers.hold`.

        Once the ref is dropped, it is released when its last use has ended, also if no op follows;
        if nothing is in flight, by the next op. A captured graph is held so, under its handle.
        """
        self.buffers.hold(ref, resource)
        self._release_when_retired()

    def _release_when_retired(self) -> None:
        """Check whenever ops retire whether a held resource can be released."""
        self.after_retire = self._release_held

    def _release_held(self) -> None:
        """Release held resources whose uses have ended; check no more when none is left."""
        if not self.buffers.release_unused():
            self.after_retire = None

    def apply_frees(self, max_count: int | None = None) -> None:
        """Free the memory of dropped refs, of ``max_count`` at most."""
        self.buffers.apply_frees(max_count)

    def is_out_of_memory(self, raised: BaseException) -> bool:
        """Return whether a library's error means that the device has no memory. Thread-safe."""
        return isinstance(self.device, KnowsShortages) and self.device.is_out_of_memory(raised)

    def fault_of(self, stream: AccelStream, error: AccelError) -> AccelError | None:
        """Return the fault that a library's error was caused by, or ``None`` if none is known.

        A library that checks the device's state, such as torch, raises a fault as an error of its
        own, before a mark of this context reports it. So the driver is asked, where it can be.
        """
        try:
            if isinstance(self.device, ChecksAlive):
                self.device.check_alive(stream)
        except Exception as found:
            if isinstance(found, AccelError) and found.is_fault:
                found.__cause__ = found.__cause__ or error
                return found
            logger.warning("context_not_asked", device=self.core.name, error=found)
        return None

    def busy_seconds(self) -> float:
        """See :meth:`ContextBase.busy_seconds`."""
        return self.offloaded.loading.seconds() + self.core.loans.seconds()

    @property
    def peak(self) -> int:
        """The most bytes of slabs at once. Thread-safe."""
        return self.buffers.allocator.peak

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes of buffers, of slabs, and of workspaces, in this order. Thread-safe."""
        buffers, allocator, workspaces = self.buffers, self.buffers.allocator, self.buffers.workspace_nbytes
        return allocator.used - workspaces, allocator.reserved + buffers.closing_nbytes, workspaces

    # -- the end

    async def close(self, *, abandon: bool) -> None:
        """Release all resources, off the loop; with ``abandon``, work in streams is not awaited.

        On cancellation, or a shortage of threads, the rest is released at once, and work that runs
        is abandoned. In a forked child this does nothing.
        """
        if self.core.home.is_inherited:
            return
        if self.fault is None:
            # From here on a fault that surfaces in a stream is not reported.
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
            self.fail_all(self.fault)
        self.after_retire = None
        tasks = [lane.task for lane in self.lanes.all if lane.task is not None]
        # What may still use streams, events or memory ends first; these are released last.
        try:
            for task in tasks:
                task.cancel()
                await asyncio.wait((task,))
            await self.libraries.aclose()
            await self.watcher.aclose(abandon=abandon)
            await self.sharing.aclose()
            await self.buffers.aclose()
            await self.durables.aclose()
            await self.core.system.run_blocking(self._close_blocking, abandon)
        except BaseException:  # cancelled, or no thread can be had
            if not self.core.home.is_inherited:
                self._close_blocking(abandon=True)
            raise

    def _close_blocking(self, abandon: bool) -> None:
        """Release everything, once; on a worker thread, or to abandon on the loop's thread."""
        if not self._close_lock.acquire(blocking=False):
            return  # another thread closes the context, or has closed it
        # The epochs of worlds end first, and then the calls on worker threads.
        close_offloaded = partial(self.offloaded.close, partial(self._release_all, abandon), wait=not abandon)
        self.members.close(close_offloaded, wait=not abandon)

    def _release_all(self, abandon: bool) -> None:
        """Close streams, memory, events and the backend's context; no worker uses them any more."""
        with ExitStack() as stack:  # calls all, in reverse order, whatever one raises
            stack.callback(self.device.close, abandon=abandon)
            stack.callback(self.core.pinned.arena.detach, self.device)
            stack.callback(lambda: close_all(self.sharing.take_all()))  # all slabs, and memory of other libraries
            stack.callback(self.events.close)
            stack.callback(self.buffers.close, abandon=abandon)
            for stream in (*[lane.stream for lane in self.lanes.all], *[stream for _, stream in self.lanes.unused]):
                stack.callback(stream.close, abandon=abandon)
