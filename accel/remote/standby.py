"""The actor that keeps a spare child ready, and replaces it when it was promoted or has died."""

from __future__ import annotations

import contextlib
import enum
import time
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from accel._log import get_logger
from accel.actors import Actor, ActorContext, RestartStrategy
from accel.actors.supervision import RestartBudget
from accel.errors import AccelError, FaultScope, HostDiedError
from accel.process.protocol import ProtocolError
from accel.remote.error_codec import decode_error
from accel.remote.link import Link
from accel.remote.messages import Kind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.engine.core import DeviceCore
    from accel.process.exit_status import ExitStatus
    from accel.remote.children import Children

__all__ = ["StandbyActor"]

logger = get_logger()

_BUDGET = RestartStrategy(max_restarts=5, within=60.0, backoff=(0.2, 10.0))
"""How often a spare that has died by itself is replaced."""


class _Wish(enum.Enum):
    LOOK = "look"  # see whether there is to be a spare


class StandbyActor(Actor[_Wish, None]):
    """Has a spare child while the device is ready and has none. What becomes of the spare is never the device's concern.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    children
        Told of the spare.
    ahead
        What the spare makes ready: its ``"imports"``, or its ``"context"`` too.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, children: Children, ahead: Literal["imports", "context"]) -> None:
        self._core = core
        self._children = children
        self._ahead = ahead
        self._link: Link | None = None
        self._began = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._budget = RestartBudget(_BUDGET, core.system.clock, core.system.random)
        self._reason: AccelError | None = None
        self._is_missed = False  # the log has said that there is none
        self._wish: Callable[[], None] = _nothing

    async def started(self, context: ActorContext) -> None:
        """Offer the spare that there will be, and begin with it."""
        core = self._core
        self._children.take_spare = self._take_sound
        self._wish = lambda: _tell(context.self_ref)
        core.lifecycle.listeners.append(self._wish)
        self._wish()

    async def receive(self, message: _Wish, context: ActorContext) -> None:
        """Start a spare, unless there is one, or end it with the device, which may be reopened; returns long before it is ready."""
        core = self._core
        if core.lifecycle.is_final:
            await self._end_spare()
            return
        if self._link is not None or self._retry is not None or core.refs.is_closing or not core.is_ready:
            return
        self._children.standby = "starting"
        self._began = time.perf_counter()
        try:
            self._link = await Link.start(core, self._ahead, self)
        except AccelError as error:
            self._failed(error)

    def _take_sound(self) -> Link | None:
        """Hand the spare over, unless it was given up: its watchdog has stopped, and would not bound a promotion."""
        return None if self._reason is not None else self._take()

    def _take(self) -> Link | None:
        """Hand the spare over."""
        link, self._link, self._reason = self._link, None, None
        self._rest("none")
        return link

    def _rest(self, state: str) -> None:
        self._children.standby = state
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
            self._children.standby = "ready"
            link.watchdog.end()
            self._announce(link)
            log, self._is_missed = logger.warning if self._is_missed else logger.info, False
            log("standby_ready", device=core.name, standby=self._ahead, pid=link.pid, seconds=round(time.perf_counter() - self._began, 4))
        elif kind in (Kind.REFUSED, Kind.FAULT):
            self._reason = decode_error(data)
            link.kill()
        elif kind not in (Kind.MEMORY, Kind.BUSY):
            raise ProtocolError(f"the spare child of {core.name} sent a message of kind {kind}", device=core.name)

    def _announce(self, link: Link) -> None:
        """Have the spare map, and register, the host memory that there is: it need not when it is promoted."""
        if self._ahead == "context":
            for block in self._core.pinned.arena.blocks():
                link.announce(block.number, block)

    def lost(self, error: AccelError | None) -> None:
        """See :class:`~accel.remote.link.Listener`."""
        self._reason = self._reason or error

    def exited(self, status: ExitStatus) -> None:
        """Replace it, after a while, and as long as the budget lasts."""
        link, self._link = self._link, None
        if link is not None:
            link.channel.close()
            self._failed(self._reason or status.error(device=self._core.name, scope=FaultScope.CONTEXT))

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
            # Tried again with the next generation; until then it is not mentioned again.
            self._rest("failed")
            logger.error("standby_given_up", device=core.name, standby=self._ahead, error=error)
            return
        self._rest("none")
        logger.warning("standby_lost", device=core.name, standby=self._ahead, error=error)

        def again() -> None:
            self._retry = None
            self._wish()

        self._retry = core.loop.call_later(max(delay, _BUDGET.backoff[0]), again)

    # -- the end

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """End the spare."""
        await self._end()

    async def stopped(self, context: ActorContext) -> None:
        """End the spare: it outlives nothing."""
        await self._end()

    async def _end(self) -> None:
        core = self._core
        if self._wish in core.lifecycle.listeners:
            core.lifecycle.listeners.remove(self._wish)
        self._children.take_spare = _no_spare
        await self._end_spare()

    async def _end_spare(self) -> None:
        link = self._take()
        if link is not None:
            self._children.kill(link)
            await self._children.gone()


def _tell(actor: Any) -> None:
    with contextlib.suppress(AccelError):  # it has stopped, or has more than enough such wishes
        actor.tell(_Wish.LOOK)


def _nothing() -> None:
    """Do nothing."""


def _no_spare() -> None:
    """Return no spare."""
