"""The application of `accel serve` for models and functions: one device or several, and a route for each. Imported late: it needs FastAPI."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated, Any

from accel import __version__
from accel._log import get_logger
from accel.cli.console import LoadingProgress
from accel.cli.extras import install_command
from accel.cli.targets import opened
from accel.integrations.encoding import dumps
from accel.integrations.fastapi import add_model, cancel_on_disconnect, install, lifespan
from accel.patterns import ModelService

# After the integration, whose ImportError says what to install.
from fastapi import Body, FastAPI, Request, Response  # isort: skip
from fastapi.responses import RedirectResponse  # isort: skip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from accel import Device, Pool
    from accel.cli.targets import Function, Target

__all__ = ["make_app"]

logger = get_logger()

_PAGE = "/accel"
_BODY_TIMEOUT = 30.0
"""Seconds in which a body must arrive, as for :func:`add_model`."""


def make_app(
    targets: Sequence[Target],
    place: dict[str, Any],
    model_options: dict[str, Any],
    load_options: dict[str, Any],
    *,
    timeout: float,
    body_limit: int,
    admin_token: str | None = None,
    **options: Any,
) -> FastAPI:
    """Return the application.

    Parameters
    ----------
    targets
        What it serves, each at its name.
    place
        Which device or pool to open: options of :func:`accel.integrations.fastapi.lifespan`.
    model_options
        Of :func:`accel.serve`, for each model.
    load_options
        Of :meth:`accel.Device.load_model`, for a model that is named itself.
    timeout
        Seconds for an answer of a model.
    body_limit
        The most bytes of a body.
    admin_token
        Of :func:`accel.integrations.fastapi.install`.
    **options
        Of :func:`accel.integrations.fastapi.lifespan`.
    """

    @contextlib.asynccontextmanager
    async def setup(opened_place: Device | Pool) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for target in targets:
                with LoadingProgress(target.name, sys.stderr) as progress:
                    served = await stack.enter_async_context(opened(target, opened_place, model_options, load_options, progress.update))
                path = f"/{target.name}"
                if isinstance(served, ModelService):
                    add_model(app, path, served, timeout=timeout, body_limit=body_limit)
                else:
                    _add_function(app, path, served)
            yield

    app = FastAPI(title=f"accel serve {' '.join(target.name for target in targets)}", lifespan=lifespan(setup, **place, **options))
    metrics: dict[str, Any] = {}
    if importlib.util.find_spec("prometheus_client") is not None:
        from prometheus_client import REGISTRY

        metrics = {"metrics": "/metrics", "metrics_registry": REGISTRY}  # it has the metrics of the process
    else:
        logger.info("metrics_not_served", missing="prometheus_client", remedy=f"Run: {install_command('metrics')}")
    install(app, body_limit=body_limit, body_timeout=_BODY_TIMEOUT, page=_PAGE, admin_token=admin_token, **metrics)
    _add_index(app, [f"/{target.name}" for target in targets], has_metrics=bool(metrics))
    return app


def _add_index(app: FastAPI, paths: Sequence[str], *, has_metrics: bool) -> None:
    """Answer ``/`` to a browser with the page, else with a line for people: what is served, on what, and what else is there."""
    more = ["/docs", _PAGE, "/healthz", "/readyz", *(["/metrics"] if has_metrics else [])]

    async def index(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(_PAGE.removeprefix("/"))  # relative, for a proxy with a prefix
        devices = app.state.accel.devices
        where = "on " + "; ".join(f"{device.name}, {device.state.value}, generation {device.generation}" for device in devices)
        return Response(f"accel {__version__} serves POST {', '.join(paths)} {where}; see {', '.join(more)}\n", media_type="text/plain")

    app.add_route("/", index, ["GET"], include_in_schema=False)


def _add_function(app: FastAPI, path: str, function: Function) -> None:
    async def answer(request: Request, body: Annotated[Any, Body()]) -> Response:
        async with cancel_on_disconnect(request):
            return Response(await dumps(await function(body)), media_type="application/json")

    # FastAPI would look up the names of the annotations in a module that has them for type checkers alone.
    answer.__annotations__.update({"request": Request, "body": Annotated[Any, Body()], "return": Response})
    app.add_api_route(path, answer, methods=["POST"], response_model=None, name=path.strip("/"))
