"""The actor that keeps a device's forkserver, and has it import what the device's children need."""

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
        State of the device that outlives its contexts.
    source
        Has the forkserver, for the device's children.
    is_first
        Whether the first context is in a child: the forkserver starts before the device is ready.
    """

    def __init__(self, core: DeviceCore, source: ForkSource, *, is_first: bool) -> None:
        super().__init__(core)
        self._source = source
        self._is_first = is_first
        self._ending: Forks | None = None
        self._is_given_up = self._is_changed = False
        self._imported: weakref.WeakSet[Registration] = weakref.WeakSet()
        self._left_out: weakref.WeakSet[Registration] = weakref.WeakSet()
        source.on_importing()

    async def _keep(self) -> None:
        """Start the forkserver unless it runs, and have it import what is registered."""
        core, source = self._core, self._source
        if self._is_given_up or not (core.is_ready or self._is_first):
            return
        self._is_first = False
        source.on_importing()
        try:
            if source.forks is None:
                await self._start()
            # Without spares the serving child imports them, and the forkserver would do so beside it.
            for registration in tuple(core.own.values()) if core.options.standby != "none" else ():
                if source.forks is not None and registration not in self._imported and registration not in self._left_out:
                    self._imported.add(registration)
                    await self._import_library(source.forks, registration)
            if source.forks is not None and source.forks.is_ready and self._is_changed:
                self._is_changed = False
                logger.info("forkserver_ready", device=core.name, pid=source.forks.child.pid)
        finally:
            source.on_settled()

    async def _start(self) -> None:
        core, source = self._core, self._source
        self._imported.clear()

        def on_exit(status: ExitStatus) -> None:
            if source.forks is forks:  # else this actor ends it
                source.forks = None
                self._failed(status.error(device=core.name, scope=FaultScope.OP))

        source.forks = forks = await Forks.start(core.system, _PREPARE, on_exit, core.disposal.close)
        modules = [TARGET.partition(":")[0]]
        if is_uvloop(core.loop):
            modules.append("uvloop")
        if logging.getLogger("accel").isEnabledFor(logging.INFO):  # each child logs that its context is ready
            modules.append("structlog")
        failed = await self._import(forks, Preload(backend_name(core), core.options.libraries, tuple(modules)), STARTUP_TIMEOUT)
        if failed:
            logger.warning("forkserver_import_failed", device=core.name, error=failed)
        if forks.refused:  # all further children are started
            self._is_given_up = True
            logger.warning("forkserver_given_up", device=core.name, reason=forks.refused, remedy=_REMEDY)

    async def _import_library(self, forks: Forks, registration: Registration) -> None:
        core, name = self._core, registration.name
        failed = await self._import(forks, Preload(backend_name(core), registration=registration), core.options.limits.busy_timeout)
        if failed:  # the child that opens the library raises the error
            logger.info("forkserver_import_failed", device=core.name, library=name, error=failed)
        if forks.refused:  # another forkserver is started, which does not import the library
            self._left_out.add(registration)
            logger.warning("forkserver_without_library", device=core.name, library=name, reason=forks.refused, remedy=_REMEDY)
            self._look()

    async def _import(self, forks: Forks, wanted: Preload, timeout: float) -> str:
        """Have the forkserver import; end it if it refuses; return what was raised, or ``""``."""
        try:
            data = pickle.dumps(wanted)
        except Exception as error:  # pickle raises anything, also in the child that opens the library
            return repr(error)
        self._is_changed = True
        failed = await forks.prepare(data, timeout)
        if forks.refused:
            await self._end()
        return failed

    def _on_lost(self, error: AccelError, pause: float, *, is_spent: bool) -> None:
        # Children are started meanwhile; those that the forkserver has forked live on.
        logger.warning("forkserver_lost", device=self._core.name, seconds=round(pause, 3), error=error)

    async def _end(self) -> None:
        self._ending, self._source.forks = self._source.forks or self._ending, None
        if self._ending is not None:
            await self._ending.aclose()  # if this is cancelled, `stopped` waits for it
            self._ending = None
