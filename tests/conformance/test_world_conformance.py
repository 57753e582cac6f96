"""Every collective, of every dtype, between 2 to 4 ranks, awaited, in batches and in graphs, against numpy."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.ops.collective import REDUCED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array = np.ndarray[Any, Any]
REDUCERS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "min": lambda x: x.min(0),
    "max": lambda x: x.max(0),
    "avg": lambda x: x.sum(0) / len(x),
}
ROWS = 12  # a multiple of each number of ranks


def fresh(rng: np.random.Generator, size: int, dtype: accel.DType, shape: tuple[int, ...] = (ROWS, 3)) -> Array:
    """Return an array for each rank: numbers so small that each dtype holds their sums and products exactly."""
    low = 0 if dtype.kind in ("unsigned", "bool") else -2
    return rng.integers(low, 3 if dtype.kind != "bool" else 2, (size, *shape)).astype(dtype.numpy)


def wide(x: Array) -> Array:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


async def given(world: accel.World, arrays: Array) -> tuple[accel.AccelRef, ...]:
    return await world.each(lambda device, rank: device.put(arrays[rank]))


async def seen(world: accel.World, refs: Sequence[accel.AccelRef]) -> Array:
    return np.stack(await world.each(lambda device, rank: device.get(refs[rank])))


def reduced(x: Array, op: str) -> Array:
    """Return the reduction in float64, rounded to the dtype as the ranks round it."""
    exact = REDUCERS[op](wide(x))
    return (np.trunc(exact) if x.dtype.kind in "iu" else exact).astype(x.dtype)


async def check_reductions(world: accel.World, x: Array, refs: tuple[accel.AccelRef, ...], root: int) -> None:
    size = len(x)
    for op in REDUCERS:
        expected = reduced(x, op)
        name = f"{op} of {x.dtype} over {size}"
        async with world.graph() as graph:
            captured = graph.all_reduce(refs, op)  # type: ignore[arg-type]
        await graph.replay()
        for total in (await world.all_reduce(refs, op), captured):  # type: ignore[arg-type]
            np.testing.assert_array_equal(await seen(world, total), np.stack([expected] * size), name)
        parts = await seen(world, await world.reduce_scatter(refs, op))  # type: ignore[arg-type]
        np.testing.assert_array_equal(parts.reshape(expected.shape), expected, name)
        of_root = await world.reduce(refs, op, root=root)  # type: ignore[arg-type]
        np.testing.assert_array_equal(await world.devices[root].get(of_root), expected, name)


def moved(x: Array, root: int) -> dict[str, Array]:
    """Return what all ranks get of the collectives that move arrays."""
    size = len(x)
    joined = np.concatenate(list(x))
    parts = np.stack([np.stack(np.split(given, size)) for given in x])
    return {
        "all_gather": np.stack([joined] * size),
        "all_to_all": parts.swapaxes(0, 1).reshape(x.shape),
        "broadcast": np.stack([x[root]] * size),
        "scatter": parts[root],
        "gather": joined,
        "send": x[root],
    }


async def check_moves(world: accel.World, x: Array, refs: tuple[accel.AccelRef, ...], root: int) -> None:
    size, expected = len(x), moved(x, root)
    target = (root + 1) % size
    awaited: dict[str, Any] = {
        "all_gather": await world.all_gather(refs),
        "all_to_all": await world.all_to_all(refs),
        "broadcast": await world.broadcast(refs[root], root=root),
        "scatter": await world.scatter(refs[root], root=root),
        "gather": await world.gather(refs, root=root),
        "send": await world.send(refs[root], source=root, target=target),
    }
    async with world.batch() as batch:
        recorded: dict[str, Any] = {
            "all_gather": batch.all_gather(refs),
            "send": batch.send(refs[root], source=root, target=target),
            "all_to_all": batch.all_to_all(refs),
            "gather": batch.gather(refs, root=root),
            "broadcast": batch.broadcast(refs[root], root=root),
            "scatter": batch.scatter(refs[root], root=root),
        }
        batch.barrier()
    async with world.graph() as graph:
        captured: dict[str, Any] = {
            "gather": graph.gather(refs, root=root),
            "all_to_all": graph.all_to_all(refs),
            "send": graph.send(refs[root], source=root, target=target),
            "scatter": graph.scatter(refs[root], root=root),
            "broadcast": graph.broadcast(refs[root], root=root),
            "all_gather": graph.all_gather(refs),
        }
        graph.barrier()
    await graph.replay()
    await graph.replay()
    for results in (awaited, recorded, captured):
        for name, result in results.items():
            device = world.devices[root if name == "gather" else target]
            array = await seen(world, result) if isinstance(result, tuple) else await device.get(result)
            np.testing.assert_array_equal(array, expected[name], f"{name} of {x.dtype} over {size}")


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_collectives_agree_with_numpy(size: int, rng: np.random.Generator, nothing_left: None) -> None:
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=size)
        for number, dtype in enumerate(accel.DType):
            x = fresh(rng, size, dtype)
            refs = await given(world, x)
            await check_moves(world, x, refs, number % size)
            if dtype in REDUCED_DTYPES:
                await check_reductions(world, x, refs, number % size)
            else:
                with pytest.raises(accel.UnsupportedError, match="cannot be reduced"):
                    await world.all_reduce(refs)
        await world.barrier()
        assert (world.epoch, world.state) == (1, accel.DeviceState.READY)


async def test_arrays_larger_than_a_chunk_and_empty_ones(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=3)
        for shape in ((3, 200_001), (3, 0), ()):
            x = rng.standard_normal((3, *shape)).astype(np.float32)
            refs = await given(world, x)
            total = await seen(world, await world.all_reduce(refs))
            np.testing.assert_allclose(total[0], x.sum(0), rtol=1e-5, atol=1e-5)
            assert total[0].tobytes() == total[1].tobytes() == total[2].tobytes()
            if shape:
                await check_moves(world, x, refs, 1)


async def test_results_go_where_out_says_and_views_are_operands(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=2)
        x = rng.standard_normal((2, 4, 6)).astype(np.float32)
        refs = await given(world, x)
        out = await world.each(lambda device, _: device.zeros((4, 6)))
        assert await world.all_reduce(refs, out=out) == out
        np.testing.assert_array_equal(await seen(world, out), np.stack([x.sum(0)] * 2))
        columns = [ref[:, ::2] for ref in refs]
        np.testing.assert_array_equal(await seen(world, await world.all_gather(columns)), np.stack([x[:, :, ::2].reshape(8, 3)] * 2))
        assert await world.all_reduce(refs, "max", out=refs) == refs
        np.testing.assert_array_equal(await seen(world, refs), np.stack([x.max(0)] * 2))


async def test_host_arrays_are_broadcast_and_scattered_along_any_axis(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=2)
        x = rng.standard_normal((4, 6))
        np.testing.assert_array_equal(await seen(world, await world.broadcast(x, root=1)), np.stack([x] * 2))
        for axis in (0, 1, -1):
            np.testing.assert_array_equal(await seen(world, await world.scatter(x, axis=axis)), np.stack(np.split(x, 2, axis)))
        with pytest.raises(accel.InvalidArgumentError, match="cut into 2 equal parts"):
            await world.scatter(np.zeros((4, 5)), axis=1)


async def test_a_graph_has_work_of_each_rank_between_collectives_and_ends_with_its_epoch(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=2)
        x = rng.standard_normal((2, 4)).astype(np.float32)
        refs = await given(world, x)
        async with world.graph() as graph:
            doubled = [graph[rank].elementwise.binary("add", ref, ref) for rank, ref in enumerate(refs)]
            total = graph.all_reduce(doubled)
            halves = [graph[rank].elementwise.unary("neg", ref) for rank, ref in enumerate(total)]
        for _ in range(3):
            await asyncio.gather(*(device.put(x[rank], out=refs[rank]) for rank, device in enumerate(world.devices)))
            replayed, awaited = await asyncio.gather(graph.replay(), world.all_reduce(refs))
            assert replayed is None
            np.testing.assert_allclose(await seen(world, halves), np.stack([-2 * x.sum(0)] * 2), rtol=1e-6)
            np.testing.assert_allclose(await seen(world, awaited), np.stack([x.sum(0)] * 2), rtol=1e-6)
            x += 1
        pid = world.devices[0].info().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(accel.WorldChangedError):
            while True:
                await graph.replay()
