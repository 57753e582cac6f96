"""Softmax, norms and pooling: what is refused, results over operands, and rows that are not numbers. Values are compared by the samples of the family."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel_cuda.families.dnn import PART
from accel_cuda.families.normalization import columns_of, row_launch
from tests.device_support import failure, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with opened() as device:
        yield device


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


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "is_packed", "expected"),
    [
        (8192, 8192, "bfloat16", True, ("many", 256, 256, 8192)),
        (8192, 8192, "float32", True, ("many", 256, 256, 8192)),
        (7, 1, "float32", False, ("few", 1, 128, 1)),
        (1000, 64, "float16", True, ("few", 4, 128, 32)),
        (1000, 65, "float16", False, ("few", 32, 128, 250)),
        (3, 1024, "float16", True, ("many", 32, 128, 1)),
        (3, 1032, "float16", True, ("many", 64, 64, 3)),
        (2, 16_384, "float32", True, ("many", 512, 512, 2)),
        (2, 16_388, "float32", True, ("streamed", 512, 512, 2)),
        (2, 8193, "float64", False, ("streamed", 512, 512, 2)),
    ],
)
def test_cuda_holds_rows_in_as_few_threads_as_can(rows: int, length: int, dtype: str, is_packed: bool, expected: Any) -> None:
    which, *shares = expected
    kernel, *launch = row_launch("norm", rows, length, accel.DType.of(dtype), is_packed)
    assert kernel.startswith(f"norm_{'packed' if is_packed else 'single'}_{which}_")
    assert launch == shares


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 8192, 8192, 8), (8, 64, 128, 128)),
        ((4, 21, 4096, 4), (256, 2, 4, 16)),
        ((2, 5, 3, 1), (4, 1, 1, 2)),
        ((1, 100_000, 8, 8), (1, 512, 1, 1)),
        ((3, 1, 1000, 1), (512, 1, 2, 6)),
    ],
)
def test_cuda_shares_columns_out(sizes: tuple[int, int, int, int], expected: Any) -> None:
    assert columns_of(*sizes) == expected


def test_cuda_takes_packs_where_rows_and_weights_allow_it() -> None:
    owner: Any = SimpleNamespace(dropped=deque())
    launched: list[str] = []
    stream = SimpleNamespace(ready=lambda: None)
    stream.launch = stream.launch_wide = lambda name, *_: launched.append(name)
    stream.functions = type("Names", (dict,), {"__missing__": lambda self, name: name})()

    def run(op: ops.FamilyOp, *inputs: int, output: int = 1 << 20) -> str:
        PART.kernels[op.kind](SimpleNamespace(stream=stream), op, op.plan(), inputs, (output,))
        return launched.pop() if launched else ""

    def ref(*shape: int) -> accel.AccelRef:
        return accel.AccelRef(owner, 1, shape, accel.DType.FLOAT16, 1)

    x, base = ref(2, 6, 4, 8), 1 << 20
    assert run(ops.Softmax(x), base) == "softmax_packed_few_f16"
    assert run(ops.Softmax(x), base + 2) == "softmax_single_few_f16"
    assert run(ops.Softmax(ref(2, 7)), base) == "softmax_single_few_f16"
    assert run(ops.LogSoftmax(x, 2), base) == "softmax_log_packed_columns_f16"
    assert run(ops.LogSoftmax(x, 2), base, output=base + 2) == "softmax_log_single_columns_f16"
    assert run(ops.Softmax(ref(3, 5, 1), 1), base) == "softmax_single_few_f16", "there is nothing behind the axis"
    assert run(ops.LayerNorm(x, 8, ref(8)), base, base) == "norm_packed_few_f16"
    assert run(ops.LayerNorm(x, 8, ref(8)), base, base + 2) == "norm_single_few_f16"
    assert run(ops.RmsNorm(x, 8), base) == "norm_rms_packed_few_f16"
    assert run(ops.GroupNorm(x, 3, ref(6)), base, base + 2) == "norm_packed_few_f16", "all elements of a pack have one weight"
    assert run(ops.GroupNorm(ref(2, 6, 4), 3, ref(6)), base, base) == "norm_single_few_f16"
    assert run(ops.BatchNorm(x, ref(6), ref(6)), base, base, base) == "norm_channels_packed_f16"
    assert run(ops.MaxPool(x, 2), base) == "pool_largest_single_f16"
    assert run(ops.AvgPool(x, 2, channels_last=True), base) == "pool_mean_packed_f16"
    assert run(ops.Softmax(ref(0, 8)), base) == run(ops.LayerNorm(ref(0, 8), 8), base) == run(ops.MaxPool(ref(0, 1, 4), 2), base) == ""
