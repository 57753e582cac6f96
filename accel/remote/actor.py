"""The parent's actor that keeps a context in a child process, one child for each generation."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import time
from typing import TYPE_CHECKING, ClassVar

from accel._log import get_logger
from accel.actors import Actor, ActorContext
from accel.dtype import DType
from accel.engine.op_error import op_error
from accel.errors import AccelError, FaultScope, HostDiedError, UnsupportedError
from accel.process.protocol import ProtocolError
from accel.remote.context import RemoteContext
from accel.remote.error_codec import decode_error
from accel.remote.link import STARTUP_TIMEOUT, Link
from accel.remote.messages import Begin, Kind, pickled_library

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import TypeAlias

    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.process.exit_status import ExitStatus
    from accel.remote.children import Children
    from accel.remote.requests import Copy, Landed

    _Land: TypeAlias = Callable[[Copy, Landed], None]
    _Ready: TypeAlias = "asyncio.Future[dict[str, frozenset[DType]]]"

__all__ = ["RemoteContextActor"]

logger = get_logger()

_ANSWER = 2.0
"""Seconds in which a promoted spare must send something; else another child replaces it."""

_IMPORTS = 30.0
"""Seconds for which the first child waits for the forkserver, before it is started instead."""

_GRACE = 5.0
"""Seconds in which a child must end after it was asked to."""

_MEMORY_BACK = 10.0
"""Seconds for which a new generation retries to get memory that the last one may still hold."""


class RemoteContextActor(Actor["tuple[Copy, Landed]", None]):
    """Owns one child, and through it one context.

    Its messages are copies of arrays from shared memory, which it makes off the loop. After a fault
    of the context or the death of the child its supervisor replaces it.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    owner
        Told the context once it is ready, and ``None`` when it is not any more.
    children
        The other children of the device.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, owner: ContextOwner, children: Children) -> None:
        self._core = core
        self._owner = owner
        self._children = children
        self._context: RemoteContext | None = None
        self._link: Link | None = None
        self._ready: _Ready | None = None

    async def started(self, context: ActorContext) -> None:
        """Promote a spare child or start one, and have it begin the generation."""
        core = self._core
        began = time.perf_counter()

        def land(copy: Copy, then: Landed) -> None:
            context.self_ref.tell((copy, then))

        try:
            made, link, promoted = await self._bring_up(land)
        except BaseException:
            await self._children.wait_gone()
            raise
        self._owner.on_published(made)
        core.refs.sharing = made.sharing
        core.became_ready(began, host="process", pid=link.pid, promoted=promoted)

    async def _bring_up(self, land: _Land) -> tuple[RemoteContext, Link, str | None]:
        """Return a context, its child, and what that had made ready: ``None`` for a new child."""
        core = self._core
        while (spare := self._children.take_spare()) is not None:
            state = core.options.standby if spare.is_warm else "starting"
            ready = self._ready = core.loop.create_future()
            try:
                return await self._begin(spare, ready, land, _ANSWER if spare.is_warm else STARTUP_TIMEOUT), spare, state
            except AccelError as error:
                logger.warning("standby_not_promoted", device=core.name, standby=core.options.standby, pid=spare.pid, error=error)
        if not core.lifecycle.generation:  # a later one is needed at once
            await self._children.forkserver.wait_settled(_IMPORTS)
        ready = self._ready = core.loop.create_future()  # it may refuse at once
        link = await Link.start(core, "imports", self, self._children.forkserver)
        try:
            # The new child imports while the last one ends, whose memory it needs.
            await self._children.wait_gone()
        except BaseException:
            ready.cancel()
            self._children.kill(link)
            raise
        return await self._begin(link, ready, land, STARTUP_TIMEOUT), link, None

    async def _begin(self, link: Link, ready: _Ready, land: _Land, answer: float) -> RemoteContext:
        """Have a child begin the generation. It must send something within ``answer`` seconds."""
        core, watchdog = self._core, link.watchdog
        self._link, link.listener = link, self
        watchdog.begin(answer, then=STARTUP_TIMEOUT)
        made = self._context = RemoteContext(core, self._owner, land, link)
        if link.child.exit is not None:
            self.on_exit(link.child.exit)
        link.ping()
        is_first = not core.lifecycle.generation
        try:
            if not ready.done():  # it is if the child has ended
                await made.drop_unregistered()
            begin = Begin(made.generation, self._own(), core.durable.most_slabs, 0.0 if is_first else _MEMORY_BACK)
            link.tell(Kind.BEGIN, pickle.dumps(begin))
            core.capabilities = await ready
            watchdog.end()
            if core.durable.buffers:
                # The last child must not write to durable memory any more.
                await self._check_last_gone()
            watchdog.begin(core.options.limits.busy_timeout)
            await made.bind()
            for registration in [library for library in core.own.values() if library.is_eager and not library.is_leaving]:
                watchdog.begin(core.options.limits.busy_timeout)
                await made.open_ahead(registration)
            watchdog.end()
            made.check_alive()  # the child may have ended since it was ready
        except BaseException:
            if not ready.cancel() and not ready.cancelled():
                ready.exception()  # mark it as retrieved
            self._context = self._link = None
            made.end()
            self._children.kill(link, made.gone)
            raise
        return made

    async def _check_last_gone(self) -> None:
        """Wait until no earlier child can write to durable memory.

        Raises
        ------
        HostDiedError
            If a killed child does not end.
        """
        core = self._core
        if not await self._children.wait_gone():
            raise HostDiedError(
                f"a child of {core.name} was killed and does not end: it may still write to durable memory, which no other one can have before",
                device=core.name,
                scope=FaultScope.CONTEXT,
                remedy="Put the data on the device anew, in another process or after a reboot; the kernel's log may tell what the child waits for.",
            )

    async def receive(self, message: tuple[Copy, Landed], context: ActorContext) -> None:
        """Make a copy on a worker thread, and report its end on the loop."""
        copy, then = message
        failed: AccelError | None = None
        try:
            await self._core.system.run_blocking(copy)
        except Exception as error:
            failed = op_error(error, "copying what came back", self._core.loop)
        try:
            then(failed)
        except Exception as error:  # a bug of accel's own, which may have lost an answer
            self._fail(op_error(error, "taking what came back", self._core.loop))

    def _own(self) -> dict[str, bytes]:
        """Return the registered libraries that can be pickled. The child refuses ops of others."""
        found = {}
        for name, registration in self._core.own.items():
            try:
                found[name] = pickled_library(registration)
            except UnsupportedError as error:
                logger.warning("library_not_sent", device=self._core.name, library=name, error=error)
        return found

    # -- called by the link

    def on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """See :class:`~accel.remote.link.Listener`."""
        made, ready = self._context, self._ready
        try:
            if ready is None or kind == Kind.WARM:
                return
            if ready.done():
                if made is not None:
                    made.on_message(kind, data, fds)
            elif kind == Kind.READY:
                offer, self._core.durable.is_offered, self._core.has_graphs = _offer(data)
                ready.set_result(offer)
            elif kind in (Kind.REFUSED, Kind.FAULT):
                ready.set_exception(decode_error(data))
            elif kind in (Kind.DONE, Kind.FAILED) and made is not None and self._link is not None and self._link.asked:
                made.on_message(kind, data, fds)  # answers to questions to the spare
            elif kind not in (Kind.MEMORY, Kind.BUSY):
                ready.set_exception(
                    HostDiedError(f"the child of {self._core.name} began with a message of kind {kind}", device=self._core.name)
                )
        except (ValueError, TypeError, KeyError, struct.error) as error:
            raise ProtocolError(f"the child of {self._core.name} sent a message of kind {kind} that means nothing: {error!r}") from error

    def on_lost(self, error: AccelError | None) -> None:
        """See :class:`~accel.remote.link.Listener`."""
        if isinstance(error, ProtocolError):
            self._fail(error)

    def on_expired(self, why: str) -> None:
        """See :class:`~accel.remote.link.Listener`."""
        name = self._core.name
        self._fail(HostDiedError(f"the child of {name} {why}", hung=True, device=name, scope=FaultScope.CONTEXT))

    def on_exit(self, status: ExitStatus) -> None:
        """See :class:`~accel.remote.link.Listener`."""
        self._fail(status.error(device=self._core.name, scope=FaultScope.CONTEXT))

    def _fail(self, error: AccelError) -> None:
        made, ready = self._context, self._ready
        if ready is not None and not ready.done():
            ready.set_exception(error)
            if self._link is not None:
                self._link.give_up(error)
        elif made is not None:
            made.report_fault(error)

    # -- the end

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """Kill the child. Its shared memory is reused once it has ended."""
        self._kill()

    async def stopped(self, context: ActorContext) -> None:
        """Have the child release everything, and wait for its end."""
        made, link = self._context, self._link
        if made is not None and link is not None and made.fault is None and not made.in_flight:
            self._withdraw()
            made.end()
            made.ask_to_close()
            # Before its socket: else the loop would remove the reader of the next descriptor of
            # that number.
            link.channel.close()
            with contextlib.suppress(HostDiedError):  # `wait_gone` logs it
                await link.child.aclose(grace=_GRACE)
        self._kill()
        await self._children.wait_gone()

    def _withdraw(self) -> None:
        if self._link is not None:
            self._link.watchdog.stop()
        if self._context is not None:
            self._owner.on_published(None)

    def _kill(self) -> None:
        self._withdraw()
        made, self._context = self._context, None
        link, self._link = self._link, None
        if made is not None:
            made.end()
        if link is not None:
            self._children.kill(link, None if made is None else made.gone)


def _offer(data: bytes) -> tuple[dict[str, frozenset[DType]], bool, bool]:
    """Return the capabilities in a READY message, and whether it offers durability and graphs."""
    try:
        told = json.loads(data)
        offer = {str(name): frozenset(DType(dtype) for dtype in dtypes) for name, dtypes in told["capabilities"].items()}
        return offer, told.get("durable") is True, told.get("graphs") is True
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a message that should be an offer is none: {type(error).__name__}: {error}") from None
