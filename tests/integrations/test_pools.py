"""Applications with several devices: which one a handler gets, when they are ready, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from aiohttp import web
from fastapi import FastAPI

import accel
from accel.integrations import aiohttp as on_aiohttp
from accel.integrations import fastapi as on_fastapi
from accel.integrations.aiohttp import DEVICE, POOL
from accel.integrations.fastapi import DeviceDependency, PoolDependency  # noqa: TC001 - FastAPI looks them up
from accel.testing import FaultPlan
from tests.device_support import failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FRAMEWORKS = ("fastapi", "aiohttp")


@contextlib.asynccontextmanager
async def fastapi_app(options: dict[str, Any], lifespan_options: dict[str, Any]) -> AsyncIterator[tuple[accel.Pool, httpx.AsyncClient]]:
    seen: list[accel.Pool] = []

    @contextlib.asynccontextmanager
    async def setup(pool: accel.Pool) -> AsyncIterator[None]:
        seen.append(pool)
        yield

    app = FastAPI(lifespan=on_fastapi.lifespan(setup, close_timeout=5, **lifespan_options))
    on_fastapi.install(app, **options)

    @app.get("/device")
    async def device(device: DeviceDependency, pool: PoolDependency) -> dict[str, Any]:
        return {"device": device.name, "devices": [each.name for each in pool]}

    async with app.router.lifespan_context(app):
        assert seen == [app.state.accel.pool]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            yield seen[0], client


@contextlib.asynccontextmanager
async def aiohttp_app(options: dict[str, Any], lifespan_options: dict[str, Any]) -> AsyncIterator[tuple[accel.Pool, httpx.AsyncClient]]:
    async def device(request: web.Request) -> web.Response:
        pool = request.app[POOL]
        return web.json_response({"device": pool.pick().name, "devices": [each.name for each in pool]})

    app = web.Application()
    on_aiohttp.install(app, close_timeout=5, **options, **lifespan_options)
    app.router.add_get("/device", device)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        assert DEVICE not in app
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
            yield app[POOL], client
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def app_of(
    framework: str, options: dict[str, Any] | None = None, **lifespan_options: Any
) -> AsyncIterator[tuple[accel.Pool, httpx.AsyncClient]]:
    """Run an application with a pool of two CPU devices."""
    opened = fastapi_app if framework == "fastapi" else aiohttp_app
    async with asyncio.timeout(45), opened(options or {}, {"pool": "cpu", "count": 2, **lifespan_options}) as found:
        yield found


async def lose(device: accel.Device) -> None:
    x = await device.put(np.ones(4))
    await failure(device.elementwise.unary("neg", x), accel.ContextPoisonedError)
    assert device.state is accel.DeviceState.LOST


def losing() -> dict[str, Any]:
    """Return the options with which the first and the second 'unary' lose their devices."""
    plan = FaultPlan().poison_at(1, op="unary").poison_at(2, op="unary")
    return {"faults": plan, "restart": accel.RestartStrategy(max_restarts=0), "host": "inline"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_a_handler_gets_a_device_that_serves(framework: str) -> None:
    async with app_of(framework, **losing()) as (pool, client):
        answers = [(await client.get("/device")).json() for _ in range(2)]
        assert {answer["device"] for answer in answers} == {"cpu:0", "cpu:0#2"}
        assert answers[0]["devices"] == ["cpu:0", "cpu:0#2"]
        await lose(pool[0])
        assert [(await client.get("/device")).json()["device"] for _ in range(3)] == ["cpu:0#2"] * 3
        await lose(pool[1])
        response = await client.get("/device")
        assert (response.status_code, response.json()["error"]) == (503, "DeviceLostError")


@pytest.mark.parametrize(("enough", "statuses"), [("any", [200, 200, 503]), ("all", [200, 503, 503]), (2, [200, 503, 503])])
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_readiness_asks_for_as_many_devices_as_are_enough(framework: str, enough: Any, statuses: list[int]) -> None:
    async with app_of(framework, enough=enough, **losing()) as (pool, client):
        found = [(await client.get("/readyz")).status_code]
        for device in pool:
            await lose(device)
            found.append((await client.get("/readyz")).status_code)
            if device is pool[0]:
                body = (await client.get("/readyz")).json()
                assert (body["ready"], body["devices"]["cpu:0"]["state"], body["devices"]["cpu:0#2"]["ok"]) == (1, "lost", True)
        assert found == statuses
        assert (await client.get("/healthz")).status_code == 503


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_metrics_have_all_devices(framework: str) -> None:
    async with app_of(framework, {"metrics": "/metrics", "admin_token": "t" * 16}) as (_, client):
        text = (await client.get("/metrics", headers={"Authorization": f"Bearer {'t' * 16}"})).text
        assert 'accel_device_ready{device="cpu:0"} 1.0' in text
        assert 'accel_device_ready{device="cpu:0#2"} 1.0' in text


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_the_process_exits_when_too_few_devices_are_live(framework: str) -> None:
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    try:
        async with app_of(framework, on_lost="exit", **losing()) as (pool, _):
            await lose(pool[0])
            await asyncio.sleep(0)
            assert not told.is_set()
            await lose(pool[1])
            await told.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_lost_devices_are_reopened_one_by_one() -> None:
    async with app_of("fastapi", on_lost="reopen", **losing()) as (pool, _):
        await lose(pool[1])
        while not pool.health("all").is_ready:  # bounded by the timeout of app_of()
            await asyncio.sleep(0.01)
        assert [device.generation for device in pool] == [1, 2]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("wrong", [{"device": "cpu"}, {"enough": "some"}, {"enough": 0}, {"pool": None, "enough": "all", "count": 1}])
async def test_what_does_not_go_together_is_refused(framework: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(accel.InvalidArgumentError):
        async with app_of(framework, **wrong):
            pass


async def test_without_a_pool_none_is_given() -> None:
    app = FastAPI(lifespan=on_fastapi.lifespan(device="cpu"))
    on_fastapi.install(app)

    @app.get("/pool")
    async def pool(pool: PoolDependency) -> int:
        return len(pool)

    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        assert (await client.get("/pool")).status_code == 500
