"""A child with its connection and its watchdog, in one object that a promotion hands over."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pickle
import struct
from typing import TYPE_CHECKING, Any, Literal, Protocol

from accel._log import get_logger
from accel.actors import RestartStrategy
from accel.engine.options import ProcessHost
from accel.errors import ClosedError, HostDiedError, UnsupportedError
from accel.process.channel import Channel
from accel.process.child import ChildProcess
from accel.process.protocol import ProtocolError
from accel.process.spawning import start_error
from accel.remote.messages import Config, Kind
from accel.remote.watchdog import Watchdog

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from accel.engine.core import DeviceCore
    from accel.engine.registration import Registration
    from accel.errors import AccelError
    from accel.memory import HostBlock
    from accel.process.exit_status import ExitStatus
    from accel.process.forkserver_client import ForkserverSlot
    from accel.remote.arrays import SharedArray

__all__ = ["MAX_ANSWER", "STARTUP_TIMEOUT", "TARGET", "Link", "Listener", "Starter", "backend_name", "is_uvloop"]

logger = get_logger()

TARGET = "accel.remote.service:serve"
"""The function that children run."""

MAX_ANSWER = 2 << 20
"""Bytes of the longest message of a child, a little more than the longest error has."""

STARTUP_TIMEOUT = 120.0
"""Seconds for the start of a child, which imports the backend and makes a context."""

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

_RESERVED_KEYS = frozenset(("self", "level", "event", "method_name", "exc_info", "generation"))
"""Keys that are dropped from an event of a child: parameters of the logging call, and the
generation, which only the parent counts.
"""


class Listener(Protocol):
    """Handles a child's messages and its end: the actor that the child belongs to."""

    def on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle a message that is none of PONG, LOG and BUSY, which the link handles.

        See :class:`accel.process.channel.Channel`.
        """

    def on_lost(self, error: AccelError | None) -> None:
        """Handle the loss of the connection; the child was killed."""

    def on_expired(self, why: str) -> None:
        """Handle that the watchdog has given the child up, and why."""

    def on_exit(self, status: ExitStatus) -> None:
        """Handle the end of the child."""


class Child(Protocol):
    """A process of a device: :class:`~accel.process.child.ChildProcess`, or one on another machine.

    Attributes
    ----------
    pid, exit
        See there.
    """

    pid: int
    exit: ExitStatus | None

    @property
    def is_stopped(self) -> bool:
        """See :attr:`ChildProcess.is_stopped`."""

    def kill(self) -> None:
        """See :meth:`ChildProcess.kill`."""

    async def aclose(self, grace: float = 1.0) -> ExitStatus:
        """See :meth:`ChildProcess.aclose`."""


class Messages(Protocol):
    """A connection to a child: :class:`~accel.process.channel.Channel`, or to another machine."""

    def send(self, kind: int, *parts: bytes, fds: Sequence[int] = (), now: bool = False) -> None:
        """See :meth:`Channel.send`."""

    def close(self) -> None:
        """See :meth:`Channel.close`."""


class NodeMessages(Child, Messages, Protocol):
    """A child on another machine, which is also the connection to it."""

    def announce(self, request: int, sources: Sequence[SharedArray], results: Sequence[SharedArray]) -> None:
        """Send the arrays that a request reads, and expect those that it fills, before it is sent."""

    async def end_others(self) -> None:
        """Have the device's children there that were given up ended, and wait until they have ended."""


class Starter(Protocol):
    """Starts children on another machine; see :class:`accel.node.client.NodeSession`."""

    address: str

    async def start_child(
        self,
        device: DeviceCore,
        *,
        uvloop: bool,
        silence: float,
        on_message: Callable[[int, bytes, list[int]], None],
        on_lost: Callable[[AccelError | None], None],
        on_exit: Callable[[ExitStatus], None],
    ) -> NodeMessages:
        """Start a child there."""


class Link:
    """A child of a device, its connection, and the record of what it has and of its questions.

    Attributes
    ----------
    child : Child
        The process.
    channel : Messages
        The connection to it.
    node : NodeMessages or None
        Both of them in one object, if the child is on another machine: arrays are sent to it.
        ``None`` for a child of this machine, which maps them.
    watchdog : Watchdog
        Bounds the child's answers and its silence.
    listener : Listener
        Handles the child's messages; another one after a promotion.
    on_exit : callable
        Called with the exit status of the child, once it has ended; by default the listener's.
    is_warm : bool
        Whether the child has made ready all that it can before a generation begins.
    numbers : iterator of int
        Numbers of requests.
    questions : dict of int to Future
        Number -> future of the answer, of unanswered requests outside the order of ops.
    mapped_slabs : dict
        Of a spare child: number -> blocks, of the slabs of durable memory that it has mapped.
    libraries : dict
        Of a spare child: name -> registration, of the libraries that it was to open.
    sent_blocks : set of int
        Numbers of the blocks of host memory that the child has.
    """

    child: Child
    channel: Messages
    watchdog: Watchdog

    def __init__(self, core: DeviceCore, listener: Listener) -> None:
        self._core = core
        self.listener = listener
        self.on_exit: Callable[[ExitStatus], object] = lambda status: self.listener.on_exit(status)
        self.node: NodeMessages | None = None
        self.is_warm = False
        # Seconds of the busy times that have ended, and when the present one began. In one object,
        # which is replaced: Device.health() reads it on any thread.
        self._busy: tuple[float, float | None] = (0.0, None)
        self.sent_blocks: set[int] = set()
        self.numbers = itertools.count(1)
        self.questions: dict[int, asyncio.Future[Any]] = {}
        self.mapped_slabs: dict[int, tuple[tuple[int, int, int, int], ...]] = {}
        self.libraries: dict[str, Registration] = {}

    @classmethod
    async def start(
        cls,
        core: DeviceCore,
        readiness: Literal["imports", "context", "model"],
        listener: Listener,
        forkserver: ForkserverSlot,
        node: Starter | None,
    ) -> Link:
        """Start or fork a child, here or on the device's node, and send it its configuration.

        The child makes ready all that it can before a generation begins, and then sends WARM or
        REFUSED. This returns before that.

        Parameters
        ----------
        core
            State of the device that outlives its contexts.
        readiness
            Which part the child makes ready: its imports, or its context too. For ``"model"`` that
            is the context: the listener then sends slabs and libraries.
        listener
            Handles the child's messages.
        forkserver
            Forks the child, if there is a forkserver and it is ready.
        node
            Starts the child on another machine; ``None``: it is started here.

        Raises
        ------
        BackendUnavailableError
            Descriptors, processes or memory ran out, or the node cannot be reached.
        DeviceLostError
            The node was lost, and has not come back in time.
        UnsupportedError
            An option of the device cannot be pickled.
        """
        link = cls(core, listener)
        try:
            config = pickle.dumps(_child_config(core, readiness))
        except Exception as error:  # pickle raises anything
            raise UnsupportedError(
                f"an option of {core.name} cannot be sent to its process: {error}",
                device=core.name,
                remedy="Give objects of classes that are defined at the top of a module that can be imported.",
            ) from error
        if node is None:
            link.child = child = await link._start_here(forkserver)
        else:
            link.child = link.channel = link.node = await node.start_child(
                core,
                uvloop=is_uvloop(core.loop),
                silence=core.options.limits.heartbeat_timeout,
                on_message=link._on_message,
                on_lost=link._on_lost,
                on_exit=link._on_exit,
            )
        # No await between the start of the child and this: _on_exit uses the watchdog.
        link.watchdog = Watchdog(core.loop, link, core.options, lambda why: link.listener.on_expired(why))
        link.watchdog.begin_step(STARTUP_TIMEOUT)
        core.pinned.block_listeners.add(link.release_block)
        if node is None:
            await link._open_channel(child)
        link.tell(Kind.CONFIG, config)
        return link

    async def _start_here(self, forkserver: ForkserverSlot) -> ChildProcess:
        """Fork or start a child of this process, and return it.

        It is started where there is no forkserver, or the forkserver cannot fork now.
        """
        core, client = self._core, forkserver.client
        uvloop = is_uvloop(core.loop)
        forked = None if client is None else await client.fork(TARGET, uvloop=uvloop, on_exit=self._on_exit)
        return forked or await ChildProcess.start(core.system, TARGET, uvloop=uvloop, on_exit=self._on_exit)

    async def _open_channel(self, child: ChildProcess) -> None:
        """Open the channel to a child of this process; if that fails, end the child and raise."""
        try:
            self.channel = Channel(
                child.sock,
                self._core.loop,
                on_message=self._on_message,
                on_lost=self._on_lost,
                max_received=MAX_ANSWER,
                close_fds=self._core.disposal.close_fds,
            )
        except BaseException as error:
            self.on_exit = lambda _: None  # the listener has not got this link, and gets the error
            self.kill()
            with contextlib.suppress(HostDiedError):  # it is in a system call that does not return
                await child.aclose(grace=0.0)
            if isinstance(error, OSError):  # the loop's selector has no room for the socket
                raise start_error(error) from error
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self.child.pid

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the child, as far as this machine can tell."""
        return self.child.is_stopped

    @property
    def is_busy(self) -> bool:
        """Whether the child opens, loads or compiles something, as its messages say."""
        return self._busy[1] is not None

    def busy_seconds(self) -> float:
        """Return for how many seconds in all the child has opened, loaded or compiled something. Thread-safe."""
        seconds, since = self._busy
        return seconds if since is None else seconds + self._core.loop.time() - since

    def end_busy(self) -> None:
        """Count the child as not busy: its message says so, or nothing is in flight any more."""
        self._busy = self.busy_seconds(), None

    def tell(self, kind: Kind, data: bytes = b"", fds: Sequence[int] = (), *, now: bool = False) -> None:
        """Send a message, at the end of this loop iteration or ``now``.

        Nothing is sent, and nothing raised, once the connection is closed: the listener is told of
        the end of the child.
        """
        try:
            self.channel.send(kind, data, fds=fds, now=now)
        except ClosedError:
            return

    def ask(self, kind: Kind, data: bytes, fds: Sequence[int] = ()) -> asyncio.Future[Any]:
        """Send a question, and return the future of the answer.

        When the child ends, its listener calls :meth:`fail_questions`, so that the future ends too.
        """
        number = next(self.numbers)
        answer = self.questions[number] = self._core.loop.create_future()
        try:
            self.tell(kind, number.to_bytes(8, "little") + data, fds=fds)
        except BaseException:  # such as a closed descriptor
            del self.questions[number]
            raise
        return answer  # cancelling it leaves the entry, because the answer still comes

    def settle(self, number: int, error: AccelError | None, answer: object = None) -> bool:
        """Settle a question with its answer or error; return whether it was asked and unanswered.

        ``True`` also if its waiter was cancelled meanwhile.
        """
        question = self.questions.pop(number, None)
        if question is not None and not question.done():
            question.set_result(answer) if error is None else question.set_exception(error)
        return question is not None

    def fail_questions(self, error: AccelError) -> None:
        """Fail all questions that have no answer: the child will not answer them."""
        for number in tuple(self.questions):
            self.settle(number, error.clone())

    def unmap_slabs(self, numbers: Iterable[int]) -> None:
        """Have a spare child unmap those of the slabs that it has mapped, and forget them."""
        unused = [number for number in numbers if self.mapped_slabs.pop(number, None) is not None]
        if unused:
            self.tell(Kind.UNMAP_SLABS, struct.pack(f"<{len(unused)}Q", *unused))

    def ping(self) -> None:
        """Ask the child whether its loop runs."""
        self.tell(Kind.PING)

    def send_block(self, block: HostBlock) -> None:
        """Send the child a block of host memory, unless it has it or the block is closed.

        Called before the first op with an array in the block, and ahead for a spare: mapping takes
        time. An op's block is open until the op ends; only one sent ahead may be closed.
        """
        number = block.number
        fd = None if number in self.sent_blocks else block.duplicate()
        if fd is not None:
            try:
                self.tell(Kind.BLOCK, number.to_bytes(8, "little") + block.nbytes.to_bytes(8, "little"), fds=(fd,))
            finally:
                os.close(fd)
            self.sent_blocks.add(number)

    def release_block(self, number: int) -> None:
        """Have the child unmap a block of host memory, if it has it.

        Called when the arena has closed the block, which it does only once no op uses it.
        """
        if number in self.sent_blocks:
            self.sent_blocks.discard(number)
            self.tell(Kind.UNMAP_BLOCK, number.to_bytes(8, "little"))

    def kill(self) -> None:
        """Kill the child, and stop its watchdog. :attr:`on_exit` is called when it has ended."""
        self.watchdog.stop()
        self.child.kill()

    # -- called by the channel and the child

    def _on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle LOG, BUSY and PONG; give the listener all other messages.

        Any message shows the watchdog that the child is alive.
        """
        self.watchdog.is_heard = True
        if fds and kind not in (Kind.NEW_SLAB, Kind.LENT):
            raise ProtocolError(f"the child of {self._core.name} sent {len(fds)} descriptors with a message of kind {kind}")
        if kind == Kind.LOG:
            self._log(data)
        elif kind == Kind.BUSY:
            self.end_busy()
            if data != b"\0":
                self._busy = self._busy[0], self._core.loop.time()
        elif kind != Kind.PONG:
            self.listener.on_message(kind, data, fds)

    def _log(self, data: bytes) -> None:
        """Log an event of the child's log, with the device and the child's pid."""
        try:
            level, event, pairs = json.loads(data)
            number, event = _LEVELS[level], str(event)
            pairs = {key: value for key, value in pairs.items() if key not in _RESERVED_KEYS}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"the child of {self._core.name} sent a log event that means nothing: {error!r}") from error
        pairs |= {"device": self._core.name, "pid": self.pid, "host": "process"}
        logger.log(number, event, **pairs)

    def _on_lost(self, error: AccelError | None) -> None:
        """Kill the child, which is of no use without its connection, and notify the listener."""
        self.child.kill()  # if the connection has merely broken, the exit status says why
        self.listener.on_lost(error)

    def _on_exit(self, status: ExitStatus) -> None:
        """Stop the watchdog and the reports of closed blocks, and call :attr:`on_exit`."""
        self.watchdog.stop()
        self._core.pinned.block_listeners.discard(self.release_block)
        self.on_exit(status)


def is_uvloop(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop is uvloop's, so that children have such loops too."""
    return type(loop).__module__.startswith("uvloop")


def backend_name(core: DeviceCore) -> str:
    """Return ``"MODULE:CLASS"`` of a device's backend, by which a child finds it."""
    kind = type(core.backend)
    return f"{kind.__module__}:{kind.__qualname__}"


def _child_config(core: DeviceCore, readiness: Literal["imports", "context", "model"]) -> Config:
    """Return the configuration of a child: the device's options, without those of the parent alone.

    Fault plans, restarts, the overload policy and the limits, which the watchdog enforces, are the
    parent's. A spare with ``readiness="model"`` gets ``"context"``: the libraries and slabs of the
    model follow in further messages.
    """
    options: Any = core.options  # those of a device that is open, which the protocol of the engine does not name
    return Config(
        backend=backend_name(core),
        uuid=core.description.uuid,
        name=core.name,
        options=dataclasses.replace(options, faults=None, restart=RestartStrategy(), overload="wait", limits=ProcessHost(stall_after=None)),
        readiness="imports" if readiness == "imports" else "context",
        log_level=logging.getLogger("accel").getEffectiveLevel(),
    )
