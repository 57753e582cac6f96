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
from accel.process.incoming import Incoming, close_at_once
from accel.process.protocol import MAX_MESSAGE, check_greeting, encode_header, greeting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["STATUS", "ForkKind", "ForkedTarget", "Forkserver"]

STATUS: Final = struct.Struct("<i")
"""The exit status of a child, as :func:`os.waitstatus_to_exitcode` gives it."""

_READ_BYTES = 64 << 10
_F_SETSIG = 10  # Linux; Python's module fcntl has no name for it
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
    """Fork a child: a request as JSON, with the descriptors of socket, output and lifeline."""
    ANSWER = 3
    """The answer to each message, in order, as JSON.

    ``pid`` is that of a fork, whose pidfd comes with the message; ``refused`` says why this process
    must not be forked; ``failed`` says what was raised.
    """


class ForkedTarget(NamedTuple):
    """What a forked child runs: its ``target``, on which loop, and its socket's descriptor."""

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
        self._incoming = Incoming(sock, MAX_MESSAGE, close_at_once)
        self._lifelines: dict[int, int] = {}  # pid -> descriptor, of children that were not reaped
        self._reason = ""  # why this process must not be forked
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Close all descriptors in a fork; see :class:`accel.fork.Inherited`."""
        self._sock.close()
        self._incoming.close()
        close_at_once(self._lifelines.values())
        self._lifelines.clear()

    def serve(self) -> ForkedTarget:
        """Answer until the connection is closed, and exit after the last child has ended.

        Returns in a fork only, with what it is to run.
        """
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())  # also while something is imported
        self._sock.sendall(greeting())
        is_greeted = False
        while self._incoming.read(_READ_BYTES):
            while self._incoming.messages:
                kind, payload, descriptors = self._incoming.messages.popleft()
                if not is_greeted:
                    check_greeting(kind, payload)
                    is_greeted = True
                elif kind == ForkKind.PREPARE:
                    self._send_answer(self._run_prepare(payload))
                else:
                    forked = self._fork(payload, descriptors)
                    if forked is not None:
                        return forked
        self._reap(0)  # wait for the children: there may be no other process that reaps orphans
        os._exit(0)

    def _send_answer(self, answer: dict[str, Any], pidfds: Sequence[int] = ()) -> None:
        """Send an answer to the parent. Blocks until the socket has taken it."""
        data = json.dumps(answer).encode()
        header = encode_header(ForkKind.ANSWER, len(data), len(pidfds))
        socket.send_fds(self._sock, [header], pidfds)
        self._sock.sendall(data)

    def _run_prepare(self, payload: bytes) -> dict[str, str]:
        """Do the imports of a PREPARE message, make the heap cheap to fork, and return the answer.

        What an import raises is in the answer: the child that needs the module raises it too.
        """
        failed = ""
        gc.disable()  # objects made by imports live on; collections would only traverse them
        try:
            self._reason = self._prepare(payload)
        except BaseException as error:  # an import raises anything
            failed = repr(error)
        gc.enable()
        sys.stdout.flush()  # or each fork would write the buffer again
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page that it marks
        return {"refused": self._refusal(), "failed": failed}

    def _refusal(self) -> str:
        """Return why this process must not be forked, or ``""``. A reason stays for good.

        Another thread may hold a lock, which would never be released in a child.
        """
        if not self._reason and _other_threads():
            # OpenBLAS ends its threads before a fork, and starts them again at the next product. So
            # fork once, a child that ends at once, and look whether threads are left.
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
            if threads := _other_threads():
                self._reason = f"threads run besides its own: {', '.join(sorted(threads))}"
        return self._reason

    def _fork(self, payload: bytes, descriptors: list[int]) -> ForkedTarget | None:
        """Fork a child, answer the parent, and return ``None``; in the child, return what it runs.

        The child's socket and output are closed here; its lifeline is kept until it is reaped.
        """
        sock, output, lifeline = descriptors
        answer, pid = {"refused": self._refusal()}, None  # not forked
        if not answer["refused"]:
            try:
                pid = os.fork()
            except OSError as error:  # memory or process ids ran out
                answer = {"failed": str(error)}
        if pid == 0:  # in the child
            return _become_child(json.loads(payload), sock, output, lifeline)
        close_at_once((sock, output))
        if pid is None:
            os.close(lifeline)
            self._send_answer(answer)
        else:
            pidfd = os.pidfd_open(pid)
            self._lifelines[pid] = lifeline  # from here on it may be reaped, and its pid reused
            self._send_answer({"pid": pid}, (pidfd,))
            os.close(pidfd)
            self._reap()  # it may have ended before it was known here
        return None

    def _reap(self, flags: int = os.WNOHANG) -> None:
        """Send the exit status of each ended child through its lifeline to the parent.

        Called by the handler of SIGCHLD; with ``flags=0``, wait until all children have ended.
        """
        for pid in tuple(self._lifelines):
            with contextlib.suppress(ChildProcessError):  # the signal's handler has reaped it
                reaped, status = os.waitpid(pid, flags)
                if reaped:
                    with socket.socket(fileno=self._lifelines.pop(pid)) as lifeline, contextlib.suppress(OSError):
                        lifeline.send(STATUS.pack(os.waitstatus_to_exitcode(status)))


def _become_child(request: dict[str, Any], sock: int, output: int, lifeline: int) -> ForkedTarget:
    """Make a fork of this process equal to a started child: session, signals, output, environment.

    Return what it runs.
    """
    _die_with_parent(lifeline)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = dict.fromkeys((*request["path"], *sys.path))
    importlib.invalidate_caches()
    # The module random seeds itself after a fork.
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()
    return ForkedTarget(sock, request["target"], request["uvloop"])


def _die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process when the parent ends, or closes its end of the lifeline.

    The kernel sends SIGKILL (F_SETSIG, F_SETOWN) when the socket's other end is closed (O_ASYNC).
    """
    # PR_SET_PDEATHSIG would follow the forkserver's death instead. This end stays open for ever.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # the parent ended before this
        os._exit(_child.ORPHAN)


def _other_threads() -> list[str]:
    """Return the names of this process's other threads, without the harmless ones."""
    names = []
    for number in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        with contextlib.suppress(OSError):  # it has ended
            names.append(Path(f"/proc/self/task/{number}/comm").read_text(encoding="utf-8", errors="replace").strip())
    return [name for name in names if _HARMLESS.get(name) not in sys.modules]
