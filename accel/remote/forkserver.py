"""The actor that keeps a device's forkserver, and has it make the imports of the children."""

from __future__ import annotations

import logging
import pickle
import weakref
from typing import TYPE_CHECKING

from accel._log import get_logger
from accel.errors import AccelError, FaultScope
from accel.process.forkserver_client import ForkserverClient
from accel.remote.helper_process import HelperProcessActor
from accel.remote.link import STARTUP_TIMEOUT, TARGET, backend_name, is_uvloop
from accel.remote.preloading import Preload

if TYPE_CHECKING:
    from accel.engine.core import DeviceCore
    from accel.engine.registration import Registration
    from accel.process.exit_status import ExitStatus
    from accel.process.forkserver_client import ForkserverSlot

__all__ = ["ForkserverActor"]

logger = get_logger()

_PREPARE = "accel.remote.preloading:preload"
_REMEDY = "Have modules start threads, and use the device, when they are called and not when they are imported."


class ForkserverActor(HelperProcessActor):
    """Keeps a device's forkserver. While there is none, children are started as new processes.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    slot
        Where the device's children find the forkserver.
    starts_before_ready
        Whether the forkserver starts before the device is ready, because the first context is in a
        child that it forks.
    """

    def __init__(self, core: DeviceCore, slot: ForkserverSlot, *, starts_before_ready: bool) -> None:
        super().__init__(core)
        self._slot = slot
        self._starts_before_ready = starts_before_ready
        self._closing_client: ForkserverClient | None = None  # its aclose() may have been cancelled
        self._is_given_up = False  # for good, once it must not be forked any more
        self._imported: weakref.WeakSet[Registration] = weakref.WeakSet()
        slot.on_importing()  # children wait for it from here on

    async def _ensure_process(self) -> None:
        """Start the forkserver unless it runs, and have it import the registered libraries.

        Children that are wanted meanwhile wait for it: see :attr:`ForkserverSlot.is_importing`.
        Does nothing once it was given up, or before it is wanted.
        """
        core, slot = self._core, self._slot
        if self._is_given_up or not (core.is_ready or self._starts_before_ready):
            return
        self._starts_before_ready = False
        slot.on_importing()
        try:
            if slot.client is None:
                await self._start()
            # Without spares the serving child imports them, and the forkserver need not.
            for registration in tuple(core.registrations.values()) if core.options.standby != "none" else ():
                if slot.client is not None and registration not in self._imported:
                    self._imported.add(registration)
                    preload = Preload(backend_name(core), registration=registration)
                    await self._import(slot.client, preload, core.options.limits.busy_timeout)
        finally:
            slot.on_settled()

    async def _start(self) -> None:
        """Start a forkserver, and wait until it has made the imports of all children.

        Until then no spare is started, which would make them again.
        """
        core, slot = self._core, self._slot
        self._imported.clear()

        def on_exit(status: ExitStatus) -> None:
            if slot.client is client:  # else this actor has closed it
                slot.client = None
                self._replace_later(status.error(device=core.name, scope=FaultScope.OP))

        slot.client = client = await ForkserverClient.start(core.system, _PREPARE, on_exit, core.disposal.close_fds)
        modules = [TARGET.partition(":")[0]]
        if is_uvloop(core.loop):
            modules.append("uvloop")
        if logging.getLogger("accel").isEnabledFor(logging.INFO):  # children log then
            modules.append("structlog")
        await self._import(client, Preload(backend_name(core), core.options.libraries, tuple(modules)), STARTUP_TIMEOUT)
        if not self._is_given_up:
            logger.info("forkserver_ready", device=core.name, pid=client.child.pid)

    async def _import(self, client: ForkserverClient, preload: Preload, timeout: float) -> None:
        """Have the forkserver import; if it must not be forked after that, end it for good.

        An import that fails is only logged.
        """
        name, registration = self._core.name, preload.registration
        library = None if registration is None else registration.name
        try:
            data = pickle.dumps(preload)
        except Exception as error:  # pickle raises anything
            failed = repr(error)
        else:
            failed = await client.prepare(data, timeout)
        if failed:  # the child that needs it raises the error
            logger.info("forkserver_import_failed", device=name, library=library, error=failed)
        if client.refusal:
            self._is_given_up = True
            logger.warning("forkserver_given_up", device=name, library=library, reason=client.refusal, remedy=_REMEDY)
            await self._end_process()

    def _on_process_lost(self, error: AccelError, pause: float, *, is_spent: bool) -> None:
        """Log that there is no forkserver for now."""
        # Children are started meanwhile; those that the forkserver has forked live on.
        logger.warning("forkserver_lost", device=self._core.name, seconds=round(pause, 3), error=error)

    async def _end_process(self) -> None:
        """Close the forkserver, if there is one; new children are started from here on."""
        self._closing_client, self._slot.client = self._slot.client or self._closing_client, None
        if self._closing_client is not None:
            await self._closing_client.aclose()  # if it is cancelled, the call from `stopped` closes the client
            self._closing_client = None
