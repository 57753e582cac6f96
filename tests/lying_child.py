"""A child process that lies: it comes up as a child of a process host does, and from then on says what a test wants instead of what is so.

It is a backend, found by its entry point. In the process that opens the device it is the CPU. In a child of that process its constructor finds the
socket that leads to the parent and never returns, so that the honest half of the child never says another word. The form of the messages is known
in this file alone.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import marshal
import os
import socket
import struct
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from accel.cpu.backend import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

LIE, PARENT, ONCE = "ACCEL_TEST_LIE", "ACCEL_TEST_LIE_PARENT", "ACCEL_TEST_LIE_ONCE"
NAME = "lying"

_HEADER, _MAGIC = struct.Struct("<IHHI"), 0x4C434341
_BATCH, _PING, _REGISTER, _HELD, _COMPILE = 3, 8, 10, 11, 21
_READY, _DONE, _FAILED, _PONG, _SLAB, _PLACED, _LENT, _BUSY, _COMPILED = 101, 103, 104, 107, 108, 110, 111, 121, 123
_OFFER = json.dumps({"capabilities": {"fill": ["float64"]}, "durable": True}).encode()
_SLAB_BYTES = 1 << 20
_LENT_BYTES = 8 << 20
_MANY = 253  # descriptors that the kernel takes in one call


class LyingBackend(CpuBackend):
    """The processor, in a child that is honest."""

    def __init__(self) -> None:
        lie, parent, once = os.environ.get(LIE), os.environ.get(PARENT), os.environ.get(ONCE)
        if lie is None or parent is None or os.getpid() == int(parent):
            return
        if "--forkserver" in sys.argv and os.getppid() == int(parent):  # it makes a backend too, and none of its forks' contexts
            return
        if once is not None:
            try:
                os.close(os.open(once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        _tell(LIES[lie])


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Have the backend found by its name, which is returned, in this process and its children."""
    package = folder / "lying-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lying\nVersion: 0\n")
    (package / "entry_points.txt").write_text(f"[accel.backends]\n{NAME} = {__name__}:LyingBackend\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(PARENT, str(os.getpid()))
    return NAME


def lie(monkeypatch: pytest.MonkeyPatch, what: str, *, once: Path | None = None) -> None:
    """Have the children that start from here on tell a lie; with ``once``, a file that is not there yet, only the first of them."""
    assert what in LIES
    monkeypatch.setenv(LIE, what)
    if once is not None:
        monkeypatch.setenv(ONCE, str(once))


def be_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the children that start from here on be honest."""
    monkeypatch.delenv(LIE)


# -- what a child says, as bytes


class _Wire:
    """The connection to the parent, which has been greeted."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""

    def say(self, kind: int, payload: bytes = b"", fds: tuple[int, ...] = (), *, announced: int | None = None) -> None:
        """Send one message."""
        data = _HEADER.pack(_MAGIC, kind, len(fds) if announced is None else announced, len(payload)) + payload
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.sock.sendmsg([data], control)
        self.sock.sendall(data[sent:])

    def heard(self, seconds: float = 60.0) -> Iterator[tuple[int, bytes]]:
        """Yield what the parent says, but for its questions whether anybody is there, which are answered; ends after ``seconds`` of silence."""
        self.sock.settimeout(seconds)
        while True:
            while len(self._rest) >= _HEADER.size:
                _, kind, _, length = _HEADER.unpack_from(self._rest)
                if len(self._rest) < _HEADER.size + length:
                    break
                body, self._rest = self._rest[_HEADER.size : _HEADER.size + length], self._rest[_HEADER.size + length :]
                if kind == _PING:
                    self.say(_PONG)
                else:
                    yield kind, body
            try:
                data, control, _, _ = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 64))
            except TimeoutError:
                return
            if not data:
                os._exit(0)
            for _, _, content in control:
                for number in array.array("i", content):
                    os.close(number)
            self._rest += data


def _tell(story: Callable[[_Wire], None]) -> NoReturn:
    try:
        wire = _Wire(_to_parent())
        wire.say(_READY, _OFFER)
        story(wire)
        for _ in wire.heard():
            pass
        os._exit(0)
    except BaseException:  # the parent has had enough; or the story is wrong, which the parent shows
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _to_parent() -> socket.socket:
    """Return the socket of which the other end is the service's, and which is not the lifeline of a fork."""
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it is none, or what listed the folder
            continue
        if sock.family == socket.AF_UNIX and _peer(sock) == int(os.environ[PARENT]) and not fcntl.fcntl(sock, fcntl.F_GETFL) & os.O_ASYNC:
            sock.setblocking(True)
            return sock
        sock.close()
    raise OSError("there is no socket to the parent")


def _peer(sock: socket.socket) -> int:
    (pid,) = struct.unpack_from("i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _ops(wire: _Wire) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Take durable memory over, and yield for each op its number, and those of the buffers that it makes."""
    for kind, body in wire.heard():
        if kind == _HELD:
            wire.say(_DONE, body[:8])
        elif kind == _BATCH:
            number, _, (made,), *_ = marshal.loads(body)
            yield number, tuple(made)


def _memfd(nbytes: int, *, is_sealed: bool = True) -> int:
    fd = os.memfd_create("lying", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if is_sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


# -- the lies


def _busy(wire: _Wire) -> None:
    """Say again and again that something is being loaded."""
    while True:
        for _ in wire.heard(0.05):
            pass
        wire.say(_BUSY, b"\1")


def _toggling(wire: _Wire) -> None:
    """The same, and in between that it is over."""
    while True:
        for _ in wire.heard(0.02):
            pass
        wire.say(_BUSY, b"\0")
        wire.say(_BUSY, b"\1")


def _deaf(wire: _Wire) -> None:
    """Answer pings and nothing else."""
    for _ in wire.heard():
        pass


def _half_deaf(wire: _Wire) -> None:
    """Take durable memory over, and answer no op."""
    for _ in _ops(wire):
        pass


def _compile(wire: _Wire, *, kind: int, layout: bytes = b"") -> None:
    """Say that a kernel was compiled, and of what layout it is."""
    for asked, body in wire.heard():
        if asked == _COMPILE:
            wire.say(kind, body[:8] + layout)


def _lend(wire: _Wire, *, make: Callable[[], int] | None = None, nbytes: int = _LENT_BYTES, offset: int = 0, ask: bool = True) -> None:
    """Say of each op that it is done, and of each but the first that it has lent a buffer, which is not where it is said to be.

    Without ``make`` nothing is said of the buffer. Without ``ask`` a buffer is lent that the service has not asked for.
    """
    batches = 0
    for asked, body in wire.heard():
        if asked != _BATCH:
            continue
        number, batches = marshal.loads(body)[0], batches + 1
        if make is not None and (batches > 1 or not ask):
            wire.say(_LENT, struct.pack("<QQQQ", number, 0, nbytes, offset), (make(),))
        wire.say(_DONE, struct.pack("<Q", number))


class _Slabs:
    """Durable memory that is not what is said of it. Each new buffer is where the ``places`` say, in a slab of its own if they say so."""

    def __init__(self, *places: tuple[int, int], make: Callable[[], int], nbytes: int = _SLAB_BYTES) -> None:
        self._places = places
        self._make = make
        self._nbytes = nbytes

    def __call__(self, wire: _Wire) -> None:
        places, known, fd = list(self._places), set[int](), self._make()
        for number, buffers in _ops(wire):
            for buffer in buffers:
                slab, offset = places.pop(0)
                if slab not in known:
                    known.add(slab)
                    wire.say(_SLAB, struct.pack("<QQ", slab, self._nbytes), (fd,))
                wire.say(_PLACED, struct.pack("<QQQQ", buffer, slab, offset, 4096))
            wire.say(_DONE, struct.pack("<Q", number))


def _fail(wire: _Wire, *, nbytes: int) -> None:
    """Answer each op with an error, each of whose texts is that long."""
    text = "x" * nbytes
    names = dict.fromkeys(("message", "remedy", "code", "library", "device", "op"), text)
    fields = {**names, "suspects": [text] * 3, "executed": "no", "scope": 1}
    error = json.dumps({"class": "ContextPoisonedError", "fields": fields, "causes": [text] * 3}).encode()
    for number, _ in _ops(wire):
        wire.say(_FAILED, struct.pack("<Qi", number, -1) + error)


def _lingering() -> tuple[int, socket.socket]:
    """Return a descriptor of a connection that lingers for five seconds, since what was written there is not taken, and the other end of it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sock = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(1 << 16))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5))
    return sock.detach(), other


def _pass_lingering(wire: _Wire, *, many: int = 1, announced: int = 1, first: bytes = b"") -> None:
    """Send a connection that lingers with a message that has none, and keep none; go on as if that was nothing."""
    fd, other = _lingering()
    for number, _ in _ops(wire):
        wire.sock.sendall(first)
        wire.say(_PONG, b"", (fd,) * many, announced=announced)
        os.close(fd)
        wire.say(_DONE, struct.pack("<Q", number))
        break
    for _ in _ops(wire):
        other.fileno()  # it is open as long as this goes on


def _flood(wire: _Wire) -> None:
    """Announce more durable memory than the parent may have descriptors."""
    for number, _ in _ops(wire):
        for slab in range(1, 5000):
            fd = _memfd(4096)
            wire.say(_SLAB, struct.pack("<QQ", slab << 40, 4096), (fd,))
            os.close(fd)
        wire.say(_DONE, struct.pack("<Q", number))


def _of_device() -> int:
    """Return a descriptor that is of no memory, which only shows when it is mapped."""
    return os.open("/dev/null", os.O_RDWR)


LIES: dict[str, Callable[[_Wire], None]] = {
    "busy": _busy,
    "toggling": _toggling,
    "deaf": _deaf,
    "deaf to ops": _half_deaf,
    "a layout that is none": partial(_compile, kind=_COMPILED, layout=b"{"),
    "a layout that is deeply nested": partial(_compile, kind=_COMPILED, layout=b"[" * 100_000),
    "no layout": partial(_compile, kind=_DONE),
    "a connection that lingers": _pass_lingering,
    "a connection that lingers, many times": partial(_pass_lingering, many=_MANY),
    "a connection that lingers, announced by nothing": partial(_pass_lingering, announced=0),
    "a connection that lingers, after nonsense": partial(_pass_lingering, first=_HEADER.pack(_MAGIC, 999, 0, 0)),
    "memory without end": _flood,
    "lent memory that can shrink": partial(_lend, make=partial(_memfd, _LENT_BYTES, is_sealed=False)),
    "lent memory that ends early": partial(_lend, make=partial(_memfd, _LENT_BYTES), offset=_LENT_BYTES - 8),
    "lent memory of no end": partial(_lend, make=partial(_memfd, _LENT_BYTES), nbytes=2**62),
    "lent memory that is nowhere": _lend,
    "lent memory, unasked": partial(_lend, make=partial(_memfd, _LENT_BYTES), ask=False),
    "errors of a megabyte": partial(_fail, nbytes=(1 << 20) // 12),
    "errors of many megabytes": partial(_fail, nbytes=15 * (1 << 20) // 12),
    "overlapping buffers": _Slabs((1 << 40, 4096), (1 << 40, 0), (1 << 40, 2048), make=partial(_memfd, _SLAB_BYTES)),
    "nested buffers": _Slabs((1 << 40, 0), (1 << 40, 0), make=partial(_memfd, _SLAB_BYTES)),
    "a buffer at an odd place": _Slabs((1 << 40, 100), make=partial(_memfd, _SLAB_BYTES)),
    "the same memory twice": _Slabs((1 << 40, 0), (2 << 40, 0), make=partial(_memfd, _SLAB_BYTES)),
    "more memory than there is": _Slabs((1 << 40, 0), make=partial(_memfd, _SLAB_BYTES), nbytes=2**63),
    "memory that can shrink": _Slabs((1 << 40, 0), make=partial(_memfd, _SLAB_BYTES, is_sealed=False)),
    "no memory": _Slabs(*((1 << 40, 4096 * at) for at in range(9)), make=_of_device),
    "no memory, and a lot of it": _Slabs(*((1 << 40, 4096 * at) for at in range(9)), make=_of_device, nbytes=2**63),
}
