"""The servers of `accel serve`: an application on a listening socket, until it is asked to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Literal

from accel.cli.listening import with_head_timeout
from accel.cli.serve_log import log_request

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

__all__ = ["serve_aiohttp", "serve_asgi"]

_PATIENCE = 10
"""Seconds for the requests in flight at the end."""


async def serve_asgi(
    app: Any,
    bound: socket.socket,
    stop: asyncio.Event,
    started: Callable[[], None],
    *,
    head_timeout: float,
    lifespan: Literal["auto", "off"],
    stopping: Callable[[], None] | None = None,
) -> bool:
    """Serve an ASGI application until ``stop`` is set, then answer what is in flight.

    Parameters
    ----------
    app, bound, stop
        What to serve, where, until when.
    started
        Called once requests are taken.
    head_timeout
        Seconds in which the head of a request must arrive.
    lifespan
        Whether the application is started and ended too, if it wants that.
    stopping
        Called when no more requests are taken: it ends what would be waited for.

    Returns
    -------
    bool
        Whether it started; if not, uvicorn has said why.
    """
    import uvicorn  # as the framework of the application, where it is needed
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the command has its own handlers; uvicorn would end the process by the signal that stopped it

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            try:
                await super().startup(sockets)
            except SystemExit:  # newer versions end the process, and not their task, when the application does not start
                self.should_exit = True
            if self.started:
                started()

    config = uvicorn.Config(
        app,
        http=with_head_timeout(AutoHTTPProtocol, head_timeout),
        log_config=None,  # the command's is in effect
        access_log=False,
        lifespan=lifespan,
        ws="none",
        timeout_graceful_shutdown=_PATIENCE,
    )
    server = Server(config)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([bound]), name="accel-serve")
        waiting = group.create_task(stop.wait(), name="accel-serve-stop")
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if stopping is not None:
            stopping()
        waiting.cancel()
    return bool(server.started)


async def serve_aiohttp(
    app: Any, bound: socket.socket, stop: asyncio.Event, started: Callable[[], None], *, head_timeout: float, access_log: bool
) -> None:
    """Serve an aiohttp application until ``stop`` is set, then answer what is in flight; otherwise as :func:`serve_asgi`."""
    from aiohttp import web
    from aiohttp.abc import AbstractAccessLogger

    class AccessLog(AbstractAccessLogger):
        def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
            log_request(request.method, request.path, request.remote, response.status, time)

    # aiohttp counts it from the begin of a connection, and from each answer, to the next whole head.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=logging.getLogger("accel") if access_log else None,
        access_log_class=AccessLog,
        shutdown_timeout=_PATIENCE,
        keepalive_timeout=head_timeout,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, bound, backlog=512).start()
        started()
        await stop.wait()
    finally:
        await runner.cleanup()
