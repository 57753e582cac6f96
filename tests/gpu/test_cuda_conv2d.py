"""Convolutions on the GPU against a product in higher precision: every dtype, and shapes for each way in which they are made."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel import DType, InvalidArgumentError, UnsupportedError
from accel_cuda.families.conv2d import Convolution
from tests.gpu.compute_support import bench, random, wide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.gpu.compute_support import Array, Bench

# (N, C, H, W), (K, R, S), stride, padding
_CASES = (
    ((1, 1, 1, 1), (1, 1, 1), (1, 1), (0, 0)),
    ((2, 3, 5, 7), (4, 3, 2), (1, 1), (0, 0)),
    ((3, 5, 9, 8), (65, 3, 3), (1, 1), (1, 1)),
    ((2, 7, 11, 13), (130, 5, 3), (2, 3), (2, 1)),
    ((1, 16, 33, 31), (129, 3, 3), (1, 2), (4, 0)),
    ((4, 64, 7, 7), (128, 3, 3), (1, 1), (1, 1)),
    ((2, 200, 4, 4), (70, 4, 4), (1, 1), (0, 0)),
    ((9, 24, 14, 14), (200, 1, 1), (1, 1), (0, 0)),
    ((2, 24, 15, 15), (33, 1, 1), (2, 2), (0, 0)),
    ((2, 24, 5, 6), (33, 1, 1), (1, 1), (1, 1)),
    ((40, 33, 30, 30), (256, 3, 3), (1, 1), (1, 1)),
    ((200, 64, 14, 14), (72, 3, 3), (1, 1), (1, 1)),
)
_ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 0.0, "float64": 0.0}
_SUM = {"float16": 1e-6, "bfloat16": 1e-6, "float32": 1e-6, "float64": 1e-14}


def test_tilings_cover_every_tap() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    for _ in range(2000):
        n, c, k, p, q = (int(2 ** rng.uniform(0, 9)) for _ in range(5))
        r, s = (int(each) for each in rng.integers(1, 8, 2))
        dtype = DType.of(str(rng.choice(list(_SUM))))
        work = Convolution((n, c, p + r - 1, q + s - 1), (k, c, r, s), (n, k, p, q), (1, 1), (0, 0))
        height, each, parts = work.tiling(dtype, 132, 32 << 20)
        case = (work, dtype, seed)
        assert height in (64, 128), case
        piece = work.piece(dtype, 0, 32 << 20)
        assert piece * 2 * (work.taps + k) <= 32 << 20, case
        assert piece % 128 == 0, case
        assert each * parts >= work.taps > each * (parts - 1), case
        assert parts == 1 or parts * n * k * p * q * (8 if dtype is DType.FLOAT64 else 4) <= 32 << 20, case
        assert each % 32 == 0 or dtype.itemsize > 2, case


def test_sizes_beyond_the_kernels_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="too large"):
        Convolution((1, 1, 1, 1 << 30), (1, 1, 1, 1), (1, 1, 1, 1 << 30), (1, 1), (0, 0)).check("cuda:0")


@pytest.fixture(scope="module")
def device() -> Iterator[Bench]:
    with bench() as opened:
        yield opened


def reference(x: Array, f: Array, stride: tuple[int, int], padding: tuple[int, int]) -> Array:
    (py, px), (sy, sx) = padding, stride
    padded = np.pad(wide(x), ((0, 0), (0, 0), (py, py), (px, px)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, f.shape[2:], (2, 3))[:, :, ::sy, ::sx]
    result: Array = np.moveaxis(np.tensordot(windows, wide(f), ((1, 4, 5), (1, 2, 3))), 3, 1)
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", _SUM)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_convolutions(
    device: Bench, dtype: str, case: tuple[tuple[int, ...], tuple[int, int, int], tuple[int, int], tuple[int, int]]
) -> None:
    shape, (k, r, s), stride, padding = case
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype)
    x, f = random(rng, shape, element.numpy), random(rng, (k, shape[1], r, s), element.numpy)
    expected, sizes = reference(x, f, stride, padding), reference(np.abs(x), np.abs(f), stride, padding)
    # Filters at an odd place, so that they cannot be read as packs, must do too.
    for offset in (0, 1):
        out = device.poisoned(expected.size, element.numpy)
        inputs = device.put(x, offset), x.shape, device.put(f, offset), f.shape
        device.compute.conv2d_forward(*inputs, out, expected.shape, stride, padding, dtype=element)
        got = device.get(out, expected.shape, element.numpy)
        error = _SUM[dtype] * sizes + _ROUNDING[dtype] * np.abs(expected)
        assert np.all(np.abs(wide(got) - expected) <= error), f"offset {offset}, seed {seed}"
        device.clear()


@pytest.mark.gpu
def test_wrong_shapes_are_refused(device: Bench) -> None:
    with pytest.raises(InvalidArgumentError, match="output_shape"):
        device.compute.conv2d_forward(4096, (1, 1, 4, 4), 4096, (1, 1, 3, 3), 4096, (1, 1, 4, 4), (1, 1), (0, 0), dtype=DType.FLOAT32)
