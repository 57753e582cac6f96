"""Four GPUs as the ranks of one world."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

import accel
from accel.ops.collective import REDUCED_DTYPES
from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import PATIENCE, run_program
from tests.conformance.test_world_conformance import check_moves, check_reductions, fresh, given
from tests.device_support import child_pid, until

if TYPE_CHECKING:
    import numpy as np

pytestmark = pytest.mark.gpu

RANKS = 4


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
