"""Strided views on the GPU: read where they are by walks, folds, moves and cuBLAS, copied for other ops, and shared with other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.cpu.families import sampling
from tests.device_support import failure, some_view

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture(params=["inline", "process"])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cuda", host=request.param)


@pytest.fixture
async def inline() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cuda", host="inline")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "int8"])
async def test_random_views(inline: accel.Device, rng: np.random.Generator, name: str) -> None:
    dtype = accel.DType.of(name)
    x = rng.integers(-20, 20, (5, 34, 16)).astype(dtype.numpy)
    whole = await inline.put(x)
    for _ in range(12):
        array, ref = some_view(rng, x, whole)
        case = f"{array.shape} {ref!r}"
        axis = int(rng.integers(array.ndim))
        wide = sampling.wide(array)
        expected: dict[str, tuple[Any, Any]] = {
            "get": (inline.arrays.part(ref, ...), array),
            "abs": (inline.elementwise.unary("abs", ref), np.abs(array)),
            "number": (inline.elementwise.binary("max", ref, 3), np.maximum(array, array.dtype.type(3))),
            "pair": (inline.elementwise.binary("less", ref, ref), array < array),
            "cast": (inline.elementwise.cast(ref, "float64"), array.astype(np.float64)),
            "where": (
                inline.elementwise.where(await inline.elementwise.binary("less", ref, 5), ref, 5),
                np.minimum(array, array.dtype.type(5)),
            ),
            "fused": (inline.elementwise.fused((("max", 0, 1),), (ref, dtype.numpy.type(2))), np.maximum(array, array.dtype.type(2))),
            "flip": (inline.arrays.flip(ref, axis), np.flip(array, axis)),
            "pad": (inline.arrays.pad(ref, 1), np.pad(array, 1)),
            "tril": (inline.arrays.tril(ref), np.tril(array)),
        }
        if array.shape[axis]:
            expected["max"] = inline.reduce("max", ref, axis=axis), array.max(axis)
            expected["argmin"] = inline.reduce("argmin", ref, axis=axis), array.argmin(axis)
            expected["any"] = inline.reduce("any", ref), np.any(wide != 0)
        if array.size and name in ("float32", "int64"):
            expected["sum"] = inline.reduce("sum", ref), wide.sum()
        for what, (call, value) in expected.items():
            np.testing.assert_array_equal(await inline.get(await call), value, err_msg=f"{what} {case}")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
async def test_products_read_and_write_views(inline: accel.Device, rng: np.random.Generator, name: str) -> None:
    dtype = accel.DType.of(name)
    a, b, c = (sampling.random(rng, (70, 70), dtype) for _ in range(3))
    refs = [await inline.put(each) for each in (a, b, c)]
    views = (np.s_[3:40, 5:36], np.s_[:31, ::2], np.s_[30::-1, 8:40])
    error = 4 * sampling.sums(dtype, 70)
    for turn_a in (False, True):
        for index in views:
            p, u = refs[0][index], a[index]
            p, u = (p.T, u.T) if turn_a else (p, u)
            for q, v in (
                (refs[1][: u.shape[1], 2:19], b[: u.shape[1], 2:19]),
                (refs[1].T[1 : u.shape[1] + 1, :9], b.T[1 : u.shape[1] + 1, :9]),
            ):
                expected = sampling.wide(u) @ sampling.wide(v)
                got = sampling.wide(await inline.get(await inline.blas.gemm(p, q)))
                np.testing.assert_allclose(got, expected, atol=error * np.abs(expected).max(), rtol=1e-2 if name.endswith("16") else error)
                out = refs[2][2 : 2 + expected.shape[0], 11 : 11 + expected.shape[1]]
                assert await inline.blas.gemm(p, q, out=out) is out
                np.testing.assert_array_equal(sampling.wide(await inline.get(out)), got)
                vector = refs[1][: u.shape[1], 3]
                got = sampling.wide(await inline.get(await inline.blas.gemv(p, vector, out=refs[2][: u.shape[0], 1])))
                expected = sampling.wide(u) @ sampling.wide(b[: u.shape[1], 3])
                np.testing.assert_allclose(got, expected, atol=error * np.abs(expected).max(), rtol=1e-2 if name.endswith("16") else error)
    untouched = await inline.get(refs[2][45:, 40:])
    np.testing.assert_array_equal(sampling.wide(untouched), sampling.wide(c[45:, 40:]))
    stack = await inline.put(sampling.random(rng, (4, 6, 5), accel.DType.FLOAT32))
    x = await inline.get(stack)
    product = await inline.get(await inline.blas.gemm_batched(stack[:, 1:4], stack.transpose((0, 2, 1))[..., 2:]))
    np.testing.assert_allclose(product, x[:, 1:4] @ x.transpose(0, 2, 1)[..., 2:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
async def test_elements_at_indices_of_views(inline: accel.Device, rng: np.random.Generator, name: str) -> None:
    x = rng.integers(0, 100, (6, 4, 40)).astype(accel.DType.of(name).numpy)
    ref, rows = await inline.put(x), np.array([2, 0, -1])
    indices, wrong = await inline.put(rows), await inline.put(np.array([0, 40]))
    for index, axis in ((np.s_[:, 1, 8:24], 0), (np.s_[::-1, ::2], 0), (np.s_[:, :, ::-1], 2), (np.s_[:, :, 1:7], 1)):
        view, there = ref[index], x[index]
        np.testing.assert_array_equal(await inline.get(await inline.arrays.take(view, indices, axis)), there.take(rows, axis))
        values = rng.integers(0, 100, there.take(rows, axis).shape).astype(x.dtype)
        await inline.arrays.put_along_axis(view, indices, await inline.put(values), axis)
        np.moveaxis(there, axis, 0)[rows] = np.moveaxis(values, axis, 0)
        await inline.arrays.scatter_add(view, indices, 1, axis)
        np.moveaxis(there, axis, 0)[rows] += x.dtype.type(1)
        np.testing.assert_array_equal(await inline.get(ref), x)
        await failure(inline.arrays.take(view, wrong, axis), accel.InvalidArgumentError)


async def test_writes_batches_and_graphs(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 50))
    ref = await device.put(x)
    await device.put(part := rng.standard_normal((40, 7)), out=ref[:, 2:16:2])
    x[:, 2:16:2] = part
    await device.elementwise.binary("mul", ref[::3].T, 2.0, out=ref[::3].T)
    x[::3] *= 2
    await device.copy(ref[:, 20:25], ref[:, 45:])
    x[:, 45:] = x[:, 20:25]
    np.testing.assert_array_equal(await device.get(ref), x)
    np.testing.assert_array_equal(await device.get(ref.T[::-2]), x.T[::-2])
    async with device.batch() as batch:
        lower, lower_of = batch.arrays.tril(ref.T), np.tril(x.T)
        batch.elementwise.unary("neg", ref[:, 3], out=ref[:, 4])
    x[:, 4] = -x[:, 3]
    np.testing.assert_array_equal(await device.get(lower), lower_of)
    async with device.graph() as graph:
        kept = graph.arrays.triu(ref.T)
        total = graph.reduce("sum", ref[:, ::7], axis=0)
    await graph.replay()
    np.testing.assert_array_equal(await device.get(kept), np.triu(x.T))
    np.testing.assert_allclose(await device.get(total), x[:, ::7].sum(0), rtol=1e-12)
    await graph.aclose()
    assert (await failure(device.copy(ref[:, :4], ref[:, 2:6]), accel.InvalidArgumentError)).remedy


async def test_large_views(inline: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3000, 2048)).astype(np.float32)
    ref = await inline.put(x)
    np.testing.assert_array_equal(await inline.get(await inline.elementwise.binary("add", ref.T, ref.T)), 2 * x.T)
    np.testing.assert_array_equal(await inline.get(await inline.elementwise.unary("neg", ref[:, 4:2044])), -x[:, 4:2044])
    np.testing.assert_allclose(await inline.get(await inline.reduce("sum", ref.T, axis=0)), x.T.astype(float).sum(0), atol=1e-2)
    np.testing.assert_array_equal(await inline.get(await inline.reduce("argmax", ref[::2].T)), x[::2].T.argmax())


async def test_other_libraries_see_strides(inline: accel.Device) -> None:
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    x = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    ref = await inline.put(x)
    shared = torch.from_dlpack(ref[:, 1::2])
    assert tuple(shared.stride()) == (6, 2)
    np.testing.assert_array_equal(shared.cpu().numpy(), x[:, 1::2])
    shared = cupy.asarray(ref.T)
    assert shared.strides == (4, 24)
    np.testing.assert_array_equal(shared.get(), x.T)
    del shared
