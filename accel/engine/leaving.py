"""The end of a registered library in one context: its ops run to their end, its instance is closed, its kernel actor and its place are given back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from accel._log import get_logger
from accel.engine.marks import LaneMark
from accel.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.backend import AccelEvent
    from accel.engine.context import Context
    from accel.engine.lane import Lane
    from accel.engine.registration import Unregistration

__all__ = ["LeavingLibraries", "withdraw"]

logger = get_logger()


def withdraw(context: Context, submission: Unregistration, close: Callable[[Unregistration], object]) -> None:
    """Take no more ops of a library, and have ``close`` end it beside the queue; the submission ends with that.

    Raises
    ------
    ContextPoisonedError
        If the context has faulted: nothing has changed.
    """
    context.check_alive()
    name = submission.library
    submission.registration = context.core.withdraw_own(name)
    context.refuse_own(name)
    submission.outstanding = 1
    context.sent(submission, 1, 0)
    close(submission)


class LeavingLibraries:
    """The libraries of one context that were unregistered, and are not closed yet.

    Parameters
    ----------
    context
        The context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self, submission: Unregistration, end_port: Callable[[], Awaitable[object]], then: Callable[[], object]) -> None:
        """Begin to end a library; no op of it is sent any more.

        Parameters
        ----------
        submission
            Is answered when the library has ended.
        end_port
            Ends the library's own kernel actor, if it has one.
        then
            Called when the library has ended, but for a context that faults or closes before.
        """
        context = self._context
        # What is in the streams now may be of the library: also batches, and replays of graphs, in lanes that are not its own.
        marks = [(lane, lane.issued) for lane in context.lanes]
        task = context.core.loop.create_task(self._end(submission, end_port, marks, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(
        self,
        submission: Unregistration,
        end_port: Callable[[], Awaitable[object]],
        marks: list[tuple[Lane, int]],
        then: Callable[[], object],
    ) -> None:
        context, name = self._context, submission.library
        try:
            await end_port()
            for lane, seq in marks:
                await self._passed(lane, seq)
            own = context.own.get(name)
            if own is not None:
                with context.opening:
                    await context.core.system.run_blocking(context.offloaded.make, own.close)
            context.kernels.remove_own(name)
            then()
            context.retire(submission, 1, 0, is_last=True)
        except AccelError as error:  # the context is gone, and has answered the submission
            logger.debug("library_not_closed", device=context.core.name, library=name, error=error)

    async def _passed(self, lane: Lane, seq: int) -> None:
        """Wait until a lane has done its work up to a number; raises as :meth:`Context.until` does."""
        if lane.completed >= seq:
            return
        context = self._context
        await lane.reached(seq)
        event = lane.events.take()
        mark = _Passed(context, lane, seq, event)
        if lane.stream.record(event):
            mark.complete()
        else:
            context.watcher.watch(mark)
        await context.until(lambda: lane.completed >= seq)

    async def aclose(self) -> None:
        """End what has not ended: the context closes, and closes the instances itself, or abandons them."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class _Passed(LaneMark):
    """A mark after which the context looks again at what waits."""

    __slots__ = ("_context",)

    def __init__(self, context: Context, lane: Lane, seq: int, event: AccelEvent) -> None:
        super().__init__(context.report_fault, lane, seq, event, "unregister")
        self._context = context

    def complete(self) -> None:
        """See :meth:`LaneMark.complete`."""
        super().complete()
        self._context.wake()
