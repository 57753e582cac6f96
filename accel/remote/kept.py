"""A helper process of a device, such as a spare child, which is replaced when it dies."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from accel.actors import Actor, ActorContext, RestartStrategy
from accel.actors.supervision import RestartBudget
from accel.errors import AccelError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.engine.core import DeviceCore

__all__ = ["KeptProcess"]

_BUDGET = RestartStrategy(max_restarts=5, within=60.0, backoff=(0.2, 10.0))
"""How often a process that died is replaced without a longer pause."""
_PAUSE = 30.0
"""Seconds until the next attempt once that budget is spent."""


class KeptProcess(Actor[None, None]):
    """Keeps a helper process of a device. No failure of the process is one of the device.

    A message has the actor look whether the process is as it should be. One is sent whenever the
    device's state or its registered libraries have changed.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore) -> None:
        self._core = core
        self._budget = RestartBudget(_BUDGET, core.system.clock, core.system.random)
        self._retry: asyncio.TimerHandle | None = None
        self._look: Callable[[], None] = lambda: None

    @abstractmethod
    async def _keep(self) -> None:
        """Start the process if it is wanted and there is none; bring it up to what is registered.

        Raises
        ------
        AccelError
            The process cannot be started; another attempt follows.
        """

    @abstractmethod
    async def _end(self) -> None:
        """End the process, if there is one."""

    @abstractmethod
    def _on_lost(self, error: AccelError, pause: float, *, is_spent: bool) -> None:
        """Log that the process has died, or could not be started. Another follows after a pause."""

    def _listening(self) -> list[tuple[list[Callable[[], object]], Callable[[], object]]]:
        """Return the lists of listeners that this actor joins, each with the function to call."""
        return [(self._core.lifecycle.listeners, self._look), (self._core.own_listeners, self._look)]

    async def started(self, context: ActorContext) -> None:
        """Look for the first time, and again whenever something has changed."""
        core, ref = self._core, context.self_ref

        def look() -> None:
            if not core.refs.is_closing:
                with contextlib.suppress(AccelError):  # it has stopped, or its mailbox is full
                    ref.tell(None)

        self._look = look
        for listeners, listener in self._listening():
            listeners.append(listener)
        look()

    async def receive(self, message: None, context: ActorContext) -> None:
        """Look; end the process with the device, which may be reopened."""
        core = self._core
        if core.lifecycle.is_final:
            await self._end()
        elif self._retry is None and not core.refs.is_closing:
            try:
                await self._keep()
            except AccelError as error:
                self._failed(error)

    def _failed(self, error: AccelError) -> None:
        """Replace a process that has died, after a pause."""
        if self._core.refs.is_closing or self._retry is not None:
            return
        delay = self._budget.request()
        pause = _PAUSE if delay is None else max(delay, _BUDGET.backoff[0])
        self._on_lost(error, pause, is_spent=delay is None)
        self._retry = self._core.loop.call_later(pause, self._try_again)

    def _try_again(self) -> None:
        self._cancel_retry()
        self._look()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """End the process."""
        await self.stopped(context)

    async def stopped(self, context: ActorContext) -> None:
        """End the process."""
        for listeners, listener in self._listening():
            if listener in listeners:
                listeners.remove(listener)
        self._cancel_retry()
        await self._end()
