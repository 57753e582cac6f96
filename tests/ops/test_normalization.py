"""Softmax, norms and pooling: what is refused, results over operands, and rows that are not numbers. Values are compared by the samples of the family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import accel
from accel import ops
from tests.device_support import failure

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_what_does_not_fit_is_refused(device: accel.Device) -> None:
    x, weight, other = await device.zeros((2, 6, 4)), await device.zeros(4), await device.zeros(4, "float64")
    channels = await device.zeros(6)
    for wrong in (
        device.dnn.softmax(x, 3),
        device.dnn.softmax(await device.zeros(())),
        device.dnn.softmax(x, 1.5),  # type: ignore[arg-type]
        device.dnn.softmax(x, out=weight),
        device.dnn.softmax(x[:1], out=x[:1].reshape(-1)[:24].reshape(6, 4)),
        device.dnn.layer_norm(x, 6),
        device.dnn.layer_norm(x, ()),
        device.dnn.layer_norm(x, (2, 6, 4, 1)),
        device.dnn.layer_norm(x, 4, channels),
        device.dnn.layer_norm(x, 4, other),
        device.dnn.layer_norm(x, 4, weight, out=x[0, 0]),
        device.dnn.layer_norm(x[0, 0], 4, weight, out=weight),
        device.dnn.layer_norm(x, 4, eps=-1.0),
        device.dnn.rms_norm(x, 4, eps=math.nan),
        device.dnn.rms_norm(x, 4, eps=1j),  # type: ignore[arg-type]
        device.dnn.group_norm(x, 4),
        device.dnn.group_norm(x, 0),
        device.dnn.group_norm(weight, 1),
        device.dnn.group_norm(x, 3, weight),
        device.dnn.instance_norm(x[0]),
        device.dnn.batch_norm(x, channels, weight),
        device.dnn.batch_norm(x, channels, channels, axis=3),
        device.dnn.batch_norm(x, channels, None),  # type: ignore[arg-type]
    ):
        await failure(wrong, accel.InvalidArgumentError)
    await failure(device.dnn.softmax(await device.zeros((2, 3), "int32")), accel.UnsupportedError)
    with pytest.raises(accel.InvalidArgumentError):  # before it is sent
        ops.LayerNorm(x, 5).plan()


async def test_windows_that_do_not_fit_are_refused(device: accel.Device) -> None:
    x = await device.zeros((1, 2, 5, 4))
    for wrong in (
        device.dnn.max_pool(x[0, 0], 2),
        device.dnn.max_pool(x, 6),
        device.dnn.max_pool(x, (2, 2, 2)),
        device.dnn.max_pool(x, 0),
        device.dnn.max_pool(x, 2.5),  # type: ignore[arg-type]
        device.dnn.max_pool(x, 2, 0),
        device.dnn.max_pool(x, 2, 2**40),
        device.dnn.max_pool(x, 2, padding=2),
        device.dnn.max_pool(x, 2, padding=((1, 1), (0, 2))),
        device.dnn.max_pool(x, 2, padding=((1, 1, 1), 0)),
        device.dnn.max_pool(x, 2, padding=-1),
        device.dnn.max_pool(await device.zeros((1, 2, 0, 4)), 2, padding=1),
        device.dnn.max_pool(x, 1, out=x),
        device.dnn.avg_pool(x, 2, channels_last=1),  # type: ignore[arg-type]
        device.dnn.avg_pool(x, 2, count_include_pad=None),  # type: ignore[arg-type]
    ):
        await failure(wrong, accel.InvalidArgumentError)


async def test_results_may_overwrite_the_operand(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4, 5))
    ref, powers = await device.put(x), np.exp(x)
    assert await device.dnn.softmax(ref, 1, out=ref) is ref
    np.testing.assert_allclose(await device.get(ref), powers / powers.sum(1, keepdims=True), rtol=1e-12)
    for call in (
        device.dnn.layer_norm(ref, (4, 5), out=ref),
        device.dnn.rms_norm(ref, 5, out=ref),
        device.dnn.group_norm(ref, 2, out=ref),
        device.dnn.batch_norm(ref, await device.zeros(4, "float64"), await device.full(4, 1.0, "float64"), out=ref),
    ):
        assert await call is ref
    assert np.isfinite(await device.get(ref)).all()


async def test_one_weight_may_be_the_bias_too(device: accel.Device) -> None:
    x, both = await device.put(np.array([[1.0, 3.0]])), await device.put(np.array([2.0, 4.0]))
    made = await device.get(await device.dnn.layer_norm(x, 2, both, both, eps=0.0))
    np.testing.assert_allclose(made, [[0.0, 8.0]])


async def test_large_means_and_large_rows(device: accel.Device, rng: np.random.Generator) -> None:
    """Elements far from 0 keep their deviations, and rows larger than the workspace of a kernel are computed in parts."""
    x = (1000 + rng.standard_normal((2, 70_001))).astype(np.float32)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    got = await device.get(await device.dnn.layer_norm(await device.put(x), 70_001))
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_a_row_without_a_scale_spoils_no_other(device: accel.Device, value: Any) -> None:
    x = np.ones((3, 8), np.float32)
    x[0] = np.arange(8)
    x[1, 3] = value
    ref = await device.put(x)
    for made in (device.dnn.softmax(ref), device.dnn.log_softmax(ref), device.dnn.layer_norm(ref, 8), device.dnn.rms_norm(ref, 8)):
        got = await device.get(await made)
        assert np.isfinite(got[[0, 2]]).all()
        assert np.isnan(got[1]).any()
