"""Memory of other libraries that a context has used: released once all work on it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from accel.engine.launches import OpSubmission
from accel.ops import KernelOp, Plan
from accel.storage.closing import Closing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from accel.backend import SlabMemory
    from accel.engine.context import Context
    from accel.memory import Dependency, ExternalBlock

__all__ = ["DeferredRelease"]

_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
"""Seconds until a release that failed is tried again: at first, and at last."""


class _LastUse(KernelOp[Any]):
    """Does nothing, after all uses of some memory."""

    __slots__ = ()
    library = "memory"
    kind = "last_use"

    def plan(self) -> Plan:
        return _NO_PLAN


_NO_PLAN: Final = Plan((), (), ())
_LAST_USE: Final = _LastUse()


class DeferredRelease:
    """Releases blocks that no allocator owns. Everything runs on the loop's thread.

    Parameters
    ----------
    context
        The context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: list[ExternalBlock] = []
        self._sent: list[ExternalBlock] = []  # an op that ends after their last uses is in flight
        self._dependencies: list[Dependency] = []  # of that op
        self._closing: Closing[SlabMemory] = Closing(context.core.system)
        self._retry: asyncio.TimerHandle | None = None
        self._pause = _PAUSE

    def release(self, block: ExternalBlock) -> None:
        """Close a block's memory once its uses are over."""
        self._waiting.append(block)
        if not self._sent and self._retry is None:
            self._send_last_use()

    def _send_last_use(self) -> None:
        """Send an op that ends after the uses of all waiting blocks; one is in flight at a time."""
        context, self._retry = self._context, None
        blocks, self._waiting = self._waiting, []
        if context.fault is not None or not blocks:
            self._closing.left += [block.memory for block in blocks]
            return
        self._sent = blocks
        lane = context.lanes.transfer_lanes["put"]
        last = OpSubmission(_LAST_USE, _NO_PLAN, context.core.loop.create_future(), context.generation)
        last.future.add_done_callback(self._on_last_use)
        seq = lane.issue()
        dependencies = self._dependencies = lane.outstanding(self._dependencies)
        for block in blocks:
            block.usage.write(lane, seq, dependencies)
        last.bind(context, lane, _nothing, None, 1)
        last.inputs, last.outputs, last.seq, last.dependencies = (), (), seq, dependencies
        last.is_offloaded = False
        last.outstanding = 1
        context.on_dispatched(last, 1, 1)
        lane.send(last)

    def _on_last_use(self, future: asyncio.Future[Any]) -> None:
        """Close the memory: its last uses are over.

        If the context is dead, all memory is closed with it.
        """
        failed = future.cancelled() or future.exception() is not None
        if self._context.fault is not None:
            return
        sent, self._sent = self._sent, []
        if failed:
            self._send_later(sent)
            return
        self._dependencies, self._pause = [], _PAUSE
        self._closing.add([block.memory for block in sent])
        self._send_last_use()

    def _send_later(self, sent: list[ExternalBlock]) -> None:
        """Send the op again after a pause: it could not wait for the work of other libraries.

        The end of the obstacle, such as a capture, is not reported. The new op has the same
        dependencies, because the recorded use of the first one stands for the uses before it.
        """
        self._waiting = [*sent, *self._waiting]
        self._retry = self._context.core.loop.call_later(self._pause, self._send_last_use)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    # -- the end

    async def aclose(self) -> None:
        """Wait until the memory in closing is closed. The rest is closed with the context."""
        if self._retry is not None:
            self._retry.cancel()
        await self._closing.wait_closed()

    def take_all(self) -> list[SlabMemory]:
        """Return the memory that was not closed, for the caller to close."""
        return [*self._closing.left, *(block.memory for block in (*self._sent, *self._waiting))]


def _nothing(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue nothing."""
