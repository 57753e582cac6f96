"""Messages to and from another process over a socket pair, on an event loop, which never blocks.

Sending appends to a buffer: messages of one loop iteration leave in one call at its end. One
iteration reads and delivers a bounded amount, so a peer that sends much does not block the loop.
File descriptors travel with the message that announces them.
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
_WRITE_BYTES = 256 << 10
_MESSAGES = 512
"""The most that one loop iteration reads, writes and delivers."""


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
    dispose
        Closes the descriptors that were not kept, and the socket, whose queue may hold others;
        ``None``: at once. Closing may block where the other end is not trusted; see
        :class:`~accel.storage.disposal.Disposal`.
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
        self._is_at_end = False  # nothing can be read any more ...
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
        if self._is_closed:
            raise ClosedError("the connection to the other process is closed")
        # Joined first: a part that is no buffer must not leave half a message.
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
            return  # on_lost follows
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
                self._outgoing.write(_WRITE_BYTES)
        self._shut()

    # -- writing

    def flush(self) -> None:
        """Write at once what was sent, as far as the socket takes it; before a process ends."""
        if not self._is_closed:
            self._flush()

    def _write_now(self, message: bytes) -> bool:
        """Write a message if none is pending before it; else do nothing and return ``False``."""
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
            is_empty = self._outgoing.write(_WRITE_BYTES)
        except OSError as error:
            self._break(error)
            return
        self._set_full(not is_empty)

    def _break(self, error: OSError) -> None:
        """Stop writing; the loss is reported once all that the other end had sent is delivered."""
        self._broken = _broken_by(error)
        self._outgoing.close()
        self._set_full(False)
        if self._turn is None:
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
        """Whether messages have been read that are not delivered yet."""
        return bool(self._incoming.messages)

    def _on_readable(self) -> None:
        if self._turn is None:
            self._read_turn()

    def _read_turn(self) -> None:
        """Read once, unless messages are left, and deliver what one loop iteration may take."""
        self._turn = None
        messages = self._incoming.messages
        if not messages and not self._is_at_end:
            self._read()
        for _ in range(min(len(messages), _MESSAGES)):
            self._deliver(messages.popleft())
            if self._is_closed:
                return
        if messages or (self._broken is not None and not self._is_at_end):
            self._turn = self._loop.call_soon(self._read_turn)
        elif self._is_at_end:
            self._lose(self._end)

    def _read(self) -> None:
        """Read once, and set the end if nothing follows."""
        try:
            if not self._incoming.read(_READ_BYTES):
                self._finish(self._broken)
        except BlockingIOError:
            if self._broken is not None:
                self._finish(self._broken)
        except OSError as error:
            self._finish(self._broken or _broken_by(error))
        except ProtocolError as error:
            self._finish(error)

    def _finish(self, error: AccelError | None) -> None:
        self._is_at_end, self._end = True, error
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
        # A socket that was closed elsewhere has no descriptor, and its number may be another's.
        if not self._loop.is_closed() and self._sock.fileno() == self._fd:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        self.close_inherited()

    def close_inherited(self) -> None:
        """Close the socket and the descriptors in flight, and leave the loop's selector as it is.

        See :class:`accel.fork.Inherited`.
        """
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
    # Its traceback would keep the frames of the caller that sent, as long as the channel lives.
    broken.__cause__ = error.with_traceback(None)
    return broken
