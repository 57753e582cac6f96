"""A device in a FastAPI application.

::

    app = FastAPI(lifespan=lifespan(open_classifier))
    install(app)

    @app.post("/digits")
    async def classify(image: Image, request: Request, classifier: Annotated[Classifier, Depends(get_state)]) -> int:
        async with cancel_on_disconnect(request):
            return await classifier.submit(image)

A model needs no handler: :func:`add_model` in ``open_classifier`` makes its routes.

Needs FastAPI: ``pip install '.[web]'``, in a checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from accel.device import Device, Pool, System
from accel.errors import AccelError, InvalidArgumentError, NotInitializedError
from accel.integrations._admin import Admin
from accel.integrations._answers import Answer, error_answer, health_answer, ready_answer, unopened_answer
from accel.integrations._bodies import check_limits
from accel.integrations._models import check_tenant
from accel.integrations._opening import Enough, OnLost, Opened, check_unused, open_system
from accel.integrations._page import EVENTS, PATIENCE, PROFILE, STREAM_HEADERS, TRACE_HEADERS, Page
from accel.values import check_choice

try:
    from fastapi import Depends, FastAPI, Request, Response
    from fastapi.exception_handlers import request_validation_exception_handler
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.requests import ClientDisconnect, HTTPConnection

    from accel.integrations._fastapi_bodies import BodyMiddleware, on_invalid
    from accel.integrations._fastapi_disconnect import cancel_on_disconnect
    from accel.integrations._fastapi_models import add_model, served, show_mounted
except ImportError as missing:
    message = "accel.integrations.fastapi needs FastAPI. In a checkout, run: pip install '.[web]'"
    raise ImportError(message, name=missing.name) from missing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from prometheus_client import CollectorRegistry
    from starlette.types import Receive, Scope, Send

__all__ = [
    "AccelState",
    "DeviceDependency",
    "PoolDependency",
    "SystemDependency",
    "add_model",
    "cancel_on_disconnect",
    "get_device",
    "get_pool",
    "get_state",
    "get_system",
    "install",
    "lifespan",
]


@dataclass(frozen=True, slots=True)
class AccelState:
    """What :func:`lifespan` keeps on ``app.state.accel``.

    Parameters
    ----------
    system
        The open system.
    device
        The open device; ``None`` where a pool was opened.
    state
        What ``setup`` yielded.
    pool
        The open pool; ``None`` where a device was opened.
    enough
        How many devices of the pool must serve.
    """

    system: System
    device: Device | None
    state: Any
    pool: Pool | None = None
    enough: Enough = "any"

    @property
    def opened(self) -> Opened:
        """The device, or the pool."""
        opened = self.device or self.pool
        assert opened is not None, "lifespan() opens one of the two"
        return opened

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device, or those of the pool."""
        opened = self.opened
        return tuple(opened) if isinstance(opened, Pool) else (opened,)


def lifespan(
    setup: Callable[[Device], AbstractAsyncContextManager[Any]] | Callable[[Pool], AbstractAsyncContextManager[Any]] | None = None,
    *,
    device: str = "auto",
    pool: str | Sequence[str] | None = None,
    enough: Enough = "any",
    close_timeout: float = 10.0,
    on_lost: OnLost = "stay",
    **options: Any,
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return a lifespan that opens a system and a device with the application, and closes them with it: ``FastAPI(lifespan=lifespan())``.

    Parameters
    ----------
    setup
        Called with the device, or the pool; gives an async context manager, entered before the first request and left after the last one. Handlers get what it
        yields through :func:`get_state`. It holds weights, batchers and actors.
    device
        Which one: ``"auto"``, ``"cpu"``, ``"cuda:1"``, or a UUID.
    pool
        Several devices instead, as :meth:`accel.System.open_pool` takes them: ``"cuda"`` for all GPUs.
    enough
        How many devices of the pool must serve for ``/readyz`` to be 200, and be live for ``/healthz``: ``"any"``, ``"all"``, or a number.
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
        ``setup`` is no function, or ``on_lost`` none of the three.
    AccelError
        When the application starts: the device cannot be opened, or an option is wrong.
    """
    if isinstance(setup, FastAPI):
        raise InvalidArgumentError("lifespan was not called", remedy="Give what it returns: FastAPI(lifespan=lifespan()).")
    if setup is not None and not callable(setup):
        raise InvalidArgumentError(
            f"setup is {setup!r}, not a function that takes the device", remedy="Name a device by its keyword: lifespan(device='cpu')."
        )
    if inspect.iscoroutinefunction(setup) or inspect.isasyncgenfunction(setup):
        raise _no_context_manager(setup)
    check_choice("on_lost", on_lost, "stay", "reopen", "exit")

    @contextlib.asynccontextmanager
    async def opened(app: FastAPI) -> AsyncIterator[None]:
        async with (
            open_system(device, pool, enough, close_timeout, on_lost, options) as (system, place),
            contextlib.AsyncExitStack() as stack,
        ):
            metrics = getattr(app.state, "accel_metrics", None)
            if metrics is not None:
                stack.enter_context(metrics.watching(system))
            manager = contextlib.nullcontext() if setup is None else cast("Callable[[Opened], Any]", setup)(place)
            if not isinstance(manager, contextlib.AbstractAsyncContextManager):
                raise _no_context_manager(setup)
            state = await stack.enter_async_context(manager)
            app.state.accel = (
                AccelState(system, place, state) if isinstance(place, Device) else AccelState(system, None, state, place, enough)
            )
            page = getattr(app.state, "accel_page", None)
            if page is not None:
                page.open(system)
            if metrics is not None:
                show_mounted(app, metrics)
            yield

    return opened


def _no_context_manager(setup: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"setup={getattr(setup, '__qualname__', setup)} gives no async context manager",
        remedy="Write it as `@contextlib.asynccontextmanager async def setup(device): ... yield state`.",
    )


def _accel(connection: HTTPConnection) -> AccelState:
    if not isinstance(connection, HTTPConnection):
        raise TypeError(f"{connection!r} is no request; let FastAPI give it: `device: DeviceDependency`, or Depends(get_state)")
    found = getattr(connection.app.state, "accel", None)
    if not isinstance(found, AccelState):
        raise NotInitializedError("this application has opened no device", remedy="Give it its lifespan: FastAPI(lifespan=lifespan()).")
    return found


def get_system(connection: HTTPConnection) -> System:
    """Return the system: for handlers with ``system: SystemDependency``. Handlers that are not ``async`` use its ``portal``."""
    return _accel(connection).system


def get_device(connection: HTTPConnection) -> Device:
    """Return the device, of a pool one that serves: for handlers with ``device: DeviceDependency``."""
    opened = _accel(connection).opened
    return opened.pick() if isinstance(opened, Pool) else opened


def get_pool(connection: HTTPConnection) -> Pool:
    """Return the pool: for handlers with ``pool: PoolDependency``."""
    opened = _accel(connection).opened
    if not isinstance(opened, Pool):
        raise NotInitializedError("this application has opened no pool", remedy="Name its devices: lifespan(pool='cuda').")
    return opened


def get_state(connection: HTTPConnection) -> Any:
    """Return what ``setup`` yielded: for handlers with ``batcher: Annotated[Batcher, Depends(get_state)]``."""
    return _accel(connection).state


PoolDependency = Annotated[Pool, Depends(get_pool)]
"""A handler's parameter of this type is the pool."""

SystemDependency = Annotated[System, Depends(get_system)]
"""A handler's parameter of this type is the system."""

DeviceDependency = Annotated[Device, Depends(get_device)]
"""A handler's parameter of this type is the device; of a pool, the one that has the least to do."""


def install(
    app: FastAPI,
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
    tenant: Callable[[Request], str | Awaitable[str]] | None = None,
) -> None:
    """Answer errors of accel with HTTP statuses, limit bodies, and add the routes of health and metrics.

    Parameters
    ----------
    app
        The application, whose lifespan is, or contains, :func:`lifespan`'s.
    live, ready
        Paths of the two routes; ``None`` leaves one out. *live* is 503 once the device is lost, *ready* whenever it does not serve.
        Both are 503, with a hint, if the lifespan has opened no device.
    metrics
        Path of the metrics for Prometheus, which need prometheus_client; ``None``: no such route. ``app.state.accel_metrics`` is the
        :class:`~accel.integrations.metrics.Metrics`: it has the device and the models of :func:`add_model`, and other batchers by ``add``.
        Models of mounted applications, which have none of their own, are in them too.
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
        The most bytes of a body; a longer one is answered with 413 when so much of it has been read. ``None``: no limit.
    body_timeout
        Seconds for which a body is waited for, after which the answer is 408. ``None``: no limit.
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
    A handler that :func:`cancel_on_disconnect` ended is logged as 499, and not received. A body in a charset that Python does not know is
    answered with 415, and one that FastAPI finds invalid with 422 and the first errors, without the input.
    """
    if not isinstance(app, FastAPI):
        raise InvalidArgumentError(f"app is {app!r}", remedy="Give the application: install(app), after app = FastAPI(...).")
    check_limits(body_limit, body_timeout)
    check_tenant(tenant)
    app.state.accel_tenant = tenant
    app.add_middleware(BodyMiddleware, limit=body_limit, timeout=body_timeout)
    app.add_exception_handler(AccelError, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    if app.exception_handlers.get(RequestValidationError) is request_validation_exception_handler:
        app.add_exception_handler(RequestValidationError, on_invalid)
    for path, answer in ((live, health_answer), (ready, ready_answer)):
        if path is not None:
            app.add_api_route(path, _health_route(answer), methods=["GET", "HEAD"], include_in_schema=False)
    admin = Admin(admin_token)
    if metrics is not None:
        _add_metrics(app, metrics, admin, metrics_registry, metrics_labels)
    else:
        check_unused("metrics", metrics_registry=metrics_registry, metrics_labels=metrics_labels)
    if page is not None:
        _add_page(app, page, admin)
    elif metrics is None:
        check_unused("page", admin_token=admin_token)


def _add_metrics(app: FastAPI, path: str, admin: Admin, registry: CollectorRegistry | None, labels: Mapping[str, str] | None) -> None:
    from accel.integrations.metrics import Metrics  # here, because it needs an extra of its own

    shown = app.state.accel_metrics = Metrics(lambda: _opened(app), registry=registry, labels=labels)

    async def route(request: Request) -> Response:
        body, content_type = shown.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    app.add_route(path, _guarded(admin, route), ["GET"], include_in_schema=False)


def _add_page(app: FastAPI, path: str, admin: Admin) -> None:
    page = app.state.accel_page = Page(lambda: served(app))

    async def shown(request: Request) -> Response:
        return Response(page.html, media_type="text/html", headers=page.headers)

    async def events(request: Request) -> Response:
        if request.method == "HEAD":  # Starlette's routes have it
            return Response(headers=STREAM_HEADERS)
        stream = page.stream(request.headers.get("last-event-id", ""))
        return _response(stream) if isinstance(stream, Answer) else _Stream(stream, headers=STREAM_HEADERS)

    async def profile(request: Request) -> Response:
        async for _ in request.stream():  # a body says nothing
            pass
        async with cancel_on_disconnect(request):
            found = await page.profile(request.query_params.get("seconds"), request.query_params.get("device"))
        return Response(found, headers=TRACE_HEADERS) if isinstance(found, bytes) else _response(found)

    below = path.rstrip("/")
    for at, route, method in ((path, shown, "GET"), (below + EVENTS, events, "GET"), (below + PROFILE, profile, "POST")):
        app.add_route(at, _guarded(admin, route), [method], include_in_schema=False)


class _Stream(StreamingResponse):
    """The page's stream, which ends for a viewer that does not read it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream: Any = self.body_iterator
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE), contextlib.aclosing(stream):
                await super().__call__(scope, receive, send)


def _guarded(admin: Admin, route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        refusal = admin.refusal(request.client and request.client.host, request.headers)
        return await route(request) if refusal is None else _response(refusal)

    return guarded


def _opened(app: FastAPI) -> Opened | None:
    found = getattr(app.state, "accel", None)
    return found.opened if isinstance(found, AccelState) else None


def _health_route(answer: Callable[[Opened, Enough], Answer]) -> Callable[[HTTPConnection], Any]:
    async def route(connection: HTTPConnection) -> Response:
        try:
            found = _accel(connection)
        except NotInitializedError as error:
            return _response(unopened_answer(str(error)))
        return _response(answer(found.opened, found.enough))

    return route


def _response(answer: Answer) -> Response:
    return JSONResponse(dict(answer.body), answer.status, headers=answer.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, AccelError):
        raise error
    return _response(error_answer(error, _opened(request.app)))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
