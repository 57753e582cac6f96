"""Connections that carry arrays between machines, straight from and into the memory they are in.

They are apart from the messages, so that a large array holds up no other op's answer.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from accel.errors import AccelError, HostDiedError
from accel.node.channel import Connection
from accel.process.protocol import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.node.handshake import Streams

__all__ = ["ArrayConnection", "Place", "pack_request", "unpack_request"]

_REQUEST = struct.Struct("<QQ")
_RESULT = struct.Struct("<QQQ")
_HEAD = struct.Struct("<IQQQQ")
_MAGIC = 0x52524141  # b"AARR"
_STEP_BYTES = 1 << 20
"""The most that one loop iteration reads or writes: some tenths of a millisecond."""
_WAKE_BYTES = 1 << 20
"""The bytes of a large array that must have come before the loop is woken."""
_PIECE_BYTES = 1 << 20
"""The most that is written in one call: what the system does not take is copied."""
_MAX_SHARE = 0.25
"""The part of ``silence`` that one heartbeat counts for at most."""


class Place(NamedTuple):
    """Where an array is: its request, and its bytes in a block of host memory.

    Attributes
    ----------
    request
        Number of the request that reads or fills it.
    block, offset, nbytes
        Number of the block, which both machines have, and the bytes in it.
    """

    request: int
    block: int
    offset: int
    nbytes: int


def pack_request(request: int, sources: int, results: Iterable[Place]) -> bytes:
    """Return an ARRAYS message: how many arrays a request waits for, and the places of its results."""
    return _REQUEST.pack(request, sources) + b"".join([_RESULT.pack(*place[1:]) for place in results])


def unpack_request(data: bytes) -> tuple[int, int, list[Place]]:
    """Return the request, the number of its arrays, and its results; see :func:`pack_request`.

    Raises
    ------
    ProtocolError
        If it is no such message.
    """
    try:
        request, sources = _REQUEST.unpack_from(data)
        return request, sources, [Place(request, *result) for result in _RESULT.iter_unpack(data[_REQUEST.size :])]
    except struct.error as error:
        raise ProtocolError(f"a message about arrays means nothing: {error}") from None


class ArrayConnection(Connection, asyncio.BufferedProtocol):
    """A connection for the arrays of a child; arrays leave in the order of sending.

    Parameters
    ----------
    streams, on_lost
        As for :class:`~accel.node.channel.Connection`.
    silence
        Seconds in which some of an array that is due must come; see :meth:`check`.
    locate
        ``locate(place)`` returns the memory for an array that comes, or ``None`` if it is not ready:
        the connection then waits for :meth:`resume`. Raises :class:`ProtocolError` for one that was
        not asked for.
    on_received
        ``on_received(place)``, called once an array is there as a whole.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        locate: Callable[[Place], memoryview | None],
        on_received: Callable[[Place], None],
        on_lost: Callable[[AccelError | None], None],
        silence: float,
    ) -> None:
        super().__init__(streams, on_lost, silence)
        self._silence = silence
        self._locate = locate
        self._on_received = on_received
        self._outgoing: deque[memoryview] = deque()  # heads and arrays, in order
        self._write_handle: asyncio.Handle | None = None
        self._is_full = False  # the system takes no more for now
        self._head = memoryview(bytearray(_HEAD.size))
        self._place: Place | None = None  # of the array that comes, once its head is there
        self._target = self._head  # what is being read ...
        self._filled = 0  # ... and the bytes of it that are there
        self._is_encrypted = self._transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=1)  # with 0 TLS would stay paused
        # It also counts the time in which the other end has no room for an array, which ends no
        # connection: see `check`.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._seen = (False, 0, 0)  # at the last heartbeat: an array was due; bytes that were read, and that the system has
        self._read_bytes = 0
        self._silent = 0.0  # seconds without more, while an array was due
        self._checked = self._loop.time()

    # -- sending

    def send(self, place: Place, array: memoryview) -> None:
        """Send an array after those before it. Its memory must stay as it is until it was received."""
        self._outgoing += (memoryview(_HEAD.pack(_MAGIC, *place)), array)
        self._write_soon()

    def _write_soon(self) -> None:
        """Have the next bytes written in the next loop iteration, unless the system is full."""
        if self._write_handle is None and self._outgoing and not (self._is_full or self.is_closed):
            self._write_handle = self._loop.call_soon(self._write)

    def _write(self) -> None:
        """Write what one loop iteration may."""
        self._write_handle = None
        left = _STEP_BYTES
        while self._outgoing and left > 0 and not (self._is_full or self._transport.is_closing()):
            data = self._outgoing.popleft()
            step, rest = data[:_PIECE_BYTES], data[_PIECE_BYTES:]
            if rest:
                self._outgoing.appendleft(rest)
            left -= len(step)
            self._transport.write(step)
        self._write_soon()

    def pause_writing(self) -> None:
        """Write no more: the system has not taken all of what was written."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Go on writing."""
        self._is_full = False
        self._write_soon()

    # -- receiving

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes: of a head, or of the array that it announces."""
        return self._target[self._filled : self._filled + _STEP_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Go on to the array after its head, and to the next head after the array."""
        self._filled += nbytes
        self._read_bytes += nbytes
        if self._filled < len(self._target):
            self._expect(len(self._target) - self._filled)
            return
        try:
            if self._place is None:
                magic, *numbers = _HEAD.unpack(self._head)
                if magic != _MAGIC:
                    raise ProtocolError(f"no array begins here: {magic:#010x} stands where {_MAGIC:#010x} must")
                self._place = Place(*numbers)
                self._begin_array()
            else:
                place, self._place = self._place, None
                self._target, self._filled = self._head, 0
                self._expect(_HEAD.size)
                self._on_received(place)
        except AccelError as error:
            self._lose(error)

    def _begin_array(self) -> None:
        """Have the array that was announced read into its memory, once that is ready."""
        assert self._place is not None, "its head is there"
        memory = self._locate(self._place)
        if memory is None:
            self._transport.pause_reading()
        else:
            self._target, self._filled = memory, 0
            self._expect(len(memory))

    def _expect(self, nbytes: int) -> None:
        """Have the loop woken once this many bytes are there, or many: not for each packet."""
        if not self._is_encrypted:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(nbytes, _WAKE_BYTES))

    def resume(self) -> None:
        """Go on with an array whose memory was not ready, if it is now."""
        if self._place is not None and self._target is self._head and not self.is_closed:
            try:
                self._begin_array()
            except AccelError as error:
                self._lose(error)
            else:
                if self._target is not self._head:
                    self._transport.resume_reading()

    def check(self, *, is_due: bool) -> None:
        """Lose the connection if nothing has come for ``silence`` seconds. Called at each heartbeat.

        A long time between two heartbeats counts as a part only: the interpreter of one of the two
        ends was held up, and has not sent or read meanwhile.

        Parameters
        ----------
        is_due
            Whether the other end sends an array, for which there is room here.
        """
        if self.is_closed:
            return
        now = self._loop.time()
        unread = int.from_bytes(fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4)), sys.byteorder)
        seen = is_due, self._read_bytes, unread  # the loop is not woken for each packet
        if is_due and seen == self._seen:
            self._silent += min(now - self._checked, _MAX_SHARE * self._silence)
        else:
            self._silent = 0.0
        self._seen, self._checked = seen, now
        if self._silent >= self._silence:
            error = HostDiedError(f"nothing of an array has come for {self._silence:g} s")
            self._loop.call_soon(self._lose, error)  # the caller may be a watchdog that the loss stops

    # -- the end

    def abort(self) -> None:
        """Close the connection at once: from here on no array is read or written. Idempotent."""
        super().abort()
        if self._write_handle is not None:
            self._write_handle.cancel()
        self._outgoing.clear()
        self._target, self._place = self._head, None  # a view would keep the memory's mapping

    def close_inherited(self) -> None:
        """Close the descriptor in a fork, and let the arrays go; see :class:`accel.fork.Inherited`."""
        super().close_inherited()
        self._outgoing.clear()
