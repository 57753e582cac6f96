"""A device in an aiohttp application.

::

    app = web.Application()
    install(app)
    app.cleanup_ctx.append(open_classifier)  # an async generator function that finds app[DEVICE] there
    app.router.add_post("/digits", classify)
    web.run_app(app, handler_cancellation=True)

``handler_cancellation=True`` (of ``web.run_app`` and ``web.AppRunner``) makes aiohttp cancel a handler whose client went away, and with it the
handler's work; without it, aiohttp lets the handler run on. Needs aiohttp: ``pip install 'accel-actors[web]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.device import Device, System
from accel.errors import AccelError
from accel.integrations._answers import Answer, error_answer, health_answer, ready_answer
from accel.integrations._opening import OnLost, check_on_lost, open_system

try:
    from aiohttp import web
except ImportError as missing:
    message = "accel.integrations.aiohttp needs aiohttp. Install it with: pip install 'accel-actors[web]'"
    raise ImportError(message, name=missing.name) from missing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

__all__ = ["DEVICE", "SYSTEM", "cleanup_ctx", "error_middleware", "install"]

SYSTEM: web.AppKey[System] = web.AppKey("accel_system", System)
"""``app[SYSTEM]`` is the system."""

DEVICE: web.AppKey[Device] = web.AppKey("accel_device", Device)
"""``app[DEVICE]`` is the device."""


def cleanup_ctx(
    device: str = "auto", *, close_timeout: float = 10.0, on_lost: OnLost = "stay", **options: Any
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return a context for ``app.cleanup_ctx`` that opens a system and a device with the application, and closes them with it.

    Parameters
    ----------
    device
        Which one: ``"auto"``, ``"cpu"``, ``"cuda:1"``, or a UUID.
    close_timeout
        Seconds that the end waits for work that was sent.
    on_lost
        What is done when the device is LOST. ``"stay"``: nothing, ``/healthz`` is 503 and who watches it restarts the process. ``"reopen"``:
        :meth:`accel.Device.reopen`, at once and then after pauses of 1 to 60 s, until it works. ``"exit"``: the process sends SIGTERM to itself.
    **options
        Of :meth:`accel.System.open_device`, with ``overload="reject"`` unless given.

    Raises
    ------
    InvalidArgumentError
        ``on_lost`` is none of the three.
    AccelError
        When the application starts: the device cannot be opened, or an option is wrong.
    """
    check_on_lost(on_lost)

    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with open_system(device, close_timeout, on_lost, options) as (app[SYSTEM], app[DEVICE]):
            yield

    return opened


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors of accel with HTTP statuses."""
    try:
        return await handler(request)
    except AccelError as error:
        return _response(error_answer(error, request.config_dict.get(DEVICE)))


def install(
    app: web.Application,
    device: str = "auto",
    *,
    live: str | None = "/healthz",
    ready: str | None = "/readyz",
    close_timeout: float = 10.0,
    on_lost: OnLost = "stay",
    **options: Any,
) -> None:
    """Add all of it: :func:`cleanup_ctx`, :func:`error_middleware` and the health routes.

    Parameters
    ----------
    app
        The application. Contexts and middlewares that are added later find the device open, and their errors answered.
    device, close_timeout, on_lost, **options
        As for :func:`cleanup_ctx`.
    live, ready
        Paths of the two routes; ``None`` leaves one out. *live* is 503 once the device is lost, *ready* whenever it does not serve.
    """
    app.cleanup_ctx.append(cleanup_ctx(device, close_timeout=close_timeout, on_lost=on_lost, **options))
    app.middlewares.append(error_middleware)
    for path, answer in ((live, health_answer), (ready, ready_answer)):
        if path is not None:
            app.router.add_get(path, _health_route(answer))


def _health_route(answer: Callable[[Device], Answer]) -> Handler:
    async def route(request: web.Request) -> web.StreamResponse:
        return _response(answer(request.config_dict[DEVICE]))

    return route


def _response(answer: Answer) -> web.Response:
    return web.json_response(dict(answer.body), status=answer.status, headers=dict(answer.headers))
