"""One piece of work for a device: an op, or a batch of ops, with its future and its deadline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from accel.engine.op_error import raise_op_error
from accel.errors import AccelError, DeadlineExceededError
from accel.telemetry.probe import DeviceWork

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable, Sequence

    from accel.memory import Timeline
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef
    from accel.telemetry.probe import DeviceTime, Probes

# The keys of `map` for a batch's ops: C functions, because a batch may have thousands.
_library_of, _kind_of, _written_by = attrgetter("library"), attrgetter("kind"), attrgetter("writes")

__all__ = ["BatchSubmission", "Submission", "Write", "result_of", "writes_of"]

Write: TypeAlias = "tuple[int, int, int]"
"""(index of the op, buffer, bytes that it sets without reading them)."""

Chunk: TypeAlias = "tuple[Timeline, int, int, int]"
"""Consecutive ops of a batch in one lane: (lane, first sequence number, index of the first op,
count)."""


def writes_of(plans: Sequence[Plan]) -> list[Write]:
    """Return the writes of ops to buffers that existed before; new results are not among them."""
    return [(index, ref.buffer, 0 if plan.updates else ref.nbytes) for index, plan in enumerate(plans) for ref in plan.writes]


def result_of(op: KernelOp, refs: tuple[AccelRef, ...], loop: asyncio.AbstractEventLoop) -> Any:
    """Return the result of ``await device.run(op)``, as the op makes it from its refs.

    ``KernelOp.result`` may be a user's code: what it raises becomes the op's error.
    """
    try:
        return op.result(refs)
    except BaseException as raised:
        raise_op_error(raised, f"result() of {op.kind}", loop, library=op.library)


class Submission(ABC):
    """One op, batch or graph on its way through a device: the message of the device's actor.

    Its future ends exactly once: with the result, with an error, or cancelled by the caller. A
    submission whose future ends before its work is launched is dropped.

    Attributes
    ----------
    future : Future
        Awaited by the caller.
    generation : int
        The generation of the refs among its operands.
    name : str
        The op, or "batch", as errors name it.
    launched : int
        How many of the ops, from the first on, may have reached the device. It is raised right
        before an op's kernel is called, or its message is sent, and never lowered. An op that fails
        before that counts too; one that is dropped does not.
    outstanding : int
        How many ops have been dispatched and not yet retired.
    result : object
        The future's result, once it is known.
    timer : TimerHandle or None
        Ends the future at the deadline.
    writes : sequence of Write
        The buffers that it writes and does not make. Kept after the operands are released.
    tears : int
        How often durable buffers had been torn when it was sent; 0 if none was torn then.
    observed : DeviceWork or None
        The record of it that probes get, with its device time; ``None`` where nothing observes it.
    """

    __slots__ = ("future", "generation", "launched", "name", "observed", "outstanding", "result", "tears", "timer", "writes")

    def __init__(self, name: str, future: asyncio.Future[Any], generation: int) -> None:
        self.name = name
        self.future = future
        self.generation = generation
        self.launched = 0
        self.outstanding = 0
        self.result: Any = None
        self.timer: asyncio.TimerHandle | None = None
        self.writes: Sequence[Write] = ()
        self.tears = 0
        self.observed: DeviceWork | None = None

    @property
    @abstractmethod
    def libraries(self) -> Sequence[str]:
        """Libraries of the ops."""

    @property
    @abstractmethod
    def kinds(self) -> Sequence[str]:
        """Names of the ops."""

    @property
    def duration_key(self) -> Hashable:
        """Key of the predicted duration: submissions with the same key take about as long."""
        return self.name

    @property
    @abstractmethod
    def plans(self) -> Sequence[Plan]:
        """The ops' plans. Empty once the operands are released."""

    @property
    @abstractmethod
    def chunks(self) -> Sequence[Chunk]:
        """Where in the lanes the dispatched ops are."""

    @abstractmethod
    def is_dropped(self, index: int) -> bool:
        """Return whether op ``index`` is not to be launched any more.

        Asked right before its kernel is called.
        """

    @abstractmethod
    def reject_from(self, index: int, error: AccelError) -> None:
        """End with the error of op ``index``.

        Ops before it still run. It and later ones are not launched, and the refs of their results
        are freed.
        """

    @abstractmethod
    def release_operands(self) -> None:
        """Drop the references to operands. Idempotent.

        Called when all ops are launched, or when the future ends, if that is earlier; the launches
        of ops that still run keep theirs. A ref that its user has dropped is then freed; its memory
        is reused only after the ops.
        """

    @abstractmethod
    def free_results_from(self, index: int) -> None:
        """Free the refs that ops from ``index`` on would have made: they will not be launched.

        A ref that was freed before is passed over, so that this may be called again.
        """

    @abstractmethod
    def free_unlaunched_results(self) -> None:
        """Free the result refs of ops that are not launched because the future has ended.

        Called when the caller has gone: its await was cancelled, or its batch failed.
        """

    def succeed(self) -> None:
        """End with the result, unless the future has ended; release the operands either way.

        Called when the last op retires. The future ends before if the caller goes, or an op fails.
        """
        future = self.future
        if not future.done():
            future.set_result(self.result)
        self.release_operands()
        self.result = None

    def reject(self, error: AccelError) -> None:
        """End with an error, unless the future has ended; release the operands either way.

        The future keeps ``error``: pass an instance that nothing else has. Refs of results are not
        freed: see :meth:`reject_from`.
        """
        if not self.future.done():
            self.future.set_exception(error)
        self.release_operands()
        self.result = None

    def observe(self, charged: DeviceTime | None, *, is_timed: bool) -> None:
        """Have probes notified of this submission, and its device time added to ``charged``.

        Called before it is sent, only where there are probes or the caller's work is charged. With
        ``is_timed`` its lanes measure the device time.
        """
        self.observed = DeviceWork(self.name, tuple(zip(self.libraries, self.kinds, strict=True)), charged, is_timed=is_timed)

    def end_observed(self, probes: Probes) -> None:
        """Notify probes, once, that the ops have left the device, if any was sent there.

        Called when the future has ended.
        """
        work = self.observed
        if work is None or not work.sent_at or work.ended_at:
            return
        work.ended_at = perf_counter()
        if self.future.cancelled():
            work.error = "CancelledError"
        elif (error := self.future.exception()) is not None:
            work.error = type(error).__name__
        if probes.op_ended:
            probes.tell(probes.op_ended, work)

    def on_drained(self) -> None:  # noqa: B027 - most have nothing to do then
        """Note that all ops dispatched so far have retired, but not the last op.

        Only the submissions of a child do something: one that has failed reports that now, because
        no stream uses its arrays any more.
        """

    def expire(self, timeout: float, device: str) -> None:
        """End with the deadline's error, unless the future has ended; called by the timer.

        Operands are not released: what was launched runs on.
        """
        if not self.future.done():
            what = "was on the device" if self.launched else "had not been launched and will not be"
            self.future.set_exception(
                DeadlineExceededError(f"{self.name} did not end within {timeout:g} s; it {what}", op=self.name, device=device)
            )


class BatchSubmission(Submission):
    """The work of a ``batch()`` block.

    Attributes
    ----------
    ops : sequence of KernelOp
        The ops. Emptied once the last one is launched, so that their operands can be freed.
    outputs : list of tuple of AccelRef
        Per op the refs it makes, handed out while recording.
    committed : int
        How many ops, from the first on, are launched even if the future has ended: those before the
        op that failed.
    dispatched : int
        How many ops, from the first on, were given to a lane.
    """

    __slots__ = ("chunks", "committed", "dispatched", "kinds", "libraries", "ops", "outputs", "plans")

    libraries: Sequence[str]
    kinds: Sequence[str]
    plans: Sequence[Plan]
    chunks: list[Chunk]

    def __init__(
        self,
        ops: tuple[KernelOp, ...],
        plans: tuple[Plan, ...],
        outputs: list[tuple[AccelRef, ...]],
        future: asyncio.Future[Any],
        generation: int,
    ) -> None:
        super().__init__("batch", future, generation)
        self.ops = ops
        self.plans = plans
        self.outputs = outputs
        self.writes = writes_of(plans) if any(map(_written_by, plans)) else []
        for index, refs in enumerate(outputs):
            for ref in refs:
                if ref.durable:
                    self.writes.append((index, ref.buffer, ref.nbytes))
        self.committed = self.dispatched = 0
        self.chunks = []
        self.libraries = tuple(map(_library_of, ops))
        self.kinds = tuple(map(_kind_of, ops))

    @property
    def duration_key(self) -> Hashable:
        """The last op's kind, and the number of ops to the nearest power of two."""
        return self.kinds[-1], len(self.kinds).bit_length()

    def is_dropped(self, index: int) -> bool:
        """See :meth:`Submission.is_dropped`."""
        return index >= self.committed and self.future.done()

    def reject_from(self, index: int, error: AccelError) -> None:
        """See :meth:`Submission.reject_from`."""
        self.free_results_from(index)
        if not self.future.done():  # a batch that was cancelled before launches nothing more
            self.committed = index
        self.reject(error)

    def release_operands(self) -> None:
        """See :meth:`Submission.release_operands`."""
        self.ops = ()
        self.plans = ()

    def free_results_from(self, index: int) -> None:
        """See :meth:`Submission.free_results_from`."""
        for refs in self.outputs[index:]:
            for ref in refs:
                if not ref.is_freed:
                    ref.is_freed = True
                    ref.owner.dropped.append(ref.buffer)

    def free_unlaunched_results(self) -> None:
        """See :meth:`Submission.free_unlaunched_results`."""
        self.free_results_from(self.committed)
