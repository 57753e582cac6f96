"""Messages to and from another process over a socket pair, on an event loop, which never blocks.

Sending appends to a buffer: messages of one loop iteration leave in one call at its end. One
iteration reads and delivers a bounded amount, so a peer that sends much does not block the loop.
File descriptors travel with the message that announces them.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from accel.errors import AccelError, ClosedError, HostDiedError, InvalidArgumentError
from accel.fork import close_after_fork
from accel.process.incoming import Incoming, Message, close_at_once
from accel.process.outgoing import Outgoing
from accel.process.protocol import GREETING, MAX_DESCRIPTORS, MAX_MESSAGE, ProtocolError, check_greeting, encode_header, greeting

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Channel"]

_FLUSH_BYTES = 64 << 10
"""Pending bytes beyond which a send flushes, and does not wait for the end of the iteration."""
# The most that one loop iteration reads, writes and delivers.
_READ_BYTES = 64 << 10
_WRITE_BYTES = 256 << 10
_MAX_MESSAGES = 512


class Channel:
    """One end of a connection to another process. Each end sends a greeting first.

    It is used on its loop's thread only.

    Parameters
    ----------
    sock
        A connected ``AF_UNIX`` stream socket. The channel owns it from here on.
    loop
        The loop on which everything is called; asyncio's or uvloop's.
    on_message
        ``on_message(kind, payload, descriptors)``, called for each message. The callback removes
        the descriptors that it keeps from the list; the others are closed when it returns. What it
        raises goes to the loop's exception handler, and the channel is lost. It raises
        :class:`ProtocolError` for a malformed payload, which goes to ``on_lost`` only.
    on_lost
        ``on_lost(error)``, called once, when the other end is gone or violates the protocol, after
        the messages before that were delivered. The error is ``None`` if the other end closed the
        connection between two messages and had read all that was sent. Not called after
        :meth:`close`.
    max_message
        Bytes of the largest payload that is sent.
    max_received
        Bytes of the largest payload that is received; ``None``: ``max_message``.
    close_fds
        Closes descriptors, possibly off the loop: those that were not kept, and the socket, whose
        queue may hold others. ``None``: at once. Closing may block where the other end is not
        trusted; see :class:`~accel.storage.disposal.Disposal`.

    Attributes
    ----------
    is_closed : bool
        Whether it was closed, or lost.
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
        close_fds: Callable[[Iterable[int]], object] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._max_message = max_message
        self._close_fds = close_at_once if close_fds is None else close_fds
        self._incoming = Incoming(sock, max_message if max_received is None else max_received, self._close_fds)
        self._outgoing = Outgoing(sock)
        self.is_closed = self._is_greeted = self._is_full = False
        self._write_error: AccelError | None = None  # why nothing can be written any more
        self._is_read_to_end = False  # nothing can be read any more ...
        self._read_error: AccelError | None = None  # ... and why; None: end of file
        self._flush_handle: asyncio.Handle | None = None  # of the flush at the iteration's end
        self._read_handle: asyncio.Handle | None = None  # of the next _read_and_deliver
        loop.add_reader(self._fd, self._on_readable)
        self._outgoing.append(greeting())
        self._flush_handle = loop.call_soon(self._flush)
        close_after_fork(self)

    @property
    def pending(self) -> int:
        """Bytes that were sent and that the socket has not taken yet."""
        return self._outgoing.pending

    def send(self, kind: int, *parts: bytes | bytearray | memoryview, fds: Sequence[int] = (), now: bool = False) -> None:
        """Send one message, whose payload is ``parts`` one after the other. Never blocks.

        Messages may be lost that were sent shortly before the other end is found to be gone.

        Parameters
        ----------
        kind
            1 to 65,535.
        *parts
            They are copied.
        fds
            File descriptors that go with the message. They are duplicated.
        now
            Whether it leaves at once, with what was sent before in this loop iteration, as far as
            the socket takes it.

        Raises
        ------
        ClosedError
            If the channel was closed or lost.
        InvalidArgumentError
            If the payload is longer than ``max_message``, or there are more than 64 descriptors, or
            one of them is not open.
        """
        if self.is_closed:
            raise ClosedError("the connection to the other process is closed")
        # Joined first: a part that is no buffer must not leave half a message.
        payload = b"".join(parts)
        length = len(payload)
        if length > self._max_message or len(fds) > MAX_DESCRIPTORS or kind == GREETING:
            raise InvalidArgumentError(
                f"a message of kind {kind} has {length} bytes and {len(fds)} descriptors",
                remedy=f"Send at most {self._max_message} bytes and {MAX_DESCRIPTORS} descriptors, as kind 1 or more.",
            )
        message = encode_header(kind, length, len(fds)) + payload
        if self._write_error is not None:
            return  # on_lost follows
        if now and not fds and self._write_now(message):
            return
        self._outgoing.append(message, fds)
        if self._is_full:
            return
        if now or self._outgoing.pending > _FLUSH_BYTES:
            self._flush()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the connection. What the socket takes at once is still sent. Idempotent."""
        if not self.is_closed and self._write_error is None:
            with contextlib.suppress(OSError):  # the other end is gone
                self._outgoing.write(_WRITE_BYTES)
        self._release()

    # -- writing: _is_full says that the socket is full, and the loop calls _flush once it is not

    def flush(self) -> None:
        """Write at once what was sent, as far as the socket takes it.

        For what must leave before the process ends, or before the loop is blocked.
        """
        if not self.is_closed:
            self._flush()

    def _write_now(self, message: bytes) -> bool:
        """Write a message if none is pending before it; else do nothing and return ``False``.

        ``True`` also if the write has failed: :meth:`_stop_writing` was called then.
        """
        try:
            is_taken = self._outgoing.write_now(message)
        except OSError as error:
            self._stop_writing(error)
            return True
        if self._outgoing.pending and is_taken:  # what the socket has not taken: a part of it, or all
            self._set_full(True)
        return is_taken

    def _flush(self) -> None:
        """Write what is pending; called at the end of an iteration, or when the socket has room."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        try:
            is_empty = self._outgoing.write(_WRITE_BYTES)
        except OSError as error:
            self._stop_writing(error)
            return
        self._set_full(not is_empty)

    def _stop_writing(self, error: OSError) -> None:
        """Drop what is pending, because a write failed.

        ``on_lost`` is called once all that the other end had sent before is read and delivered.
        """
        self._write_error = _connection_error(error)
        self._outgoing.close()
        self._set_full(False)
        self._schedule_read()

    def _set_full(self, is_full: bool) -> None:
        """Have the loop call :meth:`_flush` when the socket has room again, or no longer."""
        if is_full is not self._is_full:
            self._is_full = is_full
            if is_full:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)

    # -- reading: from the loop's reader, or from _read_handle while something is left from before

    @property
    def has_undelivered(self) -> bool:
        """Whether messages have been read that are not delivered yet."""
        return bool(self._incoming.messages)

    def _on_readable(self) -> None:
        """Read, unless :meth:`_read_and_deliver` is scheduled already. The loop's reader."""
        if self._read_handle is None:
            self._read_and_deliver()

    def _read_and_deliver(self) -> None:
        """Read once, unless messages are left, and deliver what one loop iteration may take.

        Schedule another call if messages are left, or if a broken connection is to be read to its
        end; report the loss once it is.
        """
        self._read_handle = None
        messages = self._incoming.messages
        if not messages and not self._is_read_to_end:
            self._read()
        for _ in range(min(len(messages), _MAX_MESSAGES)):
            self._deliver(messages.popleft())
            if self.is_closed:  # by the message's handler
                return
        if messages or (self._write_error is not None and not self._is_read_to_end):
            self._schedule_read()
        elif self._is_read_to_end:
            self._lose(self._read_error)

    def _schedule_read(self) -> None:
        """Schedule :meth:`_read_and_deliver`, unless a handler whose write failed already has."""
        if self._read_handle is None:
            self._read_handle = self._loop.call_soon(self._read_and_deliver)

    def _read(self) -> None:
        """Read once from the socket; stop reading if nothing more can come from it."""
        try:
            if not self._incoming.read(_READ_BYTES):
                self._stop_reading(self._write_error)
        except BlockingIOError:
            if self._write_error is not None:  # what had come before the break is read
                self._stop_reading(self._write_error)
        except OSError as error:
            self._stop_reading(self._write_error or _connection_error(error))
        except ProtocolError as error:
            self._stop_reading(error)

    def _stop_reading(self, error: AccelError | None) -> None:
        """Note that the other end sends nothing more, and why: ``None`` at the end of the file."""
        self._is_read_to_end, self._read_error = True, error
        self._loop.remove_reader(self._fd)

    def _deliver(self, message: Message) -> None:
        """Check the greeting, or call ``on_message``; then close the descriptors that are left."""
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
            self._on_callback_error(message.kind, error)
            if not isinstance(error, Exception):
                raise
        finally:
            if message.descriptors:
                self._close_fds(message.descriptors)

    # -- the end

    def _on_callback_error(self, kind: int, error: BaseException) -> None:
        """Lose the connection, because ``on_message`` raised something unexpected.

        The error goes to the loop's exception handler, and as the cause of the loss to ``on_lost``.
        """
        text = f"handling a message of kind {kind} from the other process failed"
        self._loop.call_exception_handler({"message": text, "exception": error})
        loss = HostDiedError(f"{text}: {type(error).__name__}: {error}", remedy="This is an error in accel: report it with its cause.")
        loss.__cause__ = error
        self._lose(loss)

    def _lose(self, error: AccelError | None) -> None:
        """Close this end, and report the loss; do nothing if it is closed already."""
        if not self.is_closed:
            self._release()
            self._on_lost(error)

    def _release(self) -> None:
        """Unregister the socket from the loop, and close it. Idempotent."""
        if self.is_closed:
            return
        # A socket that was closed elsewhere has no descriptor, and its number may be another's.
        if not self._loop.is_closed() and self._sock.fileno() == self._fd:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        self.close_inherited()

    def close_inherited(self) -> None:
        """Close the socket and the descriptors in flight, and leave the loop's selector as it is.

        See :class:`accel.fork.Inherited`.
        """
        self.is_closed, self._is_full = True, False
        for handle in (self._flush_handle, self._read_handle):
            if handle is not None:
                handle.cancel()
        self._flush_handle = self._read_handle = None
        self._incoming.close()
        self._outgoing.close()
        if self._sock.fileno() >= 0:
            self._close_fds((self._sock.detach(),))


def _connection_error(error: OSError) -> HostDiedError:
    """Return the error for ``on_lost`` after a system call on the socket failed."""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    broken = HostDiedError(f"the connection to the other process broke: {error.strerror or error}", code=name)
    # Its traceback would keep the frames of the caller that sent, as long as the channel lives.
    broken.__cause__ = error.with_traceback(None)
    return broken
