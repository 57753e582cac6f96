"""The libraries of one context: which are open, and the kernel actors that opened them."""

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
    """Opens libraries at their first use, and closes registered ones.

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
    calls : int
        How many calls of users' libraries are made on worker threads, to open them.
    """

    def __init__(
        self, context: ContextBase, lanes: Lanes, kernels: KernelTable, start: Callable[[str], Awaitable[ActorRef[Any, None]]]
    ) -> None:
        self.actors: dict[str, ActorRef[Any, None]] = {}
        self.calls = 0
        self._context = context
        self._lanes = lanes
        self._kernels = kernels
        self._start = start
        self._openings: dict[str, asyncio.Task[None]] = {}
        self._closings: set[asyncio.Task[None]] = set()

    async def open(self, library: str) -> None:
        """Open a library, off the loop, if it is not open.

        Raises
        ------
        ContextPoisonedError
            Also where the fault surfaces here: the caller gets the same error as all waiters.
        """
        context = self._context
        if library in self._lanes.routes:
            return
        context.check_alive()
        if library in self._kernels.leaving:  # one of the same name was unregistered just before
            await context.until(lambda: library not in self._kernels.leaving)
        try:
            while (opening := self._openings.get(library)) is not None:  # for a call that was cancelled
                await asyncio.wait((opening,))
            if library not in self._lanes.routes:
                opening = context.core.loop.create_task(self._open(library))
                if not opening.done():  # an eager task may have ended in the call
                    self._openings[library] = opening
                opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if no caller waits
                await asyncio.wait((opening,))  # cancelled, it is opened all the same
                if not opening.cancelled():  # else its context ended
                    opening.result()
        except AccelError as error:
            # If this context has faulted meanwhile, its actors have stopped.
            if context.fault is None and not error.is_fault:
                # A copy: the task and the actor keep the error that they ended with, and its
                # traceback would keep the callers' frames.
                raise error.clone() from error.__cause__
            context.report_fault(error)
        finally:
            opening = None
        context.check_alive()

    async def _open(self, library: str) -> None:
        try:
            self._context.check_alive()
            self.actors[library] = await self._start(library)
        finally:
            self._openings.pop(library, None)

    def withdraw(self, submission: Unregistration) -> None:
        """Refuse further ops of a registered library, and have it closed; that ends the submission.

        Raises
        ------
        ContextPoisonedError
            If the context has faulted: nothing has changed.
        """
        context, name = self._context, submission.library
        context.check_alive()
        submission.registration = context.core.withdraw_own(name)
        self._kernels.refuse_own(name)
        self._lanes.routes.pop(name, None)
        submission.outstanding = 1
        context.sent(submission, 1, 0)
        task = context.core.loop.create_task(self._close(submission))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _close(self, submission: Unregistration) -> None:
        """End the kernel actor of a registered library, and answer what asked for it."""
        context, name = self._context, submission.library
        actor = self.actors.pop(name, None)
        try:
            if actor is not None:
                await actor.ask(submission)
                await actor.stop()
        except ActorStoppedError:  # the context has faulted, or the device closes
            return
        if context.fault is None:
            self._lanes.leave(name)
            self._kernels.remove_own(name)
            context.retire(submission, 1, 0, is_last=True)

    async def aclose(self) -> None:
        """Cancel the tasks that close libraries: the context ends."""
        for task in tuple(self._closings):
            task.cancel()
            await asyncio.wait((task,))
