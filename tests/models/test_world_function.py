"""Coroutine functions of refs over the ranks of a world."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests import sharded_models
from tests.device_support import bounded, child_pid, failure, until
from tests.sharded_models import answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from accel.models import RefGroup

pytestmark = pytest.mark.usefixtures("nothing_left")

X = {"x": accel.TensorSpec(("batch", 5), "float64")}


async def layers(group: RefGroup, *, x: accel.AccelRef, weights: Mapping[str, accel.AccelRef], twice: bool = False) -> dict[str, Any]:
    device = group.device
    hidden = await device.blas.gemm(x, weights["up"])
    part = await device.blas.gemm(await device.elementwise.unary("tanh", hidden), weights["down"])
    y = await group.all_reduce(part)
    return {"y": await device.elementwise.binary("add", y, y) if twice else y}


@pytest.fixture
async def world() -> AsyncIterator[accel.World]:
    async with accel.System() as system:
        yield await system.open_world("cpu", ranks=2, restart=accel.RestartStrategy(max_restarts=20))


async def loaded(world: accel.World, function: Any = layers, **options: Any) -> accel.Model:
    weights = {**sharded_models.weights(), "bias": np.zeros(16)}
    del weights["bias"], weights["version"]
    given: dict[str, Any] = {"weights": weights, "inputs": X, "buckets": {"batch": (1, 4)}, "split": {"up": 1, "down": 0}}
    return await world.load_model(function, **(given | options))


def wanted(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    given = sharded_models.weights()
    y: np.ndarray[Any, Any] = np.tanh(x @ given["up"]) @ given["down"]
    assert y.shape == answer(x).shape
    return y


async def test_a_function_answers_on_all_ranks_through_a_loss(world: accel.World, rng: np.random.Generator) -> None:
    model, x = await loaded(world), rng.standard_normal((6, 5))
    np.testing.assert_allclose((await model.numpy(x))["y"], wanted(x), rtol=0, atol=1e-13)
    async with accel.serve(model) as service:
        for epoch in (1, 2):
            await until(lambda epoch=epoch: world.epoch == epoch and world.state is accel.DeviceState.READY)  # type: ignore[misc]
            for row, found in zip(x, await bounded(asyncio.gather(*map(service.submit, x))), strict=True):
                np.testing.assert_allclose(found["y"], wanted(row), rtol=0, atol=1e-13)
            if epoch == 1:
                os.kill(child_pid(world.devices[1]), signal.SIGKILL)
        assert service.statistics().failed == 0
    twice = await loaded(world, options={"twice": True})
    np.testing.assert_allclose((await twice.numpy(x))["y"], 2 * wanted(x), rtol=0, atol=1e-13)


async def test_an_extra_device_takes_the_rank_of_a_function(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=2, extra="cpu", restart=accel.RestartStrategy(max_restarts=0))
        model, x = await loaded(world), rng.standard_normal((4, 5))
        async with accel.serve(model) as service:
            os.kill(world.devices[1].info().pid or 0, signal.SIGKILL)
            await until(lambda: world.state is accel.DeviceState.REBUILDING)  # no item is suspected of it
            for row, found in zip(x, await bounded(asyncio.gather(*map(service.submit, x))), strict=True):
                np.testing.assert_allclose(found["y"], wanted(row), rtol=0, atol=1e-13)
            assert (world.epoch, world.extras, service.statistics().failed) == (2, (), 0)


async def test_each_collective_of_a_function(world: accel.World, rng: np.random.Generator) -> None:
    async def every(group: RefGroup, *, x: accel.AccelRef) -> dict[str, accel.AccelRef]:
        mine = await group.device.elementwise.binary("add", x, await group.device.put(np.full(x.shape, float(group.rank))))
        ranks = await group.device.put(np.full((2, 5), float(group.rank)))
        return {
            "largest": await group.all_reduce(mine, "max"),
            "second": await group.broadcast(mine, 1),
            "all": await group.all_gather(ranks),
            "part": await group.reduce_scatter(ranks),
            "parts": await group.all_to_all(ranks),
        }

    x = rng.standard_normal((1, 5))
    model = await loaded(
        world,
        every,
        weights=None,
        split=None,
        buckets={"batch": (1,)},
        batch_axis={"largest": 0, "second": 0, "all": None, "part": None, "parts": None},
    )
    found = await model.numpy(x)
    np.testing.assert_array_equal(found["largest"], x + 1)
    np.testing.assert_array_equal(found["second"], x + 1)
    np.testing.assert_array_equal(found["all"], np.repeat([[0.0], [0.0], [1.0], [1.0]], 5, 1))
    np.testing.assert_array_equal(found["part"], np.ones((1, 5)))
    np.testing.assert_array_equal(found["parts"], np.repeat([[0.0], [1.0]], 5, 1))


async def test_ranks_that_do_not_meet_are_told(world: accel.World) -> None:
    async def leaves(group: RefGroup, *, x: accel.AccelRef) -> accel.AccelRef:
        return x if group.rank == 0 else await group.all_reduce(x)

    async def differs(group: RefGroup, *, x: accel.AccelRef) -> accel.AccelRef:
        return await group.all_reduce(x, "sum" if group.rank == 0 else "max")

    async def hurries(group: RefGroup, *, x: accel.AccelRef) -> accel.AccelRef:
        calls = [asyncio.create_task(group.all_reduce(x)) for _ in range(2)]
        try:
            return (await asyncio.gather(*calls))[0]
        finally:  # gather leaves the other one running
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def raises(group: RefGroup, *, x: accel.AccelRef) -> accel.AccelRef:
        if group.rank == 0:
            raise ArithmeticError("the function raised this")
        return await group.all_reduce(x)

    for function, kind, said in (
        (leaves, accel.InvalidArgumentError, "has ended on rank 0, and awaits all_reduce"),
        (differs, accel.InvalidArgumentError, "rank 0 awaits all_reduce with {'op': 'sum'}, and rank 1 all_reduce with {'op': 'max'}"),
        (hurries, accel.InvalidArgumentError, "awaits two collectives at a time"),
        (raises, accel.LibraryError, "the function raised this"),
    ):
        error = await failure(loaded(world, function, weights=None, split=None), kind)
        assert said in str(error)
    assert world.epoch == 1
