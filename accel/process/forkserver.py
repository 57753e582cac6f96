"""The forkserver: a process that has done its imports, and forks children that need not do them.

It runs no event loop, no driver, and no thread but harmless ones. So in a fork every lock is free,
and no device is open. Where that does not hold the forkserver says so, and does not fork. A fork
becomes what a started worker is; see :mod:`accel.process.worker`, whose program this is.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from accel import _child
from accel.fork import close_after_fork
from accel.process.incoming import Incoming
from accel.process.protocol import MAX_MESSAGE, check_greeting, encode_header, greeting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["STATUS", "ForkKind", "Forked", "Forkserver"]

STATUS: Final = struct.Struct("<i")
"""The exit status of a child, as :func:`os.waitstatus_to_exitcode` gives it."""

_READ = 64 << 10
_F_SETSIG = 10  # Linux; the module fcntl has no name for it
_HARMLESS = {"jemalloc_bg_thd": "pyarrow"}
"""Names of threads that need not run in a fork, each with the module that starts it.

pyarrow's jemalloc takes its locks before a fork, and handles in the child that its thread is gone:
``background_thread_postfork_child`` in jemalloc's ``src/background_thread.c``.
"""


class ForkKind(enum.IntEnum):
    """Kinds of messages."""

    PREPARE = 1
    """Call the function that the forkserver was started with, which imports, with these bytes."""
    FORK = 2
    """Fork a child: an order as JSON, with the descriptors of socket, output and bond."""
    ANSWER = 3
    """The answer to each message, in order, as JSON.

    ``pid`` is that of a fork, whose pidfd comes with the message; ``refused`` says why this process
    must not be forked; ``failed`` says what was raised.
    """


class Forked(NamedTuple):
    """What a fork runs: its ``target``, the kind of its loop, and the descriptor of its socket."""

    fd: int
    target: str
    uvloop: bool


class Forkserver:
    """Answers the process that has started it, and reaps the forks.

    Parameters
    ----------
    sock
        The connection to that process.
    prepare
        Imports what its argument names, and returns why this process must not be forked, or ``""``.
        What it raises is reported, and is no reason not to fork.
    """

    def __init__(self, sock: socket.socket, prepare: Callable[[bytes], str]) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._prepare = prepare
        self._incoming = Incoming(sock, MAX_MESSAGE, _close)
        self._bonds: dict[int, int] = {}  # pid -> bond, of children that were not reaped
        self._refused = ""
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Close all descriptors in a fork; see :class:`accel.fork.Inherited`."""
        self._sock.close()
        self._incoming.close()
        _close(self._bonds.values())
        self._bonds.clear()

    def serve(self) -> Forked:
        """Answer until the connection is closed, and exit after the last child has ended.

        Returns in a fork only, with what it is to run.
        """
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())  # also while something is imported
        self._sock.sendall(greeting())
        is_greeted = False
        while self._incoming.read(_READ):
            while self._incoming.messages:
                kind, payload, descriptors = self._incoming.messages.popleft()
                if not is_greeted:
                    check_greeting(kind, payload)
                    is_greeted = True
                elif kind == ForkKind.PREPARE:
                    self._answer(self._prepared(payload))
                else:
                    forked = self._fork(payload, descriptors)
                    if forked is not None:
                        return forked
        self._reap(0)  # there may be no other process that reaps orphans
        os._exit(0)

    def _answer(self, answer: dict[str, Any], pidfds: Sequence[int] = ()) -> None:
        data = json.dumps(answer).encode()
        header = encode_header(ForkKind.ANSWER, len(data), len(pidfds))
        socket.send_fds(self._sock, [header], pidfds)
        self._sock.sendall(data)

    def _prepared(self, payload: bytes) -> dict[str, str]:
        failed = ""
        gc.disable()  # objects made by imports live on; collections would only traverse them
        try:
            self._refused = self._prepare(payload)
        except BaseException as error:  # an import raises anything; a child that needs it fails too
            failed = repr(error)
        gc.enable()
        sys.stdout.flush()  # or each fork would write the buffer again
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page that it marks
        return {"refused": self._why_not(), "failed": failed}

    def _why_not(self) -> str:
        """Return why this process must not be forked: a thread may hold a lock."""
        if not self._refused and _others():
            # OpenBLAS ends its threads before a fork, and starts them again at the next product.
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
            if others := _others():
                self._refused = f"threads run besides its own: {', '.join(sorted(others))}"
        return self._refused

    def _fork(self, payload: bytes, descriptors: list[int]) -> Forked | None:
        """Fork a child and answer; in the child, return what it runs."""
        sock, output, bond = descriptors
        answer, pid = {"refused": self._why_not()}, -1
        if not answer["refused"]:
            try:
                pid = os.fork()
            except OSError as error:  # memory or process ids ran out
                answer = {"failed": str(error)}
        if not pid:
            return _become(json.loads(payload), sock, output, bond)
        _close((sock, output))
        if pid < 0:
            os.close(bond)
            self._answer(answer)
        else:
            pidfd = os.pidfd_open(pid)
            self._bonds[pid] = bond  # from here on it may be reaped, and its pid reused
            self._answer({"pid": pid}, (pidfd,))
            os.close(pidfd)
            self._reap()  # it may have ended before it was known here
        return None

    def _reap(self, flags: int = os.WNOHANG) -> None:
        """Send the exit status of each ended child to its bond; without flags, wait for all."""
        for pid in tuple(self._bonds):
            with contextlib.suppress(ChildProcessError):  # the signal's handler has reaped it
                found, status = os.waitpid(pid, flags)
                if found:
                    with socket.socket(fileno=self._bonds.pop(pid)) as bond, contextlib.suppress(OSError):
                        bond.send(STATUS.pack(os.waitstatus_to_exitcode(status)))


def _become(order: dict[str, Any], sock: int, output: int, bond: int) -> Forked:
    """Give a fork of this process the state of a started child."""
    _bind(bond)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:] = dict.fromkeys((*order["path"], *sys.path))
    importlib.invalidate_caches()
    # The module random seeds itself after a fork.
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()
    return Forked(sock, order["target"], order["uvloop"])


def _bind(bond: int) -> None:
    """Have the kernel kill this process when the service ends, or closes its end of the bond."""
    # PR_SET_PDEATHSIG would follow the forkserver's death. This end of the bond is never closed.
    fcntl.fcntl(bond, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(bond, _F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(bond, fcntl.F_SETFL, fcntl.fcntl(bond, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(bond, 0)
    if poll.poll(0):
        os._exit(_child.ORPHAN)


def _others() -> list[str]:
    """Return the names of this process's other threads, without the harmless ones."""
    found = []
    for number in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        with contextlib.suppress(OSError):  # it has ended
            found.append(Path(f"/proc/self/task/{number}/comm").read_text(encoding="utf-8", errors="replace").strip())
    return [name for name in found if _HARMLESS.get(name) not in sys.modules]


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)
