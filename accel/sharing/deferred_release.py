"""The release of imported and managed memory, once all work on it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from accel.engine.launches import OpSubmission
from accel.ops import KernelOp, Plan
from accel.storage.closing import Closing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    from accel.backend import SlabMemory
    from accel.engine.context import Context
    from accel.memory import Dependency, ExternalBlock

__all__ = ["DeferredRelease"]

_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
"""Seconds until a release that failed is tried again: at first, and at last."""


class _Marker(KernelOp[Any]):
    """An op that does nothing, and depends on all uses of some memory: it ends after them."""

    __slots__ = ()
    library = "memory"
    kind = "last_use"

    def plan(self) -> Plan:
        return _EMPTY_PLAN


_EMPTY_PLAN: Final = Plan((), (), ())
_MARKER: Final = _Marker()


class DeferredRelease:
    """Releases blocks that no allocator owns. Used on the loop's thread only.

    A block may be in use on several streams, and by other libraries. So a marker, an op that writes
    all of the blocks, is sent: it depends on all of their uses, and ends after them.

    Parameters
    ----------
    context
        The context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: list[ExternalBlock] = []
        self._marked: list[ExternalBlock] = []  # their marker is in flight
        self._dependencies: list[Dependency] = []  # of the last marker, for one after it; see _retry_later()
        self._closing: Closing[SlabMemory] = Closing(context.core.system)
        self._retry: asyncio.TimerHandle | None = None  # sends the marker again after one that failed
        self._pause = _PAUSE  # seconds until then

    def release(self, block: ExternalBlock) -> None:
        """Have a block's memory closed, off the loop, once its uses are over; returns at once."""
        self._waiting.append(block)
        if not self._marked and self._retry is None:
            self._send_marker()

    def _send_marker(self) -> None:
        """Send a marker for all waiting blocks, unless there are none; one is in flight at a time.

        After a fault no op ends: the blocks then wait for :meth:`take_all`, at the context's end.
        """
        context, self._retry = self._context, None
        if context.fault is not None or not self._waiting:
            return
        # Make the marker, an op that writes all blocks and so depends on each of their uses.
        blocks, self._waiting = self._waiting, []
        self._marked = blocks
        lane = context.lanes.transfer_lanes["put"]  # later puts run after the marker, other ops need not
        marker = OpSubmission(_MARKER, _EMPTY_PLAN, context.core.loop.create_future(), context.generation)
        marker.future.add_done_callback(self._on_marker_done)
        seq = lane.issue()
        # Those of a marker that has failed, as far as they have not ended; else none. The writes add
        # those of this one to the same list.
        dependencies = self._dependencies = lane.outstanding(self._dependencies)
        for block in blocks:
            block.usage.write(lane, seq, dependencies)
        # Bind and send it as the context does with an op, though it has no operands and no kernel.
        marker.bind(context, lane, _enqueue_nothing, None, 1)
        marker.inputs, marker.outputs, marker.seq, marker.dependencies = (), (), seq, dependencies
        marker.is_offloaded = False
        marker.outstanding = 1
        context.on_dispatched(marker, 1, 1)
        lane.send(marker)

    def _on_marker_done(self, future: asyncio.Future[Any]) -> None:
        """Close the memory of the blocks whose marker has ended, and send the next marker.

        If the marker failed, send it again later. After a fault the blocks stay as they are, for
        :meth:`take_all`.
        """
        failed = future.cancelled() or future.exception() is not None
        if self._context.fault is not None:
            return
        blocks, self._marked = self._marked, []
        if failed:
            self._retry_later(blocks)
            return
        self._dependencies, self._pause = [], _PAUSE
        self._closing.add([block.memory for block in blocks])
        self._send_marker()

    def _retry_later(self, blocks: list[ExternalBlock]) -> None:
        """Send a marker again after a pause: it could not wait for the work of other libraries.

        Nothing reports the end of what was in the way, such as a capture. The new marker has the
        dependencies of the first one too, which the blocks' usages have forgotten.
        """
        self._waiting = [*blocks, *self._waiting]
        self._retry = self._context.core.loop.call_later(self._pause, self._send_marker)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    # -- the end

    async def aclose(self) -> None:
        """Wait until the memory that is being closed is closed; :meth:`take_all` has the rest."""
        if self._retry is not None:
            self._retry.cancel()
        await self._closing.wait_closed()

    def take_all(self, blocks: Iterable[ExternalBlock]) -> list[SlabMemory]:
        """Return the memory that was not closed, for the caller to close. Called last.

        ``blocks`` are those of the context that were never released: their memory is added.
        """
        return [*self._closing.left, *(block.memory for block in (*self._marked, *self._waiting, *blocks))]


def _enqueue_nothing(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue nothing."""
