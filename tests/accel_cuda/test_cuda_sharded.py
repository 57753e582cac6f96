"""A torch decoder over two GPUs, and over four: its graphs have collectives in them, and are made anew when a rank was lost."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import accel
from accel_cuda import CudaBackend
from benchmarks import model_lm
from benchmarks.decoder_ranks import INPUTS, SPLIT, Alone, build
from tests.device_support import child_pid, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

SHAPE = model_lm.SHAPES["cpu"]
"""A small one, in float32."""
CLIENTS = 8


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    found = len(CudaBackend().devices())
    if found < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {found}")


def written(folder: Path) -> tuple[Path, torch.nn.Module]:
    """Write random weights, and return the file and the whole model."""
    path = folder / "model.safetensors"
    model_lm.make(path, SHAPE, lambda shape: build(Alone(), shape))
    module: torch.nn.Module = build(Alone(), SHAPE).eval()
    module.load_state_dict(load_file(path))
    return path, module


async def loaded(world: accel.World, path: Path, **options: Any) -> accel.Model:
    return await world.load_model(
        "benchmarks.decoder_ranks:cpu", weights=path, split=SPLIT, inputs=INPUTS, buckets=SHAPE.buckets, batch_axis=0, **options
    )


async def repeat(service: accel.ModelService, item: dict[str, Any], wanted: Any, stopped: asyncio.Event) -> int:
    """Send an item until ``stopped``; each answer must have the bits of ``wanted``. Return how many came."""
    count = 0
    while not stopped.is_set():
        np.testing.assert_array_equal(await service.submit(item), wanted)
        count += 1
    return count


@pytest.mark.parametrize("graphs", ["auto", "off"])
async def test_two_ranks_answer_as_the_whole_model(graphs: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    path, whole = written(tmp_path)
    async with accel.System() as system:
        model = await loaded(await system.open_world("cuda", ranks=2), path, graphs=graphs)
        assert model.outputs.is_captured is (graphs == "auto")
        for batch, length in ((1, 16), (4, 32), (3, 20)):
            ids, last = model_lm.batch_of(SHAPE, batch, length, rng)
            with torch.inference_mode():
                wanted = whole(torch.from_numpy(ids), torch.from_numpy(last)).numpy()
            np.testing.assert_allclose(await model.numpy(ids, last), wanted, rtol=0, atol=2e-3)
        assert model.replays == (3 if graphs == "auto" else 0)


async def test_no_bit_changes_and_no_request_fails_when_ranks_are_lost(rng: np.random.Generator, tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    ids, last = model_lm.batch_of(SHAPE, CLIENTS, 32, rng)
    items = [{"input_ids": row, "last": end} for row, end in zip(ids, last, strict=True)]
    async with accel.System() as system:
        restart = accel.RestartStrategy(max_restarts=10)
        world = await system.open_world("cuda", ranks=2, standby="model", hang_timeout=30.0, restart=restart)
        model = await loaded(world, path)
        async with accel.serve(model, max_items=1) as service:
            before, stopped, used = [await service.submit(item) for item in items], asyncio.Event(), list[int]()
            clients = [asyncio.create_task(repeat(service, *given, stopped)) for given in zip(items, before, strict=True)]
            for epoch in range(2, 6):
                async with asyncio.timeout(60):
                    assert all([await device.spare_ready() for device in world.devices])
                answered = service.statistics().answered
                os.kill(child_pid(world.devices[epoch % 2]), signal.SIGKILL)
                await until(lambda epoch=epoch: world.epoch == epoch and world.state is accel.DeviceState.READY)  # type: ignore[misc]
                await until(lambda answered=answered: service.statistics().answered > answered + 10 * CLIENTS)  # type: ignore[misc]
                used.append(world.devices[0].info().memory.durable)
            stopped.set()
            assert all(await asyncio.gather(*clients))
            assert service.statistics().failed == 0
        assert [device.generation for device in world.devices] == [3, 3]
        assert len(set(used)) == 1


async def test_weights_are_swapped_on_both(rng: np.random.Generator, tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    ids, last = model_lm.batch_of(SHAPE, 1, 16, rng)
    async with accel.System() as system:
        model = await loaded(await system.open_world("cuda", ranks=2), path)
        before = await model.numpy(ids, last)
        weights = load_file(path)
        assert await model.swap(weights | {"head.weight": 2 * weights["head.weight"]}) == 2
        np.testing.assert_array_equal(await model.numpy(ids, last), 2 * before)
        assert await model.rollback() == 1
        np.testing.assert_array_equal(await model.numpy(ids, last), before)


@pytest.mark.parametrize("ranks", [4, 2])
async def test_a_decoder_over_four_gpus_loses_no_request_when_a_rank_is_killed(
    ranks: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    """One world of four ranks, or two of two as replicas: then the other one answers meanwhile."""
    specs = [f"cuda:{device.index}" for device in CudaBackend().devices()[:4]]
    if len(specs) < 4:
        pytest.skip(f"it takes four GPUs, and this process may use {len(specs)}")
    path, whole = written(tmp_path)
    ids, last = model_lm.batch_of(SHAPE, CLIENTS, 32, rng)
    items = [{"input_ids": row, "last": end} for row, end in zip(ids, last, strict=True)]
    with torch.inference_mode():
        wanted = whole(torch.from_numpy(ids), torch.from_numpy(last)).numpy()
    async with accel.System() as system:
        worlds = [await system.open_world(specs[start : start + ranks], standby="model") for start in range(0, 4, ranks)]
        first, lost = await loaded(worlds[0], path), worlds[-1]
        models = [first, *[await first.on(world) for world in worlds[1:]]]
        assert all(model.outputs.is_captured for model in models)
        async with accel.serve(models, max_items=1) as service:
            before, stopped = [await service.submit(item) for item in items], asyncio.Event()
            np.testing.assert_allclose(np.stack(before), wanted, rtol=0, atol=2e-3)
            clients = [asyncio.create_task(repeat(service, *given, stopped)) for given in zip(items, before, strict=True)]
            async with asyncio.timeout(60):
                assert all([await device.spare_ready() for device in lost.devices])
            answered = service.statistics().answered
            os.kill(child_pid(lost.devices[1]), signal.SIGKILL)
            await until(lambda: lost.epoch == 2 and lost.state is accel.DeviceState.READY)
            await until(lambda: service.statistics().answered > answered + 20 * CLIENTS)
            stopped.set()
            assert all(await asyncio.gather(*clients))
            assert service.statistics().failed == 0
            assert all(replica.answered for replica in service.statistics().replicas)
        assert [device.generation for device in lost.devices] == [1, 2, *[1] * (ranks - 2)]
