"""The example service on aiohttp."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from accel.cli.digits_service import DigitsService, open_service
from accel.errors import InvalidArgumentError
from accel.integrations.aiohttp import DEVICE, install

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
    install(app, device, **options)
    app.cleanup_ctx.append(service)
    app.router.add_post("/digits", _classify)
    app.router.add_get(r"/samples/{number:\d+}", _sample)
    return app


async def _classify(request: web.Request) -> web.Response:
    try:
        image = await request.json()
    except json.JSONDecodeError:
        raise InvalidArgumentError("the body is not JSON") from None
    return web.json_response(await request.app[SERVICE].classify(image))


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
