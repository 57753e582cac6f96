"""One piece of work on its way to a device: an op, or a batch of ops, with its future and its deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.errors import AccelError, DeadlineExceededError

if TYPE_CHECKING:
    import asyncio

    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef

__all__ = ["Submission"]


class Submission:
    """A message to a device.

    Its future ends exactly once: with the result, with an error, or cancelled by the caller. A submission whose future has ended before it
    reached the device is dropped, wherever it is found.

    Attributes
    ----------
    ops, plans : tuple
        The work, and what it does to memory. Emptied when the last op has reached the device, so that operands are not kept from being freed.
    outputs : list of AccelRef or None
        For a batch: per op the refs it makes, handed out while recording.
    kinds : tuple of str
        Names of the ops.
    launched : int
        How many of the ops have reached the device.
    outstanding : int
        How many ops have been dispatched and not yet retired.
    sound : int
        How many ops, from the first, are launched although the future has ended: those before the op that failed.
    """

    __slots__ = ("future", "generation", "kinds", "launched", "ops", "outputs", "outstanding", "plans", "result", "sound", "timer")

    def __init__(
        self,
        ops: tuple[KernelOp, ...],
        plans: tuple[Plan, ...],
        future: asyncio.Future[Any],
        *,
        outputs: list[tuple[AccelRef, ...]] | None = None,
        generation: int = 0,
    ) -> None:
        self.ops = ops
        self.plans = plans
        self.future = future
        self.outputs = outputs
        self.generation = generation
        self.kinds = (ops[0].kind,) if len(ops) == 1 else tuple(op.kind for op in ops)
        self.launched = 0
        self.outstanding = 0
        self.sound = 0
        self.result: Any = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_batch(self) -> bool:
        """Whether this is the work of a ``batch()`` block."""
        return self.outputs is not None

    @property
    def name(self) -> str:
        """The op, or "batch", as errors name it."""
        return "batch" if self.outputs is not None else self.kinds[0]

    @property
    def is_settled(self) -> bool:
        """Whether nobody waits any more: answered, failed, expired or cancelled."""
        return self.future.done()

    def succeed(self) -> None:
        """Answer with the result, unless nobody waits any more."""
        future = self.future
        if not future.done():
            future.set_result(self.result)
        self.release()

    def fail(self, error: AccelError) -> None:
        """Answer with an error, which must be this submission's own instance, unless nobody waits any more."""
        if not self.future.done():
            self.future.set_exception(error)
        self.release()

    def fail_from(self, index: int, error: AccelError) -> None:
        """Answer with the error of op ``index``: later ops are not launched and their refs are void, earlier ones are as good as ever."""
        self.void(index)
        if not self.future.done():
            self.sound = index
        self.fail(error)

    def is_dropped(self, index: int) -> bool:
        """Whether op ``index`` is not to be launched any more."""
        return index >= self.sound and self.future.done()

    def release_operands(self) -> None:
        """Let go of the operands: all ops have reached the device, whose memory is kept by its use and not by refs."""
        self.ops = ()
        self.plans = ()

    def release(self) -> None:
        """Let go of operands and result."""
        self.release_operands()
        self.result = None

    def void(self, index: int) -> None:
        """Make the refs of a batch's ops from ``index`` on unusable: those ops were not and will not be launched."""
        for refs in (self.outputs or ())[index:]:
            for ref in refs:
                if not ref.is_freed:
                    ref.is_freed = True
                    ref.owner.dropped.append(ref.buffer)

    def expire(self, timeout: float, device: str) -> None:
        """Answer that the deadline has passed; called by the event loop's timer."""
        if not self.future.done():
            what = "was on the device" if self.launched else "had not been launched and will not be"
            self.future.set_exception(
                DeadlineExceededError(f"{self.name} did not end within {timeout:g} s; it {what}", op=self.name, device=device)
            )
