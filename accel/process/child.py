"""A child process on its parent's event loop: its socket, its output, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
import termios
import time
from typing import TYPE_CHECKING, Any, Self

from accel import _child
from accel.errors import ClosedError, HostDiedError, OutOfMemoryError, UnsupportedError
from accel.process.exit_status import ExitStatus
from accel.process.forkserver import STATUS
from accel.process.spawning import Spawned, spawn, start_error

if TYPE_CHECKING:
    import concurrent.futures
    import socket
    from collections.abc import Callable, Mapping

    from accel.actors.system import ActorSystem

__all__ = ["ChildProcess"]

_OUTPUT_BYTES = 32768
"""Bytes kept of the child's output: the report of a crash has a line for each frame of a thread."""
_READ_BYTES = 65536
_MAX_READS = 64
"""Pieces that are read at the end: more than a pipe holds. A descendant may go on writing."""
_START_TIMEOUT = 30.0
"""Seconds within which the program of a new process must begin."""
_KILL_TIMEOUT = 10.0
"""Seconds within which a killed process must end: one that is in a system call ends after that."""
_STATUS_TIMEOUT = 1.0
"""Seconds that a forkserver has to send an exit status; an import may hold its GIL."""
_UNREAD_TIMEOUT = 0.25
"""Seconds that the owner of the socket has to read what the child had sent before it died.

``on_exit`` is called then, read or not.
"""

_NO_GRANDCHILDREN = (
    "A child may open devices with host='inline'. If it is to open none, a module that it imports runs the program: put what "
    'starts it behind `if __name__ == "__main__":`.'
)


class ChildProcess:
    """A process that runs one coroutine function; made by :meth:`start`.

    Attributes
    ----------
    pid : int
        Its process id; another process may have it once :attr:`exit` is set.
    sock : socket.socket
        This process's end of the socket pair, non-blocking. Closed by :meth:`aclose`; the Channel
        or transport that reads it is closed first: else its later close would remove the watcher of
        the next descriptor of that number.
    exit : ExitStatus or None
        How the process ended; ``None`` while it runs.

    Notes
    -----
    When the process dies, its status is collected and :attr:`exit` set in the same loop iteration;
    what it had sent is still in :attr:`sock`. ``on_exit`` is called in the first iteration in which
    nothing unread is there, so that the child's last messages come before the report of its end, or
    after 0.25 s; :meth:`wait` returns after that.

    The process ends with this one, however this one ends. A started process also ends with the
    system's spawner thread, so with the system.
    """

    def __init__(self, spawned: Spawned, on_exit: Callable[[ExitStatus], None] | None) -> None:
        self.pid = spawned.pid
        self.sock = spawned.sock
        self.exit: ExitStatus | None = None
        self._killed_at: float | None = None  # the loop's time of the first kill()
        self._status_timeout: asyncio.TimerHandle | None = None  # ends the wait for a fork's status
        self._spawned = spawned  # its descriptors are closed by this object
        self._output = b""
        self._on_exit = on_exit
        self._ended = asyncio.Event()  # set after on_exit was called
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(spawned.stderr, self._read_output)
        try:
            self._loop.add_reader(spawned.pidfd, self._on_ended)
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
        """Start a process; returns once its interpreter runs, before it has imported anything.

        Parameters
        ----------
        system
            The system, with which the process ends at the latest.
        target
            ``"MODULE:FUNCTION"``: a coroutine function that takes the child's socket, found on this
            process's ``sys.path``. It should return at the socket's end of file.
        env
            Environment variables to set, besides this process's.
        uvloop
            Whether the child runs on uvloop's event loop.
        on_exit
            Called once, on the loop, after the process has ended.
        forkserver
            Whether the process is a forkserver, whose imports ``target`` does; see
            :class:`~accel.process.forkserver_client.ForkserverClient`.
        nested
            Whether a child process may start this one: ``target`` imports no module of a user's.

        Raises
        ------
        BackendUnavailableError
            Descriptors, processes or memory ran out, or the program has not begun within 30 s.
        ClosedError
            The system is closed, or this is not its loop.
        UnsupportedError
            This process is a child itself, and ``nested`` is not set. Without that check, a program
            without a main guard would start children without end.

        Notes
        -----
        Cancelling kills the process, and returns once it has ended, which takes milliseconds. A
        target that cannot be imported shows in :attr:`exit`.
        """
        if _child.IS_WORKER and not nested:
            raise UnsupportedError("a child process of accel starts no children", remedy=_NO_GRANDCHILDREN)
        flags = [*(["--uvloop"] if uvloop else []), *(["--forkserver"] if forkserver else [])]
        try:
            future = system.spawner.submit(spawn, target, env or {}, flags)
        except OutOfMemoryError as error:  # no more threads
            raise start_error(error) from error
        cancelled = await _wait_uncancelled(future, _START_TIMEOUT)
        if future.cancel() or future.running():  # it has not begun, or not ended, within the time
            future.add_done_callback(_destroy_late)
            raise cancelled or start_error(TimeoutError(errno.ETIMEDOUT, f"its program has not begun within {_START_TIMEOUT:g} s"))
        if cancelled is not None:
            if future.exception() is None:
                await _destroy(system, future.result())
            raise cancelled
        return await cls.from_spawned(system, future.result(), on_exit)

    @classmethod
    async def from_spawned(cls, system: ActorSystem, spawned: Spawned, on_exit: Callable[[ExitStatus], None] | None) -> Self:
        """Return the child for a process that was started or forked, and watch for its end.

        Raises
        ------
        BackendUnavailableError
            The loop's selector has no room for its descriptors; the process is destroyed.
        """
        try:
            return cls(spawned, on_exit)
        except BaseException as error:
            await _destroy(system, spawned)
            if isinstance(error, OSError):
                raise start_error(error) from error
            raise

    # -- ending

    @property
    def is_stopped(self) -> bool:
        """Whether a signal, or a debugger, has stopped the process: it runs and answers nothing.

        Asked where its silence is bounded: a process that starts or computes may be silent for
        long, a stopped one may not.
        """
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                # The name, in parentheses, may have any characters in it.
                state = file.read().rpartition(b")")[2].split()[:1]
        except OSError:
            return False
        return state in ([b"T"], [b"t"])

    def kill(self) -> None:
        """Send SIGKILL to the process, and to no other one; do nothing once it has ended."""
        if self.exit is None:
            if self._killed_at is None:
                self._killed_at = self._loop.time()
            self._spawned.kill()

    async def wait(self) -> ExitStatus:
        """Wait until the process has ended and ``on_exit`` was called."""
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def aclose(self, grace: float = 1.0) -> ExitStatus:
        """Close the socket, wait for the process to end, and return how it ended. Idempotent.

        A process that does not end within ``grace`` is killed. This returns or raises at most 10
        seconds after that.

        Parameters
        ----------
        grace
            Seconds within which the process may end by itself; with 0 it is killed at once.

        Raises
        ------
        HostDiedError
            The process was killed, and has not ended within 10 seconds: it is in a system call that
            does not return, and is left there.

        Notes
        -----
        Cancelling kills the process and detaches at once; the loop collects it when it has ended.
        """
        self._close_socket()
        try:
            # Python 3.11.2 raises CancelledError for a timeout in a task that was cancelled before.
            if grace:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        return await self.wait()
            return await self._kill_and_wait()
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _kill_and_wait(self) -> ExitStatus:
        """Kill the process, and wait for its end: at most 10 s from the first kill on."""
        self.kill()
        killed_at = self._loop.time() if self._killed_at is None else self._killed_at
        try:
            async with asyncio.timeout_at(killed_at + _KILL_TIMEOUT):
                return await self.wait()
        except TimeoutError:
            if self.exit is not None:  # it ended as the time did
                return self.exit
            raise HostDiedError(
                f"child process {self.pid} was killed, and has not ended within {_KILL_TIMEOUT:g} s",
                remedy=f"It is in a system call, perhaps of a driver (see /proc/{self.pid}/stack and the kernel's log): what it holds is not released.",
            ) from None

    def _close_socket(self) -> None:
        """Close the socket and its watchers on the loop.

        Do nothing if the Channel that owns it has closed it.
        """
        fd = self.sock.fileno()
        if fd < 0:
            return
        # If the loop still watched the number, it would watch the next descriptor of that number.
        # An asyncio transport of the caller's reads it still, against the contract: it must be
        # closed first.
        with contextlib.suppress(RuntimeError):
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
        self.sock.close()

    # -- called by the loop

    def _read_output(self) -> bool:
        """Read a piece of the child's output, and return whether there may be more.

        The loop calls it when the pipe is readable; :meth:`_set_exit` calls it until it returns
        ``False``. Only the last bytes are kept. The pipe is closed at its end.
        """
        stderr = self._spawned.stderr
        if stderr < 0:  # at its end before; or in a fork, whose loop shares the selector of its parent's
            return False
        try:
            piece = os.read(stderr, _READ_BYTES)
        except BlockingIOError:
            return False
        self._output = (self._output + piece)[-_OUTPUT_BYTES:]
        if not piece:
            self._close_stderr()
        return bool(piece)

    def _close_stderr(self) -> None:
        """Close the pipe of the child's output, if it is open still."""
        stderr, self._spawned.stderr = self._spawned.stderr, -1
        if stderr >= 0:
            self._loop.remove_reader(stderr)
            os.close(stderr)

    def _on_ended(self) -> None:
        """Get the exit status, or wait for it: the loop calls this when the process has ended."""
        if self._spawned.pidfd < 0:  # in a fork, whose loop shares the selector of its parent's
            return
        self._loop.remove_reader(self._spawned.pidfd)
        lifeline = self._spawned.lifeline
        if lifeline is None:
            self._set_exit(*self._reap())
            return
        # Only the parent of a fork, the forkserver, can collect its status, and sends it through the
        # lifeline. If the forkserver has died, the other end of the lifeline is closed.
        self._status_timeout = self._loop.call_later(_STATUS_TIMEOUT, self._on_status, lifeline)
        self._loop.add_reader(lifeline.fileno(), self._on_status, lifeline)

    def _on_status(self, lifeline: socket.socket) -> None:
        """Read the exit status that the forkserver has sent, and end the wait for it.

        If none came, by a timeout or because the forkserver has died, try to collect the process.
        """
        assert self._status_timeout is not None, "a status is waited for"
        self._status_timeout.cancel()
        if lifeline.fileno() < 0:  # in a fork, whose loop shares the selector of its parent's
            return
        self._loop.remove_reader(lifeline.fileno())
        try:
            (code,) = STATUS.unpack(lifeline.recv(STATUS.size))
        except (OSError, struct.error):
            self._set_exit(*self._reap())  # an orphan may have become a child of this process
        else:
            self._set_exit(*((code, None) if code >= 0 else (None, -code)))

    def _set_exit(self, code: int | None, signal: int | None) -> None:
        """Read the last output, close the descriptors, set :attr:`exit`, and report it, once."""
        for _ in range(_MAX_READS):
            if not self._read_output():
                break
        self._close_stderr()
        self._spawned.close()
        self.exit = ExitStatus(code, signal, self._output.decode("utf-8", "replace"))
        self._report_exit(self.exit, self._loop.time() + _UNREAD_TIMEOUT, 0.0)

    def _reap(self) -> tuple[int | None, int | None]:
        """Collect the process without waiting, and return its exit code and its signal.

        One of them is ``None``, as a process ends by the other; both are if the status is unknown.
        """
        try:
            info = os.waitid(os.P_PIDFD, self._spawned.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # other code waits for all children, or ignores SIGCHLD
            info = None
        if info is None:
            self._spawned.set_returncode(0)  # popen must not wait for it
            return None, None
        if info.si_code == os.CLD_EXITED:
            self._spawned.set_returncode(info.si_status)
            return info.si_status, None
        self._spawned.set_returncode(-info.si_status)
        return None, info.si_status

    def _has_unread(self) -> bool:
        """Return whether the socket holds bytes that its owner has not read yet."""
        if self.sock.fileno() < 0:
            return False
        count = bytearray(4)
        fcntl.ioctl(self.sock, termios.FIONREAD, count)
        return any(count)

    def _report_exit(self, status: ExitStatus, deadline: float, pause: float) -> None:
        """Call ``on_exit`` once the owner of the socket has read all that the child had sent.

        Check again after ``pause`` seconds, until the loop's time is ``deadline``.
        """
        if self._has_unread() and self._loop.time() < deadline:
            self._loop.call_later(pause, self._report_exit, status, deadline, 0.001)
            return
        try:
            if self._on_exit is not None:
                self._on_exit(status)
        finally:
            self._on_exit = None
            self._ended.set()


async def _wait_uncancelled(future: concurrent.futures.Future[Any], seconds: float | None = None) -> asyncio.CancelledError | None:
    """Wait for ``future``, ``seconds`` at most, also if this task is cancelled meanwhile.

    Return that cancellation, for the caller to raise once it has cleaned up; ``None`` if there was
    none. A future that has not ended in time is cancelled; a call of it that has begun goes on.
    """
    waiter = asyncio.wrap_future(future)
    cancelled: asyncio.CancelledError | None = None
    pid = os.getpid()
    deadline = None if seconds is None else time.monotonic() + seconds
    while not waiter.done() and (deadline is None or time.monotonic() < deadline):
        try:
            await asyncio.wait({waiter}, timeout=None if deadline is None else deadline - time.monotonic())
        except asyncio.CancelledError as error:
            if os.getpid() != pid:  # a fork does not have the thread that ends the future
                raise
            cancelled = error
    if not waiter.cancel():
        waiter.exception()  # mark it as retrieved
    return cancelled


def _destroy_late(future: concurrent.futures.Future[Spawned]) -> None:
    """Destroy a process whose start timed out, once its program begins after all.

    The future's callback: it runs on the spawner's thread, and may block.
    """
    if not future.cancelled() and future.exception() is None:
        future.result().destroy()


async def _destroy(system: ActorSystem, spawned: Spawned) -> None:
    """Kill a process that is given up, and wait for its end off the loop."""
    try:
        future = system.spawner.submit(spawned.destroy)
    except (ClosedError, OutOfMemoryError):
        spawned.destroy()  # without a thread for it; a killed process ends soon
    else:
        await _wait_uncancelled(future)
