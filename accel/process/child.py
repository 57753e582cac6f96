"""A child process as its parent's event loop sees it: a socket, a death that is seen at once, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import struct
import termios
from typing import TYPE_CHECKING, Any, Self

from accel import _child
from accel.actors.checks import check_seconds
from accel.errors import ClosedError, HostDiedError, InvalidArgumentError, OutOfMemoryError, UnsupportedError
from accel.process.exit_status import ExitStatus
from accel.process.forkserver import STATUS
from accel.process.spawn_timeout import CHECK_INTERVAL, SpawnTimeout
from accel.process.spawning import Spawned, cannot_start, spawn

if TYPE_CHECKING:
    import concurrent.futures
    import socket
    from collections.abc import Callable, Mapping

    from accel.actors.system import ActorSystem

__all__ = ["ChildProcess"]

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_TAIL = 32768
"""Bytes that are kept of what the child wrote: the report of a crash has a line for each frame of each thread."""
_PIECE = 65536
_MOST_PIECES = 64
"""How much is read at the end: more than a pipe holds, and an end where a descendant of the child goes on writing."""
_END = 10.0
"""Seconds that a process which was killed gets to end: one that sits in the kernel ends when that lets it go, if ever."""
_TELLING = 1.0
"""Seconds that a forkserver gets to tell how a child has ended: it does so at once, unless a library that it imports holds the GIL."""
_READING = 0.25
"""Seconds that the owner of the socket gets to read what the child had sent before it died."""

_NO_GRANDCHILDREN = (
    "A child may open devices with host='inline'. If it is to open none, a module that it imports runs the program: put what "
    'starts it behind `if __name__ == "__main__":`.'
)


class ChildProcess:
    """A process that runs one coroutine function in a fresh interpreter; made by :meth:`start`.

    Attributes
    ----------
    pid : int
        The process's number; of no use any more when :attr:`exit` is set.
    sock : socket.socket
        This process's end of the socket pair, non-blocking, not inherited by others. Closed by :meth:`aclose`; a transport that reads it is
        closed first.
    exit : ExitStatus or None
        How the process ended; ``None`` while it runs.

    Notes
    -----
    When the process dies, its status is collected and :attr:`exit` set in the same turn of the loop; what it had sent is still in
    :attr:`sock`. ``on_exit`` is called in the first turn that finds nothing unread there, or after 0.25 s if it is not read; then those in
    :meth:`wait` go on.

    The process dies with this one, whatever ends it, and one that was started also with the system's spawner thread, so with the system.
    """

    def __init__(self, spawned: Spawned, on_exit: Callable[[ExitStatus], None] | None) -> None:
        self.pid = spawned.pid
        self.sock = spawned.sock
        self.exit: ExitStatus | None = None
        self._killed_at: float | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._spawned = spawned
        self._tail = b""
        self._on_exit = on_exit
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(spawned.stderr, self._read)
        try:
            self._loop.add_reader(spawned.pidfd, self._died)
        except BaseException:
            self._loop.remove_reader(spawned.stderr)
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} pid={self.pid} {'running' if self.exit is None else self.exit}>"

    # -- starting

    @classmethod
    async def start(
        cls,
        system: ActorSystem,
        target: str,
        *,
        env: Mapping[str, str] | None = None,
        uvloop: bool = False,
        on_exit: Callable[[ExitStatus], None] | None = None,
        forkserver: bool = False,
        nested: bool = False,
    ) -> Self:
        """Start a process; returns as soon as its interpreter runs, long before it has imported anything.

        Parameters
        ----------
        system
            The system with which the process ends at the latest.
        target
            ``"MODULE:FUNCTION"``: a coroutine function that takes the child's socket, found on this process's ``sys.path``. It is expected to
            return when the socket reaches its end.
        env
            Environment variables to set, besides this process's.
        uvloop
            Whether the child runs on uvloop's event loop.
        on_exit
            Called once, on the loop, after the process has ended.
        forkserver
            Whether the process is a forkserver, whose imports ``target`` does; see :class:`~accel.process.forks.Forks`.
        nested
            Whether such a child may start one itself: ``target`` imports nothing of a user's.

        Raises
        ------
        BackendUnavailableError
            Descriptors, processes or memory ran out, or something keeps the interpreter from beginning: after five seconds the process is killed.
        InvalidArgumentError
            ``target`` or ``env`` is malformed. Whether the target is there only the child finds out: see :attr:`exit`.
        ClosedError
            The system is closed, or this is not its loop.
        UnsupportedError
            This process is such a child itself, and ``nested`` is not set: a program that starts itself anew in each child would never end.

        Notes
        -----
        Cancelling kills the process, and returns when nothing of it is left, which takes milliseconds.
        """
        more = _checked(target, env)
        if _child.IS_WORKER and not nested:
            raise UnsupportedError("a child process of accel starts no children", remedy=_NO_GRANDCHILDREN)
        timeout = SpawnTimeout()
        flags = [*(["--uvloop"] if uvloop else []), *(["--forkserver"] if forkserver else [])]
        try:
            future = system.spawner.submit(spawn, target, more, timeout, flags)
        except OutOfMemoryError as error:  # no more threads
            raise cannot_start(error) from error
        cancelled = await _unbroken(future, timeout)
        if cancelled is not None:
            if future.exception() is None:
                await _undo(system, future.result())
            raise cancelled
        return await cls.of(system, future.result(), on_exit)

    @classmethod
    async def of(cls, system: ActorSystem, spawned: Spawned, on_exit: Callable[[ExitStatus], None] | None) -> Self:
        """Take charge of a process that was started, or forked; it is destroyed if that fails."""
        try:
            return cls(spawned, on_exit)
        except BaseException:
            await _undo(system, spawned)
            raise

    # -- ending

    def kill(self) -> None:
        """End the process at once (SIGKILL), whatever it is doing. Never reaches another process; does nothing when it has ended."""
        if self.exit is None:
            if self._killed_at is None:
                self._killed_at = self._loop.time()
            self._spawned.kill()

    async def wait(self) -> ExitStatus:
        """Wait until the process has ended and ``on_exit`` was called. Cancelling detaches the waiter.

        Raises
        ------
        ClosedError
            This is not the loop on which the process was started.
        """
        self._check_home()
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def aclose(self, grace: float = 1.0) -> ExitStatus:
        """Close the socket, wait for the process to end by itself, kill it if it does not, and return how it ended. Idempotent.

        It returns, or raises, at the latest 10 seconds after the process was killed.

        Parameters
        ----------
        grace
            Seconds that the process gets to end by itself; with 0 it is killed at once.

        Raises
        ------
        InvalidArgumentError
            ``grace`` is negative or not a number.
        ClosedError
            This is not the loop on which the process was started.
        HostDiedError
            The process was killed, and has not ended within 10 seconds: it sits in the kernel, in a driver's call, and is left there.

        Notes
        -----
        Cancelling kills the process and detaches at once; the loop collects it when it is gone. A process that sits in a driver call ends when
        that returns, even if it was killed.
        """
        check_seconds("grace", grace)
        if grace < 0:
            raise InvalidArgumentError(f"grace is {grace!r}", remedy="Give seconds, at least 0.")
        self._check_home()
        self._close_socket()
        try:
            if grace:  # in a task that was cancelled before, Python 3.11.2 raises CancelledError when the time is over
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        return await self.wait()
            return await self._killed()
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _killed(self) -> ExitStatus:
        """Kill the process, and see it end."""
        self.kill()
        killed_at = self._loop.time() if self._killed_at is None else self._killed_at
        try:
            async with asyncio.timeout_at(killed_at + _END):
                return await self.wait()
        except TimeoutError:
            if self.exit is not None:  # it ended as the time did
                return self.exit
            raise HostDiedError(
                f"child process {self.pid} was killed, and has not ended within {_END:g} s",
                remedy=f"It sits in the kernel, perhaps in a driver's call (see /proc/{self.pid}/stack and the kernel's log): what it holds is not given back.",
            ) from None

    def _check_home(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise ClosedError(f"{self!r} belongs to another event loop")

    def _close_socket(self) -> None:
        fd = self.sock.fileno()
        if fd < 0:
            return
        # A loop that still knew the number would mistake the next descriptor of that number for it.
        with contextlib.suppress(RuntimeError):  # a transport has it
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
        self.sock.close()

    # -- what the loop sees

    def _read(self) -> bool:
        """Read a piece of what the child wrote, and return whether there may be more."""
        stderr = self._spawned.stderr
        if stderr < 0:
            return False
        try:
            piece = os.read(stderr, _PIECE)
        except BlockingIOError:
            return False
        self._tail = (self._tail + piece)[-_TAIL:]
        if not piece:
            self._close_stderr()
        return bool(piece)

    def _close_stderr(self) -> None:
        if self._spawned.stderr >= 0:
            self._loop.remove_reader(self._spawned.stderr)
            self._spawned.close_stderr()

    def _died(self) -> None:
        if self._spawned.pidfd < 0:  # a fork shares the loop's selector with its parent, whose child this is
            return
        self._loop.remove_reader(self._spawned.pidfd)
        bond = self._spawned.bond
        if bond is None:
            self._over(*self._reap())
            return
        # Its forkserver is about to tell how it ended; or is gone, and so is the other end of the bond.
        self._telling = self._loop.call_later(_TELLING, self._told, bond)
        self._loop.add_reader(bond.fileno(), self._told, bond)

    def _told(self, bond: socket.socket) -> None:
        """Take what the forkserver of a dead process says."""
        assert self._telling is not None, "it is waited for"
        self._telling.cancel()
        if bond.fileno() < 0:  # a fork shares the loop's selector with its parent
            return
        self._loop.remove_reader(bond.fileno())
        try:
            (code,) = STATUS.unpack(bond.recv(STATUS.size))
        except (OSError, struct.error):
            self._over(*self._reap())  # an orphan may have become this process's own child
        else:
            self._over(*((code, None) if code >= 0 else (None, -code)))

    def _over(self, code: int | None, number: int | None) -> None:
        """Take note of how the process has ended."""
        self._spawned.close_pidfd()
        self._spawned.close_bond()
        for _ in range(_MOST_PIECES):
            if not self._read():
                break
        self._close_stderr()
        self.exit = ExitStatus(code, number, self._tail.decode("utf-8", "replace"))
        self._tell(self.exit, self._loop.time() + _READING, 0.0)

    def _reap(self) -> tuple[int | None, int | None]:
        try:
            info = os.waitid(os.P_PIDFD, self._spawned.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # other code waits for all children, or ignores SIGCHLD
            info = None
        if info is None:
            self._spawned.set_returncode(0)  # it is over, and is not to be waited for
            return None, None
        if info.si_code == os.CLD_EXITED:
            self._spawned.set_returncode(info.si_status)
            return info.si_status, None
        self._spawned.set_returncode(-info.si_status)
        return None, info.si_status

    def _unread(self) -> bool:
        if self.sock.fileno() < 0:
            return False
        count = bytearray(4)
        fcntl.ioctl(self.sock, termios.FIONREAD, count)
        return any(count)

    def _tell(self, status: ExitStatus, deadline: float, pause: float) -> None:
        if self._unread() and self._loop.time() < deadline:
            self._loop.call_later(pause, self._tell, status, deadline, 0.001)
            return
        try:
            if self._on_exit is not None:
                self._on_exit(status)
        finally:
            self._on_exit = None
            self._ended.set()


def _checked(target: str, env: Mapping[str, str] | None) -> dict[str, str]:
    if not isinstance(target, str) or _TARGET.fullmatch(target) is None:
        raise InvalidArgumentError(f"target is {target!r}", remedy='Give "MODULE:FUNCTION", names that can be imported.')
    more = dict(env or {})
    for name, value in more.items():
        if not (isinstance(name, str) and isinstance(value, str)) or not name or "=" in name or "\0" in name + value:
            raise InvalidArgumentError(
                f"env has {name!r}: {value!r}", remedy="Give names and values as str, without NUL, names without '='."
            )
    return more


async def _unbroken(future: concurrent.futures.Future[Any], timeout: SpawnTimeout | None = None) -> asyncio.CancelledError | None:
    """Wait until ``future`` is done, and return the cancellation that came meanwhile.

    Raises
    ------
    BackendUnavailableError
        What is born does not begin, and cannot be killed either. Should it ever begin, it is destroyed.
    """
    waiter = asyncio.wrap_future(future)
    cancelled: asyncio.CancelledError | None = None
    home = os.getpid()
    while not waiter.done():
        try:
            await asyncio.wait({waiter}, timeout=None if timeout is None else CHECK_INTERVAL)
            if timeout is not None and not waiter.done() and not timeout.check():
                waiter.cancel()
                future.add_done_callback(_too_late)
                raise cannot_start(TimeoutError(errno.ETIMEDOUT, "it does not begin, and killing it is of no use"))
        except asyncio.CancelledError as error:
            if os.getpid() != home:  # a fork has no thread that could end it
                raise
            cancelled = error
    waiter.exception()  # mark it as retrieved
    return cancelled


def _too_late(future: concurrent.futures.Future[Spawned]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().destroy()


async def _undo(system: ActorSystem, spawned: Spawned) -> None:
    try:
        future = system.spawner.submit(spawned.destroy)
    except (ClosedError, OutOfMemoryError):
        spawned.destroy()  # there is no thread for it any more; a process that was killed ends soon
    else:
        await _unbroken(future)
