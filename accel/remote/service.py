"""The main function of a child: hands the messages of its parent to the server, in order, and sends it the log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.actors import ActorSystem
from accel.errors import AccelError
from accel.fork import close_after_fork
from accel.process.channel import Channel
from accel.remote.error_codec import encode_error
from accel.remote.messages import Kind
from accel.remote.server import Server

if TYPE_CHECKING:
    import socket

    from accel.remote.answers import RemoteBatch, RemoteOp

__all__ = ["serve"]

_DISPATCH = 0
"""Kind of an item of the inbox that is a decoded submission, which waits to be dispatched."""

_MAX_TEXT = 8000
"""Characters of a value in an event; a longer one is cut."""

_LOGGED_BY_PARENT = frozenset(("context_ready", "actor_failed"))
"""Events that are not sent: the parent logs its own, with more fields."""


async def serve(sock: socket.socket) -> None:
    """Run a context for the process at the other end of ``sock``, until that closes it."""
    await _Service(sock).run()


class _Service:
    """Hands messages to the server: at once if possible, or through a queue.

    While the server handles a message that waits, such as for memory, those after it are queued.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._inbox: asyncio.Queue[tuple[int, Any, list[int]] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._server: Server | None = None  # set only while no message is being handled
        self._prepared: Server | None = None
        self._channel = Channel(sock, self._loop, on_message=self._on_message, on_lost=lambda _: self._inbox.put_nowait(None))
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Close the descriptors of queued messages in a fork; see :class:`accel.fork.Inherited`."""
        while not self._inbox.empty():
            for fd in (self._inbox.get_nowait() or (0, b"", []))[2]:
                os.close(fd)

    def _on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Have the server handle a message now, or queue the message, or its decoded submission.

        Descriptors of a queued message are removed from ``fds``: the channel closes those that are
        left there.
        """
        if kind == Kind.PING:  # before queued messages: it asks whether the loop runs
            self._channel.send(Kind.PONG)
            return
        if kind == Kind.WORLD and self._prepared is not None:  # before them: it may end their waits
            self._prepared.serve_world(data)
            return
        if kind == Kind.END_LOAN and self._prepared is not None:  # queued messages may wait for it
            self._prepared.end_loan(data)
            return
        outcome: bool | RemoteOp | RemoteBatch = False  # True: done; False: not begun; else decoded, to be dispatched
        if self._server is not None and self._inbox.empty():
            outcome = self._server.handle_now(kind, data)
        if outcome is False:
            self._inbox.put_nowait((kind, data, fds.copy()))
            fds.clear()  # or the channel would close them
        elif outcome is not True:
            self._inbox.put_nowait((_DISPATCH, outcome, []))

    async def run(self) -> None:
        """Serve until the parent closes the child, or has ended."""
        first = await self._inbox.get()
        if first is None:
            return
        config = pickle.loads(first[1])
        ForwardingHandler(self._channel, self._loop, config.log_level)
        async with ActorSystem("host") as system:
            server = Server(self._channel, config, system)
            self._loop.set_exception_handler(partial(_on_loop_exception, server))
            try:
                await server.prepare()
                self._prepared = server
                await self._handle_messages(server)
            except AccelError as error:
                self._channel.send(Kind.REFUSED, encode_error(error))
                self._channel.flush()
                return
        self._channel.close()

    async def _handle_messages(self, server: Server) -> None:
        """Handle queued messages one after the other, until CLOSE or the end of the connection.

        One after the other, because the parent relies on their order. While none is queued, the
        channel's callback gives the next one to the server itself, without a switch of tasks.
        """
        inbox = self._inbox
        while True:
            if inbox.empty():  # from here on, the channel may call the server directly
                self._server = server
            message = await inbox.get()
            self._server = None
            if message is None or message[0] == Kind.CLOSE:
                return
            kind, data, fds = message
            await (server.dispatch(data) if kind == _DISPATCH else server.handle(kind, data, fds))


def _on_loop_exception(server: Server, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the generation if a callback of accel's own raised: an answer may be lost.

    The loop's exception handler. Errors in callbacks of users' libraries are only printed.
    """
    error = context.get("exception")
    if error is not None and _is_from_accel(error):
        server.on_broken(error)
    else:
        loop.default_exception_handler(context)


def _is_from_accel(error: BaseException) -> bool:
    """Return whether the callback that raised is accel's, and not a user library's.

    It is the outermost frame that is not the event loop's.
    """
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in ("asyncio", "uvloop"):
            return name.partition(".")[0] in ("accel", "accel_cuda")
        trace = trace.tb_next
    return False


class ForwardingHandler(logging.Handler):
    """Sends each event of accel's logger to the parent.

    Making one sets the level of accel's logger, and keeps its events from the root's handlers.

    Parameters
    ----------
    channel
        The connection to the parent.
    loop
        The loop of the channel; events come from any thread.
    level
        The lowest level that is sent.
    """

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop, level: int) -> None:
        super().__init__(level)
        self._channel = channel
        self._loop = loop
        logger = logging.getLogger("accel")
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one event to the parent, unless that logs its own. Thread-safe; never raises."""
        try:
            fields = dict(getattr(record, "accel", {}) or {"event": record.getMessage()})
            event = str(fields.pop("event"))
            if event in _LOGGED_BY_PARENT:
                return
            if record.exc_info is not None and record.exc_info[1] is not None:
                fields.setdefault("error", repr(record.exc_info[1]))
            pairs = {str(key): value if isinstance(value, (int, float, bool)) else str(value)[:_MAX_TEXT] for key, value in fields.items()}
            data = json.dumps([record.levelname.lower(), event, pairs]).encode()
            self._loop.call_soon_threadsafe(self._send, data)
        except Exception:  # a failure to log must not harm the code that logs
            self.handleError(record)

    def _send(self, data: bytes) -> None:
        """Send an encoded event. On the loop's thread."""
        try:
            self._channel.send(Kind.LOG, data)
        except AccelError:  # the parent is gone
            return
