"""Swaps over two replicas on two GPUs, under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import accel
from accel_cuda import CudaBackend
from tests.accel_cuda.model_builders import WIDTH, version
from tests.device_support import child_pid, generation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.patterns import ModelService

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]

CANARIES = [np.ones(WIDTH, np.float32)]


def numbered(number: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {**version().state_dict(), "number": torch.tensor(number)}


@contextlib.asynccontextmanager
async def asked(host: Any) -> AsyncIterator[tuple[ModelService, set[float]]]:
    """Serve the model on two GPUs, and ask it in the block; each answer is of one version, and none fails."""
    found = len(CudaBackend().devices())
    if found < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {found}")
    async with accel.System() as system:
        models = []
        for spec in ("cuda:0", "cuda:1"):
            device = await system.open_device(spec, host=host)
            inputs = {"x": accel.TensorSpec(("batch", WIDTH), "float32")}
            models.append(await device.load_model(version, weights=numbered(1.0), inputs=inputs, buckets={"batch": (1, 8)}))
        is_over, seen = False, set[float]()
        async with accel.serve(models) as service:

            async def client(seed: int) -> None:
                rng = np.random.default_rng(seed)
                while not is_over:
                    row = await service.submit(rng.standard_normal(WIDTH, np.float32))
                    assert row[0] == row[1], "an answer of two versions"
                    seen.add(float(row[0]))

            async with asyncio.timeout(150), asyncio.TaskGroup() as group:
                for seed in range(64):
                    group.create_task(client(seed))
                yield service, seen
                is_over = True
            assert service.statistics().failed == 0
            assert {model.version for model in service.models} == {service.model.version}


@pytest.mark.parametrize("host", ["auto", "process"])
async def test_swaps_over_two_gpus_fail_and_mix_nothing(host: Any) -> None:
    async with asked(host) as (service, seen):
        for number in range(2, 12):
            done = await service.swap(numbered(float(number)), canaries=CANARIES, compare=lambda old, new: new[0] == old[0] + 1)
            assert (done.version, len(done.replicas), done.left_out) == (number, 2, ())
            while float(number) not in seen:
                await asyncio.sleep(0)
        for wrong in (float("nan"), -1.0):
            with pytest.raises(accel.AccelError):
                await service.swap(numbered(wrong), canaries=CANARIES, compare=lambda old, new: new[0] > old[0])
        assert service.model.version == 11
    assert seen == {float(number) for number in range(1, 12)}


async def test_weights_that_make_nans_in_service_are_rolled_back_on_both_gpus() -> None:
    async with asked("process") as (service, seen):
        with pytest.raises(accel.LibraryError) as caught:
            await service.swap(numbered(float("inf")), hold=20.0)
        assert (caught.value.code, service.model.version) == ("non-finite", 1)
        done = await service.swap(numbered(2.0), hold=1.0)
        assert done.held > 0
    assert 2.0 in seen


async def test_a_gpu_whose_process_is_killed_while_it_is_swapped_is_swapped_again() -> None:
    async with asked("process") as (service, seen):
        first = service.models[0].device

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "buckets" and not done and first.generation == 1 and service.model.version == 1:
                os.kill(child_pid(first), signal.SIGKILL)

        assert (await service.swap(numbered(2.0), canaries=CANARIES, on_progress=progress)).left_out == ()
        await generation(first, 2)
        while 2.0 not in seen:
            await asyncio.sleep(0)
