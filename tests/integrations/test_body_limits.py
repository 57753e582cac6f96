"""Limits of what a body may be: its length and its time by options, on both frameworks, before a handler sees it, and the charset that it names."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import pytest
from aiohttp import test_utils, web
from fastapi import FastAPI, Request, Response

import accel
from accel.integrations import aiohttp as with_aiohttp
from accel.integrations import fastapi as with_fastapi
from tests.http_support import begun, pieces

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PATIENCE = 20.0


@contextlib.asynccontextmanager
async def fastapi_client(limit: int | None, seen: list[int], timeout: float | None = None) -> AsyncIterator[Callable[..., Awaitable[int]]]:
    app = FastAPI(lifespan=with_fastapi.lifespan(device="cpu"))

    @app.middleware("http")
    async def outer(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path == "/in-a-middleware":
            seen.append(len(await request.body()))
        return await call_next(request)

    with_fastapi.install(app, body_limit=limit, body_timeout=timeout)

    async def length(request: Request) -> int:
        seen.append(len(await request.body()))
        return seen[-1]

    app.add_api_route("/length", length, methods=["POST"])
    app.add_api_route("/in-a-middleware", length, methods=["POST"])
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def post(path: str, content: Any, **headers: str) -> int:
            return (await client.post(path, content=content, headers=headers)).status_code

        yield post


@contextlib.asynccontextmanager
async def aiohttp_client(limit: int | None, seen: list[int], timeout: float | None = None) -> AsyncIterator[Callable[..., Awaitable[int]]]:
    @web.middleware
    async def outer(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/in-a-middleware":
            seen.append(len(await request.read()))
        answer: web.StreamResponse = await handler(request)
        return answer

    app = web.Application()
    with_aiohttp.install(app, "cpu", body_limit=limit, body_timeout=timeout)
    app.middlewares.append(outer)

    async def length(request: web.Request) -> web.Response:
        seen.append(len(await request.read()))
        assert request.app is app
        return web.json_response(seen[-1])

    app.router.add_post("/length", length)
    app.router.add_post("/in-a-middleware", length)
    async with test_utils.TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:

        async def post(path: str, content: Any, **headers: str) -> int:
            async with session.post(path, data=content, headers=headers) as answer:
                return answer.status

        yield post


CLIENTS = [fastapi_client, aiohttp_client]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("path", ["/length", "/in-a-middleware"])
async def test_an_application_limits_its_bodies_by_an_option(client: Any, path: str) -> None:
    seen: list[int] = []
    async with asyncio.timeout(PATIENCE), client(5000, seen) as post:
        assert await post(path, b" " * 5000) == 200
        assert await post(path, pieces(5000)) == 200
        taken = len(seen)
        assert await post(path, b" " * 5001) == 413
        assert await post(path, pieces(6000)) == 413
        assert set(seen) == {5000}
        assert len(seen) == taken, "no handler sees a body that is too long"
        assert await post(path, b"") == 200


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_unknown_charset_is_refused_before_the_handler_decodes_it(client: Any) -> None:
    seen: list[int] = []
    async with asyncio.timeout(PATIENCE), client(None, seen) as post:
        assert await post("/length", b"x", **{"Content-Type": "text/plain; charset=nope"}) == 415
        assert seen == []
        assert await post("/length", b"", **{"Content-Type": "text/plain; charset=nope"}) == 200
        for charset in ("utf-8", "UTF8", "latin-1", "windows-1252", "us-ascii", "utf-16"):
            assert await post("/length", b"x", **{"Content-Type": f'text/plain; charset="{charset}"'}) == 200, charset


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("limit", [None, 5000])
async def test_a_body_that_does_not_arrive_in_time_is_408_and_costs_no_log(
    client: Any, limit: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    ended = asyncio.Event()
    async with asyncio.timeout(PATIENCE), client(limit, seen, 0.25) as post:
        assert await post("/length", begun(ended)) == 408
        ended.set()
        assert await post("/length", begun(ended)) == 200
        assert seen == [1]
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "1 MiB"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_limit_that_is_none_is_refused(client: Any, limit: Any) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="body_limit"):
        async with client(limit, []):
            pass


async def test_uploaded_files_are_closed_on_aiohttp_with_a_limit_as_without() -> None:
    app = web.Application()
    with_aiohttp.install(app, "cpu", body_limit=5000)
    files: list[Any] = []

    async def upload(request: web.Request) -> web.Response:
        field: Any = (await request.post())["file"]
        files.append(field.file)
        return web.Response(body=field.file.read())

    app.router.add_post("/", upload)
    async with asyncio.timeout(PATIENCE), test_utils.TestServer(app) as server, aiohttp.ClientSession() as session:
        for size, status in ((100, 200), (6000, 413)):
            form = aiohttp.FormData()
            form.add_field("file", b"x" * size, filename="a")
            async with session.post(server.make_url("/"), data=form) as answer:
                assert answer.status == status
    assert [each.closed for each in files] == [True]
