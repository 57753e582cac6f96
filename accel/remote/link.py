"""A child with its connection and watchdog: one object, which is handed over at a promotion."""

from __future__ import annotations

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
from accel.engine.hosts import ProcessHost
from accel.errors import ClosedError, UnsupportedError
from accel.process.channel import Channel
from accel.process.child import ChildProcess
from accel.process.protocol import ProtocolError
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
    from accel.process.forks import ForkSource

__all__ = ["MAX_ANSWER", "STARTUP_TIMEOUT", "TARGET", "Link", "Listener", "backend_name", "is_uvloop"]

logger = get_logger()

TARGET = "accel.remote.service:serve"
"""The function that children run."""

MAX_ANSWER = 2 << 20
"""Bytes of the longest message of a child, a little more than the longest error has."""

STARTUP_TIMEOUT = 120.0
"""Seconds for the start of a child, which imports the backend and makes a context."""

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

_TAKEN = frozenset(("self", "level", "event", "method_name", "exc_info", "generation"))
"""Keys that an event of a child cannot have: parameters of the logging call, and a generation,
which only the parent counts.
"""


class Listener(Protocol):
    """The owner of a child."""

    def on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle a message; see :class:`accel.process.channel.Channel`."""

    def on_lost(self, error: AccelError | None) -> None:
        """Handle the loss of the connection; the child was killed."""

    def on_expired(self, why: str) -> None:
        """Handle that the watchdog gives the child up, and why."""

    def on_exit(self, status: ExitStatus) -> None:
        """Handle the end of the child."""


class Link:
    """A child of a device.

    Attributes
    ----------
    child : ChildProcess
    channel : Channel
    watchdog : Watchdog
    listener : Listener
        The owner, which handles what the child sends.
    on_exit : callable
        Called with the exit status of the child.
    is_warm : bool
        Whether the child has made ready all that it can before a generation begins.
    is_busy : bool
        Whether the child opens, loads or compiles something, as its messages say.
    numbers : iterator of int
        Numbers of requests.
    asked : dict of int to Future
        Questions without an answer; they take no place in the order of ops.
    mapped : dict
        Of a spare child: number -> blocks, of the slabs of durable memory that it has mapped.
    libraries : dict
        Of a spare child: name -> registration, of the libraries that it was to open.
    known : set of int
        Numbers of the blocks of host memory that the child has been sent.
    """

    child: ChildProcess
    channel: Channel
    watchdog: Watchdog

    def __init__(self, core: DeviceCore, listener: Listener) -> None:
        self._core = core
        self.listener = listener
        self.on_exit: Callable[[ExitStatus], object] = lambda status: self.listener.on_exit(status)
        self.is_warm = False
        self.is_busy = False
        self._busy_since = self._busy_before = 0.0
        self.known: set[int] = set()
        self.numbers = itertools.count(1)
        self.asked: dict[int, asyncio.Future[Any]] = {}
        self.mapped: dict[int, tuple[tuple[int, int, int, int], ...]] = {}
        self.libraries: dict[str, Registration] = {}

    @classmethod
    async def start(
        cls, core: DeviceCore, ahead: Literal["imports", "context", "model"], listener: Listener, forkserver: ForkSource
    ) -> Link:
        """Start or fork a child, and have it make ready what can be before a generation begins.

        Returns before the child is ready.

        Raises
        ------
        BackendUnavailableError
            Descriptors, processes or memory ran out.
        """
        link = cls(core, listener)
        try:
            config = pickle.dumps(_config(core, ahead))
        except Exception as error:  # pickle raises anything
            raise UnsupportedError(
                f"an option of {core.name} cannot be sent to its process: {error}",
                device=core.name,
                remedy="Give objects of classes that are defined at the top of a module that can be imported.",
            ) from error
        uvloop = is_uvloop(core.loop)
        forks = forkserver.forks
        child = None if forks is None else await forks.fork(TARGET, uvloop=uvloop, on_exit=link._on_exit)
        link.child = child or await ChildProcess.start(core.system, TARGET, uvloop=uvloop, on_exit=link._on_exit)
        link.channel = Channel(
            link.child.sock,
            core.loop,
            on_message=link._on_message,
            on_lost=link._on_lost,
            max_received=MAX_ANSWER,
            dispose=core.disposal.close,
        )
        link.watchdog = Watchdog(core.loop, link, core.options, lambda why: link.listener.on_expired(why))
        link.watchdog.begin(STARTUP_TIMEOUT)
        core.pinned.on_gone.add(link.withdraw)
        link.tell(Kind.CONFIG, config)
        return link

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self.child.pid

    def busy_seconds(self) -> float:
        """Return for how many seconds in all the child has opened, loaded or compiled something."""
        return self._busy_before + (self._core.loop.time() - self._busy_since if self.is_busy else 0.0)

    def rest(self) -> None:
        """Count the child as not busy, because it says so or nothing is in flight."""
        self._busy_before, self.is_busy = self.busy_seconds(), False

    def tell(self, kind: Kind, data: bytes = b"", fds: Sequence[int] = (), *, now: bool = False) -> None:
        """Send a message, at the end of this loop iteration or ``now``.

        To a child that is gone nothing is sent; its end is reported to the listener.
        """
        try:
            self.channel.send(kind, data, fds=fds, now=now)
        except ClosedError:
            return

    def ask(self, kind: Kind, data: bytes, fds: Sequence[int] = ()) -> asyncio.Future[Any]:
        """Send a question, and return the future of the answer.

        The listener ends the questions of a child that is gone.
        """
        number = next(self.numbers)
        answer = self.asked[number] = self._core.loop.create_future()
        self.tell(kind, number.to_bytes(8, "little") + data, fds=fds)
        return answer  # cancelling it leaves the entry, because the answer still comes

    def answered(self, number: int, error: AccelError | None, answer: object = None) -> bool:
        """Settle a question with its answer; return whether there was such a question."""
        asked = self.asked.pop(number, None)
        if asked is not None and not asked.done():
            asked.set_result(answer) if error is None else asked.set_exception(error)
        return asked is not None

    def give_up(self, error: AccelError) -> None:
        """Fail the questions: the child will not answer."""
        for number in tuple(self.asked):
            self.answered(number, error.clone())

    def unmap(self, numbers: Iterable[int]) -> None:
        """Have a spare child unmap slabs."""
        gone = [number for number in numbers if self.mapped.pop(number, None) is not None]
        if gone:
            self.tell(Kind.HELD_GONE, struct.pack(f"<{len(gone)}Q", *gone))

    def ping(self) -> None:
        """Ask the child whether its loop runs."""
        self.tell(Kind.PING)

    def announce(self, number: int, block: HostBlock) -> None:
        """Send the child a block of host memory, unless it has it or the block is released."""
        fd = None if number in self.known else block.duplicate()
        if fd is not None:
            try:
                self.tell(Kind.BLOCK, number.to_bytes(8, "little") + block.nbytes.to_bytes(8, "little"), fds=(fd,))
            finally:
                os.close(fd)
            self.known.add(number)

    def withdraw(self, number: int) -> None:
        """Have the child release a block of host memory; all ops on it are answered."""
        if number in self.known:
            self.known.discard(number)
            self.tell(Kind.BLOCK_GONE, number.to_bytes(8, "little"))

    def kill(self) -> None:
        """Kill the child. :attr:`on_exit` is called when it has ended."""
        self.watchdog.stop()
        self.child.kill()

    # -- called by the channel and the child

    def _on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        self.watchdog.is_heard = True
        if fds and kind != Kind.SLAB:
            raise ProtocolError(f"the child of {self._core.name} sent {len(fds)} descriptors with a message of kind {kind}")
        if kind == Kind.PONG:
            return
        if kind == Kind.LOG:
            self._log(data)
            return
        if kind == Kind.BUSY:
            self.rest()
            if data != b"\0":
                self.is_busy, self._busy_since = True, self._core.loop.time()
        self.listener.on_message(kind, data, fds)

    def _log(self, data: bytes) -> None:
        """Log an event of the child, with where it is from."""
        try:
            level, event, pairs = json.loads(data)
            number, event = _LEVELS[level], str(event)
            pairs = {key: value for key, value in pairs.items() if key not in _TAKEN}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"the child of {self._core.name} sent a log event that means nothing: {error!r}") from error
        pairs |= {"device": self._core.name, "pid": self.pid, "host": "process"}
        logger.log(number, event, **pairs)

    def _on_lost(self, error: AccelError | None) -> None:
        self.child.kill()  # if the connection has merely broken, the exit status says why
        self.listener.on_lost(error)

    def _on_exit(self, status: ExitStatus) -> None:
        self.watchdog.stop()
        self._core.pinned.on_gone.discard(self.withdraw)
        self.on_exit(status)


def is_uvloop(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop is uvloop's, so that children have such loops too."""
    return type(loop).__module__.startswith("uvloop")


def backend_name(core: DeviceCore) -> str:
    """Return ``"MODULE:CLASS"`` of a device's backend, by which a child finds it."""
    kind = type(core.backend)
    return f"{kind.__module__}:{kind.__qualname__}"


def _config(core: DeviceCore, ahead: Literal["imports", "context", "model"]) -> Config:
    options: Any = core.options
    return Config(
        backend_name(core),
        core.description.uuid,
        core.name,
        dataclasses.replace(options, faults=None, restart=RestartStrategy(), overload="wait", limits=ProcessHost(stall_after=None)),
        "imports" if ahead == "imports" else "context",
        logging.getLogger("accel").getEffectiveLevel(),
    )
