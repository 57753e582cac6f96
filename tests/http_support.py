"""Services of models over HTTP, on both frameworks, and a client of them."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import numpy as np
from aiohttp import test_utils, web
from fastapi import FastAPI

import accel
from accel.integrations import aiohttp as with_aiohttp
from accel.integrations import fastapi as with_fastapi
from accel.patterns import ModelService
from tests.device_support import PATIENCE, bounded
from tests.model_support import Affine, X

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Mapping

SERVICE = web.AppKey("service", ModelService)


class Client:
    """Sends requests and gives status, body and headers."""

    def __init__(self, service: ModelService, send: Callable[..., Any]) -> None:
        self.service = service
        self.device: accel.Device = service.model.device
        self._send = send

    async def get(self, path: str) -> tuple[int, bytes, Mapping[str, str]]:
        status, body, headers = await bounded(self._send("GET", path))
        return status, body, headers

    async def post(self, value: Any, path: str = "/m", **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        return await self.send(json.dumps(value).encode(), path, **headers)

    async def send(self, content: Any, path: str = "/m", **given: str) -> tuple[int, Any, Mapping[str, str]]:
        status, body, headers = await bounded(self._send("POST", path, content, **given))
        return status, json.loads(body) if body.startswith(b"{") else body, headers


@contextlib.asynccontextmanager
async def on_fastapi(open_service: Any, route: dict[str, Any], tenant: Any = None, **options: Any) -> AsyncIterator[Client]:
    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> AsyncIterator[ModelService]:
        async with open_service(device) as service:
            with_fastapi.add_model(app, "/m", service, **route)
            yield service

    app = FastAPI(lifespan=with_fastapi.lifespan(setup, device="cpu", **options))
    with_fastapi.install(app, metrics="/metrics", tenant=tenant)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE) as client,
    ):

        async def send(method: str, path: str, content: Any = None, **headers: str) -> tuple[int, bytes, Mapping[str, str]]:
            answer = await client.request(method, path, content=content, headers={"Content-Type": "application/json", **headers})
            return answer.status_code, answer.content, answer.headers

        yield Client(app.state.accel.state, send)


class _Server(test_utils.TestServer):
    aclose = test_utils.TestServer.close


@contextlib.asynccontextmanager
async def on_aiohttp(open_service: Any, route: dict[str, Any], tenant: Any = None, **options: Any) -> AsyncIterator[Client]:
    async def service(app: web.Application) -> AsyncIterator[None]:
        async with open_service(app[with_aiohttp.DEVICE]) as app[SERVICE]:
            yield

    app = web.Application()
    with_aiohttp.install(app, "cpu", metrics="/metrics", tenant=tenant, **options)
    app.cleanup_ctx.append(service)
    with_aiohttp.add_model(app, "/m", SERVICE, **route)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        contextlib.aclosing(_Server(app)) as closed,  # also where it cannot start
        closed as server,
        aiohttp.ClientSession(server.make_url("/"), connector=connector) as session,
    ):

        async def send(method: str, path: str, content: Any = None, **headers: str) -> tuple[int, bytes, Mapping[str, str]]:
            async with session.request(method, path, data=content, headers={"Content-Type": "application/json", **headers}) as answer:
                return answer.status, await answer.read(), answer.headers

        yield Client(app[SERVICE], send)


def affine_service(weights: Any, **options: Any) -> Any:
    """Return what opens a service of :class:`Affine`."""

    @contextlib.asynccontextmanager
    async def opened(device: accel.Device) -> AsyncIterator[ModelService]:
        model = await device.load_model(Affine, weights=weights, inputs=X, buckets={"batch": (1, 4, 8)})
        async with accel.serve(model, **{"overload": "reject", "quarantine": False, **options}) as service:
            yield service

    return opened


def other_service(target: Any, inputs: Any, buckets: Any) -> Any:
    """Return what opens a service of a model without weights."""

    @contextlib.asynccontextmanager
    async def opened(device: accel.Device) -> AsyncIterator[ModelService]:
        model = await device.load_model(target, inputs=inputs, buckets=buckets)
        async with accel.serve(model, overload="reject") as service:
            yield service

    return opened


async def pieces(total: int) -> AsyncIterator[bytes]:
    """Give a body without a length."""
    for _ in range(0, total, 100):
        yield b" " * 100


async def begun(ended: asyncio.Event) -> AsyncIterator[bytes]:
    """Give a body that begins, and goes on when it is told to."""
    yield b" "
    await ended.wait()


def rows(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal((n, 5), np.float32)


def row(rng: np.random.Generator, value: float | None = None) -> list[float]:
    found: list[float] = rows(rng, 1)[0].tolist()
    return found if value is None else [value, *found[1:]]
