"""Two GPUs as the ranks of a communicator, and of a world."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

import accel
from accel.ops.collective import REDUCED_DTYPES
from accel_cuda import CudaBackend
from benchmarks import worlds
from tests.accel_cuda.cuda_programs import PATIENCE, run_program
from tests.conformance.test_world_conformance import check_moves, check_reductions, fresh, given, seen
from tests.device_support import child_pid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.gpu

CLIENTS = 8

_PROGRAMS = "tests.accel_cuda.nccl_programs"


@pytest.fixture
def two_gpus() -> None:
    found = len(CudaBackend().devices())
    if found < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {found}")


@pytest.fixture(autouse=True)
def bindings() -> None:
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")


def test_each_collective_of_one_rank_is_numpys() -> None:
    run_program("conformance", "1", module=_PROGRAMS)


def test_each_collective_of_two_ranks_is_numpys(two_gpus: None) -> None:
    run_program("conformance", "2", module=_PROGRAMS)


def test_a_rank_that_waits_for_others_leaves() -> None:
    run_program("leaves_a_join", module=_PROGRAMS)


def test_a_communicator_waits_for_the_graphs_that_captured_it() -> None:
    run_program("outlived_by_a_graph", module=_PROGRAMS)


@pytest.mark.timeout(120)
def test_thirty_losses_of_a_rank_leave_nothing_behind(two_gpus: None) -> None:
    run_program("losses", "30", module=_PROGRAMS, timeout=115)


@pytest.fixture
async def world(two_gpus: None) -> AsyncIterator[accel.World]:
    async with accel.System() as system:
        yield await system.open_world("cuda", ranks=2, standby="context")


async def test_collectives_of_a_world_agree_with_numpy(world: accel.World, rng: np.random.Generator) -> None:
    for number, dtype in enumerate(accel.DType):
        x = fresh(rng, 2, dtype)
        refs = await given(world, x)
        await check_moves(world, x, refs, number % 2)
        if dtype in REDUCED_DTYPES:
            await check_reductions(world, x, refs, number % 2)
    await world.barrier()
    assert (world.epoch, world.state) == (1, accel.DeviceState.READY)


async def test_large_arrays_and_empty_ones(world: accel.World, rng: np.random.Generator) -> None:
    for shape in ((2, 20_000_001), (2, 0), ()):
        x = rng.standard_normal((2, *shape)).astype(np.float32)
        refs = await given(world, x)
        total = await seen(world, await world.all_reduce(refs))
        np.testing.assert_array_equal(total, np.stack([x.sum(0)] * 2))
        if shape:
            await check_moves(world, x, refs, 1)


async def test_a_killed_rank_is_replaced_under_load_and_the_other_keeps_everything(world: accel.World, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 1 << 20)).astype(np.float32)
    kept, survivor = await world.devices[0].put(x[0]), world.devices[0]
    pid, stop, answers, errors = child_pid(survivor), asyncio.Event(), dict[int, int](), list[accel.AccelError]()

    async def client() -> None:
        other = None
        while not stop.is_set():
            try:
                if other is None:
                    other = await world.devices[1].put(x[1])
                total = await world.all_reduce((kept, other))
                np.testing.assert_array_equal(await survivor.get(total[0]), x.sum(0))
                answers[world.epoch] = answers.get(world.epoch, 0) + 1
            except accel.AccelError as error:
                errors.append(error)
                other = None
                await anext(world.generations())

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    async with asyncio.timeout(PATIENCE):
        for epoch in (1, 2, 3):
            while answers.get(epoch, 0) < 20:
                await asyncio.sleep(0.01)
            if epoch < 3:
                os.kill(child_pid(world.devices[1]), signal.SIGKILL)
        stop.set()
        await asyncio.gather(*clients)
    assert any(isinstance(error, accel.WorldChangedError) for error in errors)
    assert (world.epoch, survivor.generation, child_pid(survivor)) == (3, 1, pid)
    np.testing.assert_array_equal(await survivor.get(kept), x[0])


async def test_a_graph_of_a_device_and_one_of_its_world_do_not_spoil_each_others_results(
    world: accel.World, rng: np.random.Generator
) -> None:
    """Both are captured in one lane: the long sums of their products are split in its workspace, and replays are in two lanes."""
    device = world.devices[0]
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 64, 1 << 15), (2, 1 << 15, 64)))
    left, right = [await device.put(each) for each in a], [await device.put(each) for each in b]
    async with device.graph() as of_device:
        products = [of_device.blas.gemm(left[0], right[0]) for _ in range(20)]
    async with world.graph() as of_world:
        products += [of_world[0].blas.gemm(left[1], right[1]) for _ in range(20)]
        of_world.barrier()
    await of_device.replay()
    await of_world.replay()
    alone = [await device.get(ref) for ref in products]
    np.testing.assert_allclose(alone[0], a[0] @ b[0], rtol=1e-2, atol=1e-1)
    for _ in range(20):
        await asyncio.gather(of_device.replay(), of_world.replay())
        for ref, expected in zip(products, alone, strict=True):
            np.testing.assert_array_equal(await device.get(ref), expected)


@pytest.mark.parametrize("graphs", ["auto", "off"])
async def test_a_model_over_two_gpus_has_the_same_bits_after_losses(
    world: accel.World, rng: np.random.Generator, graphs: Literal["auto", "off"], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    spec = {"x": accel.TensorSpec(("batch", worlds.WIDTH), "float32")}
    weights = worlds.weights()
    model = await world.load_model(
        "benchmarks.worlds:build", weights=weights, split=worlds.SPLIT, inputs=spec, buckets={"batch": (8,)}, graphs=graphs
    )
    x = rng.standard_normal((8, worlds.WIDTH)).astype(np.float32)
    before = await model.numpy(x)
    wanted = np.maximum(x @ weights["up.weight"].T, 0) @ weights["down.weight"].T
    np.testing.assert_allclose(before, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    for epoch in (2, 3):
        os.kill(child_pid(world.devices[1]), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            async for reached in world.generations():
                if reached == epoch:
                    break
        np.testing.assert_array_equal(await model.numpy(x), before)
    assert world.devices[0].generation == 1
    assert "model_not_captured" not in caplog.text


@pytest.mark.timeout(240)
async def test_an_extra_device_takes_the_rank_of_one_that_is_lost(two_gpus: None, rng: np.random.Generator) -> None:
    """It is on the GPU of the device that is lost: two GPUs are enough."""
    pytest.importorskip("torch")
    x = rng.standard_normal((8, worlds.WIDTH), dtype=np.float32)
    async with accel.System() as system:
        once = accel.RestartStrategy(max_restarts=0)
        world = await system.open_world(["cuda:0", "cuda:1"], extra="cuda:1", restart=once)
        (extra,) = world.extras
        model = await world.load_model(
            "benchmarks.worlds:build",
            weights=worlds.weights(),
            split=worlds.SPLIT,
            inputs={"x": accel.TensorSpec(("batch", worlds.WIDTH), "float32")},
            buckets={"batch": (8,)},
        )
        before = await model.numpy(x)
        os.kill(child_pid(world.devices[1]), signal.SIGKILL)
        async with asyncio.timeout(120.0):  # the extra device imports torch
            while world.epoch == 1:
                await asyncio.sleep(0.01)
        assert (world.devices[1], world.extras, world.devices[0].generation) == (extra, (), 1)
        np.testing.assert_array_equal(await model.numpy(x), before)
