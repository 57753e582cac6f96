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
        self._is_given_up = False
        self._imported: weakref.WeakSet[Registration] = weakref.WeakSet()
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
            # Without spares the serving child imports them, and the forkserver need not.
            for registration in tuple(core.own.values()) if core.options.standby != "none" else ():
                if source.forks is not None and registration not in self._imported:
                    self._imported.add(registration)
                    wanted = Preload(backend_name(core), registration=registration)
                    await self._import(source.forks, wanted, core.options.limits.busy_timeout)
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
        if logging.getLogger("accel").isEnabledFor(logging.INFO):  # children log then
            modules.append("structlog")
        await self._import(forks, Preload(backend_name(core), core.options.libraries, tuple(modules)), STARTUP_TIMEOUT)
        if not self._is_given_up:
            logger.info("forkserver_ready", device=core.name, pid=forks.child.pid)

    async def _import(self, forks: Forks, wanted: Preload, timeout: float) -> None:
        """Have the forkserver import; if it must not be forked then, start all further children."""
        name, registration = self._core.name, wanted.registration
        library = None if registration is None else registration.name
        try:
            data = pickle.dumps(wanted)
        except Exception as error:  # pickle raises anything
            failed = repr(error)
        else:
            failed = await forks.prepare(data, timeout)
        if failed:  # the child that needs it raises the error
            logger.info("forkserver_import_failed", device=name, library=library, error=failed)
        if forks.refused:
            self._is_given_up = True
            logger.warning("forkserver_given_up", device=name, library=library, reason=forks.refused, remedy=_REMEDY)
            await self._end()

    def _on_lost(self, error: AccelError, pause: float, *, is_spent: bool) -> None:
        # Children are started meanwhile; those that the forkserver has forked live on.
        logger.warning("forkserver_lost", device=self._core.name, seconds=round(pause, 3), error=error)

    async def _end(self) -> None:
        self._ending, self._source.forks = self._source.forks or self._ending, None
        if self._ending is not None:
            await self._ending.aclose()  # if this is cancelled, `stopped` waits for it
            self._ending = None
