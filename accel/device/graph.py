"""A graph: ops recorded once, and run again and again by one command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from accel import ops
from accel.device.recording import Recorder
from accel.engine.program import Call, GraphSubmission, Program, Replay
from accel.errors import AccelError, ClosedError, InvalidArgumentError, NotInitializedError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from types import TracebackType

    from accel.engine.sender import Sender
    from accel.ops import KernelOp
    from accel.ref import AccelRef

__all__ = ["Graph", "GraphFunction"]


class GraphFunction:
    """A recorded graph as a function of its operands; made by :meth:`Graph.into_function`.

    Parameters
    ----------
    sender
        Sends each call as an op to the device.
    program
        The recorded ops, bound to the memory that they keep.
    inputs, results
        Buffers of the program. A call copies its operands to ``inputs``, and after the ops
        ``results`` to new buffers, which it returns.
    """

    __slots__ = ("_inputs", "_program", "_results", "_sender")

    def __init__(self, sender: Sender, program: Program, inputs: tuple[AccelRef, ...], results: tuple[AccelRef, ...]) -> None:
        self._sender = sender
        self._program = program
        self._inputs = inputs
        self._results = results

    def __call__(self, *operands: AccelRef) -> Coroutine[Any, Any, tuple[AccelRef, ...]]:
        """Run the graph, and return its results as new buffers, where it is awaited.

        Parameters
        ----------
        *operands
            A ref for each input, which is copied there; then a ref of each other buffer that the
            recorded ops read, which is read in place and keeps the buffer alive.

        Raises
        ------
        InvalidArgumentError
            If an operand is missing, or has another shape or dtype than its input.
        StaleRefError
            If the context was rebuilt since the recording.
        """
        return self._sender.run(Call(self._program, self._inputs, self._results, operands), None)

    @property
    def is_stale(self) -> bool:
        """Whether the context was rebuilt since the recording."""
        return self._program.handle.is_stale


class Graph(Recorder):
    """Records ops inside ``async with device.graph() as graph:``, to be run again and again.

    ``await graph.replay()`` runs them all by one command.

    Nothing runs when the block ends. The refs that the methods return keep their memory as long as
    the graph or they live, and hold what the last replay has left there: the same addresses each
    time. Inputs are changed in place, by ``device.put(array, out=ref)`` or by any op with ``out=``.

    Where the backend has no graphs (the CPU), a replay enqueues the ops one after the other: the
    same results, by the same interface.

    If the context is rebuilt while recording, the end of the block raises
    :class:`~accel.StaleRefError`. After a later rebuild the graph is stale: :meth:`replay` raises
    that, and the graph is to be recorded again. Dropping the graph, or :meth:`aclose`, releases
    it.
    """

    what: ClassVar[str] = "graph"

    replay_op: ClassVar[type[Replay]] = Replay
    """The op that replays it."""

    _program: Program | None = None
    """What was captured; ``None`` before the block's end, if that has raised, and once closed."""

    def _record(self, op: KernelOp[Any]) -> Any:
        """See :meth:`Recorder._record`; refuses ops that a replay could not repeat."""
        if isinstance(op, ops.Checksum):
            raise InvalidArgumentError("a graph fills no host memory", op="checksum", remedy="Await it after the block.")
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
        return super()._record(op)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Have the device capture the recorded ops, unless the body has raised. Nothing runs.

        If either fails, the graph cannot be replayed, and the refs of its results are freed.
        """
        self._end_recording()
        core, recorded, generation = self._core, self._ops, self._ops.generation
        program = submission = None
        try:
            if error is None:
                program = await Program.of(core, recorded.ops, recorded.plans, recorded.outputs, generation)
                submission = GraphSubmission(program, core.loop.create_future(), generation)
                self._sender.guard()
                await self._sender.run(None, self._timeout, submission)
                self._program = program
        except AccelError as failed:
            failed.op_index = recorded.given_index(failed.op_index)  # as the user counts the ops
            raise
        finally:
            if self._program is None:  # nothing will fill the refs that the block returned: free them
                for ref in [ref for refs in recorded.outputs for ref in refs] if program is None else program.owned_refs:
                    if not ref.is_freed:
                        ref.is_freed = True
                        ref.owner.dropped.append(ref.buffer)
            # An error's traceback holds this frame, and the submission's future holds the error.
            submission = program = None
            await self._release_ops(is_device_done=self._program is not None)

    async def replay(self, *, timeout: float | None = None) -> None:
        """Run the recorded ops; returns when they have ended.

        Takes its place in the device's order as any op does, and waits on the device for what its
        buffers are used for before.

        Parameters
        ----------
        timeout
            Seconds until waiting ends with :class:`~accel.DeadlineExceededError`; an expired replay
            is not launched.

        Raises
        ------
        StaleRefError
            If the context was rebuilt since the recording, or one of the buffers was freed.
        NotInitializedError, ClosedError
            Before the block has ended, and after :meth:`aclose`.

        Notes
        -----
        Cancelling detaches the waiter; a replay that has reached the device runs on.

        Where an op has failed that was to write a buffer of the graph, a replay that reads the
        buffer before it writes there raises the error of that op, until all of it is rewritten.
        """
        try:
            await self._sender.run(self.replay_op(self._live_program()), timeout)
        except AccelError as error:
            error.op_index = self._ops.given_index(error.op_index)  # as the user counts the ops
            raise

    @property
    def is_one_command(self) -> bool:
        """Whether a replay is one command of the device.

        It is one if the backend has graphs, unless ``debug`` or ``faults`` of the device needs each op.
        """
        options = self._core.options
        return self._core.has_graphs and not options.debug and options.faults is None

    def into_function(self, inputs: Sequence[AccelRef], results: Sequence[AccelRef]) -> GraphFunction:
        """Return the recorded graph as a function; this object is closed.

        A call copies its operands to ``inputs``, runs the recorded ops, and copies ``results`` to
        new buffers: by one command where a replay is :attr:`one command <is_one_command>`, else op
        by op. What else the ops read must be given at each call: a graph that is one command does
        not keep it alive.

        Parameters
        ----------
        inputs, results
            Whole buffers that the graph made: where operands are copied to, and what a call returns
            copies of.

        Raises
        ------
        InvalidArgumentError
            If the graph did not make one of these buffers; if an op writes a buffer that the graph
            did not make, or has a status, which only :meth:`replay` reports.
        """
        program = self._live_program()
        owned_ids = {id(ref) for ref in program.owned_refs}
        if program.plan.status is not None or not program.writes_only_owned or not owned_ids.issuperset(map(id, (*inputs, *results))):
            raise InvalidArgumentError(
                "the graph is no function: an op has a status, or a buffer that it writes or returns is not one that the graph made",
                remedy="Use replay().",
            )
        self._program = None
        program.release_operands()  # each call brings its own
        return GraphFunction(self._sender, program, tuple(inputs), tuple(results))

    async def aclose(self) -> None:
        """Release the graph, once the replays that were sent have ended. Its refs stay valid.

        Returns at once, and is idempotent. Inside the block it does nothing.
        """
        if self._state == "ended":
            self._program = None

    @property
    def is_stale(self) -> bool:
        """Whether :meth:`replay` would raise :class:`~accel.StaleRefError` because of a rebuild."""
        return self._live_program().handle.is_stale

    def _live_program(self) -> Program:
        """Return the captured program; raise before the block's end, and after :meth:`aclose`."""
        if self._state != "ended":
            raise NotInitializedError("the graph is not recorded yet", remedy="Replay it after its `async with` block.")
        if self._program is None:
            raise ClosedError("the graph was closed, or its block failed", remedy="Record another one.")
        return self._program
