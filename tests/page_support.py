"""A served model with the page on every server, over sockets, and clients of it that read a stream or send bytes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import uvicorn
from aiohttp import web
from fastapi import FastAPI

import accel
from accel.cli.served_app import make_app
from accel.cli.servers import serve_asgi
from accel.cli.targets import find_target
from accel.integrations import aiohttp as with_aiohttp
from accel.integrations import fastapi as with_fastapi

if TYPE_CHECKING:
    from accel.testing import FaultPlan

Serve = Callable[..., AbstractAsyncContextManager[aiohttp.ClientSession]]

TOKEN = "a-token-of-16-or-more"


class Doubler:
    """A model."""

    def open(self, weights: Any, description: Any, stream: Any) -> None:
        pass

    def run(self, inputs: Any) -> Any:
        return {"y": 2 * np.asarray(inputs["x"])}


async def double(device: accel.Device) -> accel.Model:
    inputs = {"x": accel.TensorSpec(("batch", 3), "float32")}
    return await device.load_model("tests.page_support:Doubler", inputs=inputs, buckets={"batch": (1, 4)})


def client_of(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0))


@contextlib.asynccontextmanager
async def on_fastapi(faults: FaultPlan, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    @contextlib.asynccontextmanager
    async def setup(device: accel.Device) -> AsyncIterator[None]:
        async with accel.serve(await double(device), overload="reject") as service:
            with_fastapi.add_model(app, "/double", service)
            yield

    app = FastAPI(lifespan=with_fastapi.lifespan(setup, device="cpu", faults=faults))
    with_fastapi.install(app, page="/accel", **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.01)
    async with client_of(server.servers[0].sockets[0].getsockname()[1]) as session:  # it outlives the server
        try:
            yield session
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def on_aiohttp(faults: FaultPlan, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    key: web.AppKey[accel.ModelService] = web.AppKey("service")

    async def opened(app: web.Application) -> AsyncIterator[None]:
        async with accel.serve(await double(app[with_aiohttp.DEVICE]), overload="reject") as app[key]:
            yield

    app = web.Application()
    with_aiohttp.install(app, "cpu", page="/accel", faults=faults, **options)
    app.cleanup_ctx.append(opened)
    with_aiohttp.add_model(app, "/double", key)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with client_of(runner.addresses[0][1]) as session:
        try:
            yield session
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def on_accel_serve(faults: FaultPlan, *, metrics: str = "/metrics", **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    assert metrics == "/metrics", "the command has them there"
    target = await asyncio.to_thread(find_target, "tests.page_support:double")
    app = make_app([target], {"device": "cpu"}, {}, {}, timeout=30.0, body_limit=1 << 20, faults=faults, **options)
    stop, started = asyncio.Event(), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        async with app.router.lifespan_context(app), client_of(bound.getsockname()[1]) as session:
            ends = app.state.accel_page.close
            serving = asyncio.create_task(serve_asgi(app, bound, stop, started.set, head_timeout=10.0, lifespan="off", stopping=ends))
            await started.wait()
            try:
                yield session
            finally:
                stop.set()
                await serving


SERVERS = {"fastapi": on_fastapi, "aiohttp": on_aiohttp, "accel-serve": on_accel_serve}


async def messages(answer: aiohttp.ClientResponse, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return id and data of the next messages of a stream."""
    found, number = [], ""
    async for line in answer.content:
        if line.startswith(b"id: "):
            number = line[4:].strip().decode()
        if line.startswith(b"data: "):
            found.append((number, json.loads(line[6:])))
            if len(found) == count:
                break
    return found


@contextlib.asynccontextmanager
async def connected(session: aiohttp.ClientSession, request: str, *, receive_buffer: int | None = None) -> AsyncIterator[socket.socket]:
    """Send a request as it is, on a connection of its own of which nothing is read."""
    port = session._base_url.port  # type: ignore[union-attr]
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, request.replace("\n", "\r\n").encode("latin-1"))
        yield connection
