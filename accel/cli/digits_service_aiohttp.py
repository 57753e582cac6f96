"""The example service on aiohttp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.cli.digits_service import BODY_LIMIT, DigitsService, open_service
from accel.integrations.aiohttp import DEVICE, install, read_json

# After the integration, whose ImportError says what to install.
from aiohttp import web  # isort: skip

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import AsyncIterator, Callable

    from accel.cli.digits import Digits

__all__ = ["make_app", "serve"]

SERVICE = web.AppKey("digits_service", DigitsService)


def make_app(digits: Digits, device: str, **options: Any) -> web.Application:
    """Return the application.

    Parameters
    ----------
    digits
        What to fit, and to offer as samples.
    device, **options
        As for :func:`accel.integrations.aiohttp.cleanup_ctx`.
    """

    async def service(app: web.Application) -> AsyncIterator[None]:
        async with open_service(app[DEVICE], digits) as app[SERVICE]:
            yield

    app = web.Application()
    install(app, device, body_limit=BODY_LIMIT, **options)
    app.cleanup_ctx.append(service)
    app.router.add_post("/digits", _classify)
    app.router.add_get(r"/samples/{number:\d{1,18}}", _sample)
    return app


async def _classify(request: web.Request) -> web.Response:
    return web.json_response(await request.app[SERVICE].classify(await read_json(request)))


async def _sample(request: web.Request) -> web.Response:
    return web.json_response(request.app[SERVICE].sample(int(request.match_info["number"])))


async def serve(app: web.Application, bound: socket.socket, stop: asyncio.Event, started: Callable[[], None]) -> None:
    """Serve on a listening socket until ``stop`` is set, then answer what is in flight and close.

    Parameters
    ----------
    app, bound, stop
        What to serve, where, until when.
    started
        Called once requests are taken.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=10)
    await runner.setup()
    try:
        await web.SockSite(runner, bound, backlog=512).start()
        started()
        await stop.wait()
    finally:
        await runner.cleanup()
