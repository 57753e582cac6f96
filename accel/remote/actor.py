"""The actor that owns a context in a child process: a child for each generation."""

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
    from accel.remote.requests import CopyCall, CopyDone

    _CopyOffLoop: TypeAlias = Callable[[CopyCall, CopyDone], None]
    _ReadyFuture: TypeAlias = "asyncio.Future[dict[str, frozenset[DType]]]"

__all__ = ["RemoteContextActor"]

logger = get_logger()

_PROMOTION_TIMEOUT = 2.0
"""Seconds in which a promoted spare must send something; else another child replaces it."""

_FORKSERVER_TIMEOUT = 30.0
"""Seconds for which the first child waits for the forkserver, before it is started instead."""

_CLOSE_TIMEOUT = 5.0
"""Seconds in which a child must end after it was asked to."""

_OOM_PATIENCE = 10.0
"""Seconds for which a new generation retries to get memory that the last one may still hold."""


class RemoteContextActor(Actor["tuple[CopyCall, CopyDone]", None]):
    """Owns the child of one generation, and through it one context.

    Its messages are copies of arrays from shared memory, each with the function to call after it:
    the actor makes the copies on worker threads, one after the other. After a fault of the context,
    or the death of the child, its supervisor restarts it.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    owner
        Gets the context once it is ready, and ``None`` when it is not any more.
    children
        The device's spare children, one of which it promotes, and those that were killed.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, owner: ContextOwner, children: Children) -> None:
        self._core = core
        self._owner = owner
        self._children = children
        self._context: RemoteContext | None = None  # of this generation, with its child
        self._link: Link | None = None
        # Of the attempt in progress: done when the child is ready, has refused, or has ended. Of a
        # new child it may be done before _begin has set _link.
        self._ready_future: _ReadyFuture | None = None

    async def started(self, context: ActorContext) -> None:
        """Promote a spare child or start one, and have it begin the generation.

        The device is READY when this returns. If it raises, the supervisor decides what follows.
        """
        core = self._core
        began = time.perf_counter()

        def copy_off_loop(copy: CopyCall, on_done: CopyDone) -> None:
            context.self_ref.tell((copy, on_done))

        try:
            remote, link, promoted = await self._begin_in_child(copy_off_loop)
        except BaseException:
            await self._children.wait_ended()  # the next attempt needs the child's memory
            raise
        self._owner.on_published(remote)
        core.refs.sharing = remote.sharing
        core.on_context_ready(began, host="process", pid=link.pid, promoted=promoted)

    async def _begin_in_child(self, copy_off_loop: _CopyOffLoop) -> tuple[RemoteContext, Link, str | None]:
        """Begin the generation in a spare child, or in a new one if no spare can.

        A spare that fails with an AccelError is killed (by :meth:`_begin`), and the next one is
        tried; any other error or a cancellation ends the attempt. Return the context, its child,
        and, for the log, what a promoted spare had made ready: the value of ``standby=``,
        ``"starting"`` if it was not ready yet, ``None`` for a new child.
        """
        core = self._core
        while (spare := self._children.take_spare()) is not None:
            promoted, timeout = (core.options.standby, _PROMOTION_TIMEOUT) if spare.is_warm else ("starting", STARTUP_TIMEOUT)
            ready = self._ready_future = core.loop.create_future()
            try:
                return await self._begin(spare, ready, copy_off_loop, timeout), spare, promoted
            except AccelError as error:
                logger.warning("standby_not_promoted", device=core.name, standby=core.options.standby, pid=spare.pid, error=error)
        # The first generation has time for the forkserver's imports; a later one is needed at once.
        if not core.lifecycle.generation:
            await self._children.forkserver.wait_settled(_FORKSERVER_TIMEOUT)
        # Set before: while the next two awaits run, _link and _context are None, and a refusal or
        # the child's end is only kept here; _begin raises it.
        ready = self._ready_future = core.loop.create_future()
        link = await Link.start(core, "imports", self, self._children.forkserver, self._children.node)
        try:
            # The new child imports while the last one ends, whose memory it needs.
            await self._children.wait_ended()
        except BaseException:
            if not ready.cancel():
                ready.exception()  # counts as retrieved: the child has ended meanwhile
            self._children.kill(link)
            raise
        return await self._begin(link, ready, copy_off_loop, STARTUP_TIMEOUT), link, None

    async def _begin(self, link: Link, ready: _ReadyFuture, copy_off_loop: _CopyOffLoop, first_timeout: float) -> RemoteContext:
        """Have a child begin the generation, and return its context once ops may be sent.

        The child must send something within ``first_timeout`` seconds; its READY ends ``ready``.
        Becomes the listener of ``link``, sets ``core.capabilities``, binds durable buffers and
        opens eager libraries. If this raises, the child is killed.
        """
        core, watchdog = self._core, link.watchdog
        self._link, link.listener = link, self
        watchdog.begin_step(first_timeout, then=STARTUP_TIMEOUT)
        remote = self._context = RemoteContext(core, self._owner, copy_off_loop, link)
        if link.child.exit is not None and not ready.done():  # a spare that ended before this was its listener
            self.on_exit(link.child.exit)
        link.ping()  # a spare may have nothing else to send within `first_timeout`
        # The first generation has no predecessor whose memory comes back.
        oom_patience = _OOM_PATIENCE if core.lifecycle.generation else 0.0
        try:
            if not ready.done():  # done: the child has ended
                await remote.drop_unregistered()
            begin = Begin(remote.generation, self._pickled_libraries(), core.durable.most_slabs, oom_patience)
            link.tell(Kind.BEGIN, pickle.dumps(begin))
            core.capabilities = await ready
            watchdog.end_step()
            # Bind durable buffers, once no earlier child can write to them any more.
            if core.durable.buffers:
                await self._wait_earlier_ended(link)
            watchdog.begin_step(core.options.limits.busy_timeout)
            await remote.bind()
            # Open eager libraries, which the service needs at once.
            for registration in [library for library in core.registrations.values() if library.is_eager and not library.unregistrations]:
                watchdog.begin_step(core.options.limits.busy_timeout)
                await remote.open_ahead(registration)
            watchdog.end_step()
            remote.check_alive()  # the child may have ended since it was ready
        except BaseException:
            if not ready.cancel() and not ready.cancelled():
                ready.exception()  # mark it as retrieved
            self._context = self._link = None
            remote.shut_down()
            self._children.kill(link, remote.on_child_ended)
            raise
        return remote

    async def _wait_earlier_ended(self, link: Link) -> None:
        """Wait until all earlier children have ended: until then they may write to durable memory.

        On another machine the child of ``link`` asks for that: an earlier one whose connection was
        cut counts as ended here, and may run there.

        Raises
        ------
        HostDiedError
            If a killed child does not end.
        """
        core = self._core
        if not await self._children.wait_ended():
            raise HostDiedError(
                f"a child of {core.name} was killed and does not end: no other one gets the durable memory while this one may write to it",
                device=core.name,
                scope=FaultScope.CONTEXT,
                remedy="Put the data on the device anew, in another process or after a reboot; the kernel's log may tell what the child waits for.",
            )
        if link.node is not None:
            await link.node.end_others()

    async def receive(self, message: tuple[CopyCall, CopyDone], context: ActorContext) -> None:
        """Make a copy on a worker thread, then call its function on the loop with the error.

        The copies are of arrays that are too large to be copied on the loop. They are made one
        after the other, so that ops end in the order of their answers.
        """
        copy, on_done = message
        failed: AccelError | None = None
        try:
            await self._core.system.run_blocking(copy)
        except Exception as error:
            failed = op_error(error, "copying what came back", self._core.loop)
        try:
            on_done(failed)
        except Exception as error:  # a bug of accel's own, which may have lost an answer
            self._fail_child(op_error(error, "taking what came back", self._core.loop))

    def _pickled_libraries(self) -> dict[str, bytes]:
        """Return the registered libraries, pickled, for the child to open.

        Those that cannot be pickled are left out and logged; the child refuses their ops.
        """
        pickled = {}
        for name, registration in self._core.registrations.items():
            try:
                pickled[name] = pickled_library(registration)
            except UnsupportedError as error:
                logger.warning("library_not_sent", device=self._core.name, library=name, error=error)
        return pickled

    # -- called by the link

    def on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Give a message to the context; before READY, end the wait for READY.

        READY also sets in the core whether the backend has durable buffers and graphs. A malformed
        message raises :class:`ProtocolError`: the channel is lost, and :meth:`on_lost` called.
        """
        remote, ready = self._context, self._ready_future
        try:
            if ready is None or kind == Kind.WARM:  # no attempt yet, or the imports are done
                return
            if ready.done():  # the generation has begun
                if remote is not None:
                    remote.on_message(kind, data, fds)
            elif kind == Kind.READY:
                offer, self._core.durable.is_offered, self._core.has_graphs = _decode_ready(data)
                ready.set_result(offer)
            elif kind in (Kind.REFUSED, Kind.FAULT):
                ready.set_exception(decode_error(data))
            elif kind in (Kind.DONE, Kind.FAILED) and remote is not None and self._link is not None and self._link.questions:
                remote.on_message(kind, data, fds)  # answers to questions to the spare
            elif kind != Kind.MEMORY:  # which comes whenever the context is made
                ready.set_exception(
                    HostDiedError(f"the child of {self._core.name} began with a message of kind {kind}", device=self._core.name)
                )
        except (ValueError, TypeError, KeyError, struct.error) as error:
            raise ProtocolError(f"the child of {self._core.name} sent a message of kind {kind} that means nothing: {error!r}") from error

    def on_lost(self, error: AccelError | None) -> None:
        """Fail the child if it violated the protocol; if it has ended, :meth:`on_exit` does."""
        if isinstance(error, ProtocolError):
            self._fail_child(error)

    def on_expired(self, why: str) -> None:
        """Fail the child: a limit of its watchdog has expired, which ``why`` names.

        A child on a node that is not heard counts as lost, and not as hung: its machine, or the
        network, may be gone, and such a fault says nothing of the ops that it ran.
        """
        name, link = self._core.name, self._link
        hung = link is None or link.node is None or link.watchdog.is_heard
        self._fail_child(HostDiedError(f"the child of {name} {why}", hung=hung, device=name, scope=FaultScope.CONTEXT))

    def on_exit(self, status: ExitStatus) -> None:
        """Fail the child, whose process has ended."""
        self._fail_child(status.error(device=self._core.name, scope=FaultScope.CONTEXT))

    def _fail_child(self, error: AccelError) -> None:
        """Report that the child has failed: to its start if that is in progress, else as a fault.

        With neither a start nor a context, nothing waits for the child. The receiver of the error
        kills it: :meth:`_begin`, or after a fault :meth:`restarting`.
        """
        remote, ready = self._context, self._ready_future
        if ready is not None and not ready.done():
            ready.set_exception(error)
            if self._link is not None:
                self._link.fail_questions(error)
        elif remote is not None:
            remote.report_fault(error)

    # -- the end

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """Kill the child before the next attempt. Its shared memory is reused once it has ended."""
        self._end_child()

    async def stopped(self, context: ActorContext) -> None:
        """Have the child release everything, and wait for its end: the device is closed.

        A child that has faulted, or has ops in flight, is killed.
        """
        remote, link = self._context, self._link
        if remote is not None and link is not None and remote.fault is None and not remote.in_flight:
            self._unpublish()
            remote.shut_down()
            link.tell(Kind.CLOSE, now=True)
            # Close the channel before the child's socket: else the loop would remove the reader of
            # the next descriptor of that number.
            link.channel.close()
            with contextlib.suppress(HostDiedError):  # `wait_ended` logs it
                await link.child.aclose(grace=_CLOSE_TIMEOUT)
        self._end_child()
        await self._children.wait_ended()

    def _unpublish(self) -> None:
        """Take the context back from the owner, which sends it no more ops; stop the watchdog."""
        if self._link is not None:
            self._link.watchdog.stop()
        if self._context is not None:
            self._owner.on_published(None)

    def _end_child(self) -> None:
        """Close the context, fail its ops in flight, and kill the child; do not wait for its end.

        The child may use its shared memory until it has ended: :class:`Children` has that released.
        """
        self._unpublish()
        remote, self._context = self._context, None
        link, self._link = self._link, None
        if remote is not None:
            remote.shut_down()
        if link is not None:
            self._children.kill(link, None if remote is None else remote.on_child_ended)


def _decode_ready(data: bytes) -> tuple[dict[str, frozenset[DType]], bool, bool]:
    """Return the capabilities in a READY message, and whether it offers durability and graphs."""
    try:
        content = json.loads(data)
        offer = {str(name): frozenset(DType(dtype) for dtype in dtypes) for name, dtypes in content["capabilities"].items()}
        return offer, content.get("durable") is True, content.get("graphs") is True
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a message that should be an offer is none: {type(error).__name__}: {error}") from None
