"""A torch decoder over two GPUs: its graphs have collectives in them, and are made anew when a rank was lost."""

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
            before, stop, used = [await service.submit(item) for item in items], False, list[int]()

            async def client(number: int) -> int:
                done = 0
                while not stop:
                    np.testing.assert_array_equal(await service.submit(items[number]), before[number])
                    done += 1
                return done

            clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
            for epoch in range(2, 6):
                async with asyncio.timeout(60):
                    assert all([await device.spare_ready() for device in world.devices])
                answered = service.statistics().answered
                os.kill(child_pid(world.devices[epoch % 2]), signal.SIGKILL)
                await until(lambda epoch=epoch: world.epoch == epoch and world.state is accel.DeviceState.READY)  # type: ignore[misc]
                await until(lambda answered=answered: service.statistics().answered > answered + 10 * CLIENTS)  # type: ignore[misc]
                used.append(world.devices[0].info().memory.durable)
            stop = True
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
