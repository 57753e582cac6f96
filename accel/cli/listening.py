"""What clients may hold of `accel serve`: a number of connections, and each for a time until it has sent the head of a request."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from time import monotonic
from typing import Any

from accel._log import get_logger

__all__ = ["Listener", "default_limit", "with_head_timeout"]

_MOST = 4096
_RESERVED = 32
"""Descriptors of the process itself: the loop's, the log's, and some of the device's."""

_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 1.0
"""Seconds for which the loop does not listen after a shortage."""
_QUIET = 60.0
"""Seconds between two lines of the log about connections."""

logger = get_logger()


def default_limit() -> int:
    """Return how many connections leave the device as many descriptors of the process (``ulimit -n``), of which a rebuild needs some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // 2 - _RESERVED))


class Listener(socket.socket):
    """A listening socket that keeps at most ``limit`` connections open, and answers others with 503.

    The limit is here and not in a protocol, because asyncio accepts all that wait before the first of their protocols runs.

    Parameters
    ----------
    listening
        The socket that listens; it is closed.
    limit
        Connections.
    """

    def __init__(self, listening: socket.socket, limit: int) -> None:
        super().__init__(listening.family, listening.type, listening.proto, listening.detach())
        self._limit = limit
        self._open: list[socket.socket] = []
        self._short_until = self._quiet_until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection that there is room for; else raise ``BlockingIOError``, as if none waited.

        Raises
        ------
        OSError
            The process has no descriptor for it. It is raised once in a second: asyncio calls for each connection that waits, and logs each error.
        """
        if monotonic() < self._short_until:
            raise BlockingIOError
        while True:
            try:
                connection, address = super().accept()
            except OSError as error:
                if error.errno in _SHORTAGES:
                    self._short_until = monotonic() + _PAUSE / 2  # until then the loop does not listen
                raise
            if len(self._open) >= self._limit:
                self._open = [each for each in self._open if each.fileno() != -1]
            if len(self._open) < self._limit:
                self._open.append(connection)
                return connection, address
            self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send(_REFUSAL)
            connection.recv(1 << 16)  # with a request unread, the client would see a reset and not the answer
        if monotonic() >= self._quiet_until:
            self._quiet_until = monotonic() + _QUIET
            logger.warning("connections_refused", limit=self._limit, remedy="Raise --max-connections, and ulimit -n with it.")


def with_head_timeout(protocol: Any, seconds: float) -> type[Any]:
    """Return a protocol of uvicorn's that closes a connection on which no head of a request was completed for some time, while it had none to answer.

    uvicorn limits how long a connection is silent after an answer, but not how long the first head takes, nor one that has begun.

    Parameters
    ----------
    protocol
        The class.
    seconds
        From the beginning of a connection. After an answer it may take up to twice as long.
    """

    class Timed(protocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look_later()

        def _look_later(self) -> None:
            self._answered = self.cycle  # the last request, or None
            self._look = self.loop.call_later(seconds, self._look_now)

        def _look_now(self) -> None:
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and self.cycle is self._answered:
                self.transport.abort()
            else:
                self._look_later()

        def connection_lost(self, exc: Exception | None) -> None:
            self._look.cancel()
            super().connection_lost(exc)

    return Timed
