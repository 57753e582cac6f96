"""Starting the program of a child process: what blocks, and what must be undone if it fails halfway."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel import _child
from accel.errors import BackendUnavailableError
from accel.fork import close_after_fork
from accel.shortage import REMEDIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from accel.process.spawn_timeout import SpawnTimeout

__all__ = ["Spawned", "cannot_start", "python_path", "spawn"]

_END = 10.0
"""Seconds that a process which was killed gets to end."""
_REMEDIES = {
    **REMEDIES,
    errno.ENOENT: "sys.executable must name a Python interpreter that has accel.",
    errno.EACCES: "sys.executable must name a Python interpreter that may be run.",
    errno.ETIMEDOUT: "Something stops new processes before their program begins: see what sends SIGSTOP, and where sys.executable lies.",
    errno.ENOSYS: "Child processes need Linux 5.4 or newer, and pidfd_open allowed.",
}


@dataclass(eq=False)
class Spawned:
    """A process that was started, and all that is open for it; all of it is its holder's to close.

    Attributes
    ----------
    pid
        Its number.
    pidfd
        Names the process, even after its number was given to another; -1 once it is closed.
    sock
        This process's end of the socket pair.
    stderr
        Reading end of the pipe that the child writes stdout and stderr to; non-blocking; -1 once it is closed.
    popen
        A process that this one has started, and collects. Only the code that sets its ``returncode`` may wait for it. ``None`` for one that was forked.
    bond
        To a process that was forked: it ends when this is closed, and its forkserver writes here how it ended. Non-blocking.
    """

    pid: int
    pidfd: int
    sock: socket.socket
    stderr: int
    popen: subprocess.Popen[bytes] | None = None
    bond: socket.socket | None = None

    def __post_init__(self) -> None:
        close_after_fork(self)

    def kill(self) -> None:
        """Send SIGKILL; does nothing once the descriptor that names the process is closed, as it is in a forked child."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close_pidfd(self) -> None:
        """Close the descriptor that names the process. Idempotent."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def set_returncode(self, code: int) -> None:
        """Take note that the process is not to be waited for any more."""
        if self.popen is not None:
            self.popen.returncode = code

    def close_bond(self) -> None:
        """Close the connection that a forked process lives by. Idempotent."""
        if self.bond is not None:
            self.bond.close()

    def close_stderr(self) -> None:
        """Close the pipe. Idempotent."""
        stderr, self.stderr = self.stderr, -1
        if stderr >= 0:
            os.close(stderr)

    def close_inherited(self) -> None:
        """See :class:`accel.fork.Inherited`. The process is the parent's: nothing here waits for it."""
        self.set_returncode(0)
        self.close_bond()
        self.sock.close()
        self.close_stderr()
        self.close_pidfd()

    def destroy(self) -> None:
        """Kill the process, wait for its end, for ten seconds at most, and close everything. Blocks."""
        self.kill()
        self.sock.close()
        self.close_bond()
        self.close_stderr()
        if self.popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_END)
        elif self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            poll.poll(_END * 1e3)
        self.close_pidfd()


def cannot_start(error: Exception) -> BackendUnavailableError:
    """Return the error that says why there is no child process, and what to do."""
    number = error.errno if isinstance(error, OSError) else errno.EAGAIN  # else: no thread to start it from
    remedy = None if number is None else _REMEDIES.get(number)
    code = None if number is None else errno.errorcode.get(number, number)
    new = BackendUnavailableError(
        f"a child process cannot be started: {error}", code=code, library="os", retryable=number in REMEDIES, remedy=remedy
    )
    new.__cause__ = error
    return new


def python_path() -> list[str]:
    """Return where this process finds modules, for a child that is to find them there too."""
    return [path or os.getcwd() for path in sys.path if isinstance(path, str)]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    # As PYTHONPATH, so that the child finds `accel` and the function wherever this process would, in the same order.
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(path for path in python_path() if os.pathsep not in path)}


def _command(fd: int, target: str, env: Mapping[str, str], flags: Iterable[str]) -> list[str]:
    command = [sys.executable, "-P", "-m", _child.WORKER, str(fd), str(os.getpid()), target, *flags]
    own = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    return command if own is None else [*command, f"--python-path={own}"]


def _reap(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()


def spawn(target: str, env: Mapping[str, str], timeout: SpawnTimeout, flags: Iterable[str]) -> Spawned:
    """Start the worker as a fresh interpreter, in a session of its own. Blocks for some milliseconds.

    Parameters
    ----------
    target
        ``MODULE:FUNCTION``.
    env
        Environment variables to set, besides this process's.
    timeout
        Lets another thread end this call.
    flags
        Flags of the worker: see :mod:`accel.process.worker`.

    Raises
    ------
    BackendUnavailableError
        Descriptors, processes or memory ran out, or there is no interpreter to start. Nothing is left open then.

    Notes
    -----
    The kernel kills the child when the *thread* that started it ends: call this from one that lives as long as the child may.
    """
    try:
        if not sys.executable:
            raise FileNotFoundError(errno.ENOENT, "sys.executable is empty")
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            ours.setblocking(False)
            with theirs:
                popen, stderr = _start(theirs.fileno(), _command(theirs.fileno(), target, env, flags), env, timeout)
            undo.callback(os.close, stderr)
            undo.callback(_reap, popen)
            pidfd = os.pidfd_open(popen.pid)
            undo.pop_all()
            return Spawned(popen.pid, pidfd, ours, stderr, popen)
    except OSError as error:
        raise cannot_start(error) from error


def _start(fd: int, command: list[str], env: Mapping[str, str], timeout: SpawnTimeout) -> tuple[subprocess.Popen[bytes], int]:
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        with timeout:
            popen = subprocess.Popen(
                command,
                env=_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                close_fds=True,
                pass_fds=(fd,),
                start_new_session=True,
            )
        if timeout.is_given_up:
            _reap(popen)
            raise TimeoutError(errno.ETIMEDOUT, "the program did not begin, and was killed")  # noqa: TRY301
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return popen, reading
