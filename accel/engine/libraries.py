"""The libraries of one context: opens them by kernel actors, and closes registered ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from accel.errors import AccelError, ActorStoppedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.actors import ActorRef
    from accel.engine.in_flight import ContextBase
    from accel.engine.kernel_table import KernelTable
    from accel.engine.lanes import Lanes
    from accel.engine.registration import Unregistration

__all__ = ["Libraries"]


class Libraries:
    """Opens libraries at their first use, and closes registered libraries.

    Parameters
    ----------
    context, lanes, kernels
        The context, with its lanes and its kernels.
    start
        Starts the kernel actor of a library, and returns it once the library is open.

    Attributes
    ----------
    actors : dict
        Library that was opened -> its kernel actor.
    opening_calls : list of str
        Users' libraries that calls on worker threads open now; such a call may never return, so
        that a context with one is abandoned.
    """

    def __init__(
        self, context: ContextBase, lanes: Lanes, kernels: KernelTable, start: Callable[[str], Awaitable[ActorRef[Any, None]]]
    ) -> None:
        self.actors: dict[str, ActorRef[Any, None]] = {}
        self.opening_calls: list[str] = []
        self._context = context
        self._lanes = lanes
        self._kernels = kernels
        self._start = start
        self._opening_tasks: dict[str, asyncio.Task[None]] = {}
        self._closing_tasks: set[asyncio.Task[None]] = set()

    async def open(self, library: str) -> None:
        """Open a library, off the loop, if it is not open; calls for one library share an attempt.

        Cancelling a call does not cancel the attempt.

        Raises
        ------
        AccelError
            Why it could not be opened. The next call tries again.
        ContextPoisonedError
            Also where the fault surfaces here: the caller gets the same error as all waiters.
        """
        context = self._context
        if library in self._lanes.routes:
            return
        context.check_alive()
        if library in self._kernels.leaving:  # another one of this name is being closed
            await context.wait_until(lambda: library not in self._kernels.leaving)
        try:
            # An opening that another call has begun is waited for; it may fail for its own reasons.
            while (opening := self._opening_tasks.get(library)) is not None:
                await asyncio.wait((opening,))
            if library not in self._lanes.routes:
                opening = context.core.loop.create_task(self._open(library))
                if not opening.done():  # with eager tasks it may be done already
                    self._opening_tasks[library] = opening
                # Retrieves the exception, so that asyncio does not log it if no caller waits.
                opening.add_done_callback(lambda task: task.cancelled() or task.exception())
                await asyncio.wait((opening,))  # cancelling this wait does not cancel the opening
                if not opening.cancelled():  # cancelled only if its context ends
                    opening.result()
        except AccelError as error:
            # If this context has faulted meanwhile, its actors have stopped.
            if context.fault is None and not error.is_fault:
                # A copy: the task and the actor keep the error that they ended with, and its
                # traceback would keep the callers' frames.
                raise error.clone() from error.__cause__
            context.report_fault(error)
        finally:
            opening = None  # it keeps its error, and the error's traceback keeps this frame
        context.check_alive()

    async def _open(self, library: str) -> None:
        """Start the kernel actor of a library: the body of an opening task.

        In a task, because all callers of :meth:`open` share it, and each may be cancelled.
        """
        try:
            self._context.check_alive()
            self.actors[library] = await self._start(library)
        finally:
            self._opening_tasks.pop(library, None)

    def unregister(self, submission: Unregistration) -> None:
        """Refuse further ops of a registered library, and have it closed by a task.

        Called at the dispatch of the submission, which the task ends.

        Raises
        ------
        ContextPoisonedError
            If the context has faulted: nothing has changed.
        """
        context, name = self._context, submission.library
        context.check_alive()
        submission.registration = context.core.withdraw_registration(name)
        self._kernels.refuse_registered(name)
        self._lanes.routes.pop(name, None)
        submission.outstanding = 1
        context.on_dispatched(submission, 1, 0)
        task = context.core.loop.create_task(self._close_registered(submission))
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)

    async def _close_registered(self, submission: Unregistration) -> None:
        """Stop the kernel actor of a registered library, then end the submission.

        After a fault the submission is left to the context, which fails all work in flight.
        """
        context, name = self._context, submission.library
        actor = self.actors.pop(name, None)
        try:
            if actor is not None:
                await actor.ask(submission)
                await actor.stop()
        except ActorStoppedError:  # the context has faulted, or the device closes
            return
        if context.fault is None:
            self._lanes.remove_library(name)
            self._kernels.remove_registered(name)
            context.retire(submission, 1, 0, is_last=True)

    async def aclose(self) -> None:
        """Cancel the tasks that close libraries: the context ends."""
        for task in tuple(self._closing_tasks):
            task.cancel()
            await asyncio.wait((task,))
