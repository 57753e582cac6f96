"""The program of a graph, its capture into one command of the backend, and its replay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from accel.actors.turns import CHECK_EVERY, Turn
from accel.dtype import DType
from accel.engine.launches import LaunchContext, OpSubmission
from accel.errors import AccelError, InvalidArgumentError, UnsupportedError
from accel.ops import Empty, KernelOp, Plan, Spec, Status
from accel.ops.base import operand, plan_of
from accel.ref import AccelRef, RefView
from accel.storage.buffers import HeldResource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from accel.backend import AccelDevice, Kernel
    from accel.engine.core import DeviceCore
    from accel.engine.registration import RegisteredLibrary
    from accel.engine.scratch import Scratch
    from accel.engine.stream_clock import StreamClock
    from accel.memory import Block, Usage
    from accel.storage.buffers import Buffers

__all__ = ["Call", "Capture", "CollectiveReplay", "GraphSubmission", "JoinsUsages", "Program", "Replay"]

_NOTHING = Plan((), (), ())

_ALIGNED = 16
"""Bytes to which the places of statuses in a graph's buffer are aligned."""


class JoinsUsages(Protocol):
    """Joins the usages of buffers that other libraries may use too; see :class:`Sharing`."""

    def merge_usages(self, usages: Sequence[Usage]) -> Usage:
        """Return the one usage that several buffers have in common from now on."""


class _Kernels(Protocol):
    """The kernels of a context; see :class:`~accel.engine.kernel_table.KernelTable`."""

    registered: dict[str, RegisteredLibrary]

    def find(self, op: KernelOp) -> Kernel:
        """Return the function that enqueues the op."""

    def is_capturable(self, op: KernelOp) -> bool:
        """Return whether what the op enqueues may be repeated by a graph."""


class _GraphContext(LaunchContext, Protocol):
    """The members of a context used here: see :class:`~accel.engine.context.Context`."""

    core: DeviceCore
    device: AccelDevice
    buffers: Buffers
    scratch: Scratch

    @property
    def kernels(self) -> _Kernels: ...

    @property
    def sharing(self) -> JoinsUsages: ...

    def hold(self, ref: AccelRef, resource: HeldResource) -> None:
        """Track a resource that is no memory of the allocator's."""


class Program:
    """The ops of a graph, bound to memory that it keeps, from its capture to its end.

    Attributes
    ----------
    ops, plans, outputs : sequence
        As they were recorded.
    owned_refs : sequence of AccelRef
        All refs of ``outputs``, the scratch memory, and the memory of the statuses.
    plan : Plan
        The uses of memory by a replay; the program's own buffers count as the handle.
    native : object
        The backend's one command for it, with a ``close`` method; ``None`` where the ops are
        enqueued one by one.
    registered_libraries : sequence of RegisteredLibrary
        Registered libraries whose kernels it calls, or has captured.
    external_reads : frozenset of int
        Buffers that it reads and does not make; known once its operands are released, because each
        call must then give them.
    writes_only_owned : bool
        Whether it writes no other buffers than :attr:`owned_refs`.
    own_inputs : frozenset of int
        Buffers of its own whose contents it reads before it writes them.
    call_plan : tuple or None
        The results that each :class:`Call` reads too, the refs that it writes, and the specs of its
        results. The first call makes them for all: a program becomes one function, whose inputs and
        results do not change.
    handle : AccelRef
        Stands for the program like a buffer: replays write it, so that they follow each other, and
        freeing it ends the program.
    """

    __slots__ = (
        "_launches",
        "_own_outputs",
        "_scratch",
        "_status",
        "_status_address",
        "_statuses",
        "call_plan",
        "external_reads",
        "handle",
        "native",
        "ops",
        "outputs",
        "own_inputs",
        "owned_refs",
        "plan",
        "plans",
        "registered_libraries",
        "writes_only_owned",
    )

    def __init__(
        self, core: DeviceCore, ops: Sequence[KernelOp], plans: Sequence[Plan], outputs: Sequence[tuple[AccelRef, ...]], generation: int
    ) -> None:
        self.ops = tuple(ops)
        self.plans = tuple(plans)
        self.outputs = tuple(outputs)
        self.owned_refs = tuple([ref for refs in outputs for ref in refs])
        self.native: Any = None
        self.call_plan: tuple[tuple[AccelRef, ...], tuple[AccelRef, ...], tuple[Spec, ...]] | None = None
        self.registered_libraries: Sequence[RegisteredLibrary] = ()
        self.external_reads: frozenset[int] = frozenset()
        self.writes_only_owned = True
        self.own_inputs: frozenset[int] = frozenset()
        self._own_outputs: frozenset[int] = frozenset()  # buffers of its own that the ops write
        self._scratch: tuple[AccelRef, ...] = ()  # one buffer at most
        self._status: tuple[AccelRef, ...] = ()  # one buffer at most
        self._status_address = 0
        self._statuses = _place_statuses(self.ops, self.plans)
        self.handle = core.refs.make((Spec((0,), DType.UINT8),), generation)[0]
        self._launches: list[tuple[Kernel, KernelOp, Plan, list[int], list[int]]] = []
        self.plan = _NOTHING

    @classmethod
    async def of(
        cls, core: DeviceCore, ops: Sequence[KernelOp], plans: Sequence[Plan], outputs: Sequence[tuple[AccelRef, ...]], generation: int
    ) -> Self:
        """Return the program of recorded ops, with the plan of its replays.

        Long programs take several loop iterations. Nothing is allocated or bound here.
        """
        program, turn = cls(core, ops, plans, outputs, generation), Turn()
        # A replay's reads and writes are those of its ops on buffers that it does not own.
        owned_buffers = {ref.buffer for ref in program.owned_refs}
        own_inputs: set[int] = set()
        own_outputs: set[int] = set()
        read: dict[int, AccelRef] = {}
        written: dict[int, AccelRef] = {}
        overwritten: set[int] = set(owned_buffers)  # wholly overwritten so far: earlier contents are not read
        for number, (op, plan, results) in enumerate(zip(ops, plans, outputs, strict=True), 1):
            if not number % CHECK_EVERY and turn.is_over:
                await turn.next()
            for ref in plan.reads + plan.writes if plan.updates else plan.reads:
                if ref.buffer not in overwritten:
                    read.setdefault(ref.buffer, ref)
                elif ref.buffer in owned_buffers and ref.buffer not in own_outputs:
                    own_inputs.add(ref.buffer)
            if not isinstance(op, Empty):  # which sets no contents
                own_outputs.update([ref.buffer for ref in results])
            for ref in plan.writes:
                if ref.buffer in owned_buffers:
                    own_outputs.add(ref.buffer)
                else:
                    written.setdefault(ref.buffer, ref)
                if not isinstance(ref, RefView) or ref.nbytes == ref.base.nbytes:
                    overwritten.add(ref.buffer)
        program.own_inputs, program._own_outputs = frozenset(own_inputs), frozenset(own_outputs)
        program.writes_only_owned = not written
        status = None
        if program._statuses:
            last = program._statuses[-1]
            status = Status(Spec((last.start + last.status.spec.nbytes,), DType.UINT8), partial(_first_error, program._statuses))
        program.plan = Plan(
            tuple(read.values()), (program.handle, *written.values()), (), updates=not overwritten.issuperset(written), status=status
        )
        return program

    async def bind(self, context: _GraphContext) -> None:
        """Find the kernels and the addresses of all ops, over several loop iterations.

        Called once, when the program's own buffers are allocated. From then on :meth:`enqueue` has
        what it needs.

        Raises
        ------
        UnsupportedError
            If the backend has no kernel for one of them, or it is of a library of the user's own
            that does not say that it can be captured.
        StaleRefError
            If a buffer is gone.
        """
        turn, scratch, kernels = Turn(), context.scratch.sizes, context.kernels
        makes_native_graph = bool(context.device.kernels(Capture.library))
        self.registered_libraries = [
            kernels.registered[name] for name in dict.fromkeys(op.library for op in self.ops) if name in kernels.registered
        ]
        address = context.buffers.address
        scratch_address = [address(ref) for ref in self._scratch]
        for ref in self._status:
            self._status_address = address(ref)
        statuses = {status.op_index: [self._status_address + status.start] for status in self._statuses}
        for index, (op, plan, results) in enumerate(zip(self.ops, self.plans, self.outputs, strict=True)):
            if not index % CHECK_EVERY and turn.is_over:
                await turn.next()
            if makes_native_graph and not kernels.is_capturable(op):
                # Its kernels may use memory that has another owner by the next replay: the results
                # would be wrong without an error.
                raise UnsupportedError(
                    f"library {op.library!r} does not say that its kernels can be captured into a graph",
                    library=op.library,
                    op=op.kind,
                    remedy="Set `capturable = True` in the class if they use no memory of an allocator; or run the op outside the graph.",
                )
            inputs = [address(ref) for ref in plan.reads]
            outputs = [*map(address, (*plan.writes, *results)), *statuses.get(index, ())]
            if (op.library, op.kind) in scratch:
                outputs += scratch_address
            self._launches.append((kernels.find(op), op, plan, inputs, outputs))

    def release_operands(self) -> None:
        """Forget the recorded ops, so that their operands can be freed.

        Called after the capture of a graph that is called as a function: each :class:`Call` brings
        the operands. Without a native graph the bound kernels stay: a call enqueues them.
        """
        self.ops = self.plans = self.outputs = ()
        self.external_reads = frozenset([ref.buffer for ref in self.plan.reads])
        if self.native is not None:
            self._launches = []
        self.plan = Plan((), self.plan.writes, ())

    def use_shared(self, scratch: tuple[AccelRef, ...], status: tuple[AccelRef, ...]) -> None:
        """Use a buffer as scratch memory that all kernels take in turn, and one for all statuses.

        Either is an empty tuple where no op needs it. The program keeps them.
        """
        self._scratch, self._status = scratch, status
        self.owned_refs = (*self.owned_refs, *scratch, *status)

    def enqueue(self, lane: StreamClock) -> None:
        """Enqueue all ops, with their statuses cleared before; stops at the first that raises."""
        if self.plan.status is not None:
            lane.stream.fill(self._status_address, b"\0", self.plan.status.spec.nbytes)
        for kernel, op, plan, inputs, outputs in self._launches:
            kernel(lane, op, plan, inputs, outputs)

    def calls(self, library: str) -> bool:
        """Return whether a replay itself calls kernels of a library: there is no native graph."""
        return self.native is None and any(op.library == library for _, op, *_ in self._launches)

    def copy_status(self, lane: StreamClock, outputs: Sequence[int]) -> None:
        """Copy the ops' statuses, after a replay, into the replay's status: the last output.

        They are copied because the next replay clears them. Does nothing if no op has a status.
        """
        if self.plan.status is not None:
            lane.stream.copy(outputs[-1], self._status_address, self.plan.status.spec.nbytes)

    def on_captured(self, context: _GraphContext) -> None:
        """Track the program's own buffers as one; once the handle is freed, close the native graph.

        Called once, when the capture has ended. Buffers that were freed while it ran are left out:
        no replay uses them. If another library shares a buffer, replays wait for that library's
        work, as any op on shared memory does.
        """
        blocks = [context.buffers.blocks.get(ref.buffer) for ref in self.owned_refs]
        shared = context.sharing.merge_usages([block.usage for block in blocks if block is not None])
        free_hooks, free = context.buffers.free_hooks, context.buffers.allocator.free
        for ref, block in zip(self.owned_refs, blocks, strict=True):
            if block is not None:
                block.usage = shared
                # Once freed, the block is reused by another buffer, which must not share its usage
                # with the rest of the program.
                free_hooks[ref.buffer] = partial(_free_with_own_usage, free_hooks.get(ref.buffer, free))
        release = None if self.native is None else self.native.close
        context.hold(self.handle, HeldResource(shared, release, self.own_inputs, self._own_outputs))
        if self.native is not None:
            self.plan = self.plan._replace(writes=(*self.plan.writes, context.buffers.captured_workspaces()))


def _free_with_own_usage(free: Callable[[Block], object], block: Block) -> None:
    """Free the block of a program's buffer, with a usage of its own instead of the joined one."""
    block.usage = block.usage.split()
    free(block)


class _PlacedStatus(NamedTuple):
    """The status of one op of a graph, and its offset in the buffer of all statuses."""

    op_index: int
    op: type[KernelOp[Any]]
    status: Status
    start: int


def _place_statuses(ops: Sequence[KernelOp], plans: Sequence[Plan]) -> tuple[_PlacedStatus, ...]:
    """Return the status of each op that has one, with its offset in one common buffer.

    In one buffer, so that a replay clears all by one fill, and reads all by one copy.
    """
    placed: list[_PlacedStatus] = []
    end = 0
    for index, (op, plan) in enumerate(zip(ops, plans, strict=True)):
        if plan.status is not None:
            placed.append(_PlacedStatus(index, type(op), plan.status, end))
            end += -(-max(plan.status.spec.nbytes, 1) // _ALIGNED) * _ALIGNED
    return tuple(placed)


def _first_error(statuses: Sequence[_PlacedStatus], values: np.ndarray[Any, Any]) -> AccelError | None:
    """Return the error of the first op of a graph that has one, given the bytes of all statuses.

    This is the ``check`` of a replay's status.
    """
    for op_index, op, status, start in statuses:
        spec = status.spec
        error = status.check(values[start : start + spec.nbytes].view(spec.dtype.numpy).reshape(spec.shape))
        if error is not None:
            return error.clone(op=error.op or op.kind, library=error.library or op.library, op_index=op_index)
    return None


@dataclass(frozen=True, eq=False, slots=True)
class Capture(KernelOp[Any]):
    """Capture a program into one command of the backend; none of its ops runs."""

    library: ClassVar[str] = "capture"
    kind: ClassVar[str] = "capture"
    captures: ClassVar[bool] = True

    program: Program

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        return _NOTHING


@dataclass(frozen=True, eq=False, slots=True)
class Replay(KernelOp[Any]):
    """Run a program."""

    library: ClassVar[str] = "graph"
    kind: ClassVar[str] = "replay"

    program: Program

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`; raises if a buffer of the program's own was freed."""
        self._check_owned()
        self.check_libraries()
        return self.program.plan

    def _check_owned(self) -> None:
        """Raise if a buffer of the program's own was freed: its memory may be another's now."""
        for ref in self.program.owned_refs:
            if ref.is_freed:
                raise ref.stale_error()

    def check_libraries(self) -> None:
        """Raise if a library that the recorded ops use was unregistered since the recording.

        Called by :meth:`plan`, and by the context again before the launch: the library may have
        gone while the op was queued.
        """
        for library in self.program.registered_libraries:
            if library.is_unregistered:
                name = library.name
                raise UnsupportedError(
                    f"library {name!r} was unregistered after the graph was recorded", library=name, remedy="Record the graph anew."
                )

    def takes_strided(self, ref: AccelRef) -> bool:
        """See :meth:`KernelOp.takes_strided`: its ops take them, or have recorded copies."""
        return True

    def result(self, refs: tuple[AccelRef, ...]) -> None:
        """Return nothing: the caller has the refs since the recording."""


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveReplay(Replay):
    """Run a program with collectives, in their lane: in the order in which all ranks run them."""

    library: ClassVar[str] = "collective"


_ONE_EACH = "Give one dense ref of its shape and dtype for each input, and then each buffer that the recorded ops read besides."


@dataclass(frozen=True, eq=False, slots=True)
class Call(Replay):
    """Run a program as a function.

    Operands are copied to where it reads them, and its results to new buffers.

    Attributes
    ----------
    inputs, results
        Buffers of the program's own.
    operands
        The refs that are copied to ``inputs``, and then those that the ops read in place.
    """

    kind: ClassVar[str] = "call"

    inputs: tuple[AccelRef, ...]
    results: tuple[AccelRef, ...]
    operands: tuple[AccelRef, ...]

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`; raises as that of a replay, and if the operands do not fit."""
        program = self.program
        self._check_owned()
        if program.registered_libraries:
            self.check_libraries()
        self._check_operands()
        call_plan = program.call_plan
        if call_plan is None:
            result_specs = tuple([Spec(ref.shape, ref.dtype) for ref in self.results])
            # Operands are copied to inputs; results that the program reads before it writes them keep their contents.
            given = {ref.buffer for ref in self.inputs}
            kept = tuple([ref for ref in self.results if ref.buffer in program.own_inputs and ref.buffer not in given])
            # `Graph.into_function` takes no program that writes other buffers or has a status; one that was captured
            # also writes the workspaces.
            handle, *workspaces = program.plan.writes
            call_plan = program.call_plan = kept, (handle, *self.inputs, *self.results, *workspaces), result_specs
        kept, writes, creates = call_plan
        # Reads, writes, creates; capability, dtype, updates, status.
        return plan_of(((*self.operands, *kept) if kept else self.operands, writes, creates, "", DType.UINT8, False, None))

    def _check_operands(self) -> None:
        """Raise unless there is a dense operand for each input, and for each external read.

        Operands are copied one after the other: one that is the buffer of another input would be
        overwritten before it is copied.
        """
        # A copy is as long as the input: a shorter operand would be read past its end.
        operands, inputs = self.operands, self.inputs
        if len(operands) < len(inputs):
            raise InvalidArgumentError(
                f"{len(operands)} operands are given, and the graph has {len(inputs)} inputs", op=self.kind, remedy=_ONE_EACH
            )
        input_buffers = [place.buffer for place in inputs]
        for number, (given, place) in enumerate(zip(operands, inputs, strict=False)):
            ref = operand(f"operand {number}", given)
            if ref.shape != place.shape or ref.dtype is not place.dtype or ref.is_strided:
                view = "a strided " if ref.is_strided else ""
                raise InvalidArgumentError(
                    f"operand {number} is {view}{ref.dtype.value}{list(ref.shape)}, and the graph's input {place.dtype.value}{list(place.shape)}",
                    op=self.kind,
                    remedy=_ONE_EACH,
                )
            if ref.buffer != place.buffer and ref.buffer in input_buffers:
                raise InvalidArgumentError(
                    f"operand {number} is in the buffer of another input of the graph, which is overwritten by its own operand",
                    op=self.kind,
                    remedy="Copy it to a buffer of its own first.",
                )
        read_in_place = operands[len(inputs) :]
        if not self.program.external_reads.issubset([operand("an operand", ref).buffer for ref in read_in_place]):
            raise InvalidArgumentError("a buffer that the recorded ops read is not given", op=self.kind, remedy=_ONE_EACH)

    def result(self, refs: tuple[AccelRef, ...]) -> Any:
        """Return the new buffers."""
        return refs[len(refs) - len(self.results) :]

    def copy_in(self, lane: StreamClock, sources: Sequence[int], outputs: Sequence[int]) -> None:
        """Enqueue the copies of operands to :attr:`inputs`.

        Called by the kernel, before the program's ops. Both are addresses that the kernel was given:
        ``sources`` of the operands, ``outputs`` in the order of the plan: the handle, inputs,
        results, what else is written, and new results.
        """
        # Sources after those of the inputs are read in place.
        for ref, source, place in zip(self.inputs, sources, outputs[1:], strict=False):
            lane.stream.copy(place, source, ref.nbytes)

    def copy_out(self, lane: StreamClock, outputs: Sequence[int]) -> None:
        """Enqueue the copies of results after the replay; ``outputs`` as in :meth:`copy_in`."""
        results = self.results
        for ref, place, new in zip(results, outputs[1 + len(self.inputs) :], outputs[-len(results) :], strict=False):
            lane.stream.copy(new, place, ref.nbytes)


class GraphSubmission(OpSubmission):
    """The capture of a program, which needs memory for the program's own buffers."""

    __slots__ = ("program",)

    _context: _GraphContext

    def __init__(self, program: Program, future: Any, generation: int) -> None:
        super().__init__(Capture(program), _NOTHING, future, generation)
        self.program = program

    async def allocate(self, context: _GraphContext, lane: StreamClock) -> None:
        """Allocate the program's memory, and bind its ops; before the capture is dispatched.

        Stops early if the future ends meanwhile: the capture is not dispatched then.
        """
        buffers, program, turn = context.buffers, self.program, Turn()
        # 1. The kernels: finding those of a family also tells the sizes of their scratch memory.
        for number, op in enumerate(program.ops, 1):
            context.kernels.find(op)
            if not number % CHECK_EVERY and turn.is_over:
                await turn.next()
        # 2. Refs for one scratch buffer and one buffer of statuses, which all ops share.
        make, status = context.core.refs.make, program.plan.status
        scratch_refs = make(await context.scratch.specs(program.ops), self.generation)
        program.use_shared(scratch_refs, make(() if status is None else (status.spec,), self.generation))
        # 3. The memory of all refs, some in each loop iteration; a slab is made where it lacks.
        refs = program.owned_refs
        for start in range(0, len(refs), CHECK_EVERY):
            chunk = refs[start : start + CHECK_EVERY]
            while not self.future.done() and not buffers.allocate(chunk, lane):
                await buffers.ensure_room([Spec(ref.shape, ref.dtype) for ref in chunk], lane)
            if turn.is_over:
                await turn.next()
        if not self.future.done():
            await program.bind(context)

    def complete(self) -> None:
        """Retire the capture, and track the program's buffers as one; called once."""
        self.program.on_captured(self._context)
        super().complete()
