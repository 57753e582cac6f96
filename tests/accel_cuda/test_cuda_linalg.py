"""Products of cuBLASLt through the device: ranks, epilogues, views, graphs, small dtypes, and algorithms that are tried out."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import accel
from accel import DType
from tests.accel_cuda.compute_support import close, random, unaligned, wide

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12, "complex64": 2e-5, "complex128": 1e-12}
FUSED = ("float16", "bfloat16", "float32", "float64")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cuda", libraries=("linalg",), **options)


def gelu(x: Any) -> Any:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_ranks_broadcasting_and_transposes(dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    shapes = [
        ((33, 65), (65, 17)), ((65,), (65, 17)), ((33, 65), (65,)), ((65,), (65,)), ((3, 2, 33, 9), (9, 17)), ((2, 1, 7, 9), (3, 9, 5)),
        ((3, 1, 2, 4, 8), (2, 1, 8, 16)), ((9,), (3, 9, 5)), ((3, 5, 9), (9,)), ((1, 1), (1, 1)), ((0, 3), (3, 4)), ((4, 0), (0, 3)), ((0, 4, 3), (3, 4)),
    ]  # fmt: skip
    async with opened() as gpu:
        for shape_a, shape_b in shapes:
            a, b = random(rng, shape_a, element), random(rng, shape_b, element)
            got = await gpu.get(await gpu.linalg.matmul(await gpu.put(a), await gpu.put(b)))
            close(got, np.asarray(wide(a) @ wide(b)), TOLERANCE[dtype], f"{shape_a} @ {shape_b}, seed {seed}")
        a, b = random(rng, (3, 65, 33), element), random(rng, (17, 65), element)
        got = await gpu.get(await gpu.linalg.matmul(await gpu.put(a), await gpu.put(b), transpose_a="c", transpose_b=True))
        close(got, wide(a).swapaxes(1, 2).conj() @ wide(b).T, TOLERANCE[dtype], f"transposed, seed {seed}")


@pytest.mark.parametrize("dtype", FUSED)
async def test_epilogues_at_even_and_odd_sizes(dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    tolerance = max(TOLERANCE[dtype], 1e-4)  # an approximate tanh
    async with opened() as gpu:
        for lead, m, n, k in (((), 64, 128, 96), ((), 7, 5, 3), ((3,), 16, 24, 40), ((2, 3), 1, 8, 9), ((), 5, 1, 4)):
            a, b, bias = random(rng, (*lead, m, k), element), random(rng, (*lead[:1], k, n)[-3:], element), random(rng, (n,), element)
            b = b if len(lead) < 2 else random(rng, (k, n), element)
            product = wide(a) @ wide(b)
            ra, rb, rbias = await gpu.put(a), await gpu.put(b), await gpu.put(bias)
            case = f"{lead} {(m, n, k)}, seed {seed}"
            close(await gpu.get(await gpu.linalg.matmul(ra, rb, bias=rbias)), product + wide(bias), TOLERANCE[dtype], case)
            relu = await gpu.linalg.matmul(ra, rb, bias=rbias, activation="relu")
            close(await gpu.get(relu), np.maximum(product + wide(bias), 0), TOLERANCE[dtype], case)
            close(await gpu.get(await gpu.linalg.matmul(ra, rb, activation="relu")), np.maximum(product, 0), TOLERANCE[dtype], case)
            if n > 1:
                aux = await gpu.full(product.shape, np.nan, dtype)
                result = await gpu.linalg.matmul(ra, rb, bias=rbias, activation="gelu", aux=aux)
                close(await gpu.get(result), gelu(product + wide(bias)), tolerance, case)
                close(await gpu.get(aux), product + wide(bias), TOLERANCE[dtype], case)
            else:
                result = await gpu.linalg.matmul(ra, rb, bias=rbias, activation="gelu")
                close(await gpu.get(result), gelu(product + wide(bias)), tolerance, case)


@pytest.mark.parametrize("dtype", FUSED)
async def test_views_that_begin_anywhere(dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    a, b, bias = random(rng, (24, 40), element), random(rng, (40, 32), element), random(rng, (32,), element)
    expected = np.maximum(wide(a) @ wide(b) + wide(bias), 0)
    async with opened() as gpu:
        for skipped in (1, 2, 4):
            refs = [await unaligned(gpu, each, skipped) for each in (a, b, bias)]
            out = await unaligned(gpu, np.zeros((24, 32), element), skipped)
            await gpu.linalg.matmul(refs[0], refs[1], bias=refs[2], activation="relu", out=out)
            close(await gpu.get(out), expected, TOLERANCE[dtype], f"{skipped}, seed {seed}")


async def test_batches_and_graphs_and_streams() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    a, b, bias = (random(rng, shape, np.dtype(np.float32)) for shape in ((48, 64), (64, 64), (64,)))
    first = np.maximum(wide(a) @ wide(b) + wide(bias), 0)
    second = first @ wide(b)
    async with opened() as gpu:
        refs = [await gpu.put(each) for each in (a, b, bias)]
        async with gpu.batch() as batch:
            y = batch.linalg.matmul(batch.linalg.matmul(*refs[:2], bias=refs[2], activation="relu"), refs[1])
        close(await gpu.get(y), second, 1e-4, f"seed {seed}")
        async with gpu.graph() as graph:
            y = graph.linalg.matmul(graph.linalg.matmul(*refs[:2], bias=refs[2], activation="relu"), refs[1])
        for scale in (1.0, 2.0):
            await gpu.put((a * scale).astype(np.float32), out=refs[0])
            await graph.replay()
            again = np.maximum(scale * (wide(a) @ wide(b)) + wide(bias), 0) @ wide(b)
            close(await gpu.get(y), again, 1e-4, f"{scale}, seed {seed}")
        await graph.aclose()


async def test_algorithms_are_tried_out_once() -> None:
    rng = np.random.default_rng()
    a, b = (random(rng, (512, 512), np.dtype(ml_dtypes.bfloat16)) for _ in range(2))
    async with opened() as gpu:
        ra, rb = await gpu.put(a), await gpu.put(b)
        for _ in range(3):
            result = await gpu.linalg.matmul(ra, rb, activation="relu", autotune=True)
            close(await gpu.get(result), np.maximum(wide(a) @ wide(b), 0), 1.6e-2, "tuned")


async def test_int8_is_exact() -> None:
    rng = np.random.default_rng()
    async with opened() as gpu:
        for m, n, k in ((16, 16, 16), (5, 64, 256), (128, 32, 1024)):
            a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((m, k), (n, k)))
            got = await gpu.get(await gpu.linalg.matmul(await gpu.put(a), await gpu.put(b), transpose_b=True))
            np.testing.assert_array_equal(got, a.astype(np.int64) @ b.astype(np.int64).T)
            assert got.dtype == np.int32


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
async def test_other_integers_wrap_around(dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    async with opened() as gpu:
        for shape_a, shape_b in (
            ((1, 1), (1, 1)),
            ((33, 70), (70, 41)),
            ((2, 1, 31, 64), (3, 64, 100)),
            ((5, 32, 7), (7, 3)),
            ((9,), (9, 65)),
        ):
            a, b = (rng.integers(limits.min, limits.max, shape, dtype, endpoint=True) for shape in (shape_a, shape_b))
            got = await gpu.get(await gpu.linalg.matmul(await gpu.put(a), await gpu.put(b)))
            np.testing.assert_array_equal(got, np.asarray(a @ b), err_msg=f"{shape_a} {shape_b}, seed {seed}")


async def test_float8_with_scales_and_its_largest_value() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((48, 128)).astype(E4M3), rng.standard_normal((64, 128)).astype(E4M3)
    product = a.astype(np.float64) @ b.astype(np.float64).T
    top = np.abs(product).max()
    async with opened() as gpu:
        ra, rb = await gpu.put(a), await gpu.put(b)
        half, many, amax = await gpu.full((), 0.5, "float32"), await gpu.full((), 1e4, "float32"), await gpu.full((), 1e9, "float32")
        for dtype in ("bfloat16", "float16", "float32"):
            got = (await gpu.get(await gpu.linalg.matmul(ra, rb, transpose_b=True, scale_a=half, out_dtype=dtype))).astype(np.float64)
            assert np.abs(got - product / 2).max() < 1e-2 * top, f"{dtype}, seed {seed}"
        y = await gpu.linalg.matmul(ra, rb, transpose_b=True, scale_b=half, scale_out=many, amax=amax, out_dtype=str(E4M3))
        assert abs(float(await gpu.get(amax)) - top / 2) < 1e-2 * top, f"seed {seed}"
        stored = (await gpu.get(y)).astype(np.float64)
        assert np.abs(stored).max() == 448, f"results saturate, seed {seed}"


async def test_what_the_library_has_no_kernel_for_is_refused_and_the_device_goes_on() -> None:
    async with opened() as gpu:
        a, b = await gpu.zeros((16, 32), str(E4M3)), await gpu.zeros((32, 16), str(E4M3))
        with pytest.raises(accel.UnsupportedError, match="cuBLASLt has no algorithm") as caught:
            await gpu.linalg.matmul(a, b)
        assert "transpose_b" in str(caught.value.remedy)
        assert not (await gpu.get(await gpu.linalg.matmul(a, await gpu.zeros((16, 32), str(E4M3)), transpose_b=True))).any()
        assert gpu.generation == 1
