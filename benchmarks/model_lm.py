"""A causal language model as a served model: 1.4 billion random parameters in bfloat16 on a GPU, a small one on the CPU; beside the same module by hand.

``python benchmarks/model_lm.py [--backend cpu] [--seconds 2] [--rounds 3] [--json FILE]``; needs torch and safetensors. Token ids go in from the host, and the
logits of each row's last token come back there. The module is a plain decoder: rotary embeddings, attention, gated layers.

- The weights are loaded from a safetensors file in the page cache: by safetensors alone, and by ``device.load_model`` until the model is there, with a CUDA
  graph for each bucket.
- In each bucket, one batch after another: the module by hand in this process, eagerly and (on a GPU) as a CUDA graph, and accel's in a child. They take turns.
- Its logits are compared with those of the module by hand, eagerly, for batches of rows of different lengths.
- The child is killed while a spare is ready: the time until the device is READY, and until the first answer, which has to have the same bits as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Array = np.ndarray[Any, Any]
    Run = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and the buckets that it is served in."""

    dtype: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    inner: int
    buckets: dict[str, tuple[int, ...]]


SHAPES = {
    "cuda": Shape("bfloat16", 32000, 2048, 24, 16, 5632, {"batch": (1, 8, 32), "length": (128, 512)}),
    "cpu": Shape("float32", 512, 64, 2, 4, 192, {"batch": (1, 4), "length": (16, 32)}),
}
TOLERANCE = {"bfloat16": 0.25, "float32": 1e-4}
"""Of logits, which are about 1: kernels for other batch sizes add in another order, and the rounding of bfloat16 goes through all layers."""
RANDOM = {"bfloat16": (1 << 24) - 3, "float32": (1 << 16) - 3}
"""Random numbers that the weights are made of; no multiple of a row's length, so that no rows are equal."""


def cuda() -> Any:
    """Return the model for a GPU."""
    return build(SHAPES["cuda"])


def cpu() -> Any:
    """Return the model for the CPU."""
    return build(SHAPES["cpu"])


def build(shape: Shape) -> Any:
    """Return a decoder: ids of tokens, and the place of each row's last one, to that token's logits."""
    import torch
    from torch import nn
    from torch.nn import functional

    dtype, hidden, size = getattr(torch, shape.dtype), shape.hidden, shape.hidden // shape.heads

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.RMSNorm(hidden, 1e-5, dtype=dtype), nn.RMSNorm(hidden, 1e-5, dtype=dtype)
            self.qkv, self.out = linear(hidden, 3 * hidden), linear(hidden, hidden)
            self.gate_up, self.down = linear(hidden, 2 * shape.inner), linear(shape.inner, hidden)

        def forward(self, x: Any, turn: Any) -> Any:
            q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, shape.heads, size)).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    return decoder(shape, Block, linear(hidden, shape.vocabulary))


def decoder(shape: Shape, block: Callable[[], Any], head: Any, whole: Callable[[Any], Any] = lambda logits: logits) -> Any:
    """Return a decoder of some blocks, which get the hidden states and what turns queries and keys by their places.

    Parameters
    ----------
    shape
        Its sizes.
    block, head
        What makes a block, and what makes logits, or a rank's part of them.
    whole
        Joins the parts of logits.
    """
    import torch
    from torch import nn

    dtype, hidden, size = getattr(torch, shape.dtype), shape.hidden, shape.hidden // shape.heads

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(shape.vocabulary, hidden, dtype=dtype), head
            self.blocks, self.norm = nn.ModuleList([block() for _ in range(shape.layers)]), nn.RMSNorm(hidden, 1e-5, dtype=dtype)
            angles = np.outer(np.arange(max(shape.buckets["length"])), 10000.0 ** (-np.arange(0, size, 2) / size))
            for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                self.register_buffer(name, torch.from_numpy(table).to(dtype), persistent=False)

        def forward(self, input_ids: Any, last: Any) -> Any:
            tables: Any = self.cos, self.sin
            cos, sin = (table[: input_ids.shape[1]] for table in tables)

            def turn(x: Any) -> Any:
                a, b = x.chunk(2, -1)
                return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

            x = self.tokens(input_ids)
            for block in self.blocks:
                x = block(x, turn)
            ends = x[torch.arange(len(x), device=x.device), last]
            return whole(self.head(self.norm(ends))).float()

    return Decoder()


def make(path: Path, shape: Shape, builder: Callable[[Shape], Any] = build) -> int:
    """Write random weights for what a builder builds, and return how many there are. They are pieces of one block, which begin at places of their own."""
    import torch
    from safetensors.torch import save_file

    with torch.device("meta"):
        wanted = builder(shape).state_dict()
    block = torch.randn(RANDOM[shape.dtype]).to(getattr(torch, shape.dtype))
    weights: dict[str, torch.Tensor] = {}
    for number, (name, each) in enumerate(wanted.items()):
        if "norm" in name:
            weights[name] = torch.ones(each.shape, dtype=each.dtype)
            continue
        repeated = block.roll(-7919 * number).repeat(-(-each.numel() // len(block)))[: each.numel()].view(each.shape)
        # Outputs are about as large as inputs, and what a block adds is smaller than what it is added to.
        scale = 1.0 if name == "tokens.weight" else each.shape[1] ** -0.5
        weights[name] = repeated * (scale if name in ("tokens.weight", "head.weight") else scale / math.sqrt(shape.layers))
    save_file(weights, path)
    return sum(each.numel() for each in weights.values())


# -- by hand


def loaded(path: Path, backend: str) -> tuple[Any, float]:
    """Return the module on a device, and the seconds in which safetensors loaded its weights there."""
    import torch
    from safetensors.torch import load_file

    with torch.device(backend):
        module = build(SHAPES[backend]).to(backend).eval()
    began = time.perf_counter()
    weights = load_file(path, device=backend)
    if backend == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    module.load_state_dict(weights, assign=True)
    return module, took


def eager(module: Any, backend: str) -> Run:
    """Return a function that runs the module as it is."""
    import torch

    def run(ids: Array, last: Array) -> Array:
        with torch.inference_mode():
            given = [torch.from_numpy(each).to(backend, non_blocking=True) for each in (ids, last)]
            found: Array = module(*given).cpu().numpy()
            return found

    return run


def captured(module: Any, buckets: dict[str, tuple[int, ...]]) -> Run:
    """Return a function that replays a CUDA graph for batches of exactly a bucket's size."""
    import torch

    graphs, pool = {}, torch.cuda.graph_pool_handle()
    with torch.inference_mode():
        for batch in buckets["batch"]:
            for length in buckets["length"]:
                ids = torch.zeros((batch, length), dtype=torch.int64, device="cuda")
                last = torch.zeros(batch, dtype=torch.int64, device="cuda")
                module(ids, last)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    logits = module(ids, last)
                graphs[batch, length] = graph, ids, last, logits

    def run(ids: Array, last: Array) -> Array:
        graph, ids_there, last_there, logits = graphs[ids.shape[0], ids.shape[1]]
        with torch.inference_mode():
            ids_there.copy_(torch.from_numpy(ids), non_blocking=True)
            last_there.copy_(torch.from_numpy(last), non_blocking=True)
            graph.replay()
            found: Array = logits.cpu().numpy()
            return found

    return run


# -- what is measured


def batch_of(shape: Shape, batch: int, length: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return a batch of a bucket's size, whose rows end at places of their own; behind these the ids are 0."""
    lengths = rng.integers(1, length + 1, batch)
    lengths[0] = length
    ids = rng.integers(1, shape.vocabulary, (batch, length))
    ids[np.arange(length) >= lengths[:, None]] = 0
    return ids, lengths - 1


async def speeds(model: accel.Model, hands: dict[str, Run], shape: Shape, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a batch, and tokens a second, in each bucket; medians of the rounds."""
    rng = np.random.default_rng()

    def by_hand(run: Run) -> Callable[[Array, Array], Awaitable[Array]]:
        async def call(ids: Array, last: Array) -> Array:
            return run(ids, last)  # on this thread, which has nothing else to do: the shortest way

        return call

    subjects: dict[str, Callable[[Array, Array], Awaitable[Array]]] = {name: by_hand(run) for name, run in hands.items()}
    subjects["accel"] = model.numpy
    found: dict[str, dict[str, float]] = {}
    for batch in shape.buckets["batch"]:
        for length in shape.buckets["length"]:
            given = batch_of(shape, batch, length, rng)
            times: dict[str, list[float]] = {name: [] for name in subjects}
            for number in range(rounds + 1):
                for name, call in subjects.items():
                    each, end = list[float](), time.perf_counter() + (seconds if number else min(seconds, 0.3))
                    while time.perf_counter() < end or not each:
                        began = time.perf_counter()
                        await call(*given)
                        each.append(time.perf_counter() - began)
                    if number:
                        times[name].append(statistics.median(each))
            row: dict[str, float] = {}
            for name, medians in times.items():
                row |= {f"{name}_ms": 1e3 * statistics.median(medians), f"{name}_tokens_per_s": batch * length / statistics.median(medians)}
            found[f"{batch}x{length}"] = row
            print(f"{batch:3} x {length:4}", *(f"{key} {value:10.2f}" for key, value in row.items()), flush=True)
    return found


async def compared(model: accel.Model, run: Run, shape: Shape) -> dict[str, Any]:
    """Compare logits with those of the module by hand in batches of a bucket's size, and of single rows that accel pads."""
    rng = np.random.default_rng()
    worst, same_bits, checked, agree, rows = 0.0, 0, 0, 0, 0
    for batch in shape.buckets["batch"]:
        for length in shape.buckets["length"]:
            ids, last = batch_of(shape, batch, length, rng)
            found, wanted = await model.numpy(ids, last), run(ids, last)
            assert np.isfinite(found).all(), "there are logits that are no numbers"
            same_bits += bool(np.array_equal(found, wanted))
            checked += 1
            alone = np.concatenate([await model.numpy(ids[row : row + 1, : end + 1], last[row : row + 1]) for row, end in enumerate(last)])
            for each in (found, alone):
                worst = max(worst, float(np.abs(each - wanted).max()))
                agree += int((each.argmax(1) == wanted.argmax(1)).sum())
                rows += batch
    assert worst <= TOLERANCE[shape.dtype], f"logits differ by {worst:g}"
    return {"logits_differ_by": worst, "batches_of_the_same_bits": [same_bits, checked], "same_best_token": [agree, rows]}


async def killed(device: accel.Device, model: accel.Model, shape: Shape) -> dict[str, float]:
    """Kill the child while a spare is ready, and return the seconds until the model is there again."""
    async with asyncio.timeout(180):
        assert await device.spare_ready()
    given = batch_of(shape, shape.buckets["batch"][0], shape.buckets["length"][0], np.random.default_rng())
    before = await model.numpy(*given)
    pid = device.info().pid
    assert pid is not None
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    async for generation in device.generations():
        if generation == 2:
            break
    ready = time.perf_counter()
    after = await model.numpy(*given)
    answered = time.perf_counter()
    assert np.array_equal(before, after), "the weights are not those of before"
    return {"remap_s": ready - began, "first_answer_s": answered - began}


async def measured(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measure accel beside the module by hand."""
    shape = SHAPES[given.backend]
    module, raw_s = loaded(path, given.backend)
    hands = {"eager": eager(module, given.backend)}
    if given.backend == "cuda":
        hands["graph"] = captured(module, shape.buckets)
    async with accel.System() as system:
        device = await system.open_device(given.backend, host="process", standby="model")
        times: list[float] = []
        began = time.perf_counter()
        model = await device.load_model(
            f"benchmarks.model_lm:{given.backend}",
            weights=path,
            inputs={
                "input_ids": accel.TensorSpec(("batch", "length"), "int64", pad=0),
                "last": accel.TensorSpec(("batch",), "int64", pad=0),
            },
            buckets=shape.buckets,
            on_progress=lambda stage, _done, _total: times.append(time.perf_counter()) if stage == "weights" else None,
        )
        ready = time.perf_counter()
        found: dict[str, Any] = {
            "graphs": model.outputs.is_captured,
            "load": {"safetensors_s": raw_s, "weights_s": times[-1] - began, "model_s": ready - began},
        }
        print("load", found["load"], "graphs", found["graphs"], flush=True)
        assert given.backend == "cpu" or found["graphs"], "the forwards were not captured into graphs: see the log"
        found["compared"] = await compared(model, hands["eager"], shape)
        print("compared", found["compared"], flush=True)
        found["buckets"] = await speeds(model, hands, shape, given.seconds, given.rounds)
        found["killed"] = await killed(device, model, shape)
        print("killed", found["killed"], flush=True)
        return found


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one block of a subject in a bucket")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        began = time.perf_counter()
        parameters = make(path, SHAPES[given.backend])
        print(f"{parameters / 1e9:.3f} billion parameters were written in {time.perf_counter() - began:.1f} s", flush=True)
        found = {"backend": given.backend, "parameters": parameters, **asyncio.run(measured(path, given))}
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
