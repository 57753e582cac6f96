"""The actor that keeps a device's forkserver: it starts it, has it import what the device's children need, and replaces it."""

from __future__ import annotations

import logging
import pickle
import weakref
from typing import TYPE_CHECKING

from accel._log import get_logger
from accel.errors import AccelError, FaultScope
from accel.process.forks import Forks
from accel.remote.kept import KeptProcess
from accel.remote.link import STARTUP_TIMEOUT, TARGET, backend_name, is_uvloop
from accel.remote.preloading import Preload

if TYPE_CHECKING:
    from accel.engine.core import DeviceCore
    from accel.engine.registration import Registration
    from accel.process.exit_status import ExitStatus
    from accel.process.forks import ForkSource

__all__ = ["ForkserverActor"]

logger = get_logger()

_PREPARE = "accel.remote.preloading:preload"
_REMEDY = "Have modules start threads, and use the device, when they are called and not when they are imported."


class ForkserverActor(KeptProcess):
    """Keeps a forkserver. Without it, children are started.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    source
        Where the device's children look for the forkserver.
    is_first
        Whether the first context is in a child too: the forkserver starts before the device is ready.
    """

    def __init__(self, core: DeviceCore, source: ForkSource, *, is_first: bool) -> None:
        super().__init__(core)
        self._source = source
        self._is_first = is_first
        self._ending: Forks | None = None
        self._is_given_up = self._is_news = False
        self._imported: weakref.WeakSet[Registration] = weakref.WeakSet()
        self._left_out: weakref.WeakSet[Registration] = weakref.WeakSet()
        source.importing()

    async def _keep(self) -> None:
        """Start the forkserver, unless it is there, and have it import what is registered."""
        core, source = self._core, self._source
        if self._is_given_up or not (core.is_ready or self._is_first):
            return
        self._is_first = False
        source.importing()
        try:
            if source.forks is None:
                await self._start()
            # Without spares the child that serves imports them, and the forkserver would do it once more beside it.
            for registration in tuple(core.own.values()) if core.options.standby != "none" else ():
                if source.forks is not None and registration not in self._imported and registration not in self._left_out:
                    self._imported.add(registration)
                    await self._import(source.forks, registration)
            if source.forks is not None and source.forks.is_ready and self._is_news:
                self._is_news = False
                logger.info("forkserver_ready", device=core.name, pid=source.forks.child.pid)
        finally:
            source.settled()

    async def _start(self) -> None:
        core, source = self._core, self._source
        self._imported.clear()

        def exited(status: ExitStatus) -> None:
            if source.forks is forks:  # else it was to end
                source.forks = None
                self._failed(status.error(device=core.name, scope=FaultScope.OP))

        source.forks = forks = await Forks.start(core.system, _PREPARE, exited, core.disposal.close)
        modules = [TARGET.partition(":")[0]]
        if is_uvloop(core.loop):
            modules.append("uvloop")
        if logging.getLogger("accel").isEnabledFor(logging.INFO):  # then each child logs that its context is ready
            modules.append("structlog")
        wanted = Preload(backend_name(core), core.options.libraries, tuple(modules))
        self._is_news = True
        refused, failed = await forks.prepare(pickle.dumps(wanted), STARTUP_TIMEOUT)
        if failed:
            logger.warning("forkserver_import_failed", device=core.name, error=failed)
        if refused:  # all further children are started
            self._is_given_up = True
            logger.warning("forkserver_given_up", device=core.name, reason=refused, remedy=_REMEDY)
            await self._end()

    async def _import(self, forks: Forks, registration: Registration) -> None:
        core, name = self._core, registration.name
        try:
            data = pickle.dumps(Preload(backend_name(core), registration=registration))
        except Exception as error:  # pickle raises what it likes; the child that is to open it cannot be sent it either
            refused, failed = "", repr(error)
        else:
            self._is_news = True
            refused, failed = await forks.prepare(data, core.options.limits.busy_timeout)
        if failed:  # the child that opens it says it as its own error
            logger.info("forkserver_import_failed", device=core.name, library=name, error=failed)
        if refused:  # another one is started, without what it cannot have
            self._left_out.add(registration)
            logger.warning("forkserver_without_library", device=core.name, library=name, reason=refused, remedy=_REMEDY)
            await self._end()
            self._look()

    def _on_lost(self, error: AccelError, pause: float, *, is_spent: bool) -> None:
        # Children are started meanwhile; those that it has forked live on.
        logger.warning("forkserver_lost", device=self._core.name, seconds=round(pause, 3), error=error)

    def _give_up(self, reason: str) -> None:
        """Start all further children."""
        self._is_given_up = True
        self._look()
        logger.warning("forkserver_given_up", device=self._core.name, reason=reason, remedy=_REMEDY)

    async def _end(self) -> None:
        self._ending, self._source.forks = self._source.forks or self._ending, None
        if self._ending is not None:
            await self._ending.aclose()  # if this is cancelled, `stopped` waits for it
            self._ending = None
