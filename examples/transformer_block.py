"""A block of a transformer, recorded once as a graph and replayed for every input, on any device; checked against torch, or numpy where that is missing.

Run: ``pip install .``, in a checkout, then ``python examples/transformer_block.py``.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from typing import Any

import numpy as np

import accel

BATCH, TOKENS, WIDTH, HEADS = 2, 48, 128, 4
DEPTH = WIDTH // HEADS
Arrays = dict[str, np.ndarray[Any, Any]]
Refs = dict[str, accel.AccelRef]


def weights(rng: np.random.Generator) -> Arrays:
    """Return the parameters, each matrix as (inputs, outputs)."""
    shapes = {
        "norm1": (WIDTH,), "shift1": (WIDTH,), "qkv": (WIDTH, 3 * WIDTH), "qkv_bias": (3 * WIDTH,), "mix": (WIDTH, WIDTH), "mix_bias": (WIDTH,),
        "norm2": (WIDTH,), "shift2": (WIDTH,), "up": (WIDTH, 4 * WIDTH), "up_bias": (4 * WIDTH,), "down": (4 * WIDTH, WIDTH), "down_bias": (WIDTH,),
    }  # fmt: skip
    made = {name: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in shapes.items()}
    return made | {"norm1": made["norm1"] + 1, "norm2": made["norm2"] + 1}


def record(graph: accel.Graph, x: accel.AccelRef, w: Refs) -> accel.AccelRef:
    """Record the block: causal attention, then two layers, each added to what came in."""
    y = graph.dnn.layer_norm(x, WIDTH, w["norm1"], w["shift1"])
    y = graph.linalg.matmul(y, w["qkv"], bias=w["qkv_bias"])
    heads = graph.arrays.transpose(y.reshape(BATCH, TOKENS, 3, HEADS, DEPTH), (2, 0, 3, 1, 4))
    y = graph.dnn.attention(heads[0], heads[1], heads[2], causal=True)
    y = graph.arrays.transpose(y, (0, 2, 1, 3)).reshape(BATCH, TOKENS, WIDTH)
    x = graph.elementwise.binary("add", x, graph.linalg.matmul(y, w["mix"], bias=w["mix_bias"]))
    y = graph.dnn.layer_norm(x, WIDTH, w["norm2"], w["shift2"])
    y = graph.linalg.matmul(y, w["up"], bias=w["up_bias"], activation="gelu")
    return graph.elementwise.binary("add", x, graph.linalg.matmul(y, w["down"], bias=w["down_bias"]))


def by_torch(torch: Any, x: np.ndarray[Any, Any], arrays: Arrays) -> np.ndarray[Any, Any]:
    """Return what torch makes of the same block, in float64."""
    functional: Any = torch.nn.functional
    w = {name: torch.from_numpy(array).double() for name, array in arrays.items()}
    x = torch.from_numpy(x).double()
    y = functional.layer_norm(x, (WIDTH,), w["norm1"], w["shift1"]) @ w["qkv"] + w["qkv_bias"]
    q, k, v = y.reshape(BATCH, TOKENS, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH) @ w["mix"] + w["mix_bias"]
    y = functional.layer_norm(x, (WIDTH,), w["norm2"], w["shift2"]) @ w["up"] + w["up_bias"]
    result: np.ndarray[Any, Any] = (x + functional.gelu(y, approximate="tanh") @ w["down"] + w["down_bias"]).numpy()
    return result


def by_numpy(x: np.ndarray[Any, Any], arrays: Arrays) -> np.ndarray[Any, Any]:
    """Return the same by numpy."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}

    def norm(x: Any, weight: Any, shift: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + shift

    y = norm(x.astype(np.float64), w["norm1"], w["shift1"]) @ w["qkv"] + w["qkv_bias"]
    q, k, v = y.reshape(BATCH, TOKENS, 3, HEADS, DEPTH).transpose(2, 0, 3, 1, 4)
    scores = np.where(np.tri(TOKENS, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(DEPTH), -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    y = (shares / shares.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(BATCH, TOKENS, WIDTH)
    x = x + y @ w["mix"] + w["mix_bias"]
    y = norm(x, w["norm2"], w["shift2"]) @ w["up"] + w["up_bias"]
    y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    result: np.ndarray[Any, Any] = x + y @ w["down"] + w["down_bias"]
    return result


async def main() -> int:
    """Run the example and return its exit status."""
    rng = np.random.default_rng()
    arrays = weights(rng)
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        torch = None
    async with accel.System() as system:
        device = await system.open_device("auto", libraries=("linalg", "dnn", "arrays", "elementwise"))
        w = {name: await device.put(array) for name, array in arrays.items()}
        x = await device.zeros((BATCH, TOKENS, WIDTH), "float32")
        async with device.graph() as graph:
            y = record(graph, x, w)
        for _ in range(3):
            tokens = rng.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float32)
            await device.put(tokens, out=x)
            began = time.perf_counter()
            await graph.replay()
            took = time.perf_counter() - began
            found = await device.get(y)
            expected = by_numpy(tokens, arrays) if torch is None else by_torch(torch, tokens, arrays)
            error = float(np.abs(found - expected).max() / np.abs(expected).max())
            print(
                f"{device.name}: {BATCH * TOKENS} tokens in {took * 1e3:.1f} ms, off by {error:.1e} of {'numpy' if torch is None else 'torch'}'s"
            )
            if not error < 1e-4:
                return 1
        await graph.aclose()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
