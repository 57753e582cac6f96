"""Four GPUs: as the ranks of one world, and as two worlds of two ranks that are replicas of one service."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.ops.collective import REDUCED_DTYPES
from accel_cuda import CudaBackend
from benchmarks import model_lm
from benchmarks.decoder_ranks import SPLIT
from tests.accel_cuda.cuda_programs import PATIENCE, run_program
from tests.conformance.test_world_conformance import check_moves, check_reductions, fresh, given
from tests.device_support import child_pid, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

RANKS = 4
CLIENTS = 16


@pytest.fixture(autouse=True)
def four_gpus() -> None:
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    found = len(CudaBackend().devices())
    if found < RANKS:
        pytest.skip(f"it takes four GPUs, and this process may use {found}")


def test_each_collective_of_four_ranks_is_numpys() -> None:
    run_program("conformance", f"{RANKS}", module="tests.accel_cuda.nccl_programs")


@pytest.mark.timeout(120)
async def test_collectives_of_a_world_agree_with_numpy_before_a_loss_and_after_it(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        world = await system.open_world("cuda", ranks=RANKS, standby="context")
        pids = [child_pid(device) for device in world.devices]
        for epoch in (1, 2):
            async with asyncio.timeout(PATIENCE):
                while world.epoch < epoch or world.state is not accel.DeviceState.READY:
                    await anext(world.generations())
            for number, dtype in enumerate(accel.DType):
                x = fresh(rng, RANKS, dtype)
                refs = await given(world, x)
                await check_moves(world, x, refs, number % RANKS)
                if dtype in REDUCED_DTYPES:
                    await check_reductions(world, x, refs, number % RANKS)
            if epoch == 1:
                os.kill(pids[2], signal.SIGKILL)
                await until(lambda: world.epoch == 2)
        assert [device.generation for device in world.devices] == [1, 1, 2, 1]
        assert [child_pid(device) == pid for device, pid in zip(world.devices, pids, strict=True)] == [True, True, False, True]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [4, 2])
async def test_a_decoder_over_all_of_them_loses_no_request_when_a_rank_is_killed(
    ranks: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    """One world of four ranks, or two of two: then the other one answers meanwhile."""
    torch = pytest.importorskip("torch")
    from benchmarks.decoder_ranks import INPUTS, Alone, build

    shape, path = model_lm.SHAPES["cpu"], tmp_path / "model.safetensors"
    model_lm.make(path, shape, lambda each: build(Alone(), each))
    whole = build(Alone(), shape).eval()
    from safetensors.torch import load_file

    whole.load_state_dict(load_file(path))
    ids, last = model_lm.batch_of(shape, CLIENTS, 32, rng)
    items = [{"input_ids": row, "last": end} for row, end in zip(ids, last, strict=True)]
    with torch.inference_mode():
        wanted = whole(torch.from_numpy(ids), torch.from_numpy(last)).numpy()
    async with accel.System() as system:
        specs = [f"cuda:{index}" for index in range(RANKS)]
        groups = [specs[start : start + ranks] for start in range(0, RANKS, ranks)]
        worlds = [await system.open_world(group, standby="model") for group in groups]
        first = await worlds[0].load_model(
            "benchmarks.decoder_ranks:cpu", weights=path, split=SPLIT, inputs=INPUTS, buckets=shape.buckets, batch_axis=0
        )
        models = [first, *[await first.on(world) for world in worlds[1:]]]
        assert all(model.outputs.is_captured for model in models)
        async with accel.serve(models, max_items=1) as service:
            before, stop = [await service.submit(item) for item in items], False
            np.testing.assert_allclose(np.stack(before), wanted, rtol=0, atol=2e-3)

            async def client(number: int) -> int:
                done = 0
                while not stop:
                    np.testing.assert_array_equal(await service.submit(items[number]), before[number])
                    done += 1
                return done

            clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
            async with asyncio.timeout(PATIENCE):
                assert all([await device.spare_ready() for device in worlds[-1].devices])
            answered = service.statistics().answered
            os.kill(child_pid(worlds[-1].devices[1]), signal.SIGKILL)
            await until(lambda: worlds[-1].epoch == 2 and worlds[-1].state is accel.DeviceState.READY)
            await until(lambda: service.statistics().answered > answered + 20 * CLIENTS)
            stop = True
            assert all(await asyncio.gather(*clients))
            assert service.statistics().failed == 0
            assert all(replica.answered for replica in service.statistics().replicas)
        assert [device.generation for device in worlds[-1].devices] == [1, 2, *[1] * (ranks - 2)]
