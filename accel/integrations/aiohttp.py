"""A device in an aiohttp application.

::

    app = web.Application()
    install(app)
    app.cleanup_ctx.append(open_classifier)  # an async generator function that finds app[DEVICE] there
    app.router.add_post("/digits", classify)
    web.run_app(app, handler_cancellation=True)

``handler_cancellation=True`` (of ``web.run_app`` and ``web.AppRunner``) makes aiohttp cancel a handler whose client has disconnected, and with it
the handler's work; without it, the handler runs on. Needs aiohttp: ``pip install '.[web]'``, in a checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from accel.device import Device, Pool, System
from accel.errors import AccelError, InvalidArgumentError
from accel.integrations._admin import Admin
from accel.integrations._answers import Answer, error_answer, health_answer, ready_answer
from accel.integrations._bodies import LATE, TOO_LONG, UNKNOWN_CHARSET, check_limits, has_known_charset, parsed
from accel.integrations._models import ModelRoute, check_json, check_tenant
from accel.integrations._opening import Enough, OnLost, Opened, check_unused, open_system
from accel.integrations._page import EVENTS, PATIENCE, PROFILE, STREAM_HEADERS, TRACE_HEADERS, Page
from accel.values import check_choice

try:
    from aiohttp import web
except ImportError as missing:
    message = "accel.integrations.aiohttp needs aiohttp. In a checkout, run: pip install '.[web]'"
    raise ImportError(message, name=missing.name) from missing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from aiohttp.typedefs import Middleware
    from prometheus_client import CollectorRegistry

    from accel.integrations.metrics import Metrics
    from accel.patterns import ModelService

    Tenant = Callable[[web.Request], str | Awaitable[str]]
    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

__all__ = ["DEVICE", "METRICS", "POOL", "SYSTEM", "add_model", "cleanup_ctx", "error_middleware", "install", "read_json"]

SYSTEM: web.AppKey[System] = web.AppKey("accel_system", System)
"""``app[SYSTEM]`` is the system."""

DEVICE: web.AppKey[Device] = web.AppKey("accel_device", Device)
"""``app[DEVICE]`` is the device."""

POOL: web.AppKey[Pool] = web.AppKey("accel_pool", Pool)
"""``app[POOL]`` is the pool, where one was named in place of a device."""

METRICS: web.AppKey[Metrics] = web.AppKey("accel_metrics")
"""``app[METRICS]`` are the metrics, where :func:`install` was given a path for them."""

_TENANT: web.AppKey[Tenant] = web.AppKey("accel_tenant")
_PAGE: web.AppKey[Page] = web.AppKey("accel_page", Page)

_MODELS: web.AppKey[list[tuple[ModelRoute, web.AppKey[ModelService]]]] = web.AppKey("accel_models")


def cleanup_ctx(
    device: str = "auto",
    *,
    pool: str | Sequence[str] | None = None,
    enough: Enough = "any",
    close_timeout: float = 10.0,
    on_lost: OnLost = "stay",
    **options: Any,
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return a context for ``app.cleanup_ctx`` that opens a system and a device with the application, and closes them with it.

    Parameters
    ----------
    device
        Which one: ``"auto"``, ``"cpu"``, ``"cuda:1"``, or a UUID.
    pool
        Several devices instead, as :meth:`accel.System.open_pool` takes them: ``"cuda"`` for all GPUs.
    enough
        How many devices of the pool must be live for ``on_lost="exit"`` to let the process run: ``"any"``, ``"all"``, or a number.
    close_timeout
        Seconds that the shutdown waits for work that was sent.
    on_lost
        What is done when the device is LOST. ``"stay"``: nothing; ``/healthz`` answers 503, so that a supervisor restarts the process. ``"reopen"``:
        :meth:`accel.Device.reopen`, at once and then after pauses of 1 to 60 s, until it works. ``"exit"``: the process sends SIGTERM to itself;
        with a pool, when too few of its devices are live.
    **options
        Of :meth:`accel.System.open_device`, or of :meth:`accel.System.open_pool`, with ``overload="reject"`` unless given.

    Raises
    ------
    InvalidArgumentError
        ``on_lost`` is none of the three.
    AccelError
        When the application starts: the device cannot be opened, or an option is wrong.
    """
    check_choice("on_lost", on_lost, "stay", "reopen", "exit")

    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with open_system(device, pool, enough, close_timeout, on_lost, options) as (app[SYSTEM], opened):
            if isinstance(opened, Pool):
                app[POOL] = opened
            else:
                app[DEVICE] = opened
            with app[METRICS].watching(app[SYSTEM]) if METRICS in app else contextlib.nullcontext():
                yield

    return opened


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors of accel with HTTP statuses, and a body that does not match its headers with 400."""
    try:
        return await handler(request)
    except AccelError as error:
        return _response(error_answer(error, _opened(request.config_dict)))
    except web.RequestPayloadError:
        answer = web.Response(status=400, text="The body cannot be decoded.")
        answer.force_close()  # where the next request begins is not known
        return answer


async def read_json(request: web.Request) -> Any:
    """Read a request's body as JSON: in UTF-8, as JSON is, whatever charset the client names.

    Parameters
    ----------
    request
        The handler's request.

    Raises
    ------
    InvalidArgumentError
        It is not JSON, nested too deeply, or has an integer of more digits than Python takes. The client gets 422.
    """
    return parsed(await request.read())


def install(
    app: web.Application,
    device: str = "auto",
    *,
    live: str | None = "/healthz",
    ready: str | None = "/readyz",
    metrics: str | None = None,
    metrics_registry: CollectorRegistry | None = None,
    metrics_labels: Mapping[str, str] | None = None,
    page: str | None = None,
    admin_token: str | None = None,
    body_limit: int | None = None,
    body_timeout: float | None = None,
    tenant: Tenant | None = None,
    pool: str | Sequence[str] | None = None,
    enough: Enough = "any",
    close_timeout: float = 10.0,
    on_lost: OnLost = "stay",
    **options: Any,
) -> None:
    """Add all of it: :func:`cleanup_ctx`, :func:`error_middleware`, the limit of bodies, and the routes of health and metrics.

    Parameters
    ----------
    app
        The application. Contexts and middlewares that are added later find the device open, and their errors answered.
    device, pool, close_timeout, on_lost, **options
        As for :func:`cleanup_ctx`.
    enough
        How many devices of the pool must serve for *ready*, and be live for *live*: ``"any"``, ``"all"``, or a number.
    live, ready
        Paths of the two routes; ``None`` leaves one out. *live* is 503 once the device is lost, *ready* whenever it does not serve.
    metrics
        Path of the metrics for Prometheus, which need prometheus_client; ``None``: no such route. ``app[METRICS]`` is the
        :class:`~accel.integrations.metrics.Metrics`: it has the device and the models of :func:`add_model`, and other batchers by ``add``.
        Models of sub-applications, which have none of their own, are in them too.
    metrics_registry
        A registry of prometheus_client whose metrics are served with them: ``prometheus_client.REGISTRY`` has those of the application and of the process.
    metrics_labels
        Labels that all of them get, such as ``{"worker": str(os.getpid())}`` where several processes answer at one address.
    page
        Path of a page that shows the service while it runs, for browsers; ``None``: no such route. It reads only. A POST to ``/profile`` below it is
        answered with a :meth:`profile <accel.Device.profile>` of the next ``seconds=``, of all devices or of ``device=``.
    admin_token
        What a client must present for metrics, page and profiles: as a bearer token, or as the password of any user. ``None``: they are answered to this
        machine alone, that is at a loopback address and without the headers of a proxy; behind a proxy on this machine, give a token. Pages of other
        sites are refused either way.
    body_limit
        The most bytes of a body, after decompression; a handler that reads a longer one is answered with 413. ``None``: the application's
        ``client_max_size``, which is 1 MiB unless it was given. What a handler reads from ``request.content`` itself is not counted.
    body_timeout
        Seconds from the head of a request in which its body must arrive; a handler that reads a later one is answered with 408. ``None``: no limit.
    tenant
        ``tenant(request)`` says which tenant a request to a model with shares is of: see :func:`add_model`.

    Raises
    ------
    InvalidArgumentError
        ``body_limit`` is not an int of at least 1, ``body_timeout`` no number of seconds, or ``metrics_registry`` or ``metrics_labels`` is none, or
        given without ``metrics``, or ``admin_token`` is not text of at least 16 printable ASCII characters, or given without ``metrics`` and ``page``.
    ImportError
        ``metrics`` is given, and prometheus_client is not installed.

    Notes
    -----
    A body in a charset that Python does not know is answered with 415.
    """
    if not isinstance(app, web.Application):
        raise InvalidArgumentError(f"app is {app!r}", remedy="Give the application: install(app), after app = web.Application().")
    check_limits(body_limit, body_timeout)
    check_tenant(tenant)
    if tenant is not None:
        app[_TENANT] = tenant
    app.cleanup_ctx.append(cleanup_ctx(device, pool=pool, enough=enough, close_timeout=close_timeout, on_lost=on_lost, **options))
    app.middlewares.extend((error_middleware, _body_middleware(body_limit, body_timeout)))
    for path, answer in ((live, health_answer), (ready, ready_answer)):
        if path is not None:
            app.router.add_get(path, _health_route(answer, enough))
    admin = Admin(admin_token)
    if metrics is not None:
        _add_metrics(app, metrics, admin, metrics_registry, metrics_labels)
    else:
        check_unused("metrics", metrics_registry=metrics_registry, metrics_labels=metrics_labels)
    if page is not None:
        _add_page(app, page, admin)
    elif metrics is None:
        check_unused("page", admin_token=admin_token)


def add_model(
    app: web.Application,
    path: str,
    service: web.AppKey[ModelService],
    *,
    name: str | None = None,
    timeout: float | None = 30.0,
    max_list: int = 64,
    body_limit: int | None = 1 << 20,
    body_timeout: float | None = 30.0,
    tenant: Tenant | None = None,
) -> None:
    """Serve a model at a path: POST one item as JSON, or ``{"items": [...]}`` at ``path + "/list"``.

    Each input of the model is a field of the body, without the batch dimension; so is each output of the answer. A model that returns one array, or a
    tuple, has the field ``output``, or ``outputs``. NaN and infinities are ``null`` in answers. Items of concurrent requests are batched by the service.

    Parameters
    ----------
    app
        The application, before it starts and after :func:`install`, which answers its errors.
    path
        Begins with a slash.
    service
        The key under which a cleanup context puts what :func:`accel.serve` returned, entered. With ``overload="reject"`` it answers 429 when it is full.
    name
        The label ``model`` of metrics; ``None``: the path without its first slash.
    timeout
        Seconds for the answer to an item, after which it is 504; ``None`` waits as long as it takes.
    max_list
        The most items of one request; 0 leaves out the route of lists. If one item fails, the answer is its error.
    body_limit
        The most bytes of a body, after decompression; a longer one is answered with 413 before it is parsed. ``None``: the limit of :func:`install`.
    body_timeout
        Seconds in which a body must arrive, after which it is 408. ``None``: the limit of :func:`install`.
    tenant
        For a service with shares: ``tenant(request)`` says which tenant a request is of, and may be a coroutine function. It has to check what the client
        presents, and may raise what the framework answers with 401. A name that has no share is answered with 403, and none within
        ``timeout`` with 504. ``None``: that of :func:`install`.

    Raises
    ------
    InvalidArgumentError
        An option is out of range. When the application starts: the service has shares and there is no ``tenant``, or the other way round.
    UnsupportedError
        When the application starts: an input or output is complex, which JSON has not.
    """
    check_limits(body_limit, body_timeout)
    route = ModelRoute(path.removeprefix("/") if name is None else name, timeout, max_list, tenant)

    async def started(app: web.Application) -> None:
        opened = app[service]
        check_json(opened)
        route.check_shares(opened, app.get(_TENANT))
        metrics = app.get(METRICS, route.metrics)
        if metrics is not None:
            route.show(metrics, opened)

    async def body(request: web.Request) -> Any:
        with _in_time(request, body_timeout):
            try:
                return await read_json(request if body_limit is None else request.clone(client_max_size=body_limit))
            except web.HTTPRequestEntityTooLarge as error:
                error.text, error.content_type = _detail(TOO_LONG), "application/json"
                raise

    async def one(request: web.Request) -> web.Response:
        tenant = await route.tenant(request)
        return _json(*await route.one(app[service], await body(request), tenant))

    async def many(request: web.Request) -> web.Response:
        tenant = await route.tenant(request)
        return _json(*await route.many(app[service], await body(request), tenant))

    if _MODELS not in app:
        app[_MODELS] = []
    app[_MODELS].append((route, service))
    app.on_startup.append(started)  # after the cleanup contexts
    app.router.add_post(path, one)
    if max_list:
        app.router.add_post(f"{path.rstrip('/')}/list", many)


def _json(body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(body=body, headers=headers, content_type="application/json")


def _add_metrics(
    app: web.Application, path: str, admin: Admin, registry: CollectorRegistry | None, labels: Mapping[str, str] | None
) -> None:
    from accel.integrations.metrics import Metrics  # here, because it needs an extra of its own

    shown = app[METRICS] = Metrics(lambda: _opened(app), registry=registry, labels=labels)

    async def show_parts(app: web.Application) -> None:
        _show_parts(app, shown)

    app.on_startup.append(show_parts)

    async def route(request: web.Request) -> web.StreamResponse:
        body, content_type = shown.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    app.router.add_get(path, _guarded(admin, route))


def _add_page(app: web.Application, path: str, admin: Admin) -> None:
    page = app[_PAGE] = Page(lambda: _served(app))

    async def open_page(app: web.Application) -> None:
        page.open(app[SYSTEM])

    async def close_page(app: web.Application) -> None:
        page.close()

    async def shown(request: web.Request) -> web.StreamResponse:
        return web.Response(body=page.html, content_type="text/html", charset="utf-8", headers=page.headers)

    async def events(request: web.Request) -> web.StreamResponse:
        found = page.stream(request.headers.get("Last-Event-ID", ""))
        if isinstance(found, Answer):
            return _response(found)
        response = web.StreamResponse(headers=STREAM_HEADERS)
        try:
            async with asyncio.timeout(PATIENCE), contextlib.aclosing(found) as stream:
                await response.prepare(request)
                async for message in stream:
                    await response.write(message)
        except ConnectionError:
            pass  # the viewer has left
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response

    async def profile(request: web.Request) -> web.StreamResponse:
        found = await page.profile(request.query.get("seconds"), request.query.get("device"))
        return web.Response(body=found, headers=TRACE_HEADERS) if isinstance(found, bytes) else _response(found)

    app.on_startup.append(open_page)
    app.on_shutdown.append(close_page)
    below = path.rstrip("/")
    for at, route, method in ((path, shown, "GET"), (below + EVENTS, events, "GET"), (below + PROFILE, profile, "POST")):
        app.router.add_route(method, at, _guarded(admin, route))


def _guarded(admin: Admin, route: Handler) -> Handler:
    async def guarded(request: web.Request) -> web.StreamResponse:
        peer = None if request.transport is None else request.transport.get_extra_info("peername")
        refusal = admin.refusal(peer[0] if isinstance(peer, tuple) else None, request.headers)
        return await route(request) if refusal is None else _response(refusal)

    return guarded


def _served(app: web.Application) -> Iterator[tuple[str, ModelService]]:
    """Yield name and service of each model of an application, and of its sub-applications."""
    yield from ((route.name, app[service]) for route, service in app.get(_MODELS, ()) if service in app)
    for resource in app.router.resources():
        part = resource.get_info().get("app")
        if part is not None:
            yield from _served(part)


def _show_parts(app: web.Application, metrics: Metrics) -> None:
    """Show the models of sub-applications in these metrics: those that have started now, the others as they start."""
    for resource in app.router.resources():
        part = resource.get_info().get("app")
        if part is None or METRICS in part:
            continue
        for route, service in part.get(_MODELS, ()):
            route.metrics = metrics
            if service in part:
                route.show(metrics, part[service])
        _show_parts(part, metrics)


def _detail(text: str) -> str:
    """Return the body of an answer to a body that was not read: on FastAPI it is the same."""
    return json.dumps({"detail": text})


class _LateBodyError(TimeoutError):
    """Ends the reading of a body. A TimeoutError, because aiohttp then closes the connection without a line in the log."""


@contextlib.contextmanager
def _in_time(request: web.Request, seconds: float | None) -> Iterator[None]:
    """Answer a request with 408 whose body is read in the block, and has not arrived some seconds after its begin."""
    content = request.content

    def end() -> None:
        if not content.is_eof():
            content.set_exception(_LateBodyError())

    ending = None if seconds is None or content.is_eof() else asyncio.get_running_loop().call_later(seconds, end)
    try:
        yield
    except _LateBodyError:
        late = web.HTTPRequestTimeout(text=_detail(LATE), content_type="application/json")
        late.force_close()
        raise late from None
    finally:
        if ending is not None:
            ending.cancel()


def _body_middleware(limit: int | None, timeout: float | None) -> Middleware:
    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.can_read_body:
            return await handler(request)
        if not has_known_charset(request.headers.get("Content-Type", "")):
            raise web.HTTPUnsupportedMediaType(text=_detail(UNKNOWN_CHARSET), content_type="application/json")
        with _in_time(request, timeout):
            if limit is None:
                return await handler(request)
            limited = request.clone(client_max_size=limit)
            try:
                return await handler(limited)
            finally:
                # When all is sent aiohttp closes the uploaded files of the request that it has made itself.
                request._post = limited._post  # noqa: SLF001

    return checked


def _opened(app: Mapping[Any, Any]) -> Opened | None:
    """Return the device of an application, or its pool, if it is open."""
    found: Opened | None = app.get(DEVICE) or app.get(POOL)
    return found


def _health_route(answer: Callable[[Opened, Enough], Answer], enough: Enough) -> Handler:
    async def route(request: web.Request) -> web.StreamResponse:
        opened = _opened(request.config_dict)
        assert opened is not None, "the cleanup context has opened one before the first request"
        return _response(answer(opened, enough))

    return route


def _response(answer: Answer) -> web.Response:
    return web.json_response(dict(answer.body), status=answer.status, headers=dict(answer.headers))
