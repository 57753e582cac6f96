"""A replica whose weights are torn takes nothing, and gets them again where they still are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests.device_support import bounded, failure, until
from tests.model_support import Affine, affine, expected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")

X = {"x": accel.TensorSpec(("batch", 5), "float32")}
ITEM = np.linspace(-1.0, 1.0, 5, dtype=np.float32)


@pytest.fixture
def weights(rng: np.random.Generator) -> dict[str, Any]:
    return affine(rng)


@pytest.fixture
async def models(weights: dict[str, Any]) -> AsyncIterator[list[Any]]:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", count=2, host="inline")
        yield list(await pool.load_model(Affine, weights=weights, inputs=X, buckets={"batch": (1, 8)}))


def tear(model: Any) -> None:
    """Have the weights of a model torn, as by the loss of their memory."""
    model.device._core.durable.tear([ref.buffer for ref in model.weights.values()], "a test has torn it")


def states(service: Any) -> list[str]:
    return [replica.state for replica in service.statistics().replicas]


async def test_a_torn_replica_gets_its_weights_again_once_in_a_generation(weights: dict[str, Any], models: list[Any]) -> None:
    right = expected(weights, ITEM[None])[0]
    async with accel.serve(models, max_items=1) as service:
        await service.swap(weights)
        tear(models[0])
        assert states(service) == ["lost", "ready"]
        assert not models[0].device.health().is_ready
        np.testing.assert_allclose((await bounded(service.submit(ITEM)))["y"], right, rtol=2e-6, atol=2e-6)
        await until(lambda: states(service) == ["ready", "ready"], "the weights are there again")
        assert [model.version for model in models] == [2, 2]
        await until(lambda: models[0].device.health().is_ready, "the torn weights have gone")
        for model in models:  # one of them had nothing to go back to, so none has
            await failure(model.rollback(), accel.InvalidArgumentError)
        tear(models[0])  # so the model does it, and would do it again
        for _ in range(20):
            np.testing.assert_allclose((await bounded(service.submit(ITEM)))["y"], right, rtol=2e-6, atol=2e-6)
        assert states(service) == ["lost", "ready"]
        error = await failure(models[0](ITEM[None]), accel.StaleRefError)
        assert (error.reason, "service.swap(weights)" in str(error)) == ("torn", True)
        await service.swap(weights, canaries=[ITEM])
        assert states(service) == ["ready", "ready"]
        assert service.statistics().failed == 0


async def test_a_torn_model_is_added_again_with_the_weights_of_another(weights: dict[str, Any], models: list[Any]) -> None:
    async with accel.serve(models, max_items=1) as service:
        tear(models[0])
        await service.drain(models[0])
        await service.add(models[0])
        assert states(service) == ["ready", "ready"]
        first, second = [await model.numpy(ITEM[None]) for model in models]
        np.testing.assert_allclose(first["y"], second["y"])
