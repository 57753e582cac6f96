"""A model over the ranks of a world is served over HTTP as any other, also while a rank is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests import sharded_models
from tests.device_support import child_pid, until
from tests.http_support import on_aiohttp, on_fastapi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.patterns import ModelService


@contextlib.asynccontextmanager
async def over_two_ranks(device: accel.Device) -> AsyncIterator[ModelService]:
    inputs = {"x": accel.TensorSpec(("batch", 5), "float64")}
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=2)
        model = await world.load_model(
            "tests.sharded_models:Mlp", weights=sharded_models.weights(), split=sharded_models.SPLIT, inputs=inputs
        )
        async with accel.serve(model) as service:
            yield service


@pytest.mark.parametrize("serving", [on_fastapi, on_aiohttp], ids=["fastapi", "aiohttp"])
async def test_a_killed_rank_fails_no_request(serving: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 5))
    async with serving(over_two_ranks, {}) as client:
        world = client.service.model.device
        for epoch in (1, 2):
            asked = [asyncio.create_task(client.post({"x": row.tolist()})) for row in x]
            if epoch == 1:
                os.kill(child_pid(world.devices[1]), signal.SIGKILL)
            for status, body, _ in await asyncio.gather(*asked):
                assert status == 200, body
            await until(lambda: world.epoch == 2 and world.state is accel.DeviceState.READY)
        _, body, _ = await client.post({"x": x[0].tolist()})
        np.testing.assert_allclose(body["y"], sharded_models.answer(x[0]), rtol=0, atol=1e-13)
        status, text, _ = await client.get("/metrics")
        assert status == 200
        assert b'accel_world_epoch{world="world:1"} 2.0' in text
