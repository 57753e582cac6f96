"""The base of actors that keep a helper process of a device: a spare child, or a forkserver."""

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

__all__ = ["HelperProcessActor"]

_BUDGET = RestartStrategy(max_restarts=5, within=60.0, backoff=(0.2, 10.0))
"""How often a process that died is replaced without a longer pause."""
_PAUSE = 30.0
"""Seconds until the next attempt once that budget is spent."""


class HelperProcessActor(Actor[None, None]):
    """Keeps a helper process running while the device wants it, and replaces one that died.

    A failure of the process is not one of the device. Each message has the actor check the process;
    one is sent whenever the device's state or its registered libraries have changed.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore) -> None:
        self._core = core
        self._budget = RestartBudget(_BUDGET, core.system.clock, core.system.random)
        self._retry_timer: asyncio.TimerHandle | None = None  # during the pause after a failure
        self._request_check: Callable[[], None] = lambda: None  # set by started()

    @abstractmethod
    async def _ensure_process(self) -> None:
        """Start the process if it is wanted and there is none; bring a running one up to date.

        Raises
        ------
        AccelError
            The process cannot be started; another attempt follows.
        """

    @abstractmethod
    async def _end_process(self) -> None:
        """End the process, if there is one."""

    @abstractmethod
    def _on_process_lost(self, error: AccelError, pause: float, *, is_spent: bool) -> None:
        """Log that the process died or could not be started, and is replaced in ``pause`` seconds.

        With ``is_spent`` the budget of replacements is spent, and the pause is a long one.
        """

    def _subscriptions(self) -> list[tuple[list[Callable[[], object]], Callable[[], object]]]:
        """Return lists of listeners, each with the function that is in it while this actor runs."""
        return [(self._core.lifecycle.listeners, self._request_check), (self._core.registration_listeners, self._request_check)]

    async def started(self, context: ActorContext) -> None:
        """Check the process now, and again whenever something has changed."""
        core, ref = self._core, context.self_ref

        def request_check() -> None:
            if not core.is_closing:
                with contextlib.suppress(AccelError):  # it has stopped, or its mailbox is full
                    ref.tell(None)

        self._request_check = request_check
        for listeners, listener in self._subscriptions():
            listeners.append(listener)
        request_check()

    def refused(self, message: None) -> None:
        """Drop a check that came while the actor stops: its process ends with it."""

    async def receive(self, message: None, context: ActorContext) -> None:
        """Check the process; end it once the device is lost or closed.

        During the pause after a failure, and while the device is closing, this does nothing.
        """
        core = self._core
        if core.lifecycle.is_final:
            await self._end_process()
        elif self._retry_timer is None and not core.is_closing:
            try:
                await self._ensure_process()
            except AccelError as error:
                self._replace_later(error)

    def _replace_later(self, error: AccelError) -> None:
        """Have a process that died, or could not be started, replaced after a pause.

        Unless that is scheduled already, or the device is closing.
        """
        if self._core.is_closing or self._retry_timer is not None:
            return
        delay = self._budget.request()
        pause = _PAUSE if delay is None else max(delay, _BUDGET.backoff[0])  # the budget's first delay is 0
        self._on_process_lost(error, pause, is_spent=delay is None)
        self._retry_timer = self._core.loop.call_later(pause, self._retry)

    def _retry(self) -> None:
        """Check the process: the pause after a failure is over. The timer's callback."""
        self._cancel_retry_timer()
        self._request_check()

    def _cancel_retry_timer(self) -> None:
        """End the pause after a failure, if there is one."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """End the process: the next instance of this actor starts another."""
        await self.stopped(context)

    async def stopped(self, context: ActorContext) -> None:
        """Listen to changes no more, and end the process."""
        for listeners, listener in self._subscriptions():
            if listener in listeners:
                listeners.remove(listener)
        self._cancel_retry_timer()
        await self._end_process()
