"""Line 5: workspaces are memory of the device's like any other, and other libraries' shortages are told as ours are."""

from __future__ import annotations

import numpy as np
import pytest

import accel
from tests.accel_cuda.hazard_programs import run_program

pytestmark = pytest.mark.gpu

MIB = 1 << 20


async def test_workspaces_count_in_the_limit_and_take_the_place_of_idle_slabs(rng: np.random.Generator) -> None:
    a = rng.standard_normal((64, 64), np.float32)
    async with accel.System() as system:
        device = await system.open_device("cuda", memory_limit=160 * MIB)
        x = await device.put(a)
        held = await device.empty((90 * MIB,), "uint8")
        more = await device.empty((50 * MIB,), "uint8")
        with pytest.raises(accel.OutOfMemoryError) as caught:
            await device.blas.gemm(x, x)
        assert caught.value.retryable
        assert caught.value.limit == 160 * MIB
        assert device.generation == 1
        await device.free(held)
        product = await device.get(await device.blas.gemm(x, x))
        np.testing.assert_allclose(product, a.astype(np.float64) @ a, rtol=1e-4, atol=1e-4)
        memory = device.info().memory
        assert memory.workspace == 32 * MIB
        assert memory.used >= x.nbytes + more.nbytes
        assert memory.used + memory.workspace <= memory.reserved <= 160 * MIB


async def test_a_batch_and_a_graph_take_their_workspaces_from_the_limit_too(rng: np.random.Generator) -> None:
    a = rng.standard_normal((64, 64), np.float32)
    async with accel.System() as system:
        device = await system.open_device("cuda", memory_limit=200 * MIB)
        x = await device.put(a)
        async with device.batch() as batch:
            total = batch.reduce("sum", batch.blas.gemm(x, x))
        np.testing.assert_allclose(await device.get(total), (a.astype(np.float64) @ a).sum(), rtol=1e-3, atol=1e-2)
        async with device.graph() as graph:
            y = graph.blas.gemm(x, x)
        await graph.replay()
        np.testing.assert_allclose(await device.get(y), a.astype(np.float64) @ a, rtol=1e-4, atol=1e-4)
        memory = device.info().memory
        assert memory.workspace == 64 * MIB, "32 for batches, 32 for graphs"
        assert memory.used + memory.workspace <= memory.reserved <= 200 * MIB
        with pytest.raises(accel.OutOfMemoryError):
            await device.empty((140 * MIB,), "uint8")


def test_shortages_of_torch_and_cupy_give_idle_slabs_back_and_may_be_tried_again() -> None:
    run_program("makes_room_for_other_libraries")
