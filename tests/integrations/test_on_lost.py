"""What a web service does when its device is LOST: it stays, it reopens the device, or it ends itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FRAMEWORKS = ("fastapi", "aiohttp")


@contextlib.asynccontextmanager
async def fastapi_device(**options: Any) -> AsyncIterator[accel.Device]:
    from fastapi import FastAPI

    from accel.integrations.fastapi import install, lifespan

    app = FastAPI(lifespan=lifespan(device="cpu", close_timeout=5, **options))
    install(app)
    async with app.router.lifespan_context(app):
        yield app.state.accel.device


@contextlib.asynccontextmanager
async def aiohttp_device(**options: Any) -> AsyncIterator[accel.Device]:
    from aiohttp import web

    from accel.integrations.aiohttp import DEVICE, install

    app = web.Application()
    install(app, "cpu", close_timeout=5, **options)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        yield app[DEVICE]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def service(framework: str, **options: Any) -> AsyncIterator[accel.Device]:
    """Run an application whose first 'unary' loses the device."""
    opened = fastapi_device if framework == "fastapi" else aiohttp_device
    plan, restart = FaultPlan().poison_at(1, op="unary"), accel.RestartStrategy(max_restarts=0)
    async with asyncio.timeout(45), opened(faults=plan, restart=restart, **options) as device:
        yield device


async def lose(device: accel.Device) -> None:
    x = await device.put(np.ones(4))
    with pytest.raises(accel.ContextPoisonedError):
        await device.elementwise.unary("neg", x)


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_reopen_brings_the_device_back(framework: str) -> None:
    async with service(framework, host="inline", on_lost="reopen") as device:
        weights = await device.put(np.arange(4.0), durable=True)
        await lose(device)
        while device.generation < 2:  # bounded by the timeout of service()
            await asyncio.sleep(0.01)
        assert device.state is accel.DeviceState.READY
        np.testing.assert_array_equal(await device.get(weights), np.arange(4.0))


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_exit_sends_the_process_sigterm(framework: str) -> None:
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    try:
        async with service(framework, host="inline", on_lost="exit") as device:
            assert not told.is_set()
            await lose(device)
            await told.wait()
            assert device.state is accel.DeviceState.LOST
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@pytest.mark.parametrize("options", [{}, {"on_lost": "stay"}], ids=["by default", "asked for"])
async def test_stay_leaves_the_device_lost_until_the_application_reopens_it(options: dict[str, Any]) -> None:
    async with service("fastapi", host="inline", **options) as device:
        await lose(device)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not device.health().is_live
        await device.reopen()
        assert device.health().is_ready


async def test_a_device_that_cannot_be_reopened_is_not_tried_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan().poison_at(1, accel.DriverError("dead", scope=accel.FaultScope.PROCESS), op="unary")
    async with asyncio.timeout(45), fastapi_device(host="inline", faults=plan, on_lost="reopen") as device:
        await lose(device)
        while "device_stays_lost" not in caplog.text:  # bounded above
            await asyncio.sleep(0.01)
        assert device.state is accel.DeviceState.LOST


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_an_unknown_choice_is_refused_in_words(framework: str) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="on_lost"):
        async with service(framework, host="inline", on_lost="restart"):
            pass
