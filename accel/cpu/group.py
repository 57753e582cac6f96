"""Collectives between CPU devices of one machine, over shared memory.

The memory is a memfd. Rank 0 makes it and gives its descriptor to the others, over an abstract Unix
socket that the unique id names. Each rank has a slot there with room for a chunk, and a row of
counters, one for each other rank. A collective goes chunk by chunk: a rank writes its own slot,
*meets* the others, by counters that each rank alone writes, and reads from their slots what it
needs. There are two chunks in turn, so that one meeting is enough: when a rank writes the first one
again, all have met after they had read it. Two ranks that send and receive use a third one, and meet
twice.

A rank that waits looks at two flags, its own and one in the memory. Whichever rank is told to revoke
the group sets both, so that all ranks of it leave.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.views import array
from accel.errors import DeadlineExceededError, FaultScope, WorldChangedError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from accel.cpu.stream import CpuStream
    from accel.dtype import DType
    from accel.ops.collective import Call

__all__ = ["CpuGroup", "Rendezvous"]

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 1 << 20
"""Bytes of a chunk."""
_LINE = 64
"""Bytes of a cache line: the counters of a rank share none with those of others."""
_POLL = 0.02
"""Seconds between two looks at whether joining was given up."""
_MOST_LISTENING = 64
"""Communicators that are awaited in a process at most."""
_SPINS = 10
"""How often a rank that waits lets others run before it sleeps."""
_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3
_CUT = frozenset({"reduce_scatter", "all_to_all", "scatter"})
"""Kinds whose source has a part for each rank."""
_JOINED = frozenset({"all_gather", "gather", "all_to_all"})
"""Kinds whose target has a part of each rank."""
_REDUCERS: dict[str, Callable[..., Any]] = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class Rendezvous:
    """How the ranks of a communicator find each other: the sockets on which this process, as rank 0, is found."""

    def __init__(self) -> None:
        self._listening: dict[bytes, socket.socket] = {}

    def unique_id(self) -> bytes:
        """Return the name of a new socket, on which others are awaited."""
        name = b"\0accel-" + secrets.token_hex(16).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen()
        listener.settimeout(_POLL)
        if len(self._listening) >= _MOST_LISTENING:
            oldest, *_ = list(self._listening)  # a list at once: other threads do this too
            if (given_up := self._listening.pop(oldest, None)) is not None:
                given_up.close()
        self._listening[name] = listener
        return name

    def join(self, name: bytes, rank: int, size: int, deadline: float, revoked: threading.Event) -> CpuGroup:
        """See :meth:`accel.world.group.FormsGroups.join`."""
        wait = partial(_until, deadline, revoked)
        listener = self._listening.pop(name, None)
        if (rank == 0) is not (listener is not None):
            raise WorldChangedError("the rendezvous of this communicator is not in the process of rank 0", scope=FaultScope.OP)
        nbytes = _layout(size)[1]
        fd = os.memfd_create("accel-group", os.MFD_CLOEXEC) if listener else _fetch_descriptor(name, wait)
        try:
            if listener is not None:
                os.ftruncate(fd, nbytes)
                with listener:
                    for _ in range(size - 1):
                        wait(lambda: _give_descriptor(listener, fd))
            memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        group = CpuGroup(memory, rank, size, revoked)
        group.meet(deadline=deadline)
        return group

    def close(self) -> None:
        """Close the sockets of communicators that rank 0 has not joined."""
        while self._listening:
            self._listening.popitem()[1].close()


class CpuGroup:
    """One rank's end of a communicator; see :class:`accel.world.group.Group`."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, revoked: threading.Event) -> None:
        self.rank = rank
        self.size = size
        self.reached = 0
        self._revoked = revoked
        head, _ = _layout(size)
        counters = np.frombuffer(memory, np.int64, head // 8).reshape(size + 1, -1)
        self._flag = counters[size, :1]  # set once the group is revoked
        self._mine, self._theirs = counters[rank, :size], counters[:size, rank]
        chunks = np.frombuffer(memory, np.uint8, size * 3 * _CHUNK, head)
        self._slots = chunks.reshape(size, 3, _CHUNK)
        self._turn = 0

    def launch(self, stream: CpuStream, call: Call, source: int, target: int) -> None:
        """See :meth:`accel.world.group.Group.launch`. The stream's worker takes part in it."""
        stream.submit(partial(self._run, stream, call, source, target))

    def revoke(self) -> None:
        """See :meth:`accel.world.group.Group.revoke`."""
        self._revoked.set()
        self._flag[0] = 1

    def abort(self) -> None:
        """See :meth:`accel.world.group.Group.abort`. The memory goes with the last view of it."""
        self._slots = self._slots[:, :, :0]

    def meet(self, others: slice | int = slice(None), deadline: float | None = None, stream: CpuStream | None = None) -> None:
        """Wait until the others have come here too.

        Raises
        ------
        WorldChangedError
            The group was revoked.
        DeadlineExceededError
            Not all have come by then.
        """
        self._mine[others] += 1
        spins, sleep = 0, _SHORTEST_SLEEP
        while (self._theirs < self._mine).any():
            if self._revoked.is_set() or self._flag[0] or (stream is not None and stream.fault is not None):
                raise self._over()
            if deadline is not None and time.monotonic() >= deadline:
                raise _late()
            if spins < _SPINS:
                spins += 1
                os.sched_yield()
            else:
                time.sleep(sleep)
                sleep = min(2 * sleep, _LONGEST_SLEEP)

    def _run(self, stream: CpuStream, call: Call, source: int, target: int) -> None:
        """Take part in a collective; on the stream's thread."""
        self.reached = call.number or self.reached
        if call.kind == "barrier":
            self.meet(stream=stream)
            return
        given = self._parts(source, call, call.kind in _CUT)
        wanted = self._parts(target, call, call.kind in _JOINED)
        parts = self.size if call.kind in _CUT else 1
        step = _CHUNK // (parts * call.dtype.itemsize)
        is_pair = call.kind in ("send", "receive")
        others = call.root if is_pair else slice(None)
        for start in range(0, call.elements, step):
            width = min(step, call.elements - start)
            turn = 2 if is_pair else self._turn
            slots = self._slots[:, turn, : parts * width * call.dtype.itemsize].view(call.dtype.numpy).reshape(self.size, parts, width)
            if given is not None:
                slots[self.rank] = given[:, start : start + width]
            self.meet(others, stream=stream)
            if wanted is not None:
                with np.errstate(all="ignore"):  # elements may be anything
                    self._read(call, slots, wanted[:, start : start + width])
            if is_pair:
                self.meet(others, stream=stream)
            else:
                self._turn = 1 - self._turn

    def _parts(self, address: int, call: Call, has_several: bool) -> Array | None:
        """Return a buffer as a matrix of parts; ``None`` where this rank has none."""
        shape = (self.size if has_several else 1, call.elements)
        return array(address, shape, call.dtype.numpy) if address and call.elements else None

    def _read(self, call: Call, slots: Array, wanted: Array) -> None:
        """Read from the slots what this rank gets of a chunk."""
        part = self.rank if call.kind in _CUT else 0
        if call.reduction:
            _reduce(slots[:, part], call.reduction, call.dtype, wanted[0])
        elif call.kind in _JOINED:
            wanted[...] = slots[:, part]
        else:
            wanted[0] = slots[call.root, part]

    def _over(self) -> WorldChangedError:
        return WorldChangedError("a rank was lost, or the world was closed", scope=FaultScope.OP)


def _reduce(values: Array, reduction: str, dtype: DType, wanted: Array) -> None:
    """Reduce the rows of a matrix, in the order of the ranks, so that all get the same bits."""
    reduce = _REDUCERS[reduction]
    # Narrow floats are summed up in float32, as a GPU does.
    is_narrow = dtype.kind == "float" and dtype.itemsize < 4
    result: Array = np.empty(wanted.shape, np.float32) if is_narrow else wanted
    reduce(values[0], values[1], out=result, dtype=result.dtype, casting="unsafe")
    for row in values[2:]:
        reduce(result, row, out=result, dtype=result.dtype, casting="unsafe")
    if reduction == "avg" and dtype.kind == "float":
        result /= len(values)
    elif reduction == "avg":
        result -= np.fmod(result, len(values), dtype=result.dtype)
        result //= len(values)
    if is_narrow:
        wanted[...] = result


def _layout(size: int) -> tuple[int, int]:
    """Return the bytes of the counters, in lines, and of all the memory."""
    line = -(-8 * size // _LINE) * _LINE
    head = (size + 1) * line
    return head, head + size * 3 * _CHUNK


def _until(deadline: float, revoked: threading.Event, attempt: Callable[[], Any]) -> Any:
    """Return what an attempt returns; repeat it while it raises an OSError."""
    while True:
        if revoked.is_set():
            raise WorldChangedError("joining was given up", scope=FaultScope.OP)
        if time.monotonic() >= deadline:
            raise _late()
        try:
            return attempt()
        except OSError:
            revoked.wait(_POLL / 10)


def _late() -> DeadlineExceededError:
    return DeadlineExceededError("not all ranks have joined in time")


def _fetch_descriptor(name: bytes, wait: Callable[[Callable[[], Any]], Any]) -> int:
    """Return the descriptor of the group's memory, from rank 0."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        wait(lambda: connection.connect(name))
        _check_user(connection)
        connection.settimeout(_POLL)
        # One connection, whatever it takes: rank 0 counts them.
        _, fds, _, _ = wait(lambda: socket.recv_fds(connection, 1, 1))
    if not fds:
        raise WorldChangedError("rank 0 has ended", scope=FaultScope.OP)
    return int(fds[0])


def _give_descriptor(listener: socket.socket, fd: int) -> None:
    """Give the descriptor of the group's memory to the next rank that connects."""
    connection, _ = listener.accept()
    with connection:
        _check_user(connection)
        socket.send_fds(connection, [b"\0"], [fd])


def _check_user(connection: socket.socket) -> None:
    """Raise unless a process of the same user is at the other end: the name can be read by all."""
    _, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError(f"a process of user {user} is there")
