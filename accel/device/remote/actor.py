"""The parent's actor that keeps a context in a child process: a child per generation, replaced by its supervisor when it faults or dies."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import struct
import time
from typing import TYPE_CHECKING, ClassVar

from accel._log import get_logger
from accel.actors import Actor, ActorContext, RestartStrategy
from accel.device.in_flight import fault_behind
from accel.device.remote.context import RemoteContext
from accel.device.remote.messages import Config, Kind, pickled_library
from accel.dtype import DType
from accel.errors import AccelError, FaultScope, HostDiedError, UnsupportedError
from accel.hosts.channel import Channel
from accel.hosts.child import ChildProcess
from accel.hosts.error_codec import decode_error
from accel.hosts.protocol import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.device.core import DeviceCore
    from accel.hosts.exit_status import ExitStatus

__all__ = ["RemoteContextActor"]

logger = get_logger()

_TARGET = "accel.device.remote.served:serve"
_BEAT = 1.0
"""Seconds between two questions whether the child is there."""

_SILENCE = 10
"""After so many unanswered ones it is not: its loop hangs, or the process is stopped."""

_PATIENCE = 120.0
"""Seconds that a child may take to come up: it imports, and makes a context."""


class RemoteContextActor(Actor["tuple[Callable[[], None], Callable[[], None]]", None]):
    """Owns one child, and through it one context. Its messages are what has to be copied off the loop when it comes back.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    publish
        Told the context once it is ready, and ``None`` when it is not any more.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, publish: Callable[[RemoteContext | None], None]) -> None:
        self._core = core
        self._publish = publish
        self._context: RemoteContext | None = None
        self._child: ChildProcess | None = None
        self._ready: asyncio.Future[dict[str, frozenset[DType]]] | None = None
        self._beat: asyncio.TimerHandle | None = None

    async def started(self, context: ActorContext) -> None:
        """Start a child, have it make the context, and declare the generation ready."""
        core = self._core
        core.restarts_left = context.restarts_left
        began = time.perf_counter()
        self._ready = core.loop.create_future()
        self._context = made = RemoteContext(core, lambda copy, then: context.self_ref.tell((copy, then)))
        try:
            self._child = await ChildProcess.start(
                core.system, _TARGET, uvloop=type(core.loop).__module__.startswith("uvloop"), on_exit=self._exited
            )
            made.pid, made.kill = self._child.pid, self._child.kill
            made.channel = Channel(self._child.sock, core.loop, on_message=self._received, on_lost=self._lost)
            made.channel.send(Kind.CONFIG, pickle.dumps(self._config(made.generation)))
            async with asyncio.timeout(_PATIENCE):
                offer = await self._ready
            await made.bind()
            made.check_alive()  # it may have ended right after it was ready
        except BaseException as error:
            await self._end(abandon=True)
            if isinstance(error, TimeoutError):
                raise HostDiedError(f"the child of {core.name} was not ready within {_PATIENCE:g} s", device=core.name) from None
            raise
        core.capabilities = offer
        made.on_fault = context.self_ref.fail
        self._publish(made)
        core.sharing = made.sharing
        if core.lifecycle.generation:
            core.restarts += 1
            core.rebuild_seconds = time.perf_counter() - core.faulted_at
        core.became_ready()
        self._listen()
        logger.info(
            "context_ready", device=core.name, generation=core.lifecycle.generation, seconds=round(time.perf_counter() - began, 4), restarts=core.restarts,
            host="process", pid=self._child.pid,
        )  # fmt: skip

    def _listen(self) -> None:
        """Ask the child from time to time whether it is there; one that does not answer for long is killed."""
        loop = self._core.loop
        silent, due = 0, loop.time() + _BEAT

        def beat() -> None:
            nonlocal silent, due
            made, now = self._context, loop.time()
            if made is None or made.fault is not None:
                return
            # If this process was stopped itself, or its loop was, it has heard nobody: that says nothing of the child.
            silent = 0 if made.heard or now > due + _BEAT else silent + 1
            if silent >= _SILENCE:
                self._fail(
                    HostDiedError(
                        f"the child of {self._core.name} has not answered for {_BEAT * _SILENCE:g} s",
                        device=self._core.name,
                        scope=FaultScope.CONTEXT,
                    )
                )
                return
            made.ping()
            due = now + _BEAT
            self._beat = loop.call_at(due, beat)

        self._beat = loop.call_at(due, beat)

    async def receive(self, message: tuple[Callable[[], None], Callable[[], None]], context: ActorContext) -> None:
        """Copy what has come back on a worker thread, and say so on the loop."""
        copy, then = message
        await self._core.system.run_blocking(copy)
        then()

    def _config(self, generation: int) -> Config:
        core, options = self._core, self._core.options
        kind = type(core.backend)
        return Config(
            f"{kind.__module__}:{kind.__qualname__}",
            core.description.uuid,
            core.name,
            generation,
            dataclasses.replace(options, faults=None, restart=RestartStrategy(), priorities=dict(options.priorities), overload="wait"),
            self._own(),
        )

    def _own(self) -> dict[str, bytes]:
        """Return the registered libraries that can be sent; ops of others are refused by the child."""
        found = {}
        for name, make in self._core.own.items():
            try:
                found[name] = pickled_library(name, make)
            except UnsupportedError as error:
                logger.warning("library_not_sent", device=self._core.name, library=name, error=error)
        return found

    # -- called by the channel and the child

    def _received(self, kind: int, data: bytes, fds: list[int]) -> None:
        try:
            self._take(kind, data, fds)
        except (ValueError, TypeError, KeyError, struct.error) as error:
            raise ProtocolError(f"the child of {self._core.name} sent a message of kind {kind} that means nothing: {error!r}") from error

    def _take(self, kind: int, data: bytes, fds: list[int]) -> None:
        made, ready = self._context, self._ready
        if made is None or ready is None:
            return
        if ready.done():
            made.received(kind, data, fds)
        elif kind == Kind.READY:
            offer, self._core.durable.is_offered = _offer(data)
            ready.set_result(offer)
        elif kind == Kind.REFUSED:
            ready.set_exception(decode_error(data))
        else:
            ready.set_exception(
                HostDiedError(f"the child of {self._core.name} began with a message of kind {kind}", device=self._core.name)
            )

    def _lost(self, error: AccelError | None) -> None:
        # Of a connection that only broke, the end of the process says why; it comes at once, or is brought about.
        if isinstance(error, ProtocolError):
            self._fail(error)
        if self._child is not None:
            self._child.kill()

    def _exited(self, status: ExitStatus) -> None:
        self._fail(status.error(device=self._core.name, scope=FaultScope.CONTEXT))

    def _fail(self, error: AccelError) -> None:
        made, ready = self._context, self._ready
        if ready is not None and not ready.done():
            ready.set_exception(error)
        elif made is not None:
            made.report_fault(error)

    # -- the end

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """See the child dead, and give its shared memory back."""
        made = self._context
        if made is not None and made.fault is None:
            made.report_fault(fault_behind(error), is_survived=True)
        logger.info("context_rebuilding", device=self._core.name, generation=self._core.lifecycle.generation)
        await self._end(abandon=True)

    async def stopped(self, context: ActorContext) -> None:
        """Have the child give everything back, and see it end."""
        made = self._context
        await self._end(abandon=made is None or made.fault is not None or made.in_flight > 0)

    async def _end(self, *, abandon: bool) -> None:
        if self._beat is not None:
            self._beat.cancel()
        made, self._context = self._context, None
        child, self._child = self._child, None
        if made is not None:
            self._publish(None)
            made.end()
        if child is not None:
            if made is not None and not abandon:
                made.ask_to_close()
            await child.aclose(grace=0.0 if abandon else 5.0)
        if made is not None:
            if hasattr(made, "channel"):
                made.channel.close()
            made.gone()


def _offer(data: bytes) -> tuple[dict[str, frozenset[DType]], bool]:
    """Return what a child says that it offers, and whether it has durable buffers; what it says is not believed before it was read."""
    try:
        told = json.loads(data)
        offer = {str(name): frozenset(DType(each) for each in dtypes) for name, dtypes in told["capabilities"].items()}
        return offer, told.get("durable") is True
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a message that should be an offer is none: {type(error).__name__}: {error}") from None
