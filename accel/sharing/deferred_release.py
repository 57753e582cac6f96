"""Memory of others that a context has used: it is let go of once all that was enqueued on it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from accel.engine.launches import OpSubmission
from accel.ops import KernelOp, Plan

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from accel.backend import SlabMemory
    from accel.engine.context import Context
    from accel.memory import Dependency, ExternalBlock

__all__ = ["DeferredRelease"]

_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
"""Seconds until what could not be given back is tried again: at first, and at last."""


class _Last(KernelOp[Any]):
    """Does nothing, after everything that memory was used for."""

    __slots__ = ()
    library = "memory"
    kind = "last_use"

    def plan(self) -> Plan:
        return _NO_PLAN


_NO_PLAN: Final = Plan((), (), ())
_LAST: Final = _Last()


class DeferredRelease:
    """Gives blocks back that no allocator owns. Everything runs on the loop's thread.

    Parameters
    ----------
    context
        The context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: list[ExternalBlock] = []
        self._sent: list[ExternalBlock] = []  # after whose last uses something was sent
        self._before: list[Dependency] = []  # what that has to wait for
        self._left: list[SlabMemory] = []  # used no more
        self._closing: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._pause = _PAUSE

    def leave(self, block: ExternalBlock) -> None:
        """Let a block go once its uses are over."""
        self._waiting.append(block)
        if not self._sent and self._again is None:
            self._send_last()

    def _send_last(self) -> None:
        """Send what ends after the uses of all blocks that leave: one at a time, for any number of them."""
        context, self._again = self._context, None
        blocks, self._waiting = self._waiting, []
        if context.fault is not None or not blocks:
            self._left += [block.memory for block in blocks]
            return
        self._sent = blocks
        port = context.ports["memory"]
        last = OpSubmission(_LAST, _NO_PLAN, context.core.loop.create_future(), context.generation)
        last.future.add_done_callback(self._ended)
        seq = port.lane.issue()
        dependencies = self._before = port.lane.outstanding(self._before)
        for block in blocks:
            block.usage.write(port.lane, seq, dependencies)
        last.bind(context, port.lane, _nothing, None, 1)
        last.inputs, last.outputs, last.seq, last.dependencies = (), (), seq, dependencies
        last.is_offloaded = False
        last.outstanding = 1
        context.sent(last, 1, 1)
        if not port.hand_over(last):
            port.actor.tell(last)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        """Take note that the last uses are over, or that the context is dead: then all is given back when that is closed."""
        failed = future.cancelled() or future.exception() is not None
        if self._context.fault is not None:
            return
        sent, self._sent = self._sent, []
        if failed:
            self._try_again(sent)
            return
        self._before, self._pause = [], _PAUSE
        self._left += [block.memory for block in sent]
        if self._closing is None or self._closing.done():
            self._closing = self._context.core.loop.create_task(self._close_left())
        self._send_last()

    def _try_again(self, sent: list[ExternalBlock]) -> None:
        """Send it once more after a while: what kept it from waiting for the work of others, such as a capture of theirs, says not when it is over.

        What it had to wait for it still has: its own, recorded use stands for the uses before it.
        """
        self._waiting = [*sent, *self._waiting]
        self._again = self._context.core.loop.call_later(self._pause, self._send_last)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    async def _close_left(self) -> None:
        while self._left:
            left, self._left = self._left, []
            await self._context.core.system.run_blocking(_close, left)

    # -- the end

    async def aclose(self) -> None:
        """Wait until what is being given back is so; what could not be yet goes with the context."""
        if self._again is not None:
            self._again.cancel()
        if self._closing is not None:
            await self._closing

    def take_all(self) -> list[SlabMemory]:
        """Return the memory that was not given back, for the caller to close."""
        return [*self._left, *(block.memory for block in (*self._sent, *self._waiting))]


def _nothing(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue nothing."""


def _close(memories: list[SlabMemory]) -> None:
    while memories:
        memories.pop().close()
