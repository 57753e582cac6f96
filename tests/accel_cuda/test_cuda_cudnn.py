"""Convolutions and attention by cuDNN as services use them: large forms against float64, first uses that do not hold the loop up, plans on disk, graphs."""

from __future__ import annotations

import asyncio
import faulthandler
import time
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import accel
from accel_cuda.families import cudnn
from tests.accel_cuda.compute_support import unaligned

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio]

LIBRARIES = ("dnn",)

BF16 = np.dtype(ml_dtypes.bfloat16)
_LAG = 0.02


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def random(rng: np.random.Generator, *shape: int, dtype: Any = BF16) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(dtype)


def attended(
    q: Any, k: Any, v: Any, *, lengths: Any = None, is_causal: bool = True, window: int | None = None, bias: Any = None
) -> np.ndarray[Any, Any]:
    """Return attention in float64, causal from the bottom right."""
    q, k, v = (each.astype(np.float64) for each in (q, k, v))
    k, v = (each.repeat(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.swapaxes(2, 3) * q.shape[3] ** -0.5
    if bias is not None:
        scores = scores + bias.astype(np.float64)
    lengths_q, lengths_kv = lengths or ([q.shape[2]] * len(q), [k.shape[2]] * len(q))
    row, column = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for one, (queries, keys) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        last = row + keys - queries if is_causal else np.full_like(row, keys)
        seen = (column <= last) & (column < keys) & (column > last - (window or 10**9)) & (row < queries)
        each = np.where(seen, scores[one], -np.inf)
        with np.errstate(all="ignore"):
            weights = np.exp(each - each.max(-1, keepdims=True))
            weights = np.nan_to_num(weights / weights.sum(-1, keepdims=True))
        out[one] = weights @ v[one]
    return out


def assert_close(got: Any, expected: Any, error: float = 0.03) -> None:
    assert got.shape == expected.shape
    assert float(np.abs(got.astype(np.float64) - expected).max()) < error * max(1.0, float(np.abs(expected).max()))


async def test_forms_of_attention(device: accel.Device, rng: np.random.Generator) -> None:
    q, k, v = random(rng, 2, 8, 200, 64), random(rng, 2, 2, 333, 64), random(rng, 2, 2, 333, 64)
    refs = [await device.put(each) for each in (q, k, v)]
    lengths = [200, 77], [333, 100]
    lengths_q, lengths_kv = [await device.put(np.array(each, np.int32)) for each in lengths]
    attention = device.dnn.attention
    assert_close(await device.get(await attention(*refs)), attended(q, k, v, is_causal=False))
    assert_close(await device.get(await attention(*refs, causal="bottom_right", window=50)), attended(q, k, v, window=50))
    got = await attention(*refs, causal="bottom_right", lengths_q=lengths_q, lengths_kv=lengths_kv)
    assert_close(await device.get(got), attended(q, k, v, lengths=lengths))
    got = await attention(*refs, lengths_kv=lengths_kv)
    assert_close(await device.get(got), attended(q, k, v, lengths=([200, 200], lengths[1]), is_causal=False))
    bias = random(rng, 1, 8, 200, 333)
    assert_close(await device.get(await attention(*refs, bias=await device.put(bias))), attended(q, k, v, is_causal=False, bias=bias))
    # cuDNN offers no bias with the diagonal at the bottom right, nor more queries than keys: the backend's own kernel does.
    got = await attention(*refs, bias=await device.put(bias), causal="bottom_right")
    assert_close(await device.get(got), attended(q, k, v, bias=bias))


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
async def test_heads_that_were_split_off_are_read_where_they_are(device: accel.Device, rng: np.random.Generator, dtype: Any) -> None:
    whole = random(rng, 2, 150, 3, 4, 64, dtype=dtype)
    heads = whole.transpose(2, 0, 3, 1, 4)
    refs = (await device.put(whole)).transpose((2, 0, 3, 1, 4))
    op = accel.ops.Attention(refs[0], refs[1], refs[2], causal="bottom_right")
    assert op.takes_strided(op.q)
    assert_close(await device.get(await device.run(op)), attended(*heads), 0.03 if dtype == BF16 else 1e-5)


async def test_a_batch_without_keys_gives_zeros(device: accel.Device, rng: np.random.Generator) -> None:
    q, k = random(rng, 2, 2, 16, 64), random(rng, 2, 2, 32, 64)
    lengths = [await device.put(np.array(each, np.int32)) for each in ([16, 0], [0, 32])]
    refs = await device.put(q), await device.put(k), await device.put(k)
    out = await device.put(np.full(q.shape, 7, BF16))
    got = await device.get(await device.dnn.attention(*refs, lengths_q=lengths[0], lengths_kv=lengths[1], out=out))
    np.testing.assert_array_equal(got.astype(np.float32), np.zeros(q.shape, np.float32))


async def test_ragged_and_paged(device: accel.Device, rng: np.random.Generator) -> None:
    begins = np.array([0, 40, 40, 140, 150]), np.array([0, 60, 90, 190, 260])
    q, k, v = random(rng, 150, 8, 64), random(rng, 260, 2, 64), random(rng, 260, 2, 64)
    refs = [await device.put(each) for each in (q, k, v)]
    offsets = [await device.put(each.astype(np.int32)) for each in begins]
    got = await device.get(await device.dnn.ragged_attention(*refs, *offsets, longest_q=128, longest_kv=128, causal="bottom_right"))
    for one in (0, 2, 3):
        queries, keys = (slice(each[one], each[one + 1]) for each in begins)
        arrays = (each.swapaxes(0, 1)[None] for each in (q[queries], k[keys], v[keys]))
        assert_close(got[queries].swapaxes(0, 1)[None], attended(*arrays))
    for page in (16, 12):  # cuDNN takes powers of 2
        k, v = random(rng, 30, 2, page, 64), random(rng, 30, 2, page, 64)
        q, table, lengths = random(rng, 2, 8, 4, 64), rng.permutation(30)[:20].reshape(2, 10), [100, 37]
        refs = [await device.put(each) for each in (q, k, v, table.astype(np.int32), np.array(lengths, np.int32))]
        got = await device.get(await device.dnn.paged_attention(*refs, causal="bottom_right"))
        k, v = (each[table].swapaxes(1, 2).reshape(2, 2, -1, 64) for each in (k, v))
        assert_close(got, attended(q, k, v, lengths=([4, 4], lengths)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
async def test_convolutions_of_views_in_batches_and_graphs(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    x, w, b = (random(rng, *shape, dtype=dtype) for shape in ((4, 28, 28, 32), (64, 3, 3, 16), (64,)))
    refs = [await unaligned(device, each, 1) for each in (x, w, b)]

    def convolved(dnn: Any) -> Any:
        return dnn.conv2d(refs[0], refs[1], bias=refs[2], activation="relu", groups=2, padding=((0, 1), (1, 2)), channels_last=True)

    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 1), (1, 2), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    halves = [
        np.einsum("nhwcrs,krsc->nhwk", windows[..., 16 * i : 16 * i + 16, :, :], w[32 * i : 32 * i + 32].astype(np.float64)) for i in (0, 1)
    ]
    expected = np.maximum(np.concatenate(halves, -1) + b.astype(np.float64), 0)
    error = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-14}[dtype]
    assert_close(await device.get(await convolved(device.dnn)), expected, error)
    async with device.batch() as batch:
        y = convolved(batch.dnn)
    assert_close(await device.get(y), expected, error)
    async with device.graph() as graph:
        y = convolved(graph.dnn)
    for _ in range(2):
        await graph.replay()
        assert_close(await device.get(y), expected, error)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
async def test_relu_of_a_convolution_keeps_nan(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    forms: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
        ((2, 14, 14, 16), (32, 3, 3, 16), {"channels_last": True, "padding": 1}),
        ((2, 16, 14, 14), (32, 4, 3, 3), {"groups": 4}),
        ((2, 3, 17, 13), (5, 3, 3, 2), {"stride": 2}),
        ((2, 8, 31), (4, 8, 3), {}),
        ((1, 4, 5, 6, 7), (6, 4, 2, 3, 3), {"padding": 1}),
    )
    for x, w, options in forms:
        bias = random(rng, w[0], dtype=dtype)
        bias[:3] = np.nan, -np.inf, np.inf
        refs = [await device.put(each) for each in (random(rng, *x, dtype=dtype), random(rng, *w, dtype=dtype), bias)]
        convolve: Any = getattr(device.dnn, f"conv{len(x) - 2}d")
        plain = np.asarray(await device.get(await convolve(*refs[:2], bias=refs[2], **options)), np.float64)
        rectified = np.asarray(await device.get(await convolve(*refs[:2], bias=refs[2], activation="relu", **options)), np.float64)
        assert np.isnan(plain).any()
        np.testing.assert_array_equal(rectified, np.maximum(plain, 0))


async def test_tf32_only_where_it_is_allowed(device: accel.Device, rng: np.random.Generator) -> None:
    x, w = random(rng, 8, 32, 28, 28, dtype="float32"), random(rng, 64, 32, 3, 3, dtype="float32")
    refs = await device.put(x), await device.put(w)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (2, 3))
    expected = np.einsum("nchwrs,kcrs->nkhw", windows, w.astype(np.float64), optimize=True)
    exact = np.abs(await device.get(await device.dnn.conv2d(*refs)) - expected).max() / np.abs(expected).max()
    rough = np.abs(await device.get(await device.dnn.conv2d(*refs, allow_tf32=True)) - expected).max() / np.abs(expected).max()
    assert exact < 2e-6
    assert rough < 2e-3


async def test_a_first_use_does_not_hold_the_loop_up(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The plans of the first device are built by the helper process; the second finds them on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started: list[tuple[str, ...]] = []
    builder = cudnn._Builder

    def start(paths: tuple[str, ...]) -> Any:
        started.append(paths)
        return builder(paths)

    monkeypatch.setattr(cudnn, "_Builder", start)
    q, x, w = random(rng, 2, 4, 123, 64), random(rng, 3, 8, 17, 17, dtype="float16"), np.ones((5, 8, 3, 3), np.float16)
    for known in (False, True):
        async with accel.System() as system:
            device = await system.open_device("cuda")
            one, image, filters = [await device.put(each) for each in (q, x, w)]
            uses = device.dnn.attention(one, one, one, causal=True), device.dnn.conv2d(image, filters, padding=1)
            most, told = max([await _longest_lag(use, tmp_path / "threads") for use in uses])
        assert most < _LAG, f"{most * 1e3:.1f} ms with plans {'on disk' if known else 'to be built'}; the threads meanwhile:\n{told}"
        assert len(started) == 1, "once for both devices: the second needs none"


async def _longest_lag(use: Awaitable[object], told: Path) -> tuple[float, str]:
    """Return the longest event loop iteration until ``use`` is over, and what the threads did in iterations that were too long."""
    most, task = 0.0, asyncio.ensure_future(use)
    with told.open("w+") as file:
        while not task.done():
            faulthandler.dump_traceback_later(_LAG, file=file)  # by a thread that takes no GIL
            began = time.perf_counter()
            await asyncio.sleep(0)
            most = max(most, time.perf_counter() - began)
        faulthandler.cancel_dump_traceback_later()
        await task
        file.seek(0)
        return most, file.read()
