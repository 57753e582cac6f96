"""Messages that are read from a socket, each with the file descriptors that it announces."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from accel.process.protocol import HEADER_BYTES, MAX_DESCRIPTORS, ProtocolError, decode_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Incoming", "Message", "close_at_once"]

# As plain ints: flags of the enumeration take a microsecond to test.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
# Room for as many descriptors as the kernel passes in one call. With less room it would close the
# rest inside recvmsg, and that may block.
_CONTROL = socket.CMSG_SPACE(253 * array.array("i").itemsize)


class Message(NamedTuple):
    """One message with its file descriptors, which are closed on ``exec``.

    A receiver removes the descriptors that it keeps from the list.
    """

    kind: int
    payload: bytes
    descriptors: list[int]


class Incoming:
    """Messages that the other end has sent.

    It buffers the bytes of one incomplete message at most: an announced length reserves nothing.

    Parameters
    ----------
    sock
        A connected ``AF_UNIX`` stream socket; ``None`` where the caller reads, and calls :meth:`feed`.
    max_message
        Bytes of the largest payload that is accepted.
    close_fds
        Closes descriptors, possibly off the loop.

    Attributes
    ----------
    messages : deque of Message
        Complete messages that were not delivered yet.
    """

    def __init__(self, sock: socket.socket | None, max_message: int, close_fds: Callable[[Iterable[int]], object]) -> None:
        self.messages: deque[Message] = deque()
        self._sock = sock
        self._max_message = max_message
        self._close_fds = close_fds
        self._partial = bytearray()  # of a message whose end has not come
        self._descriptors: deque[int] = deque()  # that came, and are in no message yet

    def read(self, size: int) -> int:
        """Read once, up to ``size`` bytes, and add what is complete to :attr:`messages`.

        Return how many bytes there were: 0 at the end of the stream.

        Raises
        ------
        ProtocolError
            If the stream is malformed, ends within a message, or its descriptors are not those that
            were announced. Messages before that place are in :attr:`messages`.
        BlockingIOError
            If there is nothing to read now.
        OSError
            If the connection is broken.
        """
        assert self._sock is not None, "else the caller reads"
        data, control, flags, _ = self._sock.recvmsg(size, _CONTROL, _CLOEXEC)
        for level, kind, content in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if not data and self._partial:
            raise ProtocolError(f"the stream ends within a message, of which {len(self._partial)} bytes are there")
        # First, so that the complete messages are there, whatever is found wrong below.
        self.feed(data)
        if flags & _TRUNCATED:
            raise ProtocolError(
                "file descriptors got lost: this process may open no more",
                remedy="Raise `ulimit -n` if this process has too many files open.",
            )
        if self._descriptors:
            self._check_surplus()
        return len(data)

    def close(self) -> None:
        """Drop what was not delivered, and close its descriptors. Idempotent."""
        self._close_fds([*(fd for message in self.messages for fd in message.descriptors), *self._descriptors])
        self.messages.clear()
        self._descriptors.clear()

    def feed(self, data: bytes) -> None:
        """Append the messages that ``data`` completes; keep the bytes of an incomplete one.

        Raises
        ------
        ProtocolError
            If the stream is malformed. Messages before that place are in :attr:`messages`.
        """
        partial, start = self._partial, 0
        partial += data
        while len(partial) - start >= HEADER_BYTES:
            kind, count, length = decode_header(partial, start, self._max_message)
            begin = start + HEADER_BYTES
            end = begin + length
            if end > len(partial):
                break
            self.messages.append(Message(kind, bytes(partial[begin:end]), self._take_descriptors(kind, count) if count else []))
            start = end
        del partial[:start]

    def _take_descriptors(self, kind: int, count: int) -> list[int]:
        """Remove the descriptors of a complete message from those that came, and return them.

        Raises :class:`ProtocolError` if fewer came than the message announces.
        """
        if count > len(self._descriptors):
            raise ProtocolError(
                f"a message of kind {kind} announces {count} descriptors, and {len(self._descriptors)} came",
                remedy="Raise `ulimit -n` if this process has too many files open.",
            )
        return [self._descriptors.popleft() for _ in range(count)]

    def _check_surplus(self) -> None:
        """Raise if more descriptors came than the incomplete message can have: they would leak."""
        partial = self._partial
        allowed = MAX_DESCRIPTORS if partial else 0
        if len(partial) >= HEADER_BYTES:
            _, allowed, _ = decode_header(partial, 0, self._max_message)
        if len(self._descriptors) > allowed:
            raise ProtocolError(f"{len(self._descriptors)} descriptors came where {allowed} are announced")


def close_at_once(descriptors: Iterable[int]) -> None:
    """Close descriptors on this thread: a ``close_fds`` for those of a process that is trusted."""
    for fd in descriptors:
        os.close(fd)
