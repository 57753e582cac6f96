"""A conversation with another process over a connected pair of sockets, on an event loop, without ever waiting in it.

Sending only appends; what was sent in one turn of the loop leaves in one call at its end. Reading is cut into turns, so that a peer that sends much
does not block the loop. File descriptors travel with exactly the message that names them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from accel.errors import AccelError, ClosedError, HostDiedError, InvalidArgumentError
from accel.fork import close_after_fork
from accel.process.incoming import Incoming, Message
from accel.process.outgoing import Outgoing
from accel.process.protocol import GREETING, MAX_DESCRIPTORS, MAX_MESSAGE, ProtocolError, check_greeting, encode_header, greeting

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Channel"]

_FLUSH_BEYOND = 64 << 10
_READ_BYTES = 64 << 10
_TURN_BYTES = 256 << 10
_TURN_MESSAGES = 512


class Channel:
    """One end of a connection to another process. Greets the other end, and expects to be greeted.

    It is used on its loop's thread only.

    Parameters
    ----------
    sock
        A connected ``AF_UNIX`` stream socket. The channel owns it from here on.
    loop
        The loop on which everything is called; asyncio's or uvloop's.
    on_message
        ``on_message(kind, payload, descriptors)`` for each message. The callback removes the descriptors that it takes from the list; those that are
        left when it returns are closed. If it raises, that goes to the loop's exception handler, and the channel is lost. A :class:`ProtocolError`,
        by which it says that the payload is malformed, goes to ``on_lost`` only.
    on_lost
        ``on_lost(error)``, once, when the other end is gone or talks nonsense, after the messages before that were delivered. ``None`` if it closed the
        connection between two messages and had read all that was sent to it. Not called after :meth:`close`.
    max_message
        Bytes of the largest payload that is sent, and
    max_received
        of the largest that is received; ``None``: the same.
    dispose
        Closes the descriptors that were not taken, and the socket, in the queue of which there may be others; ``None``: at once. Where the other end is
        not trusted, it must not do that on the loop: see :class:`~accel.storage.disposal.Disposal`.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_message: Callable[[int, bytes, list[int]], None],
        on_lost: Callable[[AccelError | None], None],
        max_message: int = MAX_MESSAGE,
        max_received: int | None = None,
        dispose: Callable[[Iterable[int]], object] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._max_message = max_message
        self._dispose = _close if dispose is None else dispose
        self._incoming = Incoming(sock, max_message if max_received is None else max_received, self._dispose)
        self._outgoing = Outgoing(sock)
        self._is_closed = self._is_greeted = self._is_full = False
        self._broken: AccelError | None = None  # why nothing can be written any more
        self._at_end = False  # nothing can be read any more ...
        self._end: AccelError | None = None  # ... and why
        self._flushing: asyncio.Handle | None = None
        self._turn: asyncio.Handle | None = None
        loop.add_reader(self._fd, self._on_readable)
        self._outgoing.append(greeting())
        self._flushing = loop.call_soon(self._flush)
        close_after_fork(self)

    @property
    def pending(self) -> int:
        """Bytes that were sent and that the socket has not taken yet."""
        return self._outgoing.pending

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or lost."""
        return self._is_closed

    def send(self, kind: int, *parts: bytes | bytearray | memoryview, fds: Sequence[int] = (), now: bool = False) -> None:
        """Send one message, whose payload is ``parts`` one after the other. Never blocks; what is sent in one turn of the loop leaves together.

        What was sent before the loss of the other end is noticed may not arrive.

        Parameters
        ----------
        kind
            1 to 65,535.
        *parts
            They are copied.
        fds
            File descriptors that go with the message. They are duplicated: the caller may close its own.
        now
            Whether it leaves at once, with what was sent before in this turn, as far as the socket takes it.

        Raises
        ------
        ClosedError
            If the channel was closed or lost.
        InvalidArgumentError
            If the payload is longer than ``max_message``, there are more than 64 descriptors, or one is not open.
        """
        if self._is_closed:
            raise ClosedError("the connection to the other process is closed")
        # Other buffers first, as a whole: one that cannot be read must not leave half a message behind.
        payload = parts[0] if len(parts) == 1 else b"".join([bytes(memoryview(part)) for part in parts])
        if type(payload) is not bytes:
            payload = bytes(memoryview(payload))
        length = len(payload)
        if length > self._max_message or len(fds) > MAX_DESCRIPTORS or kind == GREETING:
            raise InvalidArgumentError(
                f"a message of kind {kind} has {length} bytes and {len(fds)} descriptors",
                remedy=f"Send at most {self._max_message} bytes and {MAX_DESCRIPTORS} descriptors, as kind 1 or more.",
            )
        message = encode_header(kind, length, len(fds)) + payload
        if self._broken is not None:
            return  # on_lost is about to say so
        if now and not fds and self._write_now(message):
            return
        self._outgoing.append(message, fds)
        if self._is_full:
            return
        if now or self._outgoing.pending > _FLUSH_BEYOND:
            self._flush()
        elif self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the connection. What the socket takes at once is still sent. Idempotent."""
        if not self._is_closed and self._broken is None:
            with contextlib.suppress(OSError):  # the other end is gone
                self._outgoing.write(_TURN_BYTES)
        self._shut()

    # -- writing

    def flush(self) -> None:
        """Write what was sent now, as far as the socket takes it: for a process that is about to end."""
        if not self._is_closed:
            self._flush()

    def _write_now(self, message: bytes) -> bool:
        """Write a message if none waits before it; return ``False``, with nothing done, else."""
        try:
            is_begun = self._outgoing.write_now(message)
        except OSError as error:
            self._break(error)
            return True
        if self._outgoing.pending and is_begun:
            self._set_full(True)
        return is_begun

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        try:
            is_empty = self._outgoing.write(_TURN_BYTES)
        except OSError as error:
            self._break(error)
            return
        self._set_full(not is_empty)

    def _break(self, error: OSError) -> None:
        """Write nothing any more."""
        self._broken = _broken_by(error)
        self._outgoing.close()
        self._set_full(False)
        if self._turn is None:  # what the other end said before it went is still to be read
            self._turn = self._loop.call_soon(self._read_turn)

    def _set_full(self, is_full: bool) -> None:
        if is_full is not self._is_full:
            self._is_full = is_full
            if is_full:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)

    # -- reading

    @property
    def has_more(self) -> bool:
        """Whether messages have been read that are still to be delivered."""
        return bool(self._incoming.messages)

    def _on_readable(self) -> None:
        if self._turn is None:
            self._read_turn()

    def _read_turn(self) -> None:
        """Read and deliver as much as one turn of the loop may take."""
        self._turn = None
        messages, room, quota = self._incoming.messages, _TURN_BYTES, _TURN_MESSAGES
        is_drained = False
        while True:
            while messages and quota and not self._is_closed:
                quota -= 1
                self._deliver(messages.popleft())
            if self._is_closed or (is_drained and not messages and self._broken is None):
                return
            if messages or (room <= 0 and self._broken is not None):
                self._turn = self._loop.call_soon(self._read_turn)
                return
            if self._at_end:
                self._lose(self._end)
                return
            if room <= 0:
                return
            count = self._read()
            room -= count
            # Less than was asked for: there was no more.
            is_drained = count < _READ_BYTES and not self._at_end

    def _read(self) -> int:
        """Read once; note it where that was the last time."""
        try:
            count = self._incoming.read(_READ_BYTES)
        except BlockingIOError:
            if self._broken is not None:
                self._finish(self._broken)
            return 0
        except OSError as error:
            self._finish(self._broken or _broken_by(error))
            return 0
        except ProtocolError as error:
            self._finish(error)
            return 0
        if not count:
            self._finish(self._broken)
        return count

    def _finish(self, error: AccelError | None) -> None:
        self._at_end, self._end = True, error
        self._loop.remove_reader(self._fd)

    def _deliver(self, message: Message) -> None:
        try:
            if not self._is_greeted:
                check_greeting(message.kind, message.payload)
                self._is_greeted = True
            elif message.kind == GREETING:
                raise ProtocolError("the other process greets a second time")  # noqa: TRY301
            else:
                self._on_message(*message)
        except ProtocolError as error:
            self._lose(error)
        except BaseException as error:
            self._lose_by(message.kind, error)
            if not isinstance(error, Exception):
                raise
        finally:
            if message.descriptors:
                self._dispose(message.descriptors)

    # -- the end

    def _lose_by(self, kind: int, error: BaseException) -> None:
        text = f"handling a message of kind {kind} from the other process failed"
        self._loop.call_exception_handler({"message": text, "exception": error})
        loss = HostDiedError(f"{text}: {type(error).__name__}: {error}", remedy="This is an error in accel: report it with its cause.")
        loss.__cause__ = error
        self._lose(loss)

    def _lose(self, error: AccelError | None) -> None:
        if not self._is_closed:
            self._shut()
            self._on_lost(error)

    def _shut(self) -> None:
        if self._is_closed:
            return
        if not self._loop.is_closed() and self._sock.fileno() == self._fd:  # else it was closed, and the number may be another's
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        self.close_inherited()

    def close_inherited(self) -> None:
        """Close the socket and the descriptors in flight, without a word to the loop or to the other end; see :class:`accel.fork.Inherited`."""
        self._is_closed, self._is_full = True, False
        for handle in (self._flushing, self._turn):
            if handle is not None:
                handle.cancel()
        self._flushing = self._turn = None
        self._incoming.close()
        self._outgoing.close()
        if self._sock.fileno() >= 0:
            self._dispose((self._sock.detach(),))


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _broken_by(error: OSError) -> HostDiedError:
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    broken = HostDiedError(f"the connection to the other process broke: {error.strerror or error}", code=name)
    # Its traceback would keep the frames of the caller whose message could not be written, and all that they hold, for as long as the channel is there.
    broken.__cause__ = error.with_traceback(None)
    return broken
