"""The start of a child process's program. It blocks, and undoes what it has begun if it fails."""

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
from accel.shortage import REMEDIES as SHORTAGE_REMEDIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Spawned", "python_path", "spawn", "start_error"]

_END_TIMEOUT = 10.0
"""Seconds that a killed process has to end, in :meth:`Spawned.destroy`."""
_START_REMEDIES = {
    **SHORTAGE_REMEDIES,
    errno.ENOENT: "sys.executable must name a Python interpreter that has accel.",
    errno.EACCES: "sys.executable must name a Python interpreter that may be run.",
    errno.ETIMEDOUT: "Something stops new processes before their program begins: see what sends SIGSTOP, and where sys.executable lies.",
    errno.ENOSYS: "Child processes need Linux 5.4 or newer, and pidfd_open allowed.",
}


@dataclass(eq=False)
class Spawned:
    """A process that was started or forked, and the descriptors for it, which the owner closes.

    Attributes
    ----------
    pid
        Its process id.
    pidfd
        Names the process, even after its id was given to another; -1 once it is closed.
    sock
        This process's end of the socket pair.
    stderr
        Non-blocking reading end of the pipe to which the child writes stdout and stderr; -1 once it
        is closed.
    popen
        A started process, whose exit status this process collects. Only code that sets its
        ``returncode`` may wait for it. ``None`` for a forked one.
    lifeline
        Non-blocking socket to a forked process: the kernel kills the process when it is closed, and
        the forkserver writes the exit status to it. ``None`` for a started process.
    """

    pid: int
    pidfd: int
    sock: socket.socket
    stderr: int
    popen: subprocess.Popen[bytes] | None = None
    lifeline: socket.socket | None = None

    def __post_init__(self) -> None:
        close_after_fork(self)

    def kill(self) -> None:
        """Send SIGKILL; do nothing once :attr:`pidfd` is closed, as it is in a forked child."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def set_returncode(self, code: int) -> None:
        """Record the exit status of a started process, for which :attr:`popen` then never waits."""
        if self.popen is not None:
            self.popen.returncode = code

    def close(self) -> None:
        """Close all descriptors but the socket's; a forked process that runs is killed by that.

        Idempotent.
        """
        if self.lifeline is not None:
            self.lifeline.close()
        for fd in (self.pidfd, self.stderr):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.stderr = -1

    def close_inherited(self) -> None:
        """Close all in a forked child, which does not wait; see :class:`accel.fork.Inherited`."""
        self.set_returncode(0)
        self.sock.close()
        self.close()

    def destroy(self) -> None:
        """Kill the process, wait for its end for ten seconds at most, and close all. Blocks."""
        self.kill()
        self.sock.close()
        if self.popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_END_TIMEOUT)
        elif self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            poll.poll(_END_TIMEOUT * 1e3)
        self.close()


def start_error(error: Exception) -> BackendUnavailableError:
    """Return the error for a child process that cannot be started, with ``error`` as its cause.

    It is retryable if ``error`` is a shortage. One that is no ``OSError`` comes from the system's
    spawner, and means that there is no thread.
    """
    errno_code = error.errno if isinstance(error, OSError) else errno.EAGAIN
    code = None if errno_code is None else errno.errorcode.get(errno_code, errno_code)
    new = BackendUnavailableError(
        f"a child process cannot be started: {error}",
        code=code,
        library="os",
        retryable=errno_code in SHORTAGE_REMEDIES,
        remedy=None if errno_code is None else _START_REMEDIES.get(errno_code),
    )
    new.__cause__ = error
    return new


def python_path() -> list[str]:
    """Return this process's module path, for a child that finds modules in the same places."""
    return [path or os.getcwd() for path in sys.path if isinstance(path, str)]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: this process's, and ``variables``."""
    # The whole module path, so that the child finds modules where this process does.
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(path for path in python_path() if os.pathsep not in path)}


def _command(fd: int, target: str, env: Mapping[str, str], flags: Iterable[str]) -> list[str]:
    """Return the worker's command line; see :mod:`accel.process.worker`.

    It carries this process's own PYTHONPATH, which the worker restores: :func:`_environment` sets
    another one.
    """
    command = [sys.executable, "-P", "-m", _child.WORKER, str(fd), str(os.getpid()), target, *flags]
    python_path_variable = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    return command if python_path_variable is None else [*command, f"--python-path={python_path_variable}"]


def spawn(target: str, env: Mapping[str, str], flags: Iterable[str]) -> Spawned:
    """Start the worker as a fresh interpreter, in a session of its own. Blocks for milliseconds.

    Parameters
    ----------
    target
        ``MODULE:FUNCTION``.
    env
        Environment variables to set, besides this process's.
    flags
        Flags of the worker; see :mod:`accel.process.worker`.

    Raises
    ------
    BackendUnavailableError
        Descriptors, processes or memory ran out, or there is no interpreter to start. Nothing is
        left open then.

    Notes
    -----
    The kernel kills the child when the *thread* that started it ends: call this from a thread that
    lives as long as the child may.
    """
    try:
        if not sys.executable:
            raise FileNotFoundError(errno.ENOENT, "sys.executable is empty")
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            ours.setblocking(False)
            with theirs:
                reading, writing = os.pipe()
                undo.callback(os.close, reading)
                os.set_blocking(reading, False)
                try:
                    popen = subprocess.Popen(
                        _command(theirs.fileno(), target, env, flags),
                        env=_environment(env),
                        stdin=subprocess.DEVNULL,
                        stdout=writing,
                        stderr=writing,
                        close_fds=True,
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,
                    )
                finally:
                    os.close(writing)
            undo.callback(popen.wait)  # after the next one: callbacks run in reverse order
            undo.callback(popen.kill)
            pidfd = os.pidfd_open(popen.pid)
            undo.pop_all()
            return Spawned(popen.pid, pidfd, ours, reading, popen)
    except OSError as error:
        raise start_error(error) from error
