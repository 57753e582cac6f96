"""The routes of a model in a FastAPI application, and their schemas. Imported by :mod:`accel.integrations.fastapi` alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, create_model
from starlette.routing import Mount

from accel.errors import InvalidArgumentError
from accel.integrations._bodies import check_limits, parsed
from accel.integrations._fastapi_bodies import BodyMiddleware
from accel.integrations._fastapi_disconnect import cancel_on_disconnect
from accel.integrations._models import ModelRoute, check_json
from accel.patterns import ModelService

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from accel.dtype import DType
    from accel.integrations.metrics import Metrics
    from accel.models import Buckets, OutputSpecs
    from accel.models.outputs import Dim
    from accel.models.tensor_spec import Sizes

__all__ = ["add_model", "served", "show_mounted"]


Tenant: TypeAlias = "Callable[[Request], str | Awaitable[str]]"
"""Says which tenant a request is of."""

Served: TypeAlias = "dict[str, tuple[ModelRoute, ModelService]]"
"""The models of an application, by their paths."""


class ErrorAnswer(BaseModel):
    """Why a request was not answered."""

    error: str = Field(description="The error's class.", examples=["DeadlineExceededError"])
    detail: str = Field(description="What happened, in a sentence.")
    retryable: bool = Field(description="Whether the same request may be answered later.")
    generation: int | None = Field(description="Number of the device's context.")
    field: str | None = Field(None, description="The input that is wrong.", examples=["input_ids"])


class RefusedAnswer(BaseModel):
    """Why the body was not read."""

    detail: str


_RETRY_AFTER = {"Retry-After": {"description": "Whole seconds, from 1 to 60.", "schema": {"type": "integer"}}}

_RESPONSES: dict[int | str, dict[str, Any]] = {
    408: {"model": RefusedAnswer, "description": "The body did not arrive in time"},
    413: {"model": RefusedAnswer, "description": "The body is too long"},
    422: {
        "model": ErrorAnswer,
        "description": "The body does not fit, or makes the accelerator fault (`PoisonedInputError`)",
    },
    429: {"model": ErrorAnswer, "description": "The service has as much work as it takes", "headers": _RETRY_AFTER},
    500: {"model": ErrorAnswer, "description": "The model failed on the request"},
    503: {"model": ErrorAnswer, "description": "The accelerator was restarted, or is not there", "headers": _RETRY_AFTER},
    504: {"model": ErrorAnswer, "description": "The answer did not come in time"},
}

_NO_SHARE: dict[int | str, dict[str, Any]] = {
    403: {"model": ErrorAnswer, "description": "The service has no share of the accelerator for this client"}
}


def add_model(
    app: FastAPI,
    path: str,
    service: ModelService,
    *,
    name: str | None = None,
    timeout: float | None = 30.0,
    max_list: int = 64,
    body_limit: int | None = 1 << 20,
    body_timeout: float | None = 30.0,
    tenant: Tenant | None = None,
) -> None:
    """Serve a model at a path: POST one item as JSON, or a list of them at ``path + "/list"``. For ``setup`` of :func:`lifespan`, as the model must be loaded.

    Each input of the model is a field of the body, without the batch dimension; so is each output of the answer. A model that returns one array, or a
    tuple, has the field ``output``, or ``outputs``. NaN and infinities are ``null`` in answers. Items of concurrent requests are batched by the service.

    Parameters
    ----------
    app
        The application; :func:`install` answers its errors.
    path
        Begins with a slash. A second call with a path, as when the lifespan is entered again, puts another service of the same model there.
    service
        What :func:`accel.serve` returned, entered. With ``overload="reject"`` it answers 429 when it is full.
    name
        The label ``model`` of metrics; ``None``: the path without its first slash.
    timeout
        Seconds for the answer to an item, after which it is 504; ``None`` waits as long as it takes.
    max_list
        The most items of one request; 0 leaves out the route of lists. If one item fails, the answer is its error.
    body_limit
        The most bytes of a body; a longer one is answered with 413 before it is parsed. ``None``: the limit of :func:`install`.
    body_timeout
        Seconds in which a body must arrive, after which it is 408. ``None``: the limit of :func:`install`.
    tenant
        For a service with shares: ``tenant(request)`` says which tenant a request is of, and may be a coroutine function. It has to check what the client
        presents, and may raise what the framework answers with 401. A name that has no share is answered with 403, and none within
        ``timeout`` with 504. ``None``: that of :func:`install`.

    Raises
    ------
    InvalidArgumentError
        The service is none, or another model is at this path, or an option is out of range, or the service has shares and there is no
        ``tenant``, or the other way round.
    UnsupportedError
        An input or output is complex, which JSON has not.

    Notes
    -----
    When the client goes away, its items that have not been sent to the device are dropped.
    """
    if not isinstance(service, ModelService):
        raise InvalidArgumentError(f"service is {service!r}", remedy="Give what accel.serve(model) returned.")
    if not path.startswith("/"):
        raise InvalidArgumentError(f"path is {path!r}", remedy="Begin it with a slash.")
    check_limits(body_limit, body_timeout)
    check_json(service)
    route = ModelRoute(path.removeprefix("/") if name is None else name, timeout, max_list, tenant)
    route.check_shares(service, getattr(app.state, "accel_tenant", None))
    served: Served | None = getattr(app.state, "accel_models", None)
    if served is None:
        served = app.state.accel_models = {}
    before = served[path][1].model if path in served else None
    if before is not None and (before.inputs, before.outputs) != (service.model.inputs, service.model.outputs):
        raise InvalidArgumentError(f"{path} serves {before!r} already", remedy="Choose another path for another model.")
    served[path] = (route, service)
    metrics = getattr(app.state, "accel_metrics", None)
    if metrics is not None:
        route.show(metrics, service)
    if before is None:
        _add_routes(app, path, route, served, partial(BodyMiddleware, limit=body_limit, timeout=body_timeout))


def served(app: FastAPI) -> Iterator[tuple[str, ModelService]]:
    """Yield name and service of each model of an application, and of those that are mounted in it."""
    yield from ((route.name, service) for route, service in getattr(app.state, "accel_models", {}).values())
    for mount in app.routes:
        if isinstance(mount, Mount) and isinstance(mount.app, FastAPI):
            yield from served(mount.app)


def show_mounted(app: FastAPI, metrics: Metrics) -> None:
    """Show the models of applications that are mounted in this one, and have no metrics of their own, in its metrics."""
    for mount in app.routes:
        part = mount.app if isinstance(mount, Mount) else None
        if isinstance(part, FastAPI) and getattr(part.state, "accel_metrics", metrics) is metrics:
            part.state.accel_metrics = metrics  # of what is added later
            for route, service in getattr(part.state, "accel_models", {}).values():
                route.show(metrics, service)
            show_mounted(part, metrics)


def _add_routes(app: FastAPI, path: str, route: ModelRoute, served: Served, limited: Callable[[Any], BodyMiddleware]) -> None:
    """Add the routes, which look for their service at each request: another one of the same model may have taken its place."""
    model = served[path][1].model
    title = "".join(part.capitalize() for part in route.name.replace("-", "_").replace("/", "_").split("_")) or "Model"
    item, answer = _item(f"{title}Item", model.buckets), _answer(f"{title}Answer", model.outputs)

    # The bodies are read here, and not by FastAPI: one conversion serves all frameworks, and answers with one error and not with one for each number.
    async def one(request: Request) -> Response:
        async with cancel_on_disconnect(request):
            now, service = served[path]
            tenant = await now.tenant(request)
            return _json(*await now.one(service, parsed(await request.body()), tenant))

    async def many(request: Request) -> Response:
        async with cancel_on_disconnect(request):
            now, service = served[path]
            tenant = await now.tenant(request)
            return _json(*await now.many(service, parsed(await request.body()), tenant))

    def add(at: str, endpoint: Any, taken: dict[str, Any], given: type[BaseModel], summary: str) -> None:
        endpoint.__annotations__["request"] = Request  # FastAPI would look the name up in a module that has it for type checkers alone
        body = {"required": True, "content": {"application/json": {"schema": taken}}}
        app.add_api_route(
            at,
            endpoint,
            methods=["POST"],
            response_model=given,
            responses={**_RESPONSES, **_NO_SHARE} if served[path][1].statistics().tenants else _RESPONSES,
            openapi_extra={"requestBody": body},
            name=at.strip("/"),
            summary=summary,
        )
        added = app.router.routes[-1]
        assert hasattr(added, "app"), "a route of FastAPI has an application"
        added.app = limited(added.app)

    add(path, one, item, answer, f"Run {route.name} on one item")
    if route.max_list:
        items = {"items": {"type": "array", "items": item, "minItems": 1, "maxItems": route.max_list}}
        answers = create_model(f"{title}Answers", items=(list[answer], ...))  # type: ignore[valid-type]
        add(f"{path.rstrip('/')}/list", many, _object(f"{title}Items", items), answers, f"Run {route.name} on several items")
    app.openapi_schema = None  # made anew, with these routes, when it is asked for


def _json(body: bytes, headers: dict[str, str]) -> Response:
    return Response(body, headers=headers, media_type="application/json")


def _object(title: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"title": title, "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _item(title: str, buckets: Buckets) -> dict[str, Any]:
    """Return the schema of an item. It is written and not checked: what it says is what :func:`accel.values.converted` takes."""
    longest = {dim: lengths[-1] for dim, lengths in buckets.lengths.items()}
    return _object(
        title,
        {
            name: {**_nested_schema(spec.item_shape, spec.dtype, longest), "description": _said(spec.item_shape, spec.dtype)}
            for name, spec in buckets.inputs.items()
        },
    )


def _nested_schema(shape: tuple[int | str, ...], dtype: DType, longest: Sizes) -> dict[str, Any]:
    """Return the schema of lists of a shape: as long as it says, or up to the longest bucket."""
    if dtype.kind == "float":
        schema: dict[str, Any] = {"type": "number"}
    elif dtype.kind == "bool":
        schema = {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 1}]}
    else:
        limits = np.iinfo(dtype.numpy)
        schema = {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
    for dim in reversed(shape):
        low, high = (1, longest.get(dim)) if isinstance(dim, str) else (dim, dim)
        schema = {"type": "array", "items": schema, "minItems": low, **({} if high is None else {"maxItems": high})}
    return schema


def _answer(title: str, outputs: OutputSpecs) -> type[BaseModel]:
    """Return the schema of the answer to an item. It is written and not checked: the encoder takes arrays as they are."""
    types = [
        (_nested(shape, _number_or_null(dtype)), _said(shape, dtype))
        for shape, dtype in zip(outputs.item_shapes, outputs.dtypes, strict=True)
    ]
    if outputs.structure == "tuple":
        return create_model(title, outputs=(tuple[tuple(kind for kind, _ in types)], ...))  # type: ignore[arg-type, misc]
    names = ("output",) if outputs.structure == "array" else outputs.names
    definitions: dict[str, Any] = {
        f"output_{place}": (kind, Field(alias=name, description=said))
        for place, (name, (kind, said)) in enumerate(zip(names, types, strict=True))
    }
    return create_model(title, **definitions)


def _nested(shape: tuple[Dim, ...], number: Any) -> Any:
    """Return the type of lists of a shape."""
    for dim in reversed(shape):
        low, high = (dim, dim) if isinstance(dim, int) else (int(isinstance(dim, str)), None)
        number = Annotated[list[number], Field(min_length=low, max_length=high)]
    return number


def _number_or_null(dtype: DType) -> Any:
    if dtype.kind in ("float", "bool"):
        return float | None if dtype.kind == "float" else bool
    limits = np.iinfo(dtype.numpy)
    return Annotated[int, Field(ge=int(limits.min), le=int(limits.max))]


def _said(shape: tuple[Dim, ...], dtype: DType) -> str:
    return f"{dtype.value} of shape ({', '.join(map(str, shape))})" if shape else dtype.value
