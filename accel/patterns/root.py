"""A task group that may be opened in one task and closed in another, as fixtures and lifespans do. A task of its own holds it open."""

from __future__ import annotations

import asyncio
import os
from contextvars import Context
from typing import TYPE_CHECKING, Any

import anyio

from accel._log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["RootTask"]

logger = get_logger()

_GRACE = 1.0
"""Seconds that tasks have to end after they were cancelled, before closing leaves them behind."""


class RootTask:
    """Owns the tasks of one object, and their end. Tasks start with empty context variables.

    Parameters
    ----------
    name
        Of the task that holds the group, for logs and debuggers.
    ended
        Called when no task runs any more, also after a cancellation.

    Attributes
    ----------
    loop : asyncio.AbstractEventLoop
        The loop it was made on.
    """

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._name = name
        self._pid = os.getpid()
        self._ended = ended
        self._ready: asyncio.Future[None] = self.loop.create_future()
        self._finished: asyncio.Future[None] = self.loop.create_future()
        self._group = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that it was made in."""
        return os.getpid() != self._pid

    async def open(self) -> None:
        """Start the task, and return once it can take others."""
        self._task = self.loop.create_task(self._live(), name=self._name, context=Context())
        await asyncio.shield(self._ready)

    def start(self, work: Coroutine[Any, Any, None], name: str, done: Callable[[asyncio.Task[None]], None]) -> bool:
        """Run ``work`` in a task of the group; return whether that was possible, which it is not once the group is being cancelled.

        ``done(task)`` is called when the task has ended, also if it was cancelled before its first step and ``work`` never ran.
        """
        try:
            task = self._group.create_task(work, name=name, context=Context())
        except RuntimeError:
            work.close()
            return False
        task.add_done_callback(done)
        return True

    def finish(self) -> None:
        """Let the root end when all tasks have ended; nothing more will be started. Idempotent."""
        if not self._finished.done():
            self._finished.set_result(None)

    async def join(self, timeout: float) -> None:
        """Wait until the root has ended; after ``timeout`` seconds cancel what runs, and a second later leave it behind, with a logged error.

        Cancelling does not end the wait: tasks are cancelled at once, and the cancellation is raised when they have ended or are left behind.
        """
        if self._task is None:
            return
        deadline = self.loop.time() + timeout
        is_cancelled = False
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not self._task.done():
                try:
                    await asyncio.wait({self._task}, timeout=max(0.0, deadline - self.loop.time()))
                except asyncio.CancelledError as error:
                    cancelled = error
                if self._task.done():
                    break
                is_late = self.loop.time() >= deadline
                if is_cancelled and is_late:
                    logger.error("tasks_left_behind", root=self._name)
                    break
                if not is_cancelled and (is_late or cancelled is not None):
                    is_cancelled = True
                    deadline = self.loop.time() + _GRACE
                    self._task.cancel()
        if cancelled is not None:
            raise cancelled

    async def _live(self) -> None:
        try:
            async with self._group:
                self._ready.set_result(None)
                await self._finished
        except BaseExceptionGroup as errors:
            logger.exception("root_failed", root=self._name, error=errors)
        except (KeyboardInterrupt, SystemExit):
            pass  # it left through the loop already, from the task that raised it
        finally:
            self._ended()
