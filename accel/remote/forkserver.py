"""The actor that keeps a device's forkserver: it starts it, has it import what the device's children need, and replaces it."""

from __future__ import annotations

import contextlib
import logging
import pickle
import weakref
from typing import TYPE_CHECKING, ClassVar

from accel._log import get_logger
from accel.actors import Actor, ActorContext, RestartStrategy
from accel.actors.supervision import RestartBudget
from accel.errors import AccelError, FaultScope
from accel.process.forks import Forks
from accel.remote.link import STARTUP_TIMEOUT, TARGET, backend_name, is_uvloop
from accel.remote.preloading import Preload

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.engine.core import DeviceCore
    from accel.engine.registration import Registration
    from accel.process.exit_status import ExitStatus
    from accel.process.forks import ForkSource

__all__ = ["ForkserverActor"]

logger = get_logger()

_PREPARE = "accel.remote.preloading:preload"
_BUDGET = RestartStrategy(max_restarts=5, within=60.0, backoff=(0.2, 10.0))
"""How often a forkserver that has died by itself is replaced without a longer pause."""
_PAUSE = 30.0
"""Seconds until the next attempt once that is spent: whatever ended it may be over then."""
_REMEDY = "Have modules start threads, and use the device, when they are called and not when they are imported."


class ForkserverActor(Actor[None, None]):
    """Keeps a forkserver. What becomes of it is never the device's concern: children that cannot be forked are started.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    source
        Where the device's children look for the forkserver.
    is_first
        Whether the first context is in a child too: the forkserver starts before the device is ready.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, source: ForkSource, *, is_first: bool) -> None:
        self._core = core
        self._source = source
        self._is_first = is_first
        self._budget = RestartBudget(_BUDGET, core.system.clock, core.system.random)
        self._ending: Forks | None = None
        self._is_given_up = False
        self._retry: asyncio.TimerHandle | None = None
        self._imported: weakref.WeakSet[Registration] = weakref.WeakSet()
        self._left_out: weakref.WeakSet[Registration] = weakref.WeakSet()
        self._wish: Callable[[], None] = lambda: None

    async def started(self, context: ActorContext) -> None:
        """Start at once if the first child is to be a fork; look at the device again whenever it changes."""

        def wish() -> None:
            if not self._core.refs.is_closing:
                with contextlib.suppress(AccelError):  # it has stopped, or has more than enough such wishes
                    context.self_ref.tell(None)

        self._wish = wish
        self._source.importing()
        self._core.lifecycle.listeners.append(wish)
        self._core.own_listeners.append(wish)
        wish()

    async def receive(self, message: None, context: ActorContext) -> None:
        """Start the forkserver, unless it is there, and have it import what is registered; end it with the device, which may be reopened."""
        core = self._core
        if core.lifecycle.is_final or self._is_given_up:
            await self._end()
            self._source.settled()
            return
        if self._retry is not None or core.refs.is_closing or not (core.is_ready or self._is_first):
            return
        self._is_first = False
        if self._source.forks is not None and self._source.forks.refused:  # another one is started, without what it cannot have
            await self._end()
        try:
            if self._source.forks is None:
                await self._start()
        except AccelError as error:
            self._failed(error)
        else:
            # Without spares the child that serves imports them, and the forkserver would do it once more beside it.
            for registration in core.own.values() if core.options.standby != "none" else ():
                if registration not in self._imported and registration not in self._left_out:
                    self._imported.add(registration)
                    self._import(registration)

    async def _start(self) -> None:
        core = self._core
        self._imported.clear()

        def exited(status: ExitStatus) -> None:
            if self._source.forks is forks:  # else it was to end
                self._source.forks = None
                self._failed(status.error(device=core.name, scope=FaultScope.OP))

        self._source.forks = forks = await Forks.start(core.system, _PREPARE, exited, core.disposal.close)
        modules = [TARGET.partition(":")[0]]
        if is_uvloop(core.loop):
            modules.append("uvloop")
        if logging.getLogger("accel").isEnabledFor(logging.INFO):  # then each child logs that its context is ready
            modules.append("structlog")

        def imported(refused: str, failed: str) -> None:
            if failed:
                logger.warning("forkserver_import_failed", device=core.name, error=failed)
            if refused:
                self._give_up(refused)
            else:
                self._look(forks)

        self._source.importing()
        forks.prepare(pickle.dumps(Preload(backend_name(core), core.options.libraries, tuple(modules))), STARTUP_TIMEOUT, imported)

    def _look(self, forks: Forks) -> None:
        """Say that the forkserver is ready, if it is."""
        if forks.is_ready:
            logger.info("forkserver_ready", device=self._core.name, pid=forks.child.pid)
            self._source.settled()

    def _import(self, registration: Registration) -> None:
        core, forks = self._core, self._source.forks
        assert forks is not None, "it was started"

        def imported(refused: str, failed: str) -> None:
            if failed:  # the child that opens it says it as its own error
                logger.info("forkserver_import_failed", device=core.name, library=registration.name, error=failed)
            if refused:
                self._left_out.add(registration)
                logger.warning("forkserver_without_library", device=core.name, library=registration.name, reason=refused, remedy=_REMEDY)
                self._wish()
            else:
                self._look(forks)

        try:
            data = pickle.dumps(Preload(backend_name(core), registration=registration))
        except Exception as error:  # pickle raises what it likes; the child that is to open it cannot be sent it either
            imported("", repr(error))
        else:
            self._source.importing()
            forks.prepare(data, core.options.busy_timeout, imported)

    def _failed(self, error: AccelError) -> None:
        """Replace it, after a while. Its children live on, and further ones are started meanwhile."""
        core = self._core
        self._source.settled()
        if core.refs.is_closing:
            return
        delay = self._budget.request()
        if delay is None:
            delay = _PAUSE
        logger.warning("forkserver_lost", device=core.name, seconds=round(delay, 3), error=error)

        def again() -> None:
            self._retry = None
            self._wish()

        self._retry = core.loop.call_later(delay, again)

    def _give_up(self, reason: str) -> None:
        """Start all further children."""
        self._is_given_up = True
        self._source.settled()
        self._wish()
        logger.warning("forkserver_given_up", device=self._core.name, reason=reason, remedy=_REMEDY)

    # -- the end

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """End the forkserver."""
        await self.stopped(context)

    async def stopped(self, context: ActorContext) -> None:
        """End the forkserver: it outlives nothing."""
        for listeners in (self._core.lifecycle.listeners, self._core.own_listeners):
            if self._wish in listeners:
                listeners.remove(self._wish)
        if self._retry is not None:
            self._retry.cancel()
        try:
            await self._end()
        finally:
            self._source.settled()

    async def _end(self) -> None:
        self._ending, self._source.forks = self._source.forks or self._ending, None
        if self._ending is not None:
            await self._ending.aclose()  # if this is cancelled, `stopped` waits for it
            self._ending = None
