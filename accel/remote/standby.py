"""The actor that keeps a spare child ready; a device has one for each of its spares."""

from __future__ import annotations

import contextlib
import struct
import time
from typing import TYPE_CHECKING, Literal

from accel._log import get_logger
from accel.errors import AccelError, FaultScope, HostDiedError, OutOfMemoryError
from accel.process.protocol import ProtocolError
from accel.remote.error_codec import decode_error
from accel.remote.helper_process import HelperProcessActor
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


class StandbyActor(HelperProcessActor):
    """Keeps a spare child while the device is ready, and replaces one that was promoted or died.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    children
        Has the places of spare children, of which this is one.
    readiness
        Which part the spare makes ready before its promotion: its ``"imports"``, or its
        ``"context"`` too, or also the memory and libraries of a ``"model"``; see
        :class:`~accel.remote.model_standby.ModelStandbyActor`.
    """

    def __init__(self, core: DeviceCore, children: Children, readiness: Literal["imports", "context", "model"]) -> None:
        super().__init__(core)
        self._children = children
        self._readiness = readiness
        self._state = "none"
        self._link: Link | None = None
        self._start_time = 0.0  # 0 once the spare was logged as ready
        self._error: AccelError | None = None  # why the spare was killed
        self._is_loss_logged = False  # the next spare's readiness is then a warning, too

    def _subscriptions(self) -> list[tuple[list[Callable[[], object]], Callable[[], object]]]:
        """Listen to the device's state, and to the forkserver, by which a spare starts faster."""
        return [(self._core.lifecycle.listeners, self._on_state), (self._children.forkserver.listeners, self._request_check)]

    async def started(self, context: ActorContext) -> None:
        """Add the place of the spare, and start it."""
        self._children.spares.append(self)
        await super().started(context)

    async def _ensure_process(self) -> None:
        """Start a spare, without waiting until it is ready; if there is one, bring it up to date.

        While the forkserver imports, none is started: its listener has this called again.
        """
        core = self._core
        if self._link is not None:
            await self._update(self._link)
        elif core.is_ready:
            self.state = "starting"
            self._children.spares.sort(key=lambda spare: spare is self)  # the newest is the last
            if self._children.forkserver.is_importing:  # the spare would do the same imports
                return
            self._start_time = time.perf_counter()
            self._link = await Link.start(core, self._readiness, self, self._children.forkserver, self._children.node)

    async def _update(self, link: Link) -> None:
        """Bring the spare up to date with the registered libraries: nothing to do here."""

    def _on_prepared(self, link: Link) -> None:
        """Handle WARM: the spare has its imports and, if it is to have one, its context.

        That is all here, so it is ready; a spare for a model is not yet.
        """
        self._set_ready(link)

    def _set_ready(self, link: Link) -> None:
        """Mark the spare as ready to be promoted, and log that, once for each spare.

        After a logged loss that is a warning, too, so that the end of the shortage is seen.
        """
        link.is_warm = True
        link.watchdog.end_step()
        self.state = "ready"
        if self._start_time:
            log = logger.warning if self._is_loss_logged else logger.info
            seconds = round(time.perf_counter() - self._start_time, 4)
            log("standby_ready", device=self._core.name, standby=self._readiness, pid=link.pid, seconds=seconds)
            self._start_time, self._is_loss_logged = 0.0, False

    @property
    def state(self) -> str:
        """The state of the spare; setting it wakes the callers that wait for a ready spare."""
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        self._state = state
        self._core.lifecycle.wake()

    @property
    def pid(self) -> int | None:
        """Process id of the spare."""
        return None if self._link is None else self._link.pid

    def _is_spare(self, link: Link) -> bool:
        """Return whether a child is still the spare: it may be promoted, or die, during an await."""
        return self._link is link and self._error is None

    def _on_state(self) -> None:
        """Check the spare; a new generation ends the pause after too many failures."""
        if self._state == "failed" and self._core.is_ready:
            self._cancel_retry_timer()
            self.state = "none"
        self._request_check()

    def take(self) -> Link | None:
        """Give the spare to the caller; ``None`` if there is none, or it was killed.

        This actor starts another one once the device is ready again.
        """
        return None if self._error is not None else self._detach()

    def _detach(self) -> Link | None:
        """Forget the spare, set the state to ``"none"``, and return the spare, if there is one."""
        link, self._link, self._error = self._link, None, None
        if link is not None:
            self.state = "none"
        return link

    # -- called by the link

    def on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle a message of the spare; see :class:`~accel.remote.link.Listener`.

        A spare that reports an error is killed: :meth:`on_exit` has it replaced.
        """
        core, link = self._core, self._link
        if link is None or self._error is not None:  # promoted, or given up
            return
        if kind == Kind.WARM:
            if self._readiness != "imports":  # it maps host memory before its promotion
                # Without a descriptor for one, the first op that needs it sends it.
                with contextlib.suppress(OutOfMemoryError):
                    for block in core.pinned.arena.blocks():
                        link.send_block(block)
            self._on_prepared(link)
        elif kind == Kind.DONE:
            for (number,) in struct.iter_unpack("<Q", data):
                self._on_answer(link, number, None)
        elif kind == Kind.FAILED:
            self._on_answer(link, Failure.unpack_from(data)[0], decode_error(data[Failure.size :]))
        elif kind in (Kind.REFUSED, Kind.FAULT):
            self._give_up(decode_error(data))
            link.kill()
        elif kind != Kind.MEMORY:  # a spare's memory is counted from its promotion on
            raise ProtocolError(f"the spare child of {core.name} sent a message of kind {kind}", device=core.name)

    def _on_answer(self, link: Link, number: int, error: AccelError | None) -> None:
        """Settle a question to the spare with its answer; one that was not asked is an error."""
        if not link.settle(number, error):
            raise ProtocolError(f"the spare child of {self._core.name} answered what it was not asked", device=self._core.name)

    def on_lost(self, error: AccelError | None) -> None:
        """Keep the error of the connection for :meth:`on_exit`: the link has killed the child."""
        if error is not None and self._error is None:
            self._give_up(error)

    def on_expired(self, why: str) -> None:
        """Kill the spare, which the watchdog has given up; :meth:`on_exit` has it replaced."""
        if self._link is not None:
            self._give_up(HostDiedError(f"the spare child of {self._core.name} {why}", hung=True, device=self._core.name))
            self._link.kill()

    def _give_up(self, error: AccelError) -> None:
        """Count the spare as none from now on: a child that is killed may end late."""
        self.state = "none"
        self._error = error

    def on_exit(self, status: ExitStatus) -> None:
        """Forget the spare, fail its questions, and have another one started after a pause.

        Not called for one that was promoted: its link has another listener then.
        """
        error = self._error or status.error(device=self._core.name, scope=FaultScope.CONTEXT)
        link = self._detach()
        if link is not None:
            link.channel.close()
            link.fail_questions(error)
            self._replace_later(error)

    def _on_process_lost(self, error: AccelError, pause: float, *, is_spent: bool) -> None:
        """Set the state, and log that there is no spare for now."""
        self._is_loss_logged = True
        self.state = "failed" if is_spent else "none"
        if is_spent:
            logger.error("standby_failed", device=self._core.name, standby=self._readiness, seconds=pause, error=error)
        else:
            logger.warning("standby_lost", device=self._core.name, standby=self._readiness, error=error)

    async def stopped(self, context: ActorContext) -> None:
        """Remove the place, and end the spare."""
        self._children.spares.remove(self)
        self._core.lifecycle.wake()  # the callers that wait for a ready spare
        await super().stopped(context)

    async def _end_process(self) -> None:
        """Kill the spare, if there is one, and wait for its end."""
        link = self._detach()
        if link is not None:
            self._children.kill(link)
            await self._children.wait_ended()
