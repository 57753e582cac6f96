"""A transformer block out of the ops of several families: in a batch and in a graph, against numpy in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import accel

pytestmark = pytest.mark.usefixtures("nothing_left")

BATCH, TOKENS, WIDTH, HEADS = 2, 7, 24, 3

Array = np.ndarray[Any, np.dtype[Any]]


def parameters(rng: np.random.Generator) -> dict[str, Array]:
    def random(*shape: int) -> Array:
        return (rng.standard_normal(shape) / math.sqrt(shape[0])).astype(np.float32)

    return {
        **{name: 1 + random(WIDTH) for name in ("norm_1", "norm_2")},
        **{name: random(WIDTH) for name in ("shift_1", "shift_2", "b_out", "b_down")},
        "w_qkv": random(WIDTH, 3 * WIDTH),
        "b_qkv": random(3 * WIDTH),
        "w_out": random(WIDTH, WIDTH),
        "w_up": random(WIDTH, 4 * WIDTH),
        "b_up": random(4 * WIDTH),
        "w_down": random(4 * WIDTH, WIDTH),
    }


def expected(x: Array, given: dict[str, Array]) -> Array:
    """Compute the block in numpy, in float64."""
    p, wide = {name: each.astype(np.float64) for name, each in given.items()}, x.astype(np.float64)

    def norm(values: Array, weight: Array, bias: Array) -> Array:
        centred = values - values.mean(-1, keepdims=True)
        scaled: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * weight + bias

    qkv = norm(wide, p["norm_1"], p["shift_1"]) @ p["w_qkv"] + p["b_qkv"]
    q, k, v = qkv.reshape(BATCH, TOKENS, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(2, 3) / math.sqrt(WIDTH // HEADS)
    scores = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(BATCH, TOKENS, WIDTH)
    wide = wide + attended @ p["w_out"] + p["b_out"]
    up = norm(wide, p["norm_2"], p["shift_2"]) @ p["w_up"] + p["b_up"]
    up = up / 2 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
    result: Array = wide + up @ p["w_down"] + p["b_down"]
    return result


def block(to: Any, x: accel.AccelRef, p: dict[str, accel.AccelRef]) -> accel.AccelRef:
    """Record the block into a batch or a graph."""
    made = to.dnn.layer_norm(x, WIDTH, p["norm_1"], p["shift_1"])
    qkv = to.linalg.matmul(made, p["w_qkv"], bias=p["b_qkv"])
    parts = to.arrays.transpose(qkv.reshape(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS), (2, 0, 3, 1, 4))
    attended = to.arrays.transpose(to.dnn.attention(parts[0], parts[1], parts[2], causal=True), (0, 2, 1, 3))
    x = to.elementwise.binary("add", x, to.linalg.matmul(attended.reshape(BATCH, TOKENS, WIDTH), p["w_out"], bias=p["b_out"]))
    made = to.dnn.layer_norm(x, WIDTH, p["norm_2"], p["shift_2"])
    up = to.linalg.matmul(made, p["w_up"], bias=p["b_up"])
    down = to.linalg.matmul(to.elementwise.unary("gelu", up), p["w_down"], bias=p["b_down"])
    result: accel.AccelRef = to.elementwise.binary("add", x, down)
    return result


async def check_block(device: accel.Device, rng: np.random.Generator) -> None:
    """Compare the block in a batch, and replayed by a graph, with numpy."""
    x, given = rng.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float32), parameters(rng)
    ref, refs = await device.put(x), {name: await device.put(each) for name, each in given.items()}
    async with device.batch() as batch:
        made = block(batch, ref, refs)
    np.testing.assert_allclose(await device.get(made), expected(x, given), rtol=2e-5, atol=2e-5)
    async with device.graph() as graph:
        made = block(graph, ref, refs)
    for _ in range(2):
        x = rng.standard_normal(x.shape).astype(np.float32)
        await device.put(x, out=ref)
        await graph.replay()
        np.testing.assert_allclose(await device.get(made), expected(x, given), rtol=2e-5, atol=2e-5)
    await graph.aclose()


async def test_a_transformer_block_in_a_batch_and_in_a_graph(device: accel.Device, rng: np.random.Generator) -> None:
    await check_block(device, rng)
