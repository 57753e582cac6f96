"""Messages between a controller and an agent: :class:`~accel.process.channel.Channel` over TCP."""

from __future__ import annotations

import asyncio
import enum
import os
import socket
import struct
from typing import TYPE_CHECKING, cast

from accel.errors import AccelError, ClosedError, HostDiedError
from accel.fork import close_after_fork
from accel.process.incoming import Incoming
from accel.process.protocol import ProtocolError, encode_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accel.node.handshake import Streams

__all__ = ["Connection", "NodeChannel", "NodeKind", "pack_fence", "unpack_fence"]

_FLUSH_BYTES = 64 << 10
"""Pending bytes beyond which a send flushes, and does not wait for the end of the iteration."""
_MAX_UNSENT = 256 << 20
"""Bytes that may wait for the other end, which does not read them; then the connection is given up."""
_PROBE_SECONDS = 1
"""Seconds between the kernel's probes of a silent connection."""
_MAX_SILENCE = 2_000_000.0
"""Seconds of the longest silence: the kernel counts milliseconds in 31 bits."""


class NodeKind(enum.IntEnum):
    """Kinds of messages between controller and agent, besides those between parent and child."""

    ARRAYS = 1001
    """Of the controller: a request follows that waits for arrays, and whose results are to be sent."""
    KILL = 1002
    """Of the controller: kill the child."""
    RELEASE = 1003
    """Of the controller: the device is closed; nothing of its memory is to be kept."""
    FENCE = 1004
    """Of the controller: end the older children of the device that it has given up."""
    EXIT = 1101
    """The last message of the agent: how the child ended, as JSON."""
    FENCED = 1102
    """Of the agent: they have ended, or why not, as an error."""


def pack_fence(number: int, known: Iterable[int]) -> bytes:
    """Return a FENCE message: a number above those of the children to end, and the numbers of those that stay."""
    numbers = (number, *known)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_fence(data: bytes) -> tuple[int, frozenset[int]]:
    """Return the number, and those that stay; see :func:`pack_fence`.

    Raises
    ------
    ProtocolError
        If it is no such message.
    """
    if not data or len(data) % 8:
        raise ProtocolError(f"a message of kind {NodeKind.FENCE} has {len(data)} bytes")
    number, *known = struct.unpack(f"<{len(data) // 8}Q", data)
    return number, frozenset(known)


class Connection(asyncio.BaseProtocol):
    """One end of a connection between machines, whose request was answered. Used on its loop's thread only.

    Parameters
    ----------
    streams
        The connection. This object owns it from here on.
    on_lost
        ``on_lost(error)``, called once, when the connection has ended; not after it was closed here.
    silence
        Seconds without an answer of the other machine's kernel after which the connection is lost.
        Neither end's interpreter is asked, so one that is held up loses nothing.

    Attributes
    ----------
    is_closed : bool
        Whether it was closed, or lost.
    """

    def __init__(self, streams: Streams, on_lost: Callable[[AccelError | None], None], silence: float) -> None:
        self.is_closed = False
        self._loop = asyncio.get_running_loop()
        self._streams = streams  # its writer closes the connection when it is collected
        self._sock = sock = streams.sock
        self._transport = cast("asyncio.Transport", streams.writer.transport)
        self._on_lost = on_lost
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        seconds = min(silence, _MAX_SILENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(max(int(seconds), 1), 127))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(seconds * 1000), 1))
        self._transport.set_protocol(self)
        close_after_fork(self)
        self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Report an end that came before this protocol: the transport does not do so again."""
        try:
            if not self.is_closed and not self._sock.recv(1, socket.MSG_PEEK):
                self._lose(None)
        except BlockingIOError:  # nothing is unread, and more may come
            pass
        except OSError as error:
            self._lose(HostDiedError(f"the connection broke: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection."""
        self._lose(HostDiedError(f"the connection broke: {exc}") if exc is not None else None)

    def _lose(self, error: AccelError | None) -> None:
        """Close this end, and report the loss; do nothing if it is closed already."""
        if not self.is_closed:
            self.abort()
            self._on_lost(error)

    def abort(self) -> None:
        """Close the connection at once. Idempotent."""
        self.is_closed = True
        self._transport.abort()

    def close_inherited(self) -> None:
        """Close the descriptor in a fork, and leave the loop, its parent's, as it is; see :class:`accel.fork.Inherited`."""
        self.is_closed = True
        if self._sock.fileno() >= 0:
            os.close(self._sock.detach())


class NodeChannel(Connection, asyncio.Protocol):
    """A connection for messages.

    Parameters
    ----------
    streams, on_lost, silence
        As for :class:`Connection`.
    on_message
        ``on_message(kind, payload, descriptors)`` for each message, without descriptors. What it
        raises loses the connection, as for :class:`~accel.process.channel.Channel`.
    max_received
        Bytes of the largest payload that is received.
    early
        What has come already.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        on_message: Callable[[int, bytes, list[int]], None],
        on_lost: Callable[[AccelError | None], None],
        max_received: int,
        silence: float,
        early: bytes = b"",
    ) -> None:
        super().__init__(streams, on_lost, silence)
        self._early = early
        self._on_message = on_message
        self._incoming = Incoming(None, max_received, lambda fds: None)
        self._unsent = bytearray()
        self._flush_handle: asyncio.Handle | None = None

    def _begin(self) -> None:
        """Deliver what has come already; then see :meth:`Connection._begin`."""
        if self._early:
            self.data_received(b"")
        super()._begin()

    def send(self, kind: int, *parts: bytes | bytearray | memoryview, fds: Sequence[int] = (), now: bool = False) -> None:
        """Send one message; see :meth:`accel.process.channel.Channel.send`.

        Descriptors stay here: the agent has its own of the same memory.

        Raises
        ------
        ClosedError
            If the channel was closed or lost.
        """
        if self.is_closed:
            raise ClosedError("the connection to the other machine is closed")
        payload = b"".join(parts)
        self._unsent += encode_header(kind, len(payload))
        self._unsent += payload
        if now or len(self._unsent) > _FLUSH_BYTES:
            self.flush()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Give what was sent to the system, as far as that takes it."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._unsent and not self._transport.is_closing():
            self._transport.write(bytes(self._unsent))
            self._unsent.clear()
            if self._transport.get_write_buffer_size() > _MAX_UNSENT:
                self._lose(HostDiedError(f"the other machine has not read {_MAX_UNSENT} bytes that were sent to it"))

    def close(self) -> None:
        """Close the connection, once what was sent has left. Idempotent."""
        if not self.is_closed:
            self.flush()
            self.is_closed = True
            self._transport.close()

    # -- called by the transport

    def data_received(self, data: bytes) -> None:
        """Deliver the messages that are complete now."""
        try:
            data, self._early = self._early + data, b""
            self._incoming.feed(data)
            while self._incoming.messages and not self.is_closed:
                self._on_message(*self._incoming.messages.popleft())
        except AccelError as error:
            self._lose(error)
        except Exception as error:
            text = "handling a message of another machine failed"
            self._loop.call_exception_handler({"message": text, "exception": error})
            loss = HostDiedError(f"{text}: {type(error).__name__}: {error}", remedy="This is an error in accel: report it with its cause.")
            loss.__cause__ = error
            self._lose(loss)
