"""Convolutions and attention refuse what does not fit together, with the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests.device_support import failure

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


WRONG: dict[str, Any] = {
    "groups do not divide the channels": lambda d, r: d.conv2d(r(1, 4, 5, 5), r(6, 2, 3, 3), groups=3),
    "groups do not divide the filters": lambda d, r: d.conv2d(r(1, 4, 5, 5), r(5, 2, 3, 3), groups=2),
    "no groups": lambda d, r: d.conv2d(r(1, 4, 5, 5), r(6, 4, 3, 3), groups=0),
    "channels last by a number": lambda d, r: d.conv2d(r(1, 4, 5, 5), r(6, 4, 3, 3), channels_last=0),
    "channels last by a list": lambda d, r: d.conv1d(r(1, 4, 5), r(6, 4, 3), channels_last=[]),
    "channels come last": lambda d, r: d.conv2d(r(1, 4, 5, 5), r(6, 4, 3, 3), channels_last=True),
    "a dilated filter that does not fit": lambda d, r: d.conv2d(r(1, 4, 5, 5), r(6, 4, 3, 3), dilation=3),
    "negative padding at one end": lambda d, r: d.conv2d(r(1, 4, 5, 5), r(6, 4, 3, 3), padding=((0, -1), (0, 0))),
    "padding of three numbers": lambda d, r: d.conv1d(r(1, 4, 5), r(6, 4, 3), padding=((0, 1, 2),)),
    "a bias of another length": lambda d, r: d.conv3d(r(1, 2, 5, 5, 5), r(6, 2, 3, 3, 3), bias=r(5)),
    "an unknown activation": lambda d, r: d.conv1d(r(1, 4, 5), r(6, 4, 3), activation="gelu"),
    "images for a line": lambda d, r: d.conv1d(r(1, 4, 5, 5), r(6, 4, 3, 3)),
    "heads that are no multiple": lambda d, r: d.attention(r(1, 3, 5, 8), r(1, 2, 5, 8), r(1, 2, 5, 8)),
    "another head dimension": lambda d, r: d.attention(r(1, 2, 5, 8), r(1, 2, 5, 4), r(1, 2, 5, 8)),
    "values for other keys": lambda d, r: d.attention(r(1, 2, 5, 8), r(1, 2, 5, 8), r(1, 2, 6, 8)),
    "another batch": lambda d, r: d.attention(r(2, 2, 5, 8), r(1, 2, 5, 8), r(1, 2, 5, 8)),
    "a window without causal": lambda d, r: d.attention(*[r(1, 2, 5, 8)] * 3, window=2),
    "an empty window": lambda d, r: d.attention(*[r(1, 2, 5, 8)] * 3, causal=True, window=0),
    "a bias of another shape": lambda d, r: d.attention(*[r(1, 2, 5, 8)] * 3, bias=r(1, 3, 5, 5)),
    "lengths of floats": lambda d, r: d.attention(*[r(1, 2, 5, 8)] * 3, lengths_kv=r(1)),
    "offsets of floats": lambda d, r: d.ragged_attention(*[r(5, 2, 8)] * 3, r(2), r(2), longest_q=5, longest_kv=5),
    "a table of floats": lambda d, r: d.paged_attention(r(1, 2, 3, 8), r(4, 2, 4, 8), r(4, 2, 4, 8), r(1, 4), r(1)),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
async def test_what_does_not_fit_is_refused(device: accel.Device, call: Any) -> None:
    made = {shape: await device.zeros(shape) for shape in SHAPES}
    error = await failure(call(device.dnn, lambda *shape: made[shape]), accel.InvalidArgumentError)
    assert error.remedy != accel.InvalidArgumentError.default_remedy


SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 4, 5, 5), (6, 2, 3, 3), (5, 2, 3, 3), (6, 4, 3, 3), (1, 4, 5), (6, 4, 3), (1, 2, 5, 5, 5), (6, 2, 3, 3, 3), (5,), (1, 3, 5, 8), (1, 2, 5, 8),
    (1, 2, 5, 4), (1, 2, 6, 8), (2, 2, 5, 8), (1, 3, 5, 5), (1,), (5, 2, 8), (2,), (1, 2, 3, 8), (4, 2, 4, 8), (1, 4),
)  # fmt: skip


async def test_tf32_is_for_float32_alone(device: accel.Device) -> None:
    x = await device.put(np.zeros((1, 1, 3), np.float64))
    await failure(device.dnn.conv1d(x, x, allow_tf32=True), accel.InvalidArgumentError)
    x = await device.put(np.ones((1, 1, 3), np.float32))
    assert (await device.get(await device.dnn.conv1d(x, x, allow_tf32=True))).item() == 3


async def test_rest_of_a_result_beyond_the_lengths_is_zeros(device: accel.Device) -> None:
    q = await device.put(np.ones((2, 1, 3, 4)))
    lengths = await device.put(np.array([2, 0], np.int32))
    out = await device.put(np.full((2, 1, 3, 4), 7.0))
    got = await device.get(await device.dnn.attention(q, q, q, lengths_q=lengths, lengths_kv=lengths, out=out))
    np.testing.assert_array_equal(got[:, 0, :, 0], [[1, 1, 0], [0, 0, 0]])


async def test_attention_reads_heads_that_were_split_off_where_they_are(device: accel.Device) -> None:
    rng = np.random.default_rng()
    whole = rng.standard_normal((2, 7, 3, 4, 8))  # batch, tokens, which of q, k and v, heads, head_dim
    refs = (await device.put(whole)).transpose((2, 0, 3, 1, 4))
    q, k, v = refs[0], refs[1], refs[2]
    op = accel.ops.Attention(q, k, v, causal=True)
    assert all(op.takes_strided(ref) for ref in (q, k, v))
    arrays = [np.ascontiguousarray(each) for each in whole.transpose(2, 0, 3, 1, 4)]
    expected = await device.get(await device.dnn.attention(*[await device.put(each) for each in arrays], causal=True))
    np.testing.assert_allclose(await device.get(await device.run(op)), expected, rtol=1e-12)
    odd = (await device.put(rng.standard_normal((2, 4, 7, 9))))[..., 1:]
    assert not accel.ops.Attention(odd, odd, odd).takes_strided(odd), "rows are not aligned"
    rows = [await device.put(np.ascontiguousarray(await device.get(odd))) for _ in range(3)]
    expected = await device.get(await device.dnn.attention(*rows))
    np.testing.assert_allclose(await device.get(await device.dnn.attention(odd, odd, odd)), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["attention", "attention_with_stats"])
async def test_causal_is_a_bool_of_numpy_too_and_no_other_number(device: accel.Device, kind: str) -> None:
    rng = np.random.default_rng(3)
    q, k, v = [await device.put(rng.standard_normal((1, 1, length, 8))) for length in (2, 5, 5)]

    async def made(causal: Any) -> Any:
        found = await getattr(device.dnn, kind)(q, k, v, causal=causal)
        return await device.get(found[0] if isinstance(found, tuple) else found)

    for causal in (False, True):
        np.testing.assert_array_equal(await made(np.bool_(causal)), await made(causal))
    for wrong in (0, 1, 1.0, "top_left", np.array([True, False])):
        with pytest.raises(accel.InvalidArgumentError, match="causal"):
            await made(wrong)


@pytest.mark.parametrize("wrong", ["no", 0, 1, 1.5, np.array([True, False])])
async def test_flags_are_bools(device: accel.Device, wrong: Any) -> None:
    a, x, w = await device.zeros((4, 4)), await device.zeros((1, 2, 4, 4)), await device.zeros((2, 2, 3, 3))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: device.blas.gemm(a, a, allow_tf32=wrong),
        lambda: device.dnn.conv2d(x, w, allow_tf32=wrong),
        lambda: device.arrays.linspace(0, 1, 5, endpoint=wrong),
    )
    for refused in calls:
        with pytest.raises(accel.InvalidArgumentError):
            await refused()
    no: Any = np.bool_(False)
    assert (await device.get(await device.arrays.linspace(0, 1, 2, endpoint=no))).tolist() == [0, 0.5]
