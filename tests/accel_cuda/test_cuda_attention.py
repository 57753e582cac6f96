"""Attention on the GPU against float64: by cuDNN and by the backend's own kernel, ragged sizes, and elements that are no numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel import DType
from accel.testing.conformance.harness import Array, Harness, rounding, sum_rounding, wide
from accel_cuda import CudaBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.backend import AccelDevice
    from accel.compute import ComputeBackend
    from accel.enums import Causal

FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
WIDE = (DType.FLOAT32, DType.FLOAT64)  # computed by the backend's own kernel, as are heads whose width is not a multiple of 8
CAUSAL: tuple[Causal, ...] = (False, True, "bottom_right")


@pytest.fixture(scope="module")
def primary_context() -> Iterator[AccelDevice]:
    """Keep the primary context, which takes tenths of a second to make, between the tests."""
    context = CudaBackend().open(0)
    yield context
    context.close()


@pytest.fixture
def harness(primary_context: AccelDevice) -> Harness:
    return Harness(CudaBackend())


def attention_of(q: Array, k: Array, v: Array, scale: float, causal: Causal) -> tuple[Array, Array]:
    """Return attention in float64 over the keys that each query sees alone, and the same of the values' magnitudes."""
    q, k, v = wide(q), wide(k), wide(v)
    out, spread = np.zeros_like(q), np.zeros_like(q)
    seq_q, seq_kv = q.shape[2], k.shape[2]
    first = {False: seq_kv, True: 1}.get(causal, 1 + seq_kv - seq_q) if causal != "bottom_right" else 1 + seq_kv - seq_q
    with np.errstate(all="ignore"):
        if first >= seq_kv > 0 or bool(np.isfinite(v).all()):
            scores = scale * (q @ k.swapaxes(2, 3))
            scores[:, :, np.arange(seq_kv)[None, :] >= first + np.arange(seq_q)[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
            weights /= weights.sum(-1, keepdims=True)
            blind = min(seq_q, max(0, 1 - first)) if seq_kv else seq_q
            weights[:, :, :blind] = 0
            weights[np.isneginf(scores.max(-1, initial=-np.inf))] = 0
            return weights @ v, weights @ np.abs(v)
        for i in range(seq_q):
            seen = max(0, min(seq_kv, first + i))
            if seen:
                scores = scale * np.einsum("bhd,bhkd->bhk", q[:, :, i], k[:, :, :seen])
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                weights[np.isneginf(scores.max(-1))] = 0
                out[:, :, i] = np.einsum("bhk,bhkd->bhd", weights, v[:, :, :seen])
                spread[:, :, i] = np.einsum("bhk,bhkd->bhd", weights, np.abs(v[:, :, :seen]))
    return out, spread


def check(
    harness: Harness,
    compute: ComputeBackend,
    arrays: tuple[Array, Array, Array],
    scale: float,
    causal: Causal,
    dtype: DType,
    offset: int = 0,
) -> None:
    """Run one call between guards, into poisoned memory, and compare. ``offset`` elements put the arrays that far from where they would be aligned."""
    q, k, v = arrays
    batch, heads, seq_q, dim = q.shape
    seq_kv = k.shape[2]
    what = f"attention {dtype.value} {(batch, heads, seq_q, seq_kv, dim)} {scale=} {causal=} {offset=}"
    with harness.case(compute, what) as case:
        pad = np.zeros(offset, q.dtype)
        qp, kp, vp = (case.put(np.concatenate([pad, each.ravel()])) + offset * dtype.itemsize for each in arrays)
        out = case.poisoned(q.size + offset, dtype) + offset * dtype.itemsize
        compute.attention(qp, kp, vp, out, batch, heads, seq_q, seq_kv, dim, scale, causal, dtype=dtype)
        expected, spread = attention_of(q, k, v, scale, causal)
        finite = [np.nan_to_num(wide(x), nan=0.0, posinf=0.0, neginf=0.0) for x in (q, k)]
        scores = abs(scale) * dim * float(np.abs(finite[0]).max(initial=0.0)) * float(np.abs(finite[1]).max(initial=0.0))
        # A weight is rounded to the elements' type, and what it is the power of is as uncertain as a sum of its products.
        error = (rounding(dtype) * (dtype.itemsize == 2) + (4 * scores + 2 * seq_kv**0.5 + 16) * sum_rounding(dtype)) * spread
        # The smallest weights of float16 are rounded to multiples of its smallest number.
        if dtype is DType.FLOAT16:
            error = error + seq_kv * 2.0**-25 * float(np.nanmax(np.abs(np.where(np.isfinite(wide(v)), wide(v), 0)), initial=0.0))
        case.close_to(case.get(out, q.shape, dtype), expected, np.nan_to_num(error, nan=0.0, posinf=0.0))


def random_arrays(harness: Harness, batch: int, heads: int, seq_q: int, seq_kv: int, dim: int, dtype: DType) -> tuple[Array, Array, Array]:
    q = harness.random((batch, heads, seq_q, dim), dtype)
    k, v = (harness.random((batch, heads, seq_kv, dim), dtype) for _ in range(2))
    return q, k, v


# Single queries; tiles' edges; queries that see nothing; heads that cuDNN does not take, because of their width.
SIZES = [
    (1, 2, 129, 65, 64),
    (3, 1, 300, 20, 64),
    (1, 1, 20, 300, 128),
    (2, 3, 1, 4097, 128),
    (1, 2, 7, 400, 31),
    (1, 1, 40, 50, 264),
    (1, 1, 1, 1, 8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype.value))
def test_sizes(harness: Harness, dtype: DType) -> None:
    with harness.open_compute() as compute:
        # cuDNN's plans take a second each.
        for number, sizes in enumerate(SIZES if dtype in WIDE else SIZES[2:5]):
            for causal in CAUSAL:
                # Every other call has operands that plans cannot take where they lie.
                offset = (number + len(str(causal))) % 2
                check(harness, compute, random_arrays(harness, *sizes, dtype), sizes[-1] ** -0.5, causal, dtype, offset)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", WIDE, ids=lambda dtype: str(dtype.value))
def test_random_sizes(harness: Harness, dtype: DType, causal: Causal) -> None:
    rng = harness.rng
    with harness.open_compute() as compute:
        for _ in range(20):
            batch, heads = (int(each) for each in rng.integers(1, 4, 2))
            seq_q, seq_kv = (int(2 ** rng.uniform(0, 8)) for _ in range(2))
            dim = int(rng.choice([8, 64, 96, 128, int(rng.integers(1, 300))]))
            scale = float(rng.uniform(0.2, 3)) * dim**-0.5
            check(
                harness,
                compute,
                random_arrays(harness, batch, heads, seq_q, seq_kv, dim, dtype),
                scale,
                causal,
                dtype,
                int(rng.choice([0, 1, 2])),
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype.value))
def test_scales_of_any_sign_and_size(harness: Harness, dtype: DType) -> None:
    with harness.open_compute() as compute:
        for scale in (0.0, -2.0, 1e-30, 20.0):
            # Small integers: scores are exact, so that large ones need no tolerance of their own.
            q, k = (harness.rng.integers(-2, 3, (1, 2, length, 16)).astype(dtype.numpy) for length in (6, 200))
            check(harness, compute, (q, k, harness.random((1, 2, 200, 16), dtype)), scale, True, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDE, ids=lambda dtype: str(dtype.value))
def test_scores_of_minus_infinity(harness: Harness, dtype: DType) -> None:
    """Keys whose scores are -infinity have no weight; a query with no other gives 0, as one that sees no key does."""
    q, k, v = random_arrays(harness, 1, 1, 70, 150, 16, dtype)
    q[..., 0] = 1
    k[:, :, :75, 0] = -np.inf
    with harness.open_compute() as compute:
        for causal in CAUSAL:
            check(harness, compute, (q, k, v), 0.25, causal, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sizes", [(1, 2, 150, 150, 24), (1, 1, 3, 40, 64), (1, 1, 40, 30, 260)], ids=str)
@pytest.mark.parametrize("dtype", WIDE, ids=lambda dtype: str(dtype.value))
def test_what_a_query_does_not_see_does_not_get_in(harness: Harness, dtype: DType, sizes: tuple[int, ...], value: float) -> None:
    batch, heads, seq_q, seq_kv, dim = sizes
    with harness.open_compute() as compute:
        for causal in CAUSAL:
            q, k, v = random_arrays(harness, batch, heads, seq_q, seq_kv, dim, dtype)
            q[:] *= 0.125  # so that every weight is far from 0, which infinity times is NaN
            v[0, 0, int(harness.rng.integers(seq_kv)), int(harness.rng.integers(dim))] = value
            v[0, -1, seq_kv - 1, dim - 1] = value
            check(harness, compute, (q, k, v), dim**-0.5, causal, dtype)


@pytest.mark.gpu
def test_without_keys_nothing_is_read(harness: Harness) -> None:
    with harness.open_compute() as compute, harness.case(compute, "attention without keys") as case:
        out = case.poisoned(60, DType.FLOAT32)
        compute.attention(0, 0, 0, out, 1, 2, 3, 0, 10, 1.0, False)
        case.same(case.get(out, 60, DType.FLOAT32), np.zeros(60, np.float32))
