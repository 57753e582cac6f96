"""A graph: ops recorded once, and run again and again by one command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel import ops
from accel.device.recording import Recorder
from accel.dtype import DType
from accel.engine.run import OpSubmission
from accel.errors import ClosedError, InvalidArgumentError, NotInitializedError, UnsupportedError
from accel.ops import KernelOp, Plan
from accel.ref import AccelRef, RefView

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from accel.backend import Kernel
    from accel.engine.context import Context
    from accel.engine.core import DeviceCore
    from accel.engine.lane import Lane

__all__ = ["Capture", "Graph", "GraphSubmission", "Program", "Replay"]

_NOTHING = Plan((), (), ())


class Program:
    """What a graph runs: ops bound to the memory that they keep, from its capture to its end.

    Attributes
    ----------
    ops, plans, outputs : sequence
        As they were recorded.
    made : sequence of AccelRef
        All of ``outputs``, and what the kernels work in.
    native : object
        What the backend made of it, with a ``close`` method; ``None`` where the ops are enqueued one by one.
    handle : AccelRef
        Stands for the program as for a buffer: replays write it, so that they follow each other, and its end is the program's.
    """

    __slots__ = ("_launches", "_scratch", "handle", "made", "native", "ops", "outputs", "plan", "plans")

    def __init__(
        self, core: DeviceCore, ops: Sequence[KernelOp], plans: Sequence[Plan], outputs: Sequence[tuple[AccelRef, ...]], generation: int
    ) -> None:
        self.ops = tuple(ops)
        self.plans = tuple(plans)
        self.outputs = tuple(outputs)
        self.made = tuple([ref for refs in outputs for ref in refs])
        self.native: Any = None
        self._scratch: AccelRef | None = None
        self.handle = AccelRef(core, core.next_buffer(), (0,), DType.UINT8, generation)
        self._launches: list[tuple[Kernel, KernelOp, list[int], list[int]]] = []
        own = {ref.buffer for ref in self.made}
        read: dict[int, AccelRef] = {}
        written: dict[int, AccelRef] = {}
        renewed: set[int] = set(own)  # nothing that was there before is left
        for plan in plans:
            for ref in plan.reads + plan.writes if plan.updates else plan.reads:
                if ref.buffer not in renewed:
                    read.setdefault(ref.buffer, ref)
            for ref in plan.writes:
                if ref.buffer not in own:
                    written.setdefault(ref.buffer, ref)
                if not isinstance(ref, RefView) or ref.nbytes == ref.base.nbytes:
                    renewed.add(ref.buffer)
        self.plan = Plan(tuple(read.values()), (self.handle, *written.values()), (), updates=not renewed.issuperset(written))
        """What a replay does to memory: its own buffers count as the handle."""

    def bind(self, context: Context) -> None:
        """Find the kernels and the memory of all ops; the program's own buffers have theirs.

        Raises
        ------
        UnsupportedError
            If the backend has no kernel for one of them, or it is of a library of the user's own that does not say that it can be captured.
        StaleRefError
            If a buffer is gone.
        """
        if context.device.kernels(Capture.library):
            self._check_own(context)
        address = context.buffers.address
        work = () if self._scratch is None else (self._scratch,)
        self._launches = [
            (
                context.kernel_of(op),
                op,
                [address(ref) for ref in plan.reads],
                [address(ref) for ref in (*plan.writes, *made, *(work if op.library in context.scratch.libraries else ()))],
            )
            for op, plan, made in zip(self.ops, self.plans, self.outputs, strict=True)
        ]

    def work_in(self, ref: AccelRef) -> None:
        """Take what the kernels work in, one after the other; the program keeps it, as it keeps its results."""
        self._scratch = ref
        self.made = (*self.made, ref)

    def _check_own(self, context: Context) -> None:
        """Refuse libraries whose kernels may use memory that is somebody else's by the next replay: the results would be wrong, and nobody told."""
        for op in self.ops:
            own = context.own.get(op.library)
            if own is not None and not own.library.capturable:
                raise UnsupportedError(
                    f"library {op.library!r} does not say that its kernels can be captured into a graph",
                    library=op.library,
                    op=op.kind,
                    remedy="Set `capturable = True` in the class if they use no memory of an allocator; or run the op outside the graph.",
                )

    def enqueue(self, lane: Lane) -> None:
        """Enqueue all ops. What one of them raises ends it."""
        for kernel, op, inputs, outputs in self._launches:
            kernel(lane, op, inputs, outputs)

    def settle(self, context: Context) -> None:
        """Let the program's own buffers be tracked as one from now on, and end what the backend made of it with the handle.

        Buffers that are gone by now were freed while the capture ran, or it was cancelled: no replay will use them. What other libraries have of them
        by now, or will have, replays come after what these enqueue, as any op does on shared memory.
        """
        found = [context.buffers.blocks.get(ref.buffer) for ref in self.made]
        blocks = [block for block in found if block is not None]
        shared = context.sharing.as_one([block.usage for block in blocks])
        for block in blocks:
            block.usage = shared
        context.hold(self.handle, shared, None if self.native is None else self.native.close)


@dataclass(frozen=True, eq=False, slots=True)
class Capture(KernelOp[Any]):
    """Make one command of a program; nothing of it runs."""

    library: ClassVar[str] = "capture"
    kind: ClassVar[str] = "capture"

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
        """See :meth:`KernelOp.plan`; a buffer of the program's own that was freed has given its memory to others."""
        program = self.program
        for ref in program.made:
            if ref.is_freed:
                raise ref.stale_error()
        return program.plan

    def calls(self, library: str) -> bool:
        """Whether a replay calls kernels of a library, one by one."""
        return self.program.native is None and any(op.library == library for op in self.program.ops)

    def result(self, refs: tuple[AccelRef, ...]) -> None:
        """Return nothing: the caller has the refs since the recording."""


class GraphSubmission(OpSubmission):
    """The capture of a program, which needs memory for the program's own buffers."""

    __slots__ = ("program",)

    def __init__(self, program: Program, future: Any, generation: int) -> None:
        super().__init__(Capture(program), _NOTHING, future, generation)
        self.program = program

    async def place(self, context: Context, lane: Lane) -> None:
        """Give the program its memory and its kernels. What it raises is the caller's business."""
        buffers, program, core = context.buffers, self.program, context.core
        scratch = await context.scratch.specs(program.ops)
        for spec in scratch:
            program.work_in(AccelRef(core, core.next_buffer(), spec.shape, spec.dtype, self.generation))
        specs = [spec for plan in program.plans for spec in plan.creates]
        while not self.is_settled and not buffers.place(program.made, lane):
            await buffers.provide((*specs, *scratch), lane)
        if not self.is_settled:
            program.bind(context)

    def complete(self) -> None:
        """Take note that the program is there; called once."""
        self.program.settle(self._context)  # it is complete where it runs
        super().complete()


class Graph(Recorder):
    """Records ops inside ``async with device.graph() as graph:``; ``await graph.replay()`` then runs them all by one command, as often as is wanted.

    Nothing runs when the block ends. The refs that the methods return keep their memory as long as the graph or they live, and hold what the last
    replay has left there: the same addresses each time. Inputs are changed in place, by ``device.put(array, out=ref)`` or by any op with ``out=``.

    Where the backend has no graphs (the CPU), a replay enqueues the ops one after the other: the same results, by the same interface.

    If the context is rebuilt while recording, the end of the block raises :class:`~accel.StaleRefError`. After a later rebuild the graph is stale:
    :meth:`replay` raises that, and the graph is to be recorded again. Dropping the graph, or :meth:`aclose`, gives it back.
    """

    what: ClassVar[str] = "graph"

    def _record(self, op: KernelOp[Any], timeout: float | None) -> Any:
        if isinstance(op, ops.Put):
            raise InvalidArgumentError(
                "a graph reads no host memory", op="put", remedy="Put the array before, and change it in place: device.put(array, out=ref)."
            )
        if getattr(op, "durable", False):
            raise InvalidArgumentError(
                "a graph makes no durable buffers: it is gone with its context",
                op=op.kind,
                remedy="Make the buffer before, and give it as out=.",
            )
        return super()._record(op, timeout)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        core = self._core
        program = Program(core, self._ops, self._plans, self._outputs, self._generation)
        submission = GraphSubmission(program, core.loop.create_future(), self._generation)
        self._ops, self._plans, self._outputs = [], [], []
        self._program: Program | None = None
        try:
            if error is None:
                self._sender.guard()
                await self._sender.run(None, self._timeout, submission)
                self._program = program
        finally:
            if self._program is None:
                for ref in program.made:
                    if not ref.is_freed:
                        ref.is_freed = True
                        ref.owner.dropped.append(ref.buffer)
            # An error's traceback holds this frame, and the submission's future holds the error.
            del submission, program

    async def replay(self, *, timeout: float | None = None) -> None:
        """Run the recorded ops; returns when they have ended.

        Takes its place in the device's order as any op does, and waits on the device for what its buffers are used for before.

        Parameters
        ----------
        timeout
            Seconds until waiting ends with :class:`~accel.DeadlineExceededError`; an expired replay is not launched.

        Raises
        ------
        StaleRefError
            If the context was rebuilt since the recording, or one of the buffers was freed.
        NotInitializedError, ClosedError
            Before the block has ended, and after :meth:`aclose`.

        Notes
        -----
        Cancelling detaches the waiter; a replay that has reached the device runs on.
        """
        await self._sender.run(Replay(self._recorded()), timeout)

    async def aclose(self) -> None:
        """Give the graph back, after the replays that were sent. Its refs stay. Idempotent."""
        if self._state == "ended":
            self._program = None

    @property
    def is_stale(self) -> bool:
        """Whether :meth:`replay` would raise :class:`~accel.StaleRefError` because of a rebuild."""
        return self._recorded().handle.is_stale

    def _recorded(self) -> Program:
        if self._state != "ended":
            raise NotInitializedError("the graph is not recorded yet", remedy="Replay it after its `async with` block.")
        if self._program is None:
            raise ClosedError("the graph was closed, or its block failed", remedy="Record another one.")
        return self._program
