"""The forkserver: a process that has done its imports, so that children forked from it need not do them.

It runs nothing else: no event loop, no driver, and no thread but harmless ones. So a fork of it finds every lock free, and no device. Where that does not
hold, it says so, and does not fork. Each fork becomes what a started worker is; see :mod:`accel.process.worker`, whose program this is.
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
    from collections.abc import Callable, Iterable

__all__ = ["STATUS", "ForkKind", "Forked", "Forkserver"]

STATUS: Final = struct.Struct("<i")
"""How a child ended, as :func:`os.waitstatus_to_exitcode` has it."""

_READ = 64 << 10
_F_SETSIG = 10  # of Linux; the module fcntl has no name for it
_HARMLESS = {"jemalloc_bg_thd": "pyarrow"}
"""Names of threads that need not run in a fork, each with the module that starts it. pyarrow's jemalloc takes its locks before a fork, and knows in the child
that its thread is gone: ``background_thread_postfork_child`` in jemalloc's ``src/background_thread.c``."""


class ForkKind(enum.IntEnum):
    """Kinds of messages."""

    PREPARE = 1
    """Call the function that the forkserver was started with, with these bytes: it imports something."""
    FORK = 2
    """Fork a child. What it is to be, as JSON, and four descriptors: its socket, what it writes to, its bond, and its working directory."""
    ANSWER = 3
    """To each message one, in order, as JSON: ``pid``; ``refused``, why it cannot fork; ``failed``, what was raised while it imported."""


class Forked(NamedTuple):
    """What a fork runs: the ``target``, on a loop of the named kind, with the descriptor of its socket."""

    fd: int
    target: str
    uvloop: bool


class Forkserver:
    """Answers one process, and reaps the forks.

    Parameters
    ----------
    sock
        The connection to that process.
    prepare
        Imports what it is told to. What it raises is told, and is no reason not to fork. It returns why this process must not be forked, or ``""``.
    """

    def __init__(self, sock: socket.socket, prepare: Callable[[bytes], str]) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._prepare = prepare
        self._incoming = Incoming(sock, MAX_MESSAGE, _close)
        self._bonds: dict[int, int] = {}  # of children that were not reaped
        self._refused = ""
        close_after_fork(self)

    def close_inherited(self) -> None:
        """See :class:`accel.fork.Inherited`."""
        self._sock.close()
        self._incoming.close()
        _close(self._bonds.values())
        self._bonds.clear()

    def serve(self) -> Forked:
        """Answer until the other process closes the connection, and exit then, after the last child. Return only in a fork, with what it is to run."""
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
                    self._answer(**self._prepared(payload))
                else:
                    forked = self._fork(payload, descriptors)
                    if forked is not None:
                        return forked
        self._reap(0)  # orphans might find no other process that reaps them
        os._exit(0)

    def _answer(self, **answer: Any) -> None:
        data = json.dumps(answer).encode()
        self._sock.sendall(encode_header(ForkKind.ANSWER, len(data)) + data)

    def _prepared(self, payload: bytes) -> dict[str, str]:
        if self._refused:  # said before, of what is to blame
            return {}
        failed = ""
        is_collecting = gc.isenabled()
        gc.disable()  # objects made by imports live on; collections would only traverse them
        try:
            self._refused = self._prepare(payload)
        except BaseException as error:  # an import raises anything; a child that needs it says so itself
            failed = repr(error)
        if is_collecting:
            gc.enable()
        sys.stdout.flush()  # or each fork would write it again
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page that it marks
        return {"refused": self._why_not(), "failed": failed}

    def _why_not(self) -> str:
        """Return why this process must not be forked: another thread may hold a lock, which is never released in the fork."""
        if not self._refused and _others():
            # OpenBLAS ends its threads before a fork, and starts them again when they are needed.
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
            if others := _others():
                self._refused = f"threads run besides its own: {', '.join(sorted(others))}"
        return self._refused

    def _fork(self, payload: bytes, descriptors: list[int]) -> Forked | None:
        """Fork a child, tell its number, and return ``None``; in the child, return what it is."""
        answer, pid = {"refused": self._why_not()}, -1
        if not answer["refused"]:
            try:
                pid = os.fork()
            except OSError as error:  # there is no memory for it now, or no number
                answer = {"failed": str(error)}
        if not pid:
            return _become(json.loads(payload), *descriptors)
        sock, output, bond, folder = descriptors
        _close((sock, output, folder))
        if pid < 0:
            os.close(bond)
            self._answer(**answer)
        else:
            self._bonds[pid] = bond
            self._answer(pid=pid)
            self._reap()  # it may have ended before it was known here
        return None

    def _reap(self, flags: int = os.WNOHANG) -> None:
        """Tell how children have ended, each through its bond; without flags, wait for all."""
        for pid in tuple(self._bonds):
            with contextlib.suppress(ChildProcessError):  # a signal has interrupted this, and its handler has reaped the child
                found, status = os.waitpid(pid, flags)
                if found:
                    with socket.socket(fileno=self._bonds.pop(pid)) as bond, contextlib.suppress(OSError):
                        bond.send(STATUS.pack(os.waitstatus_to_exitcode(status)))


def _become(order: dict[str, Any], sock: int, output: int, bond: int, folder: int) -> Forked:
    """Make a fork of this process what a started child is."""
    _bind(bond)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.fchdir(folder)
    _close((output, folder))
    os.umask(order["umask"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:] = dict.fromkeys((*order["path"], *sys.path))
    importlib.invalidate_caches()
    # The module random does so by itself.
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()
    return Forked(sock, order["target"], order["uvloop"])


def _bind(bond: int) -> None:
    """Have the kernel end this process when the other end of the bond is closed, as it is when the service ends, however that ends."""
    # The signal of a parent's death would be that of the forkserver's. What is kept open here is never closed, and nothing is sent to it.
    fcntl.fcntl(bond, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(bond, _F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(bond, fcntl.F_SETFL, fcntl.fcntl(bond, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(bond, 0)
    if poll.poll(0):
        os._exit(_child.ORPHAN)


def _others() -> list[str]:
    """Return the names of this process's other threads, as the kernel has them, without the harmless ones."""
    found = []
    for number in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        with contextlib.suppress(OSError):  # it has ended
            found.append(Path(f"/proc/self/task/{number}/comm").read_text(encoding="utf-8", errors="replace").strip())
    return [name for name in found if _HARMLESS.get(name) not in sys.modules]


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)
