"""Closing slabs and other resources of one context, which may block, off the loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from accel._log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.actors import ActorSystem

__all__ = ["Closing", "close_all"]

logger = get_logger()


class _Closable(Protocol):
    def close(self) -> None:
        """Give the resource back. May block. Idempotent."""


T = TypeVar("T", bound=_Closable)


class Closing(Generic[T]):
    """Closes resources on worker threads, in one task at a time.

    An error of one is logged, and the others are closed all the same.

    Parameters
    ----------
    system
        Has the worker threads. Once it has ended, the owner closes what is left by
        :func:`close_all`.

    Attributes
    ----------
    left : list
        The resources that are not closed yet, in order.
    """

    __slots__ = ("_has_begun", "_system", "_task", "left")

    def __init__(self, system: ActorSystem) -> None:
        self.left: list[T] = []
        self._system = system
        self._has_begun = False  # whether a thread has begun to close the present batch
        self._task: asyncio.Task[None] | None = None

    def add(self, resources: Iterable[T]) -> None:
        """Close resources, after those that are being closed. Returns at once."""
        self.left += resources
        if self.left and (self._task is None or self._task.done()):
            self._task = self._system.loop.create_task(self._close())

    async def _close(self) -> None:
        """Close what is left, in batches of what was added meanwhile, until nothing is.

        An error of a batch is logged, and the batch is removed from :attr:`left`. A batch for which
        the system had no thread stays there, for the next :meth:`add`, or for the owner.
        """
        while self.left:
            batch, self._has_begun = tuple(self.left), False
            try:
                await self._system.run_blocking(self._close_batch, batch)
            except Exception as error:
                if not self._has_begun:  # the system has no thread, for now or for good
                    return
                logger.exception("resources_not_closed", error=error)
            del self.left[: len(batch)]

    def _close_batch(self, batch: tuple[T, ...]) -> None:
        """Close resources, on a worker thread: what is raised from now on is an error of theirs."""
        self._has_begun = True
        close_all(batch)

    async def wait_closed(self) -> None:
        """Wait until all that was added is closed, or the system has no thread for it.

        Cancelling ends only the wait.
        """
        if self._task is not None:
            await asyncio.wait((self._task,))


def close_all(resources: Iterable[_Closable]) -> None:
    """Close all resources in order, and raise the last error of any. May block."""
    with contextlib.ExitStack() as stack:  # calls all, whatever one raises; the last one first, so they are added in reverse
        for resource in reversed(tuple(resources)):
            stack.callback(resource.close)
