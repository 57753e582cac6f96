"""Children that are forked, not started: the half of the process that wants them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from accel.errors import ClosedError, HostDiedError
from accel.process.channel import Channel
from accel.process.child import ChildProcess
from accel.process.forkserver import ForkKind
from accel.process.protocol import ProtocolError
from accel.process.spawning import Spawned, cannot_start, python_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accel.actors.system import ActorSystem
    from accel.errors import AccelError
    from accel.process.exit_status import ExitStatus

__all__ = ["ForkSource", "Forks"]

_FORK_TIMEOUT = 2.0
"""Seconds for a fork, which takes some milliseconds."""
_MAX_ANSWER = 64 << 10


class Forks:
    """A forkserver: a child that has done its imports, of which other children are forked in milliseconds; made by :meth:`start`.

    Attributes
    ----------
    child : ChildProcess
        The forkserver.
    refused : str
        Why it must not be forked, once it has said so.
    """

    def __init__(self, system: ActorSystem, child: ChildProcess, dispose: Callable[[Iterable[int]], object]) -> None:
        self.child = child
        self._system = system
        self._loop = asyncio.get_running_loop()
        self._answers: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._is_importing = False
        self.refused = ""
        self._channel = Channel(
            child.sock, self._loop, on_message=self._received, on_lost=self._lost, max_received=_MAX_ANSWER, dispose=dispose
        )

    @classmethod
    async def start(
        cls, system: ActorSystem, prepare: str, on_exit: Callable[[ExitStatus], None], dispose: Callable[[Iterable[int]], object]
    ) -> Self:
        """Start a forkserver.

        Parameters
        ----------
        system
            As for :meth:`ChildProcess.start`.
        prepare
            ``"MODULE:FUNCTION"``: a function of bytes that imports what they say, and returns why the process must not be forked then, or ``""``.
        on_exit
            Called once, on the loop, after the forkserver has ended. The children that it forked live on; how they end is not known then.
        dispose
            As for :class:`~accel.process.channel.Channel`.

        Raises
        ------
        BackendUnavailableError
            There is no process to be had.
        """
        return cls(system, await ChildProcess.start(system, prepare, on_exit=on_exit, forkserver=True), dispose)

    @property
    def is_ready(self) -> bool:
        """Whether it can fork now: it is there, does not import, and has not refused."""
        # Its death may be known before its connection ends: a fork that has just begun still has a copy of the socket.
        return self.child.exit is None and not (self._is_importing or self.refused or self._channel.is_closed)

    async def prepare(self, data: bytes, timeout: float) -> tuple[str, str]:
        """Have it import what ``data`` says, which the function is called with; it forks nothing meanwhile.

        Returns why it must not be forked since, or ``""``, and what was raised, or ``""``.

        Raises
        ------
        HostDiedError
            It has ended, or was killed because it did not answer within ``timeout`` seconds.
        """
        self._is_importing = True
        try:
            async with asyncio.timeout(timeout):
                answer = await self._ask(ForkKind.PREPARE, data)
        except TimeoutError:
            self.child.kill()
            raise HostDiedError(f"the forkserver has not imported what it was asked to within {timeout:g} s", hung=True) from None
        self._is_importing = False
        return str(answer.get("refused", "")), str(answer.get("failed", ""))

    async def fork(self, target: str, *, uvloop: bool, on_exit: Callable[[ExitStatus], None]) -> ChildProcess | None:
        """Fork a child, and return it; ``None`` if the forkserver cannot, so that the child is to be started.

        Parameters
        ----------
        target, uvloop, on_exit
            As for :meth:`ChildProcess.start`.

        Raises
        ------
        BackendUnavailableError
            Descriptors ran out.
        """
        if not self.is_ready:
            return None
        try:
            with contextlib.ExitStack() as undo:
                forked = await self._forked(undo, {"target": target, "uvloop": uvloop, "env": dict(os.environ)})
        except OSError as error:
            raise cannot_start(error) from error
        return None if forked is None else await ChildProcess.of(self._system, forked, on_exit)

    async def _forked(self, undo: contextlib.ExitStack, order: dict[str, Any]) -> Spawned | None:
        with contextlib.ExitStack() as theirs:
            ours, sock = socket.socketpair()
            undo.callback(ours.close)
            theirs.callback(sock.close)
            bond, their_bond = socket.socketpair()  # if anything fails the child ends, because this is closed
            undo.callback(bond.close)
            theirs.callback(their_bond.close)
            reading, writing = os.pipe()
            undo.callback(os.close, reading)
            theirs.callback(os.close, writing)
            folder = os.open(".", os.O_PATH)
            theirs.callback(os.close, folder)
            order |= {"path": python_path(), "umask": _umask()}
            answer = self._ask(ForkKind.FORK, json.dumps(order).encode(), fds=(sock.fileno(), writing, their_bond.fileno(), folder))
        try:
            async with asyncio.timeout(_FORK_TIMEOUT):
                pid: object = (await answer).get("pid")
        except TimeoutError:
            self.refused = f"it has not forked within {_FORK_TIMEOUT:g} s"
        except HostDiedError:
            return None
        if self.refused:
            self.child.kill()
            return None
        if not isinstance(pid, int) or (pidfd := self._pidfd_of(pid)) < 0:
            return None
        for each in (ours, bond):
            each.setblocking(False)
        os.set_blocking(reading, False)
        undo.pop_all()
        return Spawned(pid, pidfd, ours, reading, bond=bond)

    def _pidfd_of(self, pid: int) -> int:
        """Return a descriptor of a process that the forkserver has forked; -1 if it has ended already, or is another's."""
        try:
            pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, ValueError, OverflowError):
            return -1
        if _status(pid, "PPid") == str(self.child.pid):
            return pidfd
        os.close(pidfd)
        return -1

    async def aclose(self) -> None:
        """End the forkserver: at once if it imports, else after the last child that it has forked, for a second at most."""
        grace = 0.0 if self._is_importing else 1.0
        self._channel.close()
        self._give_up(ClosedError("the forkserver is closed"))
        with contextlib.suppress(HostDiedError):  # it sits in the kernel
            await self.child.aclose(grace)

    def _ask(self, kind: ForkKind, data: bytes, fds: Sequence[int] = ()) -> asyncio.Future[dict[str, Any]]:
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers.append(answer)
        try:
            self._channel.send(kind, data, fds=fds)
        except ClosedError as error:
            self._give_up(error)
        return answer

    def _received(self, kind: int, data: bytes, fds: list[int]) -> None:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the forkserver sent what means nothing: {error}") from None
        if kind != ForkKind.ANSWER or not isinstance(answer, dict) or not self._answers:
            raise ProtocolError(f"the forkserver sent a message of kind {kind} that it was not asked for")
        self.refused = str(answer.get("refused", "")) or self.refused
        future = self._answers.popleft()
        if not future.done():
            future.set_result(answer)

    def _lost(self, error: AccelError | None) -> None:
        self.child.kill()
        self._give_up(error or HostDiedError("the forkserver has closed its connection"))

    def _give_up(self, error: AccelError) -> None:
        while self._answers:
            future = self._answers.popleft()
            if not future.done():
                future.set_exception(HostDiedError(f"the forkserver does not answer: {error}"))
                future.exception()  # seen, also if it is not awaited any more


class ForkSource:
    """Where a device's children are forked from; a quarantine has the one of its device.

    Attributes
    ----------
    forks : Forks or None
        The forkserver, while there is one.
    listeners : list of callable
        Called when there is nothing to wait for any more.
    """

    def __init__(self) -> None:
        self.forks: Forks | None = None
        self.listeners: list[Callable[[], object]] = []
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def is_importing(self) -> bool:
        """Whether it is worth waiting for the forkserver: it does the imports that a child would do, and will then fork it."""
        return not self._settled.is_set()

    def importing(self) -> None:
        """Take note that the forkserver imports something, or will soon."""
        self._settled.clear()

    def settled(self) -> None:
        """Take note that there is nothing to wait for: the forkserver is ready, or there is none."""
        self._settled.set()
        for listener in tuple(self.listeners):
            listener()

    async def wait(self, timeout: float) -> None:
        """Wait until the forkserver is ready, or there is none; return after ``timeout`` seconds at the latest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._settled.wait()


def _umask() -> int:
    """Return this process's file mode creation mask, which can be asked for in no other way without setting it."""
    return int(_status(os.getpid(), "Umask") or "022", 8)


def _status(pid: int, name: str) -> str | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
    return None
