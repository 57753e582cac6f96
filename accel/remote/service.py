"""The program of a child: it makes things ready, begins a generation when it is told, and hands the messages to what serves them."""

from __future__ import annotations

import asyncio
import os
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.actors import ActorSystem
from accel.errors import AccelError
from accel.fork import close_after_fork
from accel.process.channel import Channel
from accel.remote.child_log import ToldLog
from accel.remote.error_codec import encode_error
from accel.remote.messages import Kind
from accel.remote.server import Server

if TYPE_CHECKING:
    import socket

    from accel.remote.answers import RemoteBatch, RemoteOp

__all__ = ["serve"]

_OPS_IN_HAND = 0
"""Kind of what is no message any more, but the ops that one has brought."""


async def serve(sock: socket.socket) -> None:
    """Run a context for the process at the other end of ``sock``, until that closes it."""
    await _Service(sock).run()


class _Service:
    """Hands the messages to the server: at once, or, while one of them has to wait, in a queue."""

    def __init__(self, sock: socket.socket) -> None:
        self._inbox: asyncio.Queue[tuple[int, Any, list[int]] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._server: Server | None = None  # while nothing is in hand
        self._channel = Channel(sock, self._loop, on_message=self._received, on_lost=lambda _: self._inbox.put_nowait(None))
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Close the descriptors of messages that wait, in a process that a library forked; see :class:`accel.fork.Inherited`."""
        while not self._inbox.empty():
            for fd in (self._inbox.get_nowait() or (0, b"", []))[2]:
                os.close(fd)

    def _received(self, kind: int, data: bytes, fds: list[int]) -> None:
        if kind == Kind.PING:  # at once: it asks whether the loop turns, not how much there is to do
            self._channel.send(Kind.PONG)
            return
        rest: bool | RemoteOp | RemoteBatch = False
        if self._server is not None and self._inbox.empty():
            rest = self._server.take_now(kind, data)
        if rest is False:
            self._inbox.put_nowait((kind, data, fds.copy()))
            fds.clear()  # they are ours now
        elif rest is not True:
            self._inbox.put_nowait((_OPS_IN_HAND, rest, []))

    async def run(self) -> None:
        """Serve until the parent wants this to end, or is gone."""
        first = await self._inbox.get()
        if first is None:
            return
        config = pickle.loads(first[1])
        ToldLog(self._channel, self._loop, config.log_level)
        async with ActorSystem("host") as system:
            server = Server(self._channel, config, system)
            try:
                await server.prepare()
                await self._until_begun(server)
            except AccelError as error:
                self._channel.send(Kind.REFUSED, encode_error(error))
                self._channel.flush()
                return
            self._loop.set_exception_handler(partial(_mishap, server))
            await self._serve(server)
        self._channel.close()

    async def _until_begun(self, server: Server) -> None:
        while (message := await self._inbox.get()) is not None and message[0] != Kind.CLOSE:
            kind, data, fds = message
            if kind == Kind.BEGIN:
                await server.begin(pickle.loads(data))
                return
            await server.handle(kind, data, fds)
        self._inbox.put_nowait(None)

    async def _serve(self, server: Server) -> None:
        inbox = self._inbox
        while True:
            if inbox.empty():
                self._server = server
            message = await inbox.get()
            self._server = None
            if message is None or message[0] == Kind.CLOSE:
                return
            kind, data, fds = message
            del message
            await (server.dispatch(data) if kind == _OPS_IN_HAND else server.handle(kind, data, fds))


def _mishap(server: Server, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if error is not None and _is_ours(error):
        server.broken(error)
    else:
        loop.default_exception_handler(context)


def _is_ours(error: BaseException) -> bool:
    """Return whether it was code of accel's, and not a user's, that the event loop called and that raised."""
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in ("asyncio", "uvloop"):
            return name.partition(".")[0] in ("accel", "accel_cuda")
        trace = trace.tb_next
    return False
