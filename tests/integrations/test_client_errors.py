"""Requests that are the client's fault: `accel serve` and the examples answer with 4xx on both frameworks, and read no more than their limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
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

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 20.0
JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"pixels": [0.5] * 64}).encode()
LONG = 16 << 20

PROGRAMS = {
    "serve": ["-m", "accel", "serve", "--device", "cpu", "--port", "0"],
    "aiohttp example": ["examples/aiohttp_digits.py"],
}

WRONG: dict[str, tuple[bytes, str]] = {
    "an integer of 401 digits": (GOOD.replace(b"0.5", b"1" + b"0" * 400, 1), ""),
    "an integer of 5,000 digits": (GOOD.replace(b"0.5", b"9" * 5000, 1), ""),
    "deep nesting": (b"[" * 100_000 + b"]" * 100_000, ""),
    "nesting that is parsed": (b'{"pixels": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    "bad UTF-8": (b'{"pixels": "\xff"}', ""),
    "half a surrogate pair": (b'{"pixels": ["\\ud800"]}', ""),
    "NaN": (GOOD.replace(b"0.5", b"NaN"), ""),
    "beyond a double": (GOOD.replace(b"0.5", b"1e999"), ""),
    "an unknown charset": (GOOD, "; charset=nope"),
    "a charset that is none": (GOOD, "; charset=base64"),
    "a charset beyond ASCII": (GOOD, "; charset=\xff"),
}


async def ask(port: int, path: str, body: bytes | None = None, charset: str = "", *, chunked: bool = False) -> int:
    """Send a request over a connection of its own, all of it before anything is read, and return the status."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json{charset}\r\n"
        head += "Transfer-Encoding: chunked\r\n" if chunked else f"Content-Length: {len(body)}\r\n"
    sent = body or b""
    if chunked:
        sent = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (sent[at : at + 65536] for at in range(0, len(sent), 65536)))
        sent += b"0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode("latin-1") + b"\r\n" + sent)
        await writer.drain()
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


def peak_mib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


@contextlib.asynccontextmanager
async def serving(program: str) -> AsyncIterator[tuple[int, int]]:
    """Run a service in a process of its own; give its port and its pid."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PORT": str(port), "ACCEL_DEVICE": "cpu"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *PROGRAMS[program], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        said = b""
        while (found := re.search(rb"http://127\.0\.0\.1:(\d+)", said)) is None:
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
            assert line, said
            said += line
        yield int(found[1]), process.pid
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_what_a_client_did_wrong_is_4xx_and_the_next_request_is_served(program: str) -> None:
    async with asyncio.timeout(2 * PATIENCE), serving(program) as (port, pid):
        statuses = {name: await ask(port, "/digits", body, charset) for name, (body, charset) in WRONG.items()}
        statuses["5,000 digits in a path"] = await ask(port, "/samples/" + "9" * 5000)
        assert {name: status for name, status in statuses.items() if not 400 <= status < 500} == {}
        assert statuses["an unknown charset"] == 415

        before = peak_mib(pid)
        body = b"[" + b"0.1," * (LONG // 4) + b"1]"
        assert [await ask(port, "/digits", body, chunked=chunked) for chunked in (False, True)] == [413, 413]
        assert peak_mib(pid) - before < 2 * LONG >> 20, "a body that is refused is not kept"

        assert await ask(port, "/digits", GOOD + b" " * 1000, "; charset=UTF-8") == 200
        assert await ask(port, "/readyz") == 200


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


async def test_json_is_read_on_aiohttp_with_a_word_for_the_client() -> None:
    app = web.Application()
    with_aiohttp.install(app, "cpu")

    async def echo(request: web.Request) -> web.Response:
        return web.json_response(await with_aiohttp.read_json(request))

    app.router.add_post("/", echo)
    async with asyncio.timeout(PATIENCE), test_utils.TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        for body in (b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000):
            async with session.post("/", data=body, headers=JSON) as answer:
                assert (answer.status, (await answer.json())["error"]) == (422, "InvalidArgumentError"), body[:10]
        async with session.post("/", data=b"this is no gzip", headers=JSON | {"Content-Encoding": "gzip"}) as answer:
            assert answer.status == 400
        async with session.post("/", data='[1, "\u20ac"]'.encode(), headers=JSON) as answer:
            assert await answer.json() == [1, "\u20ac"]


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
