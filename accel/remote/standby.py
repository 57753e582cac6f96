"""The actor that keeps a spare child ready, and replaces it when it was promoted or has died; a device has one for each of its spares."""

from __future__ import annotations

import contextlib
import enum
import struct
import time
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from accel._log import get_logger
from accel.actors import Actor, ActorContext, RestartStrategy
from accel.actors.supervision import RestartBudget
from accel.errors import AccelError, FaultScope, HostDiedError
from accel.process.protocol import ProtocolError
from accel.remote.error_codec import decode_error
from accel.remote.filling import Filling
from accel.remote.link import Link
from accel.remote.messages import Failure, Kind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.engine.core import DeviceCore
    from accel.process.exit_status import ExitStatus
    from accel.remote.children import Children

__all__ = ["StandbyActor"]

logger = get_logger()

_BUDGET = RestartStrategy(max_restarts=5, within=60.0, backoff=(0.2, 10.0))
"""How often a spare that has died by itself is replaced without a longer pause."""
_PAUSE = 30.0
"""Seconds until the next attempt once that is spent: whatever ended them may be over then."""


class _Wish(enum.Enum):
    LOOK = "look"  # see whether there is to be a spare
    FILL = "fill"  # bring the spare up to what is registered


class StandbyActor(Actor[_Wish, None]):
    """Has a spare child while the device is ready. What becomes of the spare is never the device's concern.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    children
        Told of the spare.
    ahead
        What the spare makes ready: its ``"imports"``, or its ``"context"`` too, or what a ``"model"`` needs besides; see :class:`Filling`.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, children: Children, ahead: Literal["imports", "context", "model"]) -> None:
        self._core = core
        self._children = children
        self._ahead = ahead
        self._state = "none"
        self._link: Link | None = None
        self._began = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._budget = RestartBudget(_BUDGET, core.system.clock, core.system.random)
        self._reason: AccelError | None = None
        self._is_missed = False  # the log has said that there is none
        self._wish: Callable[[], None] = _nothing
        self._send: Callable[[_Wish], None] = lambda _: None
        self._filling = Filling(core) if ahead == "model" else None
        self._has_context = False  # the spare, so that it can be filled
        self._is_filling = False

    async def started(self, context: ActorContext) -> None:
        """Offer the spare that there will be, and begin with it."""
        core = self._core
        self._children.spares.append(self)
        self._send = lambda wish: None if core.refs.is_closing else _tell(context.self_ref, wish)
        self._wish = lambda: self._send(_Wish.LOOK)
        if self._filling is not None:
            core.own_listeners.append(self._refill)
        core.lifecycle.listeners.append(self._state_changed)
        self._children.forkserver.listeners.append(self._wish)
        self._wish()

    async def receive(self, message: _Wish, context: ActorContext) -> None:
        """Start a spare, unless there is one, or end it with the device, which may be reopened; returns long before it is ready."""
        core = self._core
        if core.lifecycle.is_final:
            await self._end_spare()
            return
        if message is _Wish.FILL:
            await self._fill()
            return
        if self._link is not None or self._retry is not None or core.refs.is_closing or not core.is_ready:
            return
        self.state = "starting"
        self._children.spares.sort(key=lambda spare: spare is self)  # the newest is the last
        if self._children.forkserver.is_importing:  # the spare would do the same imports once more
            return
        self._has_context = False
        self._began = time.perf_counter()
        try:
            self._link = await Link.start(core, self._ahead, self, self._children.forkserver)
        except AccelError as error:
            self._failed(error)

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
        self._wish()

    def _refill(self) -> None:
        """Have the spare filled, if it has a context: libraries were registered, or are no longer. It is not ready until then."""
        link = self._link
        if link is not None and self._has_context:
            link.is_warm = False
            self.state = "starting"
            if not self._is_filling:  # else it goes on until nothing is left to do
                self._send(_Wish.FILL)

    async def _fill(self) -> None:
        """Have the spare open what is registered; it is ready after that."""
        link = self._link
        if self._filling is None or link is None or not self._has_context:
            return

        def is_spare() -> bool:
            return self._link is link and self._reason is None

        self._is_filling = True
        try:
            await self._filling.fill(link, is_spare)
        finally:
            self._is_filling = False
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
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    # -- what the spare says

    def received(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Take a message; see :class:`~accel.remote.link.Listener`."""
        core, link = self._core, self._link
        if link is None or self._reason is not None:  # handed over, or given up
            return
        if kind == Kind.WARM:
            self._has_context = True
            self._announce(link)
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

    def _announce(self, link: Link) -> None:
        """Have the spare map, and register, the host memory that there is: it need not when it is promoted."""
        if self._ahead != "imports":
            for block in self._core.pinned.arena.blocks():
                link.announce(block.number, block)

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
        core, self._reason = self._core, None
        if core.refs.is_closing:
            self._rest("none")
            return
        self._is_missed = True
        delay = self._budget.request()
        if delay is None:
            self._rest("failed")
            logger.error("standby_failed", device=core.name, standby=self._ahead, seconds=_PAUSE, error=error)
        else:
            self._rest("none")
            logger.warning("standby_lost", device=core.name, standby=self._ahead, error=error)

        def again() -> None:
            self._retry = None
            self._wish()

        self._retry = core.loop.call_later(_PAUSE if delay is None else max(delay, _BUDGET.backoff[0]), again)

    # -- the end

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """End the spare."""
        await self._end()

    async def stopped(self, context: ActorContext) -> None:
        """End the spare: it outlives nothing."""
        await self._end()

    async def _end(self) -> None:
        core = self._core
        if self._state_changed in core.lifecycle.listeners:
            core.lifecycle.listeners.remove(self._state_changed)
        if self._wish in self._children.forkserver.listeners:
            self._children.forkserver.listeners.remove(self._wish)
        if self._refill in core.own_listeners:
            core.own_listeners.remove(self._refill)
        self._children.spares.remove(self)
        core.lifecycle.wake()
        await self._end_spare()

    async def _end_spare(self) -> None:
        link = self._take()
        if link is not None:
            self._children.kill(link)
            await self._children.gone()


def _tell(actor: Any, wish: _Wish) -> None:
    with contextlib.suppress(AccelError):  # it has stopped, or has more than enough such wishes
        actor.tell(wish)


def _nothing() -> None:
    """Do nothing."""
