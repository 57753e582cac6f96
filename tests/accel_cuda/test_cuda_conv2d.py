"""Convolutions on the GPU through the compute interface, against a product in higher precision: every dtype, and operands that are not aligned."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel import DType, InvalidArgumentError
from tests.accel_cuda.compute_support import bench, random, wide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.accel_cuda.compute_support import Array, Bench

# (N, C, H, W), (K, R, S), stride, padding
_CASES = (
    ((1, 1, 1, 1), (1, 1, 1), (1, 1), (0, 0)),
    ((2, 3, 5, 7), (4, 3, 2), (1, 1), (0, 0)),
    ((3, 5, 9, 8), (65, 3, 3), (1, 1), (1, 1)),
    ((2, 7, 11, 13), (130, 5, 3), (2, 3), (2, 1)),
    ((1, 16, 33, 31), (129, 3, 3), (1, 2), (4, 0)),
    ((2, 200, 4, 4), (70, 4, 4), (1, 1), (0, 0)),
    ((9, 24, 14, 14), (200, 1, 1), (1, 1), (0, 0)),
    ((2, 24, 15, 15), (33, 1, 1), (2, 2), (0, 0)),
    ((40, 33, 30, 30), (256, 3, 3), (1, 1), (1, 1)),
)
_ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 0.0, "float64": 0.0}
_SUM = {"float16": 1e-6, "bfloat16": 1e-6, "float32": 1e-6, "float64": 1e-14}


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
    # Plans take what begins at multiples of 16 bytes; other operands are copied.
    for offset in (0, 1):
        out = device.poisoned(expected.size, element.numpy, offset)
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
