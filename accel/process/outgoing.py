"""Messages that are to be written to a socket, and the file descriptors that leave with them."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from typing import TYPE_CHECKING

from accel.errors import InvalidArgumentError
from accel.shortage import raise_shortage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Outgoing"]

_NO_SIGNAL = int(socket.MSG_NOSIGNAL)


class Outgoing:
    """Bytes and descriptors that were not written yet.

    Parameters
    ----------
    sock
        A connected, non-blocking ``AF_UNIX`` stream socket.

    Attributes
    ----------
    pending : int
        Bytes that are still to be written.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.pending = 0
        self._sock = sock
        # The kernel delivers descriptors with the first byte of a call. So a message that has some
        # begins a segment, and each segment begins with a call.
        self._segments: deque[tuple[bytearray, list[int]]] = deque()

    def append(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Add one message. The descriptors are duplicated: the caller may close its own.

        Raises
        ------
        InvalidArgumentError, OutOfMemoryError
            If a descriptor cannot be duplicated. Nothing is added.
        """
        if descriptors or not self._segments:
            self._segments.append((bytearray(), _duplicate_all(descriptors)))
        data, _ = self._segments[-1]
        data += message
        self.pending += len(message)

    def write_now(self, message: bytes) -> bool:
        """Write a message without descriptors, as far as the socket takes it; the rest is pending.

        If something is pending before it, do nothing and return ``False``. Raises as :meth:`write`
        does.
        """
        if self._segments:
            return False
        try:
            written = self._sock.send(message, _NO_SIGNAL)
        except BlockingIOError:
            written = 0
        if written < len(message):
            self.append(message[written:])
        return True

    def write(self, budget: int) -> bool:
        """Write at most ``budget`` bytes, as the socket takes them; return whether all is written.

        Raises
        ------
        OSError
            If the other end is gone. A socket that is full raises nothing.
        """
        while self._segments and budget > 0:
            data, descriptors = self._segments[0]
            try:
                written = self._write(data, descriptors, budget)
            except BlockingIOError:
                return False
            if descriptors:
                _close_all(descriptors)
            self.pending -= written
            budget -= written
            if written < len(data):
                del data[:written]
            else:
                self._segments.popleft()
        return not self._segments

    def close(self) -> None:
        """Drop what was not written, and close its descriptors."""
        for _, descriptors in self._segments:
            _close_all(descriptors)
        self._segments.clear()
        self.pending = 0

    def _write(self, data: bytearray, descriptors: list[int], budget: int) -> int:
        """Write the start of a segment, with its descriptors; return the bytes that were taken."""
        with memoryview(data) as view, view[:budget] as part:
            if not descriptors:
                return self._sock.send(part, _NO_SIGNAL)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            return self._sock.sendmsg([part], [rights], _NO_SIGNAL)


def _duplicate_all(descriptors: Iterable[int]) -> list[int]:
    """Duplicate descriptors, all or none, so that the caller may close its own at once."""
    duplicates: list[int] = []
    for descriptor in descriptors:
        try:
            duplicates.append(os.dup(descriptor))
        except OSError as error:
            _close_all(duplicates)
            raise_shortage(error, "a file descriptor cannot be sent to the other process")
            raise InvalidArgumentError(
                f"file descriptor {descriptor} cannot be sent: {error}",
                remedy="Send open ones.",
            ) from error
    return duplicates


def _close_all(descriptors: list[int]) -> None:
    """Close descriptors, and remove each from the list before: none is closed twice."""
    while descriptors:
        os.close(descriptors.pop())
