"""One generation of a device: its streams and its memory, and the dispatch of ops to the kernel actors that own the streams.

Everything here runs on the loop's thread; what may block is handed to ``run_blocking``. A context that has faulted is never used again.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from accel._log import get_logger
from accel.backend import ChecksAlive, CountsCommands, KnowsShortages, TakesWorkspace
from accel.engine.failures import Failures
from accel.engine.in_flight import ContextBase
from accel.engine.kernel_table import KernelTable
from accel.engine.lane import EventPool, Lane
from accel.engine.lane_pool import LanePool
from accel.engine.launches import BatchedOp, LaunchGroup, OpSubmission
from accel.engine.offloaded import OffloadedCalls
from accel.engine.op_error import raise_op_error, result_of
from accel.engine.program import GraphSubmission, JoinsUses, Replay
from accel.engine.registration import Unregistration
from accel.engine.scratch import Scratch
from accel.engine.status import STATUS_COMMANDS, PendingStatus
from accel.engine.streams import BATCH, POOLED
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError, ClosedError
from accel.memory import Allocator, DurableUsage
from accel.ops import Free
from accel.storage.buffers import Buffers, close_all
from accel.storage.durable_slabs import DurableSlabs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from accel.backend import AccelDevice, AccelStream, Kernel, SlabMemory
    from accel.completion import Watcher
    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.launches import Bound, Port
    from accel.engine.submission import Submission
    from accel.memory import Dependency, Timeline, Usage
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef

__all__ = ["Context", "ContextSharing"]

logger = get_logger()

_CHUNK = 128
"""Ops of a batch that are sent in one turn of the loop, some milliseconds."""


class ContextSharing(JoinsUses, Protocol):
    """What a context needs of what shares its memory with other libraries; see :class:`accel.sharing.sharing.Sharing`."""

    async def aclose(self) -> None:
        """Wait until what is being given back is so."""

    def take_all(self) -> list[SlabMemory]:
        """Take all memory out of the context, for the caller to close."""


class Context(ContextBase):
    """The disposable part of a device.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    owner
        Decides what follows a fault.
    device
        The backend's context.
    watcher
        How marks are waited for.
    open_port
        Makes the kernel actor of a library; called once per library.
    equip_lane
        Asks that another lane of the pool takes ops of a library; see :class:`~accel.engine.lane_pool.LanePool`.
    withdraw
        Ends a registered library; see :func:`accel.engine.leaving.withdraw`.
    share
        Makes what shares its memory with other libraries; the context is not complete yet.
    """

    def __init__(
        self,
        core: DeviceCore,
        owner: ContextOwner,
        device: AccelDevice,
        watcher: Watcher,
        open_port: Callable[[str], Awaitable[Port]],
        equip_lane: Callable[[str], object],
        withdraw: Callable[[Context, Unregistration], object],
        share: Callable[[Context], ContextSharing],
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
        self.opening: AbstractContextManager[object] = nullcontext()  # entered while something is made that ops wait for
        self.sharing = share(self)
        self.failures = Failures(self)
        self.lanes: list[Lane] = []
        self.ports: dict[str, Port] = {}  # of the pool's libraries it is the first lane's
        self.pool = None if core.options.pool is None else LanePool(core.options.pool, POOLED, equip_lane)
        self._weigh: Callable[[KernelOp], int] | None = None
        if isinstance(device, CountsCommands):
            self._weigh, self.limit = device.commands, min(self.limit, device.queue_limit)
        self._open_port = open_port
        self._withdraw = withdraw
        self._chunk = max(1, min(_CHUNK, self.limit // 2))
        self._to_close = threading.Lock()  # the thread that gets it closes the context, and keeps it

    # -- dispatch: called by the device's actor, one submission at a time, in order

    def dispatch_now(self, submission: OpSubmission, port: Port | None = None) -> bool:
        """Dispatch one op if nothing has to be waited for; else change nothing and return ``False``. What :meth:`dispatch` does, without a step of the loop.

        It goes to ``port``, where one is given.
        """
        buffers, op = self.buffers, submission.op
        if self.core.refs.dropped:
            buffers.apply_frees()
        if type(op) is Free:
            buffers.free(op.ref.buffer)
            submission.succeed()
            return True
        pool, is_placed = self.pool, port is not None
        port = port or self.ports.get(op.library)
        if port is None and op.library in self.core.own:
            return False
        kernel = self._found.get(type(op)) or self.kernels.find(op)
        if port is None:
            return False
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        self._check_operands(plan)
        if pool is not None and not is_placed and op.library in pool.libraries:
            port = pool.choose((op.library,), plan, buffers.blocks)
        lane, refs = port.lane, plan.writes
        scratch = self.scratch
        if (plan.status is not None or op.library in scratch.libraries) and not scratch.reserve(op, plan, lane):
            return False
        if plan.creates:
            made = buffers.create(plan.creates, lane, submission.made)
            if made is None:
                scratch.give_up()
                return False
            refs += made
        submission.result = result_of(op, refs, self.core.loop)
        faults = self.core.options.faults
        action = None if faults is None else faults.take(submission.name)
        submission.bind(self, lane, kernel, action, 1 if self._weigh is None else self._commands(op, plan))
        self._take_place(submission, op, lane, plan, refs)
        submission.outstanding = 1
        self.sent(submission, 1, submission.commands)
        if not port.hand_over(submission):
            port.actor.tell(submission)
        return True

    def _check_operands(self, plan: Plan) -> None:
        """Raise unless what an op uses is there, and may be read."""
        blocks, failures = self.buffers.blocks, self.failures
        for ref in plan.reads + plan.writes:
            if ref.buffer not in blocks:
                self.buffers.block(ref)  # which says what became of it
        if failures.raised or failures.has_unsound:
            failures.check(plan)

    def _take_place(self, launch: Bound, op: KernelOp, lane: Lane, plan: Plan, refs: Iterable[AccelRef]) -> None:
        """Make an op the next user of its memory; say at which addresses, which number it has, and what it waits for."""
        blocks = self.buffers.blocks
        status = None
        if plan.status is not None:  # before the number is given out: it may raise
            status = launch.kernel = PendingStatus(plan.status, launch.kernel, lane)
            launch.is_offloaded = True if status.may_block(lane) else None
        lane.issued = seq = lane.issued + 1
        failures = self.failures
        if failures.is_tracking and (self.in_flight or failures.has_unsound or (plan.writes and lane.completed < seq - 1)):
            failures.enlist(lane, seq, plan, refs)
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
        if plan.status is not None or op.library in self.scratch.libraries:
            lent = self.scratch.lend(op, plan, lane, seq, dependencies)
            outputs += lent
            if status is not None:
                status.address = lent[0]
                failures.expect(lane, seq, status)
        launch.inputs, launch.outputs, launch.seq, launch.dependencies = inputs, outputs, seq, dependencies

    async def dispatch(self, submission: Submission) -> None:
        """Give memory and places in line to the ops of a submission, and send them to their kernel actors.

        Returns once they are sent, which takes no waiting but for a library's first use, a new slab, or room for a large batch. What the
        submission itself got wrong is raised; so is, with nothing sent, that the context is gone.

        Raises
        ------
        ContextPoisonedError
            Also where a fault surfaces here, in making a stream or taking memory, before anything that runs tells of it.
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
            self._withdraw(self, submission)
            return
        if isinstance(submission, OpSubmission):
            if isinstance(submission, GraphSubmission):
                await self.open_own(submission.program.ops)
                port = await self.port(submission.op.library)
                with self.opening:
                    await submission.place(self, port.lane)
            given: Port | None = None
            while not submission.is_settled and not self.dispatch_now(submission, given):
                given = self.ports.get(submission.op.library)
                if given is None:
                    await self.port(submission.op.library)
                else:  # there is no memory: the pool's first lane is given some
                    await self._provide(submission, 0, submission.op, given.lane)
            return
        assert isinstance(submission, BatchSubmission), "there are two kinds"
        ops, count = submission.ops, len(submission.ops)
        await self.open_own(ops)
        await self.port(BATCH)
        port = self._batch_port(submission)
        while (start := submission.sent) < count:
            weights = self._next_chunk(submission, start)
            await self.wait_for_room(sum(weights))
            if submission.is_settled:
                # Its refs are void: memory that they were given now would never come back.
                submission.void(max(start, submission.sound))
                return
            if self.core.refs.dropped:
                self.buffers.apply_frees()
            if not self._send_ops(submission, weights, port):
                index = submission.sent
                try:
                    await self._provide(submission, index, ops[index], port.lane)
                except Exception as raised:
                    raise_op_error(raised, f"finding memory for {submission.kinds[index]}", self.core.loop, op_index=index)
            elif submission.sent < count:
                # A chunk of small ops runs in this turn of the loop, on some devices: others must get theirs.
                await asyncio.sleep(0)

    def batch_now(self, submission: BatchSubmission) -> bool:
        """Send a batch if nothing has to be waited for; else return ``False``: :meth:`dispatch` sends what was not sent yet."""
        core, ports, count = self.core, self.ports, len(submission.ops)
        if BATCH not in ports or not count:
            return False
        weights = self._next_chunk(submission, 0)
        if len(weights) < count or self.commands + sum(weights) > self.limit:
            return False
        if core.own and any(op.library in core.own and op.library not in ports for op in submission.ops):
            return False
        if core.refs.dropped:
            self.buffers.apply_frees()
        return self._send_ops(submission, weights, self._batch_port(submission))

    def _batch_port(self, submission: BatchSubmission) -> Port:
        """Return where a batch goes, all of it.

        Ops of one registered library, and copies for them, go where its other ops do. Other libraries that the pool does not serve keep to one stream for
        batches, the pool's first.
        """
        libraries = set(submission.libraries) - {"memory"}
        pool, served = self.pool, () if self.pool is None else self.pool.libraries
        if len(libraries) == 1 and not libraries.issubset(served) and libraries.issubset(self.core.own):
            return self.ports[libraries.pop()]
        if pool is None or not submission.plans:
            return self.ports[BATCH]
        if submission.places:  # some of it is there already
            return pool.port_of(submission.places[0][0])
        if not pool.libraries.issuperset(libraries):
            return self.ports[BATCH]
        return pool.choose({BATCH, *(libraries & pool.lending)}, submission.plans[0], self.buffers.blocks)

    def _send_ops(self, submission: BatchSubmission, weights: Sequence[int], port: Port) -> bool:
        """Send ops of a batch, one for each weight from the first that was not sent, into one lane: a chain needs no stream to wait for another's.

        Returns whether there was room for all of them.
        """
        start, count = submission.sent, len(submission.ops)
        launches: list[BatchedOp] = []
        try:
            is_all = self._bind(submission, start, weights, port.lane, launches)
        except Exception as raised:
            at = start + len(launches)
            raise_op_error(raised, f"sending {submission.kinds[at]}", self.core.loop, op_index=at)
        finally:
            # Places in line that were given out must reach the lane even if a later op could not be bound.
            if launches:
                submission.sent = start + len(launches)
                submission.places.append((port.lane, launches[0].seq, start, len(launches)))
                self._send(LaunchGroup(self, submission, port, launches, is_last=submission.sent == count))
        return is_all

    def _next_chunk(self, submission: BatchSubmission, start: int) -> list[int]:
        """Return the commands of each op of the part of a batch that is sent at once: at least one op."""
        ops, plans = submission.ops, submission.plans
        if self._weigh is None:
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
        """Return what an op puts into the device's queues, on a device that counts."""
        part = self.kernels.part(op.library)
        assert self._weigh is not None, "the device counts"
        return (self._weigh(op) if part is None else part.launches) + (0 if plan.status is None else STATUS_COMMANDS)

    async def _provide(self, submission: Submission, index: int, op: KernelOp, lane: Lane) -> None:
        """Take the memory that an op needs, and that is not there."""
        with self.opening:
            if op.library not in lane.provided:
                await self.provide_workspaces(lane, op.library)
            for plan in submission.plans[index : index + 1]:  # none, if it was settled meanwhile
                await self.buffers.provide((*await self.scratch.specs((op,), plan), *plan.creates), lane)

    async def provide_workspaces(self, lane: Lane, library: str) -> None:
        """Give a lane the workspaces that ops of a library use there; raises as :meth:`Buffers.provide` does."""
        if self.pool is not None and lane.needs_workspace(library):
            self.pool.lending.add(library)
        await self.buffers.provide_workspaces(lane, lane.compute, library)
        lane.provided.add(library)

    def _reclaim(self, wanting: Timeline) -> bool:
        """Give the workspaces of the pool's idle lanes back to the allocator: there is no memory for ``wanting``. Return whether there were any."""
        pool = self.pool
        if pool is None or wanting is pool.equipping:
            return False
        given = [lane for lane in pool.spare_lanes() if lane is not wanting and self.buffers.take_workspaces(lane)]
        for lane in given:
            compute = lane.compute
            assert isinstance(compute, TakesWorkspace), "it was given workspaces"
            compute.release_workspaces()
            lane.provided = {library for library in lane.provided if not lane.needs_workspace(library)}
        if given:
            pool.stop_equipping()  # or it would ask for them again
        return bool(given)

    def _send(self, group: LaunchGroup) -> None:
        count = len(group.launches)
        group.submission.outstanding += count
        self.sent(group.submission, count, group.commands)
        if not group.actor.hand_over(group):
            group.actor.tell(group)

    def _bind(self, submission: BatchSubmission, start: int, weights: Sequence[int], lane: Lane, launches: list[BatchedOp]) -> bool:
        """Find kernels and memory of ops of a batch, and take their places in line; return whether there was room for all of them.

        Parameters
        ----------
        submission, start
            The batch, and its first op that is not bound.
        weights
            The commands of each op to bind.
        lane
            Where they go.
        launches
            Gets those that are bound.
        """
        ops, plans, outputs = submission.ops, submission.plans, submission.outputs
        buffers, found, scratch, faults = self.buffers, self._found, self.scratch, self.core.options.faults
        for index, commands in enumerate(weights, start):
            op, plan = ops[index], plans[index]
            kernel = found.get(type(op)) or self.kernels.find(op)
            refs = plan.writes
            if type(op) is Replay:
                op.check()
            self._check_operands(plan)
            if op.library not in lane.provided:
                return False
            if (plan.status is not None or op.library in scratch.libraries) and not scratch.reserve(op, plan, lane):
                return False
            if plan.creates:
                made = outputs[index]
                if not buffers.place(made, lane):
                    scratch.give_up()
                    return False
                refs += made
            action = None if faults is None else faults.take(op.kind)
            launch = BatchedOp(op, plan, kernel, action, index, commands)
            self._take_place(launch, op, lane, plan, refs)
            launches.append(launch)
        return True

    async def open_own(self, ops: Iterable[KernelOp]) -> None:
        """See that the registered libraries are there whose kernels ``ops`` need, although they go into another's lane."""
        own = self.core.own
        if own:
            for library in dict.fromkeys(op.library for op in ops if op.library in own):
                await self.port(library)

    def refuse_own(self, name: str) -> None:
        """Take no more ops of a registered library; those that were taken run."""
        self.kernels.refuse_own(name)
        self.ports.pop(name, None)

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether the op is enqueued on another thread."""
        return self.kernels.may_block(lane, op)

    def is_capturable(self, op: KernelOp) -> bool:
        """Return whether what the op enqueues may be repeated by a graph."""
        return self.kernels.is_capturable(op)

    def kernel_of(self, op: KernelOp) -> Kernel:
        """Return how the op is enqueued."""
        return self._found.get(type(op)) or self.kernels.find(op)

    async def port(self, library: str) -> Port:
        """Return the port of a library; at its first use make it, off the loop.

        Raises
        ------
        ContextPoisonedError
            Also where the fault surfaces here: the caller gets the same error as all waiters.
        """
        port = self.ports.get(library)
        if port is None:
            if library in self.kernels.leaving:  # one of the same name was unregistered just before
                await self.until(lambda: library not in self.kernels.leaving)
            try:
                with self.opening:
                    port = await self._open_port(library)
            except AccelError as error:
                # Where this context has faulted meanwhile, the actor of the next one has refused.
                if self.fault is None and not error.is_fault:
                    raise
                self.report_fault(error)
            self.check_alive()
            assert port is not None, "it was opened, or the context has faulted"
        return port

    def hold(self, ref: AccelRef, usage: Usage, release: Callable[[], object] | None) -> None:
        """Take note of something that is no memory of the allocator's; see :meth:`~accel.storage.buffers.Buffers.hold`.

        It is given back when it is not used any more, also if nothing is sent after that.
        """
        self.buffers.hold(ref, usage, release)
        self._wait_for_ends()

    def _wait_for_ends(self) -> None:
        """Look, whenever work has ended, whether there is something to give back."""
        self.after_retire = self._settle

    def _settle(self) -> None:
        if not self.buffers.settle():
            self.after_retire = None

    def apply_frees(self, most: int | None = None) -> None:
        """Give the memory of dropped refs back, of ``most`` at most."""
        self.buffers.apply_frees(most)

    def unfinished(self) -> list[int]:
        """Return the durable buffers that are being written: by work that was sent to a stream and is not known to have ended."""
        blocks = self.buffers.blocks
        return [buffer for buffer in self.durables.buffers if blocks[buffer].usage.pending_write() is not None]

    def tear(self, lane: Lane, first: int, last: int, why: str) -> None:
        """Take note that work ``first`` to ``last`` of a lane failed halfway: the durable buffers that it writes hold neither the old nor the new contents."""
        blocks = self.buffers.blocks
        usages = ((buffer, blocks[buffer].usage) for buffer in self.durables.buffers)
        torn = [buffer for buffer, usage in usages if isinstance(usage, DurableUsage) and usage.was_written(lane, first, last)]
        if torn:
            self.core.keeper.torn(torn, why)

    def is_out_of_memory(self, raised: BaseException) -> bool:
        """Return whether what a kernel, or a library's ``open``, raised is that library's way to say that the device has no memory. Any thread may ask."""
        return isinstance(self.device, KnowsShortages) and self.device.is_out_of_memory(raised)

    def fault_of(self, stream: AccelStream, error: AccelError) -> AccelError | None:
        """Return the fault that is behind what a kernel, or a library's ``open``, raised; ``None`` where the device's context is alive, or cannot be asked.

        Libraries that look for the device's errors themselves raise them as their own, before any mark of this context's tells of the fault.
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
        """Return the bytes of buffers, of slabs, and of what libraries work in. Any thread may ask."""
        allocator = self.buffers.allocator
        return allocator.used - self.buffers.lent, allocator.reserved + self.buffers.leaving_nbytes, self.buffers.lent

    # -- the end

    async def close(self, *, abandon: bool) -> None:
        """Give everything back, off the loop. With ``abandon`` nothing that is still in a stream is waited for.

        Cancelling ends the waiting, and so does a shortage of threads: what has not begun to be given back by then is so at once, abandoning what runs. In
        a forked child this does nothing.
        """
        if self.core.home.is_inherited:
            return
        if self.fault is None:
            # From here on nothing that surfaces in a stream is news.
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
        self.fail_all(self.fault)
        self.after_retire = None
        try:
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
            return  # another thread is at it, or was
        self.offloaded.when_over(lambda: self._give_back(abandon), wait=not abandon)

    def _give_back(self, abandon: bool) -> None:
        for lane in self.lanes:
            lane.close(abandon=abandon)
        self.buffers.close(abandon=abandon)
        for own in self.own.values() if not abandon else ():
            own.close()
        self.events.close()
        close_all(self.sharing.take_all())
        self.core.pinned.arena.detach(self.device)
        self.device.close(abandon=abandon)
