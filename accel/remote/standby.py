"""The actor that keeps a spare child ready, and replaces it when it was promoted or has died; a device has one for each of its spares."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Literal

from accel._log import get_logger
from accel.errors import AccelError, FaultScope, HostDiedError
from accel.process.protocol import ProtocolError
from accel.remote.error_codec import decode_error
from accel.remote.filling import Filling
from accel.remote.kept import KeptProcess
from accel.remote.link import Link
from accel.remote.messages import Failure, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.actors import ActorContext
    from accel.engine.core import DeviceCore
    from accel.process.exit_status import ExitStatus
    from accel.remote.children import Children

__all__ = ["StandbyActor"]

logger = get_logger()


class StandbyActor(KeptProcess):
    """Has a spare child while the device is ready.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    children
        Told of the spare.
    ahead
        What the spare makes ready: its ``"imports"``, or its ``"context"`` too, or what a ``"model"`` needs besides; see :class:`Filling`.
    """

    def __init__(self, core: DeviceCore, children: Children, ahead: Literal["imports", "context", "model"]) -> None:
        super().__init__(core)
        self._children = children
        self._ahead = ahead
        self._state = "none"
        self._link: Link | None = None
        self._began = 0.0
        self._reason: AccelError | None = None
        self._is_missed = False  # the log has said that there is none
        self._filling = Filling(core) if ahead == "model" else None
        self._has_context = False  # the spare, so that it can be filled

    def _listening(self) -> list[tuple[list[Callable[[], object]], Callable[[], object]]]:
        core = self._core
        return [
            (core.lifecycle.listeners, self._state_changed),
            (core.own_listeners, self._refill),
            (self._children.forkserver.listeners, self._look),
        ]

    async def started(self, context: ActorContext) -> None:
        """Offer the spare that there will be, and begin with it."""
        self._children.spares.append(self)
        await super().started(context)

    async def _keep(self) -> None:
        """Start a spare, unless there is one, which is filled then; returns long before a new one is ready."""
        core = self._core
        if self._link is not None:
            await self._fill(self._link)
        elif core.is_ready:
            self.state = "starting"
            self._children.spares.sort(key=lambda spare: spare is self)  # the newest is the last
            if self._children.forkserver.is_importing:  # the spare would do the same imports once more
                return
            self._has_context = False
            self._began = time.perf_counter()
            self._link = await Link.start(core, self._ahead, self, self._children.forkserver)

    @property
    def state(self) -> str:
        """See :class:`~accel.remote.children.Spare`."""
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        self._state = state
        self._core.lifecycle.wake()

    @property
    def pid(self) -> int | None:
        """Process id of the spare."""
        return None if self._link is None else self._link.pid

    def _state_changed(self) -> None:
        """Look whether there is to be a spare, now that the device's state is another one; a new generation tries again at once what has failed."""
        if self._state == "failed" and self._core.is_ready:
            self._rest("none")
        self._look()

    def _refill(self) -> None:
        """Have the spare filled, if it has a context: libraries were registered, or are no longer. It is not ready until then."""
        link = self._link
        if self._filling is not None and link is not None and self._has_context:
            link.is_warm = False
            self.state = "starting"
            self._look()

    async def _fill(self, link: Link) -> None:
        """Have the spare open what is registered; it is ready after that."""
        if self._filling is None or not self._has_context or link.is_warm:
            return

        def is_spare() -> bool:
            return self._link is link and self._reason is None

        await self._filling.fill(link, is_spare)
        if is_spare():
            self._warm(link)

    def _warm(self, link: Link) -> None:
        """Take note that the spare has all that it is to have."""
        link.is_warm = True
        link.watchdog.end()
        self.state = "ready"
        if self._began:
            log, self._is_missed = logger.warning if self._is_missed else logger.info, False
            seconds, self._began = round(time.perf_counter() - self._began, 4), 0.0
            log("standby_ready", device=self._core.name, standby=self._ahead, pid=link.pid, seconds=seconds)

    def take(self) -> Link | None:
        """Hand the spare over, unless it was given up: its watchdog has stopped, and would not bound a promotion."""
        return None if self._reason is not None else self._take()

    def _take(self) -> Link | None:
        """Hand the spare over."""
        link, self._link, self._reason = self._link, None, None
        self._rest("none")
        return link

    def _rest(self, state: str) -> None:
        self.state = state
        self._wait_no_longer()

    # -- what the spare says

    def received(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Take a message; see :class:`~accel.remote.link.Listener`."""
        core, link = self._core, self._link
        if link is None or self._reason is not None:  # handed over, or given up
            return
        if kind == Kind.WARM:
            self._has_context = True
            if self._ahead != "imports":  # the spare maps, and registers, what host memory there is: it need not when it is promoted
                for block in core.pinned.arena.blocks():
                    link.announce(block.number, block)
            if self._filling is None:
                self._warm(link)
            else:
                self._refill()
        elif kind == Kind.DONE:
            for (number,) in struct.iter_unpack("<Q", data):
                self._answered(link, number, None)
        elif kind == Kind.FAILED:
            self._answered(link, Failure.unpack_from(data)[0], decode_error(data[Failure.size :]))
        elif kind in (Kind.REFUSED, Kind.FAULT):
            self._reason = decode_error(data)
            link.kill()
        elif kind not in (Kind.MEMORY, Kind.BUSY):
            raise ProtocolError(f"the spare child of {core.name} sent a message of kind {kind}", device=core.name)

    def _answered(self, link: Link, number: int, error: AccelError | None) -> None:
        if not link.answered(number, error):
            raise ProtocolError(f"the spare child of {self._core.name} answered what it was not asked", device=self._core.name)

    def lost(self, error: AccelError | None) -> None:
        """See :class:`~accel.remote.link.Listener`."""
        self._reason = self._reason or error

    def exited(self, status: ExitStatus) -> None:
        """Replace it, after a while, and as long as the budget lasts."""
        link, self._link = self._link, None
        if link is not None:
            link.channel.close()
            error = self._reason or status.error(device=self._core.name, scope=FaultScope.CONTEXT)
            link.give_up(error)
            self._failed(error)

    def expired(self, why: str) -> None:
        """Kill the spare; :meth:`exited` replaces it."""
        if self._link is not None:
            self._rest("none")
            self._reason = HostDiedError(f"the spare child of {self._core.name} {why}", hung=True, device=self._core.name)
            self._link.kill()

    def _failed(self, error: AccelError) -> None:
        self._reason = None
        self._rest("none")
        super()._failed(error)

    def _on_lost(self, error: AccelError, pause: float, *, is_spent: bool) -> None:
        self._is_missed = True
        if is_spent:
            self.state = "failed"
            logger.error("standby_failed", device=self._core.name, standby=self._ahead, seconds=pause, error=error)
        else:
            logger.warning("standby_lost", device=self._core.name, standby=self._ahead, error=error)

    async def stopped(self, context: ActorContext) -> None:
        """End the spare: it outlives nothing."""
        self._children.spares.remove(self)
        self._core.lifecycle.wake()
        await super().stopped(context)

    async def _end(self) -> None:
        link = self._take()
        if link is not None:
            self._children.kill(link)
            await self._children.gone()
