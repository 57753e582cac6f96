"""Pools of GPUs: what one is killed, drained and added for under load, and one service on all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel_cuda import CudaBackend
from tests.child_support import until_so
from tests.device_support import child_pid, failure, task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.gpu

IMAGE = {"image": accel.TensorSpec(("batch", 3, 16, 16), "float32")}


@pytest.fixture
def two_gpus() -> None:
    found = len(CudaBackend().devices())
    if found < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {found}")


@pytest.fixture
async def pool(two_gpus: None) -> AsyncIterator[accel.Pool]:
    """Two GPUs, each in a process."""
    async with accel.System() as system:
        yield await system.open_pool("cuda", count=2, host="process", standby="imports")


async def square(device: accel.Device) -> str:
    x = await device.put(np.full((64, 64), 2.0, np.float32))
    y = await device.get(await device.blas.gemm(x, x))
    assert (y == 256.0).all()
    return device.name


async def load(pool: accel.Pool) -> list[accel.Model]:
    import torch

    from tests.accel_cuda.model_builders import Classifier

    torch.manual_seed(0)
    weights = {name: each.numpy() for name, each in Classifier().eval().state_dict().items()}
    target = "tests.accel_cuda.model_builders:Classifier"
    return await pool.load_model(target, weights=weights, inputs=IMAGE, buckets={"batch": (1, 16)})


async def test_two_devices_of_one_gpu_have_names_and_memory_of_their_own() -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cuda:0", count=2, host="process")
        assert [device.name for device in pool] == ["cuda:0", "cuda:0#2"]
        assert await asyncio.gather(*(square(device) for device in pool)) == ["cuda:0", "cuda:0#2"]
        assert {link.peer for link in await pool.links()} == {None}
        kept = await pool[1].put(np.ones(4, np.float32))
        os.kill(child_pid(pool[0]), signal.SIGKILL)
        assert (await pool[1].get(kept) == 1.0).all()
        error = await failure(square(pool[0]), accel.ContextPoisonedError)
        assert error.device == "cuda:0"


async def test_a_pool_of_gpus_is_opened_as_a_whole() -> None:
    async with accel.System() as system:
        await failure(system.open_pool(["cuda:0", "cuda:99"], host="process"), accel.BackendUnavailableError)
        assert system.devices == ()


@pytest.mark.usefixtures("two_gpus")
async def test_by_default_one_gpu_is_inline_and_the_others_are_apart() -> None:
    async with accel.System() as system:
        await failure(system.open_pool("cuda", count=99), accel.BackendUnavailableError)
        pool = await system.open_pool("cuda")
        described = CudaBackend().devices()
        assert [device.name for device in pool] == [each.spec for each in described]
        assert sorted(device.info().host for device in pool) == ["inline", *["process"] * (len(described) - 1)]
        links = await pool.links()
        assert len(links) == len(described) * (len(described) - 1)
        assert all(link.way == ("mapped" if link.peer else "host") for link in links)


async def test_work_goes_on_while_gpus_are_killed_drained_and_added(pool: accel.Pool) -> None:
    ended: list[str] = []
    stop = asyncio.Event()

    async def client(number: int) -> None:
        while not stop.is_set():
            ended.append(await pool.run(square, key=number if number % 2 else None, idempotent=True, timeout=30))

    async def settled(names: set[str]) -> None:
        await until_so(lambda: set(ended[-60:]) == names, f"work on {names}, not on {set(ended[-60:])}")

    clients = [task(client(number)) for number in range(16)]
    both = {device.name for device in pool}
    await settled(both)
    os.kill(child_pid(pool[1]), signal.SIGKILL)
    await until_so(lambda: pool[1].generation == 2, "the next generation")
    await settled(both)
    drained = await pool.drain(pool[0], timeout=20)
    await settled({pool[0].name})
    await pool.add(drained)
    await settled(both)
    stop.set()
    await asyncio.gather(*clients)


async def test_one_service_on_two_gpus_loses_nothing_when_a_process_is_killed(pool: accel.Pool) -> None:
    models = await load(pool)
    image = np.random.default_rng(0).standard_normal((3, 16, 16)).astype(np.float32)
    wanted = await models[0].numpy(image[None])
    answered: list[float] = []
    stop = asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            np.testing.assert_allclose(await service.submit(image, timeout=30), wanted[0], rtol=1e-2, atol=1e-3)
            answered.append(time.perf_counter())

    def batches() -> list[int]:
        return [replica.batches for replica in service.statistics().replicas]

    async with accel.serve(models) as service:
        clients = [task(client()) for _ in range(64)]
        await until_so(lambda: min(batches()) > 20, "both GPUs answer")
        before = len(answered)
        os.kill(child_pid(pool[1]), signal.SIGKILL)
        await until_so(lambda: pool[1].generation == 2 and pool[1].health().is_ready, "the next generation")
        seen: Any = batches()
        await until_so(lambda: batches()[1] > seen[1] + 20, "the GPU answers again")
        stop.set()
        await asyncio.gather(*clients)
        assert len(answered) > before
        gaps = np.diff(np.array(answered))
        print(f"longest gap {gaps.max() * 1e3:.1f} ms of {len(answered)} answers")
