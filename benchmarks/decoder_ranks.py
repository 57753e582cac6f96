"""A decoder whose layers are cut into parts, one a rank: by accel over a world, and by hand with ``torch.distributed``.

``python benchmarks/decoder_ranks.py [--device cpu|cuda] [--seconds 2]``. It is the model of :mod:`benchmarks.model_lm`, 1.4 billion random parameters in
bfloat16 on two GPUs: heads and inner units are divided, and each layer adds its ranks' results up twice. Token ids go in from the host, and logits come back
there: one batch that is awaited, and :data:`IN_FLIGHT` at a time. By hand each rank is a process of its own that replays CUDA graphs; it is measured before
accel and after it. On the CPU accel is measured alone, and compared with the whole model. A rank is killed at last: the answer must have the same bits after
it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel
from benchmarks import model_lm

if TYPE_CHECKING:
    from benchmarks.model_lm import Shape

RANKS = 2
SPLIT = {
    **dict.fromkeys(("*.q.weight", "*.k.weight", "*.v.weight", "*.gate.weight", "*.up.weight", "head.weight"), 0),
    **dict.fromkeys(("*.out.weight", "*.down.weight"), 1),
}
INPUTS = {"input_ids": accel.TensorSpec(("batch", "length"), "int64", pad=0), "last": accel.TensorSpec(("batch",), "int64", pad=0)}
BUCKETS = {"cuda": (8, 512), "cpu": (4, 32)}
"""The batch and the length that are measured."""
IN_FLIGHT = 4
MUST = 0.97


class Group(Protocol):
    """What the model needs of its ranks."""

    size: int

    def all_reduce(self, array: Any) -> Any:
        """Return the sum over the ranks."""

    def all_gather(self, array: Any, axis: int) -> Any:
        """Return the arrays of all ranks, joined."""


class Alone:
    """The only rank."""

    size = 1

    def all_reduce(self, array: Any) -> Any:
        """Return the array."""
        return array

    def all_gather(self, array: Any, axis: int) -> Any:
        """Return the array."""
        return array


class ByHand:
    """The ranks of ``torch.distributed``."""

    size = RANKS

    def all_reduce(self, array: Any) -> Any:
        """Add up in place."""
        import torch.distributed

        torch.distributed.all_reduce(array)
        return array

    def all_gather(self, array: Any, axis: int) -> Any:
        """Gather, then join."""
        import torch.distributed

        parts = array.new_empty((self.size, *array.shape))
        torch.distributed.all_gather_into_tensor(parts, array)
        return parts.movedim(0, axis).flatten(axis, axis + 1)


def cuda(group: Group) -> Any:
    """Return a rank's part of the model for GPUs."""
    return build(group, model_lm.SHAPES["cuda"])


def cpu(group: Group) -> Any:
    """Return a rank's part of the small one."""
    return build(group, model_lm.SHAPES["cpu"])


def build(group: Group, shape: Shape) -> Any:
    """Return a rank's part of a decoder: ids of tokens, and the place of each row's last one, to that token's logits."""
    import torch
    from torch import nn
    from torch.nn import functional

    dtype, hidden, size = getattr(torch, shape.dtype), shape.hidden, shape.hidden // shape.heads
    mine, inner = hidden // group.size, shape.inner // group.size

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.RMSNorm(hidden, 1e-5, dtype=dtype), nn.RMSNorm(hidden, 1e-5, dtype=dtype)
            self.q, self.k, self.v, self.out = linear(hidden, mine), linear(hidden, mine), linear(hidden, mine), linear(mine, hidden)
            self.gate, self.up, self.down = linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)

        def forward(self, x: Any, turn: Any) -> Any:
            y = self.norm_1(x)
            q, k, v = (part(y).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.q, self.k, self.v))
            attended = functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
            x = x + group.all_reduce(self.out(attended.transpose(1, 2).flatten(2)))
            y = self.norm_2(x)
            return x + group.all_reduce(self.down(functional.silu(self.gate(y)) * self.up(y)))

    return model_lm.decoder(shape, Block, linear(hidden, shape.vocabulary // group.size), lambda logits: group.all_gather(logits, 1))


def whole(device: str, path: Path) -> Any:
    """Return the model of one rank, with the weights of a file."""
    from safetensors.torch import load_file

    module = build(Alone(), model_lm.SHAPES[device]).eval()
    module.load_state_dict(load_file(path))
    return module


def by_hand(path: Path, seconds: float) -> dict[str, float]:
    """Start the ranks of ``torch.distributed``, and return the seconds of a forward of a captured batch: ``awaited`` and ``in_flight``."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518", "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, __file__, "--seconds", str(seconds), "--by-hand", str(path)]
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    found: dict[str, float] = json.loads(said[0].splitlines()[-1])
    return found


def be_rank(path: Path, seconds: float) -> None:
    """Be one rank by hand: capture a forward, and print the seconds that it takes with its copies."""
    import torch
    import torch.distributed
    from safetensors import safe_open

    rank, group = int(os.environ["RANK"]), ByHand()
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    with torch.device("cuda"):
        module = cuda(group).cuda().eval()  # the tables of angles come from numpy
    with safe_open(path, "pt") as file:
        for name, parameter in module.state_dict().items():
            given = file.get_slice(name)
            axis = next((axis for pattern, axis in SPLIT.items() if name.endswith(pattern.lstrip("*"))), None)
            length = 0 if axis is None else parameter.shape[axis]
            mine = slice(rank * length, (rank + 1) * length)
            parameter.copy_(given[:] if axis is None else given[mine] if axis == 0 else given[:, mine])
    ids, last = batch_of("cuda")
    there = [torch.from_numpy(array).cuda() for array in (ids, last)]
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        module(*there)
        with torch.cuda.graph(graph):
            logits = module(*there)
    spans, rounds = list[float](), max(20, round(seconds / 0.01))  # the same on all ranks
    for _ in range(rounds):
        began = time.perf_counter()
        for target, array in zip(there, (ids, last), strict=True):
            target.copy_(torch.from_numpy(array), non_blocking=True)
        graph.replay()
        logits.cpu()
        spans.append(time.perf_counter() - began)
    answers = [torch.empty_like(logits, device="cpu", pin_memory=True) for _ in range(IN_FLIGHT)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(rounds):  # none waits for the one before it
        for target, array in zip(there, (ids, last), strict=True):
            target.copy_(torch.from_numpy(array), non_blocking=True)
        graph.replay()
        answers[number % IN_FLIGHT].copy_(logits, non_blocking=True)
    torch.cuda.synchronize()
    in_flight = (time.perf_counter() - began) / rounds
    if rank == 0:
        print(json.dumps({"awaited": statistics.median(spans), "in_flight": in_flight}), flush=True)
    os._exit(0)


def batch_of(device: str) -> tuple[Any, Any]:
    """Return the batch that is measured."""
    return model_lm.batch_of(model_lm.SHAPES[device], *BUCKETS[device], np.random.default_rng(7))


async def in_flight(model: accel.Model, given: tuple[Any, Any], seconds: float) -> float:
    """Return the seconds of a forward while :data:`IN_FLIGHT` are in flight."""
    count, began = 0, time.perf_counter()

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < began + seconds:
            await model.numpy(*given)
            count += 1

    await asyncio.gather(*[client() for _ in range(IN_FLIGHT)])
    return (time.perf_counter() - began) / count


async def by_accel(device: str, path: Path, seconds: float) -> dict[str, Any]:
    """Return what a world's forward takes, and whether the bits are the same after a loss."""
    batch, length = BUCKETS[device]
    given, found = batch_of(device), dict[str, Any]()
    async with accel.System() as system:
        world = await system.open_world(device, ranks=RANKS, standby="model")
        began = time.perf_counter()
        model = await world.load_model(
            f"benchmarks.decoder_ranks:{device}",
            weights=path,
            split=SPLIT,
            inputs=INPUTS,
            buckets={"batch": (batch,), "length": (length,)},
            batch_axis=0,
        )
        found |= {"load_s": time.perf_counter() - began, "graphs": model.outputs.is_captured}
        before = await model.numpy(*given)
        spans, end = list[float](), time.perf_counter() + seconds
        while (began := time.perf_counter()) < end or len(spans) < 5:
            await model.numpy(*given)
            spans.append(time.perf_counter() - began)
        found["forward_ms"] = 1e3 * statistics.median(spans)
        await in_flight(model, given, seconds / 2)  # the first ones make room for as many
        found["in_flight_ms"] = 1e3 * await in_flight(model, given, seconds)
        async with asyncio.timeout(180):
            assert all([await rank.spare_ready() for rank in world.devices])
        began = time.perf_counter()
        os.kill(world.devices[1].info().pid or 0, signal.SIGKILL)
        async for epoch in world.generations():
            if epoch == 2:
                break
        after = await model.numpy(*given)
        found |= {"after_loss_s": time.perf_counter() - began, "same_bits": bool(np.array_equal(before, after))}
        spans = []
        for _ in range(20):
            began = time.perf_counter()
            await model.numpy(*given)
            spans.append(time.perf_counter() - began)
        found["forward_after_ms"] = 1e3 * statistics.median(spans)
        assert found["same_bits"], "the bits are not those of before"
        if device == "cpu":
            assert np.allclose(before, model_lm.eager(whole(device, path), device)(*given), atol=1e-4), "the whole model gives other logits"
    return found


def measure(device: str, seconds: float) -> dict[str, Any]:
    """Measure accel and, on GPUs, the same by hand before it and after it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        parameters = model_lm.make(path, model_lm.SHAPES[device], lambda shape: build(Alone(), shape))
        found: dict[str, Any] = {"parameters": parameters}
        if device == "cpu":
            return found | asyncio.run(by_accel(device, path, seconds))
        twins = [by_hand(path, seconds)]
        found |= asyncio.run(by_accel(device, path, seconds))
        twins.append(by_hand(path, seconds))
        awaited, at_once = (1e3 * min(twin[way] for twin in twins) for way in ("awaited", "in_flight"))
        return found | {
            "by_hand_ms": awaited,
            "by_hand_in_flight_ms": at_once,
            "ratio": {"value": round(awaited / found["forward_ms"], 3), "must": MUST},
            "in_flight_ratio": {"value": round(at_once / found["in_flight_ms"], 3), "must": MUST},
        }


def main() -> None:
    """Measure, or be one rank by hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=tuple(BUCKETS), default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--by-hand", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.by_hand is not None:
        be_rank(given.by_hand, given.seconds)
    print(json.dumps(measure(given.device, given.seconds), indent=2))


if __name__ == "__main__":
    main()
