"""The parent's half of forking: its connection to a forkserver, which forks children for it."""

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
from accel.process.spawning import Spawned, python_path, start_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accel.actors.system import ActorSystem
    from accel.errors import AccelError
    from accel.process.exit_status import ExitStatus

__all__ = ["ForkserverClient", "ForkserverSlot"]

_FORK_TIMEOUT = 2.0
"""Seconds within which a fork is answered, which takes some milliseconds."""
_MAX_ANSWER = 64 << 10
"""Bytes of the longest answer of a forkserver."""


class ForkserverClient:
    """A connection to a forkserver, which forks children in milliseconds; made by :meth:`start`.

    Parameters
    ----------
    system, child
        The system, and the forkserver's process.
    close_fds
        Closes descriptors, possibly off the loop.

    Attributes
    ----------
    child : ChildProcess
        The forkserver.
    refusal : str
        Why the forkserver must not be forked, once it has said so; ``""`` before.
    """

    def __init__(self, system: ActorSystem, child: ChildProcess, close_fds: Callable[[Iterable[int]], object]) -> None:
        self.child = child
        self._system = system
        self._loop = asyncio.get_running_loop()
        self._pending: deque[asyncio.Future[dict[str, Any]]] = deque()  # requests without an answer, the oldest first
        self._is_importing = False  # stays True if `prepare` fails: nothing is forked then
        self.refusal = ""
        self._channel = Channel(
            child.sock, self._loop, on_message=self._on_message, on_lost=self._on_lost, max_received=_MAX_ANSWER, close_fds=close_fds
        )

    @classmethod
    async def start(
        cls, system: ActorSystem, prepare: str, on_exit: Callable[[ExitStatus], None], close_fds: Callable[[Iterable[int]], object]
    ) -> Self:
        """Start a forkserver.

        Parameters
        ----------
        system
            As for :meth:`ChildProcess.start`.
        prepare
            ``"MODULE:FUNCTION"``: a function of bytes that imports what they name. It returns why
            the process must not be forked after that, or ``""``.
        on_exit
            Called once, on the loop, after the forkserver has ended. The children that it forked
            live on, and their exit status is unknown.
        close_fds
            As for :class:`~accel.process.channel.Channel`.

        Raises
        ------
        BackendUnavailableError
            As :meth:`ChildProcess.start`.
        """
        return cls(system, await ChildProcess.start(system, prepare, on_exit=on_exit, forkserver=True), close_fds)

    @property
    def is_ready(self) -> bool:
        """Whether the forkserver can fork now: it runs, imports nothing, and has not refused."""
        # Its death may be known before its connection ends: a new fork has a copy of the socket.
        return self.child.exit is None and not (self._is_importing or self.refusal or self._channel.is_closed)

    async def prepare(self, data: bytes, timeout: float) -> str:
        """Have the forkserver import what ``data`` names; it forks nothing meanwhile.

        Returns what the import has raised, or ``""``; :attr:`refusal` may be set after it. After a
        timeout, a loss or a cancellation the forkserver counts as importing for good: it never
        becomes ready again, and :meth:`aclose` kills it at once.

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
        return str(answer.get("failed", ""))

    async def fork(self, target: str, *, uvloop: bool, on_exit: Callable[[ExitStatus], None]) -> ChildProcess | None:
        """Fork a child and return it.

        ``None`` if the forkserver is not ready, has ended, refuses, or runs out of memory: the
        caller then starts a new process.

        Parameters
        ----------
        target, uvloop, on_exit
            As for :meth:`ChildProcess.start`.

        Raises
        ------
        BackendUnavailableError, OutOfMemoryError
            Descriptors ran out; the next fork is possible all the same.
        """
        if not self.is_ready:
            return None
        request = {"target": target, "uvloop": uvloop, "env": dict(os.environ), "path": python_path()}
        try:
            forked = await self._request_fork(json.dumps(request).encode())
        except OSError as error:
            raise start_error(error) from error
        return None if forked is None else await ChildProcess.from_spawned(self._system, forked, on_exit)

    async def _request_fork(self, request: bytes) -> Spawned | None:
        """Have the forkserver fork, and return the child; ``None`` if it cannot.

        A forkserver that refuses, or does not answer in time, is killed.
        """
        with contextlib.ExitStack() as undo:  # closes this process's descriptors, unless `Spawned` has them
            # Send the child's ends, and close them here; the message holds duplicates.
            with contextlib.ExitStack() as theirs:
                ours, sock = socket.socketpair()
                undo.callback(ours.close)
                theirs.callback(sock.close)
                lifeline, their_lifeline = socket.socketpair()  # the kernel ends the child when ours closes
                undo.callback(lifeline.close)
                theirs.callback(their_lifeline.close)
                reading, writing = os.pipe()
                undo.callback(os.close, reading)
                theirs.callback(os.close, writing)
                answer = self._ask(ForkKind.FORK, request, fds=(sock.fileno(), writing, their_lifeline.fileno()))
            undo.callback(_close_pidfd, answer)
            # Wait for the answer. A forkserver that is late may be stuck in a lock: it is given up.
            try:
                async with asyncio.timeout(_FORK_TIMEOUT):
                    forked = await answer
            except TimeoutError:
                self.refusal = f"it has not forked within {_FORK_TIMEOUT:g} s"
            except HostDiedError:
                return None
            if self.refusal:
                self.child.kill()
                return None
            if "pidfd" not in forked:  # memory or process ids ran out
                return None
            ours.setblocking(False)
            lifeline.setblocking(False)
            os.set_blocking(reading, False)
            undo.pop_all()
            return Spawned(int(forked["pid"]), forked["pidfd"], ours, reading, lifeline=lifeline)

    async def aclose(self) -> None:
        """End the forkserver: at once if it imports, else once its children have ended.

        After a second it is killed; children that it has forked live on.
        """
        grace = 0.0 if self._is_importing else 1.0
        self._channel.close()
        self._fail_pending(ClosedError("the forkserver is closed"))
        with contextlib.suppress(HostDiedError):  # it is in a system call that does not return
            await self.child.aclose(grace)

    def _ask(self, kind: ForkKind, data: bytes, fds: Sequence[int] = ()) -> asyncio.Future[dict[str, Any]]:
        """Send a request, and return the future of its answer: answers come in order.

        Raises
        ------
        HostDiedError
            The connection is closed.
        OutOfMemoryError
            Descriptors ran out, and ``fds`` cannot be duplicated; nothing is sent.
        """
        try:
            self._channel.send(kind, data, fds=fds)
        except ClosedError as error:
            raise HostDiedError(f"the forkserver does not answer: {error}") from error
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._pending.append(answer)
        return answer

    def _on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Settle the oldest pending request with its answer, and note a refusal.

        A pidfd goes into the answer as ``"pidfd"``, unless nothing waits for the answer any more.
        See :class:`~accel.process.channel.Channel`.
        """
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the forkserver has sent an answer that is no JSON: {error}") from None
        if kind != ForkKind.ANSWER or not isinstance(answer, dict) or not self._pending:
            raise ProtocolError(f"the forkserver has sent a message of kind {kind} that was not asked for")
        self.refusal = str(answer.get("refused", "")) or self.refusal
        future = self._pending.popleft()
        if not future.done():
            if fds:
                answer["pidfd"] = fds.pop()
            future.set_result(answer)

    def _on_lost(self, error: AccelError | None) -> None:
        """Kill the forkserver, which does not answer any more."""
        self.child.kill()
        self._fail_pending(error or HostDiedError("the forkserver has closed its connection"))

    def _fail_pending(self, error: AccelError) -> None:
        """Fail all pending requests: no more answers come."""
        while self._pending:
            future = self._pending.popleft()
            if not future.done():
                future.set_exception(HostDiedError(f"the forkserver does not answer: {error}"))
                future.exception()  # mark it as retrieved, also if its waiter was cancelled


class ForkserverSlot:
    """Holds the forkserver of a device while there is one; a quarantine shares it.

    Attributes
    ----------
    client : ForkserverClient or None
        The connection to it.
    listeners : list of callable
        Called when the forkserver has become ready, or could not be started.
    """

    def __init__(self) -> None:
        self.client: ForkserverClient | None = None
        self.listeners: list[Callable[[], object]] = []
        self._settled = asyncio.Event()  # cleared while a forkserver starts or imports
        self._settled.set()

    @property
    def is_importing(self) -> bool:
        """Whether the forkserver starts or imports: a child that waits for it imports less."""
        return not self._settled.is_set()

    def on_importing(self) -> None:
        """Note that the forkserver starts or imports: children wait until :meth:`on_settled`."""
        self._settled.clear()

    def on_settled(self) -> None:
        """Note that the forkserver is ready, or that there is none, and call the listeners."""
        self._settled.set()
        for listener in tuple(self.listeners):
            listener()

    async def wait_settled(self, timeout: float) -> None:
        """Wait until the forkserver is ready, or there is none, for ``timeout`` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._settled.wait()


def _close_pidfd(answer: asyncio.Future[dict[str, Any]]) -> None:
    """Close the pidfd that came with the answer to a fork, if one came."""
    if answer.done() and not answer.cancelled() and answer.exception() is None and "pidfd" in answer.result():
        os.close(answer.result()["pidfd"])
