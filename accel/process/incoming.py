"""What is read from a socket: whole messages, each with the file descriptors that it announced, and no other."""

from __future__ import annotations

import array
import socket
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from accel.process.protocol import MAX_DESCRIPTORS, Frame, FrameDecoder, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Incoming", "Message"]

# As plain ints: flags of the enumeration take a microsecond to test.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
# As many as the kernel sends at once: what there is no room for it closes itself, in the call that reads, which may block there.
_CONTROL = socket.CMSG_SPACE(253 * array.array("i").itemsize)


class Message(NamedTuple):
    """One message with its file descriptors, which are closed on ``exec``. A receiver removes the descriptors that it takes from the list."""

    kind: int
    payload: bytes
    descriptors: list[int]


class Incoming:
    """Messages that the other end sent.

    Parameters
    ----------
    sock
        A connected, non-blocking ``AF_UNIX`` stream socket.
    max_message
        Bytes of the largest payload that is accepted.
    dispose
        Closes descriptors.

    Attributes
    ----------
    messages : deque of Message
        What was read and not taken yet.
    """

    def __init__(self, sock: socket.socket, max_message: int, dispose: Callable[[Iterable[int]], object]) -> None:
        self.messages: deque[Message] = deque()
        self._sock = sock
        self._dispose = dispose
        self._decoder = FrameDecoder(max_message)
        self._descriptors: deque[int] = deque()

    def read(self, size: int) -> int:
        """Read once, up to ``size`` bytes, and return how many there were: 0 at the end of the stream.

        Messages that precede what is malformed are in :attr:`messages` when it raises.

        Raises
        ------
        ProtocolError
            If the stream is malformed, ends within a message, or descriptors came that no message announced, or fewer than one did.
        BlockingIOError
            If there is nothing to read now.
        OSError
            If the connection is broken.
        """
        data, control, flags, _ = self._sock.recvmsg(size, _CONTROL, _CLOEXEC)
        for level, kind, content in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if not data:
            self._decoder.end()
            return 0
        for frame in self._decoder.feed(data):
            self.messages.append(Message(frame.kind, frame.payload, self._take(frame) if frame.descriptors else []))
        if self._decoder.error is not None:
            raise self._decoder.error.clone()
        if flags & _TRUNCATED:
            raise ProtocolError(
                "file descriptors got lost: this process may open no more",
                remedy="Raise `ulimit -n` if this process has too many files open.",
            )
        if self._descriptors:
            self._check_surplus()
        return len(data)

    def close(self) -> None:
        """Forget what was not taken, and close its descriptors."""
        self._dispose([*(fd for message in self.messages for fd in message.descriptors), *self._descriptors])
        self.messages.clear()
        self._descriptors.clear()

    def _take(self, frame: Frame) -> list[int]:
        if frame.descriptors > len(self._descriptors):
            raise ProtocolError(
                f"a message of kind {frame.kind} announces {frame.descriptors} descriptors, and {len(self._descriptors)} came",
                remedy="Raise `ulimit -n` if this process has too many files open.",
            )
        return [self._descriptors.popleft() for _ in range(frame.descriptors)]

    def _check_surplus(self) -> None:
        """Raise where more came than the message that is not complete yet can want: they would stay open."""
        awaited = self._decoder.awaited
        allowed = awaited if awaited is not None else MAX_DESCRIPTORS if self._decoder.buffered else 0
        if len(self._descriptors) > allowed:
            raise ProtocolError(f"{len(self._descriptors)} descriptors came where {allowed} are announced")
