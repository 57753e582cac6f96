"""Elements that are moved on the GPU, from and to any alignment; the samples of the family have the values of all ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cuda")


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return rng.integers(0, 100, shape).astype(accel.DType.of(dtype).numpy)


async def unaligned(device: accel.Device, array: np.ndarray[Any, Any], skipped: int) -> accel.AccelRef:
    """Return a view that begins so many elements behind an aligned address."""
    whole = np.concatenate([np.zeros(skipped, array.dtype), array.reshape(-1)])
    return (await device.put(whole))[skipped:].reshape(array.shape)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
async def test_random_shapes_at_any_alignment(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for _ in range(15):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 8, 33], int(rng.integers(1, 5))))
        x, skipped = random(rng, shape, dtype), int(rng.integers(0, 4))
        ref, order, axis = (
            await unaligned(device, x, skipped),
            tuple(int(n) for n in rng.permutation(len(shape))),
            int(rng.integers(len(shape))),
        )
        case = f"{shape} {skipped} {order} {axis}"
        for got, expected in (
            (device.arrays.transpose(ref, order), x.transpose(order)),
            (device.arrays.flip(ref, axis), np.flip(x, axis)),
            (device.arrays.roll(ref, 3, axis), np.roll(x, 3, axis)),
            (device.arrays.tile(ref, (2,) * len(shape)), np.tile(x, (2,) * len(shape))),
            (device.arrays.repeat(ref, 3, axis), np.repeat(x, 3, axis)),
            (device.arrays.pad(ref, 2, 7), np.pad(x, 2, constant_values=7)),
            (device.arrays.concatenate([ref, ref], axis), np.concatenate([x, x], axis)),
            (device.arrays.stack([ref, ref], axis), np.stack([x, x], axis)),
        ):
            np.testing.assert_array_equal(await device.get(await got), expected, err_msg=case)
        parts = await device.arrays.split(ref, (shape[axis] // 2,), axis)
        for part, expected in zip(parts, np.split(x, (shape[axis] // 2,), axis), strict=True):
            np.testing.assert_array_equal(await device.get(part), expected, err_msg=case)


async def test_large_arrays(device: accel.Device, rng: np.random.Generator) -> None:
    x = random(rng, (4097, 3001), "float32")
    ref = await device.put(x)
    np.testing.assert_array_equal(await device.get(await device.arrays.transpose(ref)), x.T)
    np.testing.assert_array_equal(await device.get(await device.arrays.triu(ref, 5)), np.triu(x, 5))
    np.testing.assert_array_equal(await device.get(await device.arrays.arange(10_000_019)), np.arange(10_000_019))
    got = await device.get(await device.arrays.linspace(-1, 3, 1_000_003, dtype="float64"))
    np.testing.assert_allclose(got, np.linspace(-1, 3, 1_000_003), rtol=1e-14, atol=1e-14)
    assert got[-1] == 3


async def test_pieces_run_in_graphs(device: accel.Device, rng: np.random.Generator) -> None:
    x = random(rng, (33, 64), "float32")
    ref = await device.put(np.zeros_like(x))
    async with device.graph() as graph:
        parts = graph.arrays.split(ref, 4, axis=1)
        made = graph.arrays.pad(graph.arrays.concatenate(list(reversed(parts)), axis=1), 1, -1)
    await device.put(x, out=ref)
    await graph.replay()
    expected = np.pad(np.concatenate(list(reversed(np.split(x, 4, 1))), 1), 1, constant_values=-1)
    np.testing.assert_array_equal(await device.get(made), expected)
    await graph.aclose()


@pytest.mark.parametrize("kind", ["int32", "int64"])
async def test_many_elements_at_indices(device: accel.Device, rng: np.random.Generator, kind: str) -> None:
    table, indices = random(rng, (5003, 257), "float32"), rng.integers(-5003, 5003, 20_011).astype(kind)
    rtable, rindices = await device.put(table), await device.put(indices)
    np.testing.assert_array_equal(await device.get(await device.arrays.take(rtable, rindices, axis=0)), table[indices])
    counts = await device.zeros(5003, "int32")
    await device.arrays.scatter_add(counts, rindices, 1)
    np.testing.assert_array_equal(await device.get(counts), np.bincount(indices % 5003, minlength=5003))
    added, sums = random(rng, (20_011, 257), "float32"), await device.zeros((5003, 257))
    await device.arrays.scatter_add(sums, rindices, await device.put(added))
    expected = np.zeros((5003, 257), np.float32)
    np.add.at(expected, indices, added)
    np.testing.assert_array_equal(await device.get(sums), expected)
    places = np.argsort(rng.random(table.shape), axis=1)[:, :100].astype(kind)
    rplaces = await device.put(places)
    np.testing.assert_array_equal(
        await device.get(await device.arrays.take_along_axis(rtable, rplaces)), np.take_along_axis(table, places.astype(np.int64), 1)
    )
    await device.arrays.put_along_axis(rtable, rplaces, -1)
    np.put_along_axis(table, places.astype(np.int64), -1, 1)
    np.testing.assert_array_equal(await device.get(rtable), table)


async def test_an_index_out_of_range_fails_its_op_alone(device: accel.Device) -> None:
    x, indices = await device.put(np.arange(5.0)), await device.put(np.array([1, 5, 0]))
    with pytest.raises(accel.InvalidArgumentError, match="index 5 "):
        await device.arrays.take(x, indices)
    with pytest.raises(accel.InvalidArgumentError, match="index 5 "):
        await device.arrays.scatter_add(await device.zeros(5), indices, 1)
    np.testing.assert_array_equal(await device.get(await device.arrays.take(x, indices, mode="clip")), [1, 4, 0])
    assert device.generation == 1
