"""One generation of a device: its lanes and its memory, and the dispatch of ops to the lanes.

Everything here runs on the loop's thread; calls that may block go to ``run_blocking``. A context
that has faulted is never used again.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
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
from accel.engine.marks import LaneMark
from accel.engine.offloaded import OffloadedCalls
from accel.engine.op_error import raise_op_error
from accel.engine.program import GraphSubmission, JoinsUses, Replay
from accel.engine.registration import Unregistration
from accel.engine.scratch import Scratch
from accel.engine.status import STATUS_COMMANDS, PendingStatus
from accel.engine.stream_clock import EventPool
from accel.engine.submission import BatchSubmission, result_of
from accel.errors import AccelError, ClosedError
from accel.memory import Allocator
from accel.ops import Free
from accel.storage.buffers import Buffers
from accel.storage.closing import close_all
from accel.storage.durable_slabs import DurableSlabs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from accel.actors import ActorRef
    from accel.backend import AccelDevice, AccelStream, Kernel, SlabMemory
    from accel.completion import Watcher
    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.lane import Lane
    from accel.engine.launches import Bound
    from accel.engine.submission import Submission
    from accel.memory import Dependency, Timeline, Usage
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef

__all__ = ["Context", "ContextSharing"]

logger = get_logger()

_CHUNK = 128
"""Ops of a batch that are sent in one turn of the loop, some milliseconds."""


class ContextSharing(JoinsUses, Protocol):
    """Shares memory with other libraries; see :class:`~accel.sharing.sharing.Sharing`."""

    async def aclose(self) -> None:
        """Wait until what is being given back is so."""

    def take_all(self) -> list[SlabMemory]:
        """Take all memory out of the context, for the caller to close."""


class Context(ContextBase):
    """The disposable part of a device.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    owner
        Decides what follows a fault.
    device
        The backend's context.
    watcher
        How marks are waited for.
    share
        Makes what shares its memory with other libraries; the context is not complete yet.
    open_library
        Starts the kernel actor of a library, and returns it once the library is open.

    Attributes
    ----------
    lanes : Lanes
        The streams.
    libraries : Libraries
        Opens and closes libraries.
    opening : context manager
        Entered while something is made that ops wait for.
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
        self.durables = DurableSlabs(core.name, core.system, core.keeper, device, self._wait_for_ends)
        self.buffers = Buffers(
            core.refs, core.system, core.memory_back, allocator, self.generation, self.check_alive, self.durables, self._reclaim
        )
        self.scratch = Scratch(device, allocator, core.system)
        self.events = EventPool(device)
        self.kernels = KernelTable(core, device, self.scratch)
        self._found = self.kernels.found
        self.own = self.kernels.own
        self.offloaded = OffloadedCalls(self.own)
        self.opening: AbstractContextManager[object] = nullcontext()
        self.sharing = share(self)
        self.failures = Failures(self, self.buffers, self.durables)
        self.lanes = Lanes(self, core.options.streams, lambda lane, library: self.libraries.actors[library].tell(lane))
        self.libraries = Libraries(self, self.lanes, self.kernels, partial(open_library, self))
        self._counts: Mapping[tuple[str, str], int | Callable[[Any], int]] | None = None
        if isinstance(device, CountsCommands):
            self._counts, self.limit = device.commands, min(self.limit, device.queue_limit)
        self._chunk = max(1, min(_CHUNK, self.limit // 2))
        self._to_close = threading.Lock()  # the thread that gets it closes the context, and keeps it

    # -- dispatch: called by the device's actor, one submission at a time, in order

    def dispatch_now(self, submission: OpSubmission, given: Lane | None = None) -> bool:
        """Dispatch one op if nothing has to be awaited; else change nothing and return ``False``.

        An op of a library that is spread over the pool goes to the lane ``given``, if there is one.
        """
        buffers, op, lanes = self.buffers, submission.op, self.lanes
        if type(op) is Free:
            self.core.refs.dropped.append(op.ref.buffer)
            buffers.apply_frees()
            submission.succeed()
            return True
        if self.core.refs.dropped:
            buffers.apply_frees()
        library = op.library
        lane = lanes.routes.get(library)
        if lane is None and library in self.core.own:
            return False
        kernel = self._found.get(type(op)) or self.kernels.find(op)
        if lane is None:
            return False
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        if library in lanes.spread:
            transfers = lanes.transfers.get(op.kind) if library == "memory" else None
            lane = transfers or given or lanes.choose((library,), plan, buffers.blocks)
        refs = plan.writes
        scratch = self.scratch
        if (plan.status is not None or (library, op.kind) in scratch.sizes) and not scratch.reserve(op, plan, lane):
            return False
        try:
            if plan.creates:
                made = submission.made or self.core.refs.make(plan.creates, self.generation)
                if not buffers.place(made, lane):
                    scratch.give_up()
                    return False
                refs += made
            submission.result = result_of(op, refs, self.core.loop)
            faults = self.core.options.faults
            action = None if faults is None else faults.take(submission.name)
            submission.bind(self, lane, kernel, action, 1 if self._counts is None else self._commands(op, plan))
            self._take_place(submission, op, lane, plan, refs)
        except BaseException:
            scratch.give_up()
            raise
        submission.outstanding = 1
        self.sent(submission, 1, submission.commands)
        lane.send(submission)
        return True

    def _take_place(self, launch: Bound, op: KernelOp, lane: Lane, plan: Plan, refs: Iterable[AccelRef]) -> None:
        """Make an op the next user of its memory: set addresses, sequence number, dependencies.

        Raises
        ------
        AccelError
            If an operand is gone, or holds what a failed op left there.
        """
        blocks, failures = self.buffers.blocks, self.failures
        # All that may raise comes before the number is issued.
        for ref in plan.reads + plan.writes:
            if ref.buffer not in blocks:
                self.buffers.block(ref)  # raises, with the reason
        if failures.raised or failures.has_unsound:
            failures.check(plan)
        status = None
        if plan.status is not None:
            status = launch.kernel = PendingStatus(plan.status, launch.kernel, lane)
            launch.is_offloaded = True if status.may_block(self.device, lane) else None
        lane.issued = seq = lane.issued + 1
        if failures.is_tracking and (self.in_flight or failures.has_unsound or (plan.writes and lane.completed < seq - 1)):
            failures.enlist(lane, seq, plan)
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
            lent = self.scratch.lend(op, plan, lane, seq, dependencies)
            outputs += lent
            if status is not None:
                status.address = lent[0]
                failures.expect(lane, seq, status)
        launch.inputs, launch.outputs, launch.seq, launch.dependencies = inputs, outputs, seq, dependencies

    async def dispatch(self, submission: Submission) -> None:
        """Allocate memory and issue sequence numbers for a submission, and send it to lanes.

        Waits for a library's first use, a new slab, or room for a large batch, and for nothing
        else. The submission's own errors are raised.

        Raises
        ------
        ContextPoisonedError
            Also if a fault surfaces here, in making a stream or allocating memory.
        """
        try:
            await self.apply_many_frees()
            await self._dispatch(submission)
        except AccelError as error:
            if self.fault is not None or not error.is_fault:
                raise
            self.report_fault(error)
            raise self.poisoned(error, submission) from None

    async def _dispatch(self, submission: Submission) -> None:
        if isinstance(submission, Unregistration):
            self.libraries.withdraw(submission)
            return
        if isinstance(submission, OpSubmission):
            op = submission.op
            if isinstance(submission, GraphSubmission):
                own = [part.library for part in submission.program.ops if part.library in self.core.own]
                for library in dict.fromkeys((*own, op.library)):  # although their kernels are called in another lane
                    await self.libraries.open(library)
                with self.opening:
                    await submission.place(self, self.lanes.routes[op.library])
            given: Lane | None = None
            while not submission.is_settled:
                self.check_alive()  # a fault that surfaced during a wait did not end what is sent only now
                if self.dispatch_now(submission, given):
                    return
                given = self.lanes.routes.get(op.library)
                if given is None:
                    await self.libraries.open(op.library)
                else:  # there is no memory
                    await self._provide(submission, 0, op, given)
            return
        assert isinstance(submission, BatchSubmission), "there are two kinds"
        ops, count = submission.ops, len(submission.ops)
        for library, op in dict(zip(reversed(submission.libraries), reversed(ops), strict=True)).items():
            if self.kernels.is_known(op):  # else it is refused in its place
                await self.libraries.open(library)
        lane = self.lanes.choose_for(submission, self.core.own, self.buffers.blocks)
        while (start := submission.sent) < count:
            if not submission.is_settled:  # else it may have released its ops
                weights = self._next_chunk(submission, start)
                await self.wait_for_room(sum(weights))
            if submission.is_settled:
                # Its refs are void: memory placed for them now would never be freed.
                submission.void(max(start, submission.sound))
                return
            if self.core.refs.dropped:
                self.buffers.apply_frees()
            if not self._send_ops(submission, weights, lane):
                index = submission.sent
                try:
                    await self._provide(submission, index, ops[index], lane)
                except Exception as raised:
                    raise_op_error(raised, f"finding memory for {submission.kinds[index]}", self.core.loop, op_index=index)
            elif submission.sent < count:
                # Some devices run a chunk in this iteration: other tasks must get a turn.
                await asyncio.sleep(0)

    def batch_now(self, submission: BatchSubmission) -> bool:
        """Send a batch if nothing has to be awaited; else return ``False``."""
        count, lanes = len(submission.ops), self.lanes
        if not count or not lanes.routes.keys() >= set(submission.libraries):
            return False
        weights = self._next_chunk(submission, 0)
        if len(weights) < count or self.commands + sum(weights) > self.limit:
            return False
        if self.core.refs.dropped:
            self.buffers.apply_frees()
        return self._send_ops(submission, weights, lanes.choose_for(submission, self.core.own, self.buffers.blocks))

    def _send_ops(self, submission: BatchSubmission, weights: Sequence[int], lane: Lane) -> bool:
        """Send the next ops of a batch to one lane; return whether there was memory for all.

        One lane, so that the ops of a chain need no waits between streams.
        """
        start, count = submission.sent, len(submission.ops)
        launches: list[BatchedOp] = []
        try:
            is_all = self._bind(submission, start, weights, lane, launches)
        except Exception as raised:
            self.scratch.give_up()
            at = start + len(launches)
            raise_op_error(raised, f"sending {submission.kinds[at]}", self.core.loop, op_index=at)
        finally:
            # Issued sequence numbers must reach the lane even if a later op could not be bound.
            if launches:
                submission.sent = start + len(launches)
                submission.places.append((lane, launches[0].seq, start, len(launches)))
                commands = sum(weights[: len(launches)])
                group = LaunchGroup(self, submission, lane, launches, commands, is_last=submission.sent == count)
                submission.outstanding += len(launches)
                self.sent(submission, len(launches), commands)
                lane.send(group)
        return is_all

    def _next_chunk(self, submission: BatchSubmission, start: int) -> list[int]:
        """Return the commands of each op of a batch's next chunk, which has at least one op."""
        ops, plans = submission.ops, submission.plans
        if self._counts is None:
            return [1] * min(self._chunk, len(ops) - start)
        weights = [commands := self._commands(ops[start], plans[start])]
        for index in range(start + 1, len(ops)):
            more = self._commands(ops[index], plans[index])
            commands += more
            if commands > self._chunk:
                break
            weights.append(more)
        return weights

    def _commands(self, op: KernelOp, plan: Plan) -> int:
        """Return the commands that an op puts into queues, on a device that counts them."""
        assert self._counts is not None, "the device counts"
        part = self.kernels.parts.get(op.library)
        count = self._counts.get((op.library, op.kind), 1) if part is None else part.launches
        commands = count if isinstance(count, int) else count(op)
        return commands if plan.status is None else commands + STATUS_COMMANDS

    async def _provide(self, submission: Submission, index: int, op: KernelOp, lane: Lane) -> None:
        """Get the memory that an op needs and the allocator lacks."""
        with self.opening:
            if op.library not in lane.provided:
                await self.provide_workspaces(lane, op.library)
            for plan in submission.plans[index : index + 1]:  # none, if it has ended meanwhile
                await self.buffers.provide((*await self.scratch.specs((op,), plan), *plan.creates), lane)

    async def provide_workspaces(self, lane: Lane, library: str) -> None:
        """Give a lane the workspaces of a library; raises as :meth:`Buffers.provide` does."""
        if lane.needs_workspace(library):
            self.lanes.lending.add(library)
        await self.buffers.provide_workspaces(lane, lane.stream, library)
        lane.provided.add(library)

    def _reclaim(self, wanting: Timeline) -> bool:
        """Free the workspaces of idle lanes for ``wanting``; return whether there were any."""
        lanes = self.lanes
        if wanting is lanes.equipping:
            return False
        given = [lane for lane in lanes.idle_lanes() if lane is not wanting and self.buffers.release_workspaces(lane)]
        for lane in given:
            stream = lane.stream
            assert isinstance(stream, TakesWorkspace), "it was given workspaces"
            stream.release_workspaces()
            lane.provided = {library for library in lane.provided if not lane.needs_workspace(library)}
        if given:
            lanes.stop_equipping()  # or it would ask for them again
        return bool(given)

    def _bind(self, submission: BatchSubmission, start: int, weights: Sequence[int], lane: Lane, launches: list[BatchedOp]) -> bool:
        """Bind ops of a batch: kernels, memory, numbers; return whether there was memory for all.

        Parameters
        ----------
        submission, start
            The batch, and its first op that is not bound.
        weights
            The commands of each op to bind.
        lane
            Where they go.
        launches
            The bound ops are appended here.
        """
        ops, plans, outputs = submission.ops, submission.plans, submission.outputs
        buffers, found, scratch, faults = self.buffers, self._found, self.scratch, self.core.options.faults
        for index in range(start, start + len(weights)):
            op, plan = ops[index], plans[index]
            kernel = found.get(type(op)) or self.kernels.find(op)
            refs = plan.writes
            if type(op) is Replay:
                op.check()
            if op.library not in lane.provided:
                return False
            if (plan.status is not None or (op.library, op.kind) in scratch.sizes) and not scratch.reserve(op, plan, lane):
                return False
            if plan.creates:
                made = outputs[index]
                if not buffers.place(made, lane):
                    scratch.give_up()
                    return False
                refs += made
            action = None if faults is None else faults.take(op.kind)
            launch = BatchedOp(op, plan, kernel, action, index)
            self._take_place(launch, op, lane, plan, refs)
            launches.append(launch)
        return True

    async def open(self, library: str) -> None:
        """See :meth:`Libraries.open`."""
        await self.libraries.open(library)

    def is_capturable(self, op: KernelOp) -> bool:
        """Return whether what the op enqueues may be repeated by a graph."""
        return self.kernels.is_capturable(op)

    def kernel_of(self, op: KernelOp) -> Kernel:
        """Return how the op is enqueued."""
        return self._found.get(type(op)) or self.kernels.find(op)

    async def wait_passed(self, marks: Iterable[tuple[Lane, int]]) -> None:
        """Wait until lanes have done their work up to a number; raises as :meth:`until` does."""
        for lane, seq in marks:
            if lane.completed >= seq:
                continue
            await lane.wait_enqueued(seq)
            mark = LaneMark(self, lane, seq, lane.events.take(), "passed")
            if lane.stream.record(mark.event):
                mark.complete()
            else:
                self.watcher.watch(mark)
            await self.until(lambda lane=lane, seq=seq: lane.completed >= seq)  # type: ignore[misc]

    def hold(self, ref: AccelRef, usage: Usage, release: Callable[[], object] | None) -> None:
        """Hold a resource under a buffer's number; see :meth:`~accel.storage.buffers.Buffers.hold`.

        It is released when its uses are over, also if no op is sent after that.
        """
        self.buffers.hold(ref, usage, release)
        self._wait_for_ends()

    def _wait_for_ends(self) -> None:
        """Check whenever ops retire whether a held resource can be released."""
        self.after_retire = self._settle

    def _settle(self) -> None:
        if not self.buffers.settle():
            self.after_retire = None

    def apply_frees(self, most: int | None = None) -> None:
        """Free the memory of dropped refs, of ``most`` at most."""
        self.buffers.apply_frees(most)

    def is_out_of_memory(self, raised: BaseException) -> bool:
        """Return whether a library's error means that the device has no memory. Thread-safe."""
        return isinstance(self.device, KnowsShortages) and self.device.is_out_of_memory(raised)

    def fault_of(self, stream: AccelStream, error: AccelError) -> AccelError | None:
        """Return the context's fault behind a library's error, or ``None``.

        Libraries that query the device's errors raise a fault as their own error, before any mark
        of this context reports it.
        """
        if not isinstance(self.device, ChecksAlive):
            return None
        try:
            self.device.check_alive(stream)
        except Exception as found:
            if isinstance(found, AccelError) and found.is_fault:
                found.__cause__ = found.__cause__ or error
                return found
            logger.warning("context_not_asked", device=self.core.name, error=found)
        return None

    def busy_seconds(self) -> float:
        """See :meth:`ContextBase.busy_seconds`."""
        return self.offloaded.busy_seconds()

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes of buffers, of slabs, and of workspaces. Thread-safe."""
        allocator = self.buffers.allocator
        return allocator.used - self.buffers.lent, allocator.reserved + self.buffers.leaving_nbytes, self.buffers.lent

    # -- the end

    async def close(self, *, abandon: bool) -> None:
        """Release all resources, off the loop; with ``abandon``, work in streams is not awaited.

        On cancellation, or a shortage of threads, the rest is released at once, and work that runs
        is abandoned. In a forked child this does nothing.
        """
        if self.core.home.is_inherited:
            return
        if self.fault is None:
            # From here on faults that surface in a stream are not reported.
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
            self.fail_all(self.fault)
        self.after_retire = None
        tasks = [lane.task for lane in self.lanes.all if lane.task is not None]
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
        if not self._to_close.acquire(blocking=False):
            return  # another thread closes it, or has
        self.offloaded.when_over(lambda: self._give_back(abandon), wait=not abandon)

    def _give_back(self, abandon: bool) -> None:
        for lane in self.lanes.all:
            lane.close(abandon=abandon)
        for _, stream in self.lanes.unused:
            stream.close(abandon=abandon)
        self.buffers.close(abandon=abandon)
        self.events.close()
        close_all(self.sharing.take_all())
        self.core.pinned.arena.detach(self.device)
        self.device.close(abandon=abandon)
