"""One piece of work on its way to a device: an op, or a batch of ops, with its future and its deadline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from accel.errors import AccelError, DeadlineExceededError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable, Sequence

    from accel.memory import Timeline
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef

__all__ = ["BatchSubmission", "Submission", "Write", "writes_of"]

Write: TypeAlias = "tuple[int, int, int]"
"""Which op of a submission writes which buffer, and how many of its bytes it sets, whatever was there."""


def writes_of(plans: Sequence[Plan]) -> list[Write]:
    """Return what ops write that was there before."""
    return [(index, ref.buffer, 0 if plan.updates else ref.nbytes) for index, plan in enumerate(plans) for ref in plan.writes]


class Submission(ABC):
    """A message to a device.

    Its future ends exactly once: with the result, with an error, or cancelled by the caller. A submission whose future has ended before it
    reached the device is dropped, wherever it is found.

    Attributes
    ----------
    future : Future
        What its caller waits for.
    generation : int
        Of the refs among its operands.
    name : str
        The op, or "batch", as errors name it.
    launched : int
        How many of the ops have reached the device.
    outstanding : int
        How many ops have been dispatched and not yet retired.
    result : object
        What the future ends with, once it is known.
    timer : TimerHandle or None
        The deadline.
    writes : sequence of Write
        What it does to buffers that others have refs of, also when its operands have been let go of.
    tears : int
        How often durable buffers had been torn when it was sent; 0 if none was torn then.
    """

    __slots__ = ("future", "generation", "launched", "name", "outstanding", "result", "tears", "timer", "writes")

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

    @property
    @abstractmethod
    def kinds(self) -> Sequence[str]:
        """Names of the ops."""

    @property
    def work(self) -> Hashable:
        """What it does, as far as one can tell from that how long it takes."""
        return self.name

    @property
    def may_have_run(self) -> bool:
        """Whether some of it is, or was, on the device, or goes there although the future has ended."""
        return self.launched > 0

    @property
    @abstractmethod
    def plans(self) -> Sequence[Plan]:
        """What the ops do to memory. Empty when the last op has reached the device."""

    @abstractmethod
    def is_dropped(self, index: int) -> bool:
        """Whether op ``index`` is not to be launched any more."""

    @abstractmethod
    def reject_from(self, index: int, error: AccelError) -> None:
        """Answer with the error of op ``index``: later ops are not launched and their refs are void, earlier ones are as good as ever."""

    @abstractmethod
    def release_operands(self) -> None:
        """Let go of the operands: all ops have reached the device, whose memory is kept by its use and not by refs."""

    @abstractmethod
    def void(self, index: int) -> None:
        """Make the refs that ops from ``index`` on were to make unusable, as far as their users have them already: those ops will not be launched."""

    @abstractmethod
    def void_unsound(self) -> None:
        """Make those refs unusable whose ops will not be launched now that the future has ended."""

    @property
    def is_settled(self) -> bool:
        """Whether no caller waits any more: the future was answered, failed, expired or cancelled."""
        return self.future.done()

    def succeed(self) -> None:
        """Answer with the result, unless the future has ended."""
        future = self.future
        if not future.done():
            future.set_result(self.result)
        self.release_operands()
        self.result = None

    def reject(self, error: AccelError) -> None:
        """Answer with an error, which must be this submission's own instance, unless the future has ended."""
        if not self.future.done():
            self.future.set_exception(error)
        self.release_operands()
        self.result = None

    def over(self) -> None:  # noqa: B027 - most have nothing to do then
        """Take note that what was sent of it has ended, and that it was not all."""

    def expire(self, timeout: float, device: str) -> None:
        """Answer that the deadline has passed; called by the event loop's timer."""
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
        The work. Emptied when the last op has reached the device, so that operands are not kept from being freed.
    outputs : list of tuple of AccelRef
        Per op the refs it makes, handed out while recording.
    sound : int
        How many ops, from the first, are launched although the future has ended: those before the op that failed.
    sent : int
        How many, from the first, have a place in line.
    places : list of tuple
        Where those are: a lane, their first number there, the index of the first, and how many.
    libraries : tuple of str
        Of the ops.
    """

    __slots__ = ("_kinds", "_plans", "libraries", "ops", "outputs", "places", "sent", "sound")

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
        self._plans = plans
        self.outputs = outputs
        made = [(index, ref.buffer, ref.nbytes) for index, refs in enumerate(outputs) for ref in refs if ref.durable]
        self.writes = writes_of(plans) + made
        self.sound = self.sent = 0
        self.places: list[tuple[Timeline, int, int, int]] = []
        self.libraries = tuple([op.library for op in ops])
        self._kinds = tuple([op.kind for op in ops])

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the ops."""
        return self._kinds

    @property
    def work(self) -> Hashable:
        """The last op's kind, and how many ops they are, to the nearest power of two."""
        return self._kinds[-1], len(self._kinds).bit_length()

    @property
    def may_have_run(self) -> bool:
        """Whether some of it is, or was, on the device, or goes there although the future has ended."""
        return self.launched > 0 or self.sound > 0

    @property
    def plans(self) -> Sequence[Plan]:
        """What the ops do to memory. Empty when the last op has reached the device."""
        return self._plans

    def is_dropped(self, index: int) -> bool:
        """Whether op ``index`` is not to be launched any more."""
        return index >= self.sound and self.future.done()

    def reject_from(self, index: int, error: AccelError) -> None:
        """Answer with the error of op ``index``."""
        self.void(index)
        if not self.future.done():
            self.sound = index
        self.reject(error)

    def release_operands(self) -> None:
        """Let go of the operands."""
        self.ops = ()
        self._plans = ()

    def void(self, index: int) -> None:
        """Make the refs of ops from ``index`` on unusable."""
        for refs in self.outputs[index:]:
            for ref in refs:
                if not ref.is_freed:
                    ref.is_freed = True
                    ref.owner.dropped.append(ref.buffer)

    def void_unsound(self) -> None:
        """Make the refs unusable of ops after those that are launched although the future has ended."""
        self.void(self.sound)
