"""P19 and P20: collectives of a world beside the library below it alone, and a served model whose rank is killed.

``python benchmarks/worlds.py [--device cpu|cuda] [--ranks 2] [--seconds 2] [--clients 64] [--only reduce,loss,decoder]``

``reduce`` awaits all-reduces one by one, 8 at a time, and in batches of 32. Its twin is :mod:`benchmarks.raw_nccl` or, on the CPU, :mod:`benchmarks.raw_gloo`,
before and after. ``loss`` kills
a rank of a model of two layers, each cut into parts, while clients send requests: when the next good answer came, and whether a request failed. On CUDA its
twin is a service of ``torch.distributed`` alone, which starts all ranks again. ``decoder`` is :mod:`benchmarks.decoder_ranks`.
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
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel
from benchmarks import decoder_ranks, raw_gloo, raw_nccl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.models import ModelGroup

IN_FLIGHT, IN_A_BATCH = 8, 32
SIZES = {"cpu": (4 << 10, 1 << 20, 16 << 20), "cuda": raw_nccl.SIZES}
WIDTH, HIDDEN = 1024, 4096
SPLIT = {"up.weight": 0, "down.weight": 1}
GLOO_MUST = {4 << 10: {2: 2.0, 4: 5.0}, 1 << 20: {2: 1.0, 4: 1.0}, 16 << 20: {2: 0.5, 4: 0.5}}
"""Bytes -> ranks -> how many times faster than gloo an all-reduce of a batch must be."""
MUST = {"in_flight": 0.97, "awaited_us": 200.0, "answer_s": {"cuda": 1.5, "cpu": 0.6}, "sooner": 5.0}


async def until(seconds: float, work: Callable[[], Awaitable[object]]) -> float:
    """Return the microseconds that one call takes, of those that are awaited one by one."""
    spans, end = list[float](), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end or len(spans) < 5:
        await work()
        spans.append(time.perf_counter() - began)
    return statistics.median(spans) * 1e6


async def of_size(world: accel.World, nbytes: int, seconds: float) -> dict[str, float]:
    """Return the microseconds of one all-reduce: awaited, with :data:`IN_FLIGHT` at a time, and in a batch."""
    given = [await world.each(lambda device, rank: device.put(np.full(nbytes // 4, rank + 1.0, np.float32))) for _ in range(IN_FLIGHT)]
    outs = [await world.each(lambda device, _: device.empty((nbytes // 4,), "float32")) for _ in range(IN_FLIGHT)]
    count, end = 0, 0.0

    async def client(number: int) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await world.all_reduce(given[number], out=outs[number])
            count += 1

    async def batch() -> None:
        async with world.batch() as batch:
            for number in range(IN_A_BATCH):
                batch.all_reduce(given[number % IN_FLIGHT], out=outs[number % IN_FLIGHT])

    awaited = await until(seconds, lambda: world.all_reduce(given[0], out=outs[0]))
    began = time.perf_counter()
    end = began + seconds
    await asyncio.gather(*[client(number) for number in range(IN_FLIGHT)])
    in_flight = (time.perf_counter() - began) / count * 1e6
    in_batch = await until(seconds, batch) / IN_A_BATCH
    total = await world.devices[-1].get(outs[0][-1])
    assert (total == sum(range(1, world.size + 1))).all(), "a sum is wrong"
    return {"awaited": awaited, "in_flight": in_flight, "batch": in_batch}


async def measure_reduce(device: str, ranks: int, seconds: float) -> dict[str, Any]:
    """Compare a world with the library alone, which is measured before it and after it."""
    twins = [raw_nccl.measure(seconds)] if device == "cuda" else []
    gloo = [raw_gloo.measure(ranks, SIZES["cpu"], seconds)] if device == "cpu" else []
    async with accel.System() as system:
        world = await system.open_world(device, ranks=ranks)
        found: dict[str, Any] = {str(nbytes): await of_size(world, nbytes, seconds) for nbytes in SIZES[device]}
    if gloo:
        gloo.append(raw_gloo.measure(ranks, SIZES["cpu"], seconds))
        for nbytes in SIZES["cpu"]:
            batch = found[str(nbytes)]["batch"]
            ratio = min(twin[str(nbytes)] for twin in gloo) / batch
            found[str(nbytes)]["over_gloo"] = {"value": round(ratio, 2), "must": GLOO_MUST[nbytes].get(ranks)}
        return found
    twins.append(raw_nccl.measure(seconds))
    raw = {size: {name: min(twin[size][name] for twin in twins) for name in twins[0][size]} for size in twins[0]}
    small, large = str(SIZES[device][0]), str(SIZES[device][-1])
    return {
        **found,
        "raw": raw,
        "in_flight_ratio": {"value": round(raw[large]["in_flight"] / found[large]["in_flight"], 3), "must": MUST["in_flight"]},
        "awaited_more_us": {"value": round(found[small]["awaited"] - raw[small]["awaited"], 1), "must": MUST["awaited_us"]},
    }


def build(group: ModelGroup) -> Any:
    """Return one rank's part of the model."""
    import torch
    from torch import nn

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, HIDDEN // group.size, bias=False)
            self.down = nn.Linear(HIDDEN // group.size, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            return group.all_reduce(self.down(torch.relu(self.up(x))))

    return Layers()


def weights() -> dict[str, Any]:
    """Return the weights of the whole model."""
    rng = np.random.default_rng(0)
    shapes = {"up.weight": (HIDDEN, WIDTH), "down.weight": (WIDTH, HIDDEN)}
    return {name: (rng.standard_normal(shape) / 32).astype(np.float32) for name, shape in shapes.items()}


async def measure_loss(device: str, ranks: int, clients: int, seconds: float) -> dict[str, Any]:
    """Kill the last rank under load, once it has a spare."""
    item = np.random.default_rng(1).standard_normal(WIDTH).astype(np.float32)
    answered, failed, wrong, stop = list[float](), list[BaseException](), 0, False

    async def client() -> None:
        nonlocal wrong
        while not stop:
            try:
                answer = await service.submit(item)
            except accel.AccelError as error:
                failed.append(error)
            else:
                answered.append(time.perf_counter())
                wrong += not np.array_equal(answer, expected)

    async with accel.System() as system:
        world = await system.open_world(device, ranks=ranks, standby="model")
        model = await world.load_model(
            "benchmarks.worlds:build",
            weights=weights(),
            split=SPLIT,
            inputs={"x": accel.TensorSpec(("batch", WIDTH), "float32")},
            buckets={"batch": (clients,)},  # one shape, whose sums have one order
        )
        async with accel.serve(model) as service:
            expected = await service.submit(item)
            tasks = [asyncio.create_task(client()) for _ in range(clients)]
            while any(rank.info().standby != "ready" for rank in world.devices):  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.05)
            await asyncio.sleep(seconds)
            pids = [rank.info().pid or 0 for rank in world.devices]
            before, killed_at = len(answered), time.perf_counter()
            os.kill(pids[-1], signal.SIGKILL)
            async for epoch in world.generations():
                if epoch > 1:
                    break
            again = time.perf_counter()
            await asyncio.sleep(seconds)
            stop = True
            await asyncio.gather(*tasks)
        late = [at for at in answered[before:] if at > again]
        found: dict[str, Any] = {
            "answered": len(answered),
            "failed": len(failed),
            "wrong": wrong,
            "first_error": repr(failed[0]) if failed else None,
            "epoch_s": round(again - killed_at, 3),
            "next_answer_s": {"value": round(late[0] - killed_at, 3), "must": MUST["answer_s"][device]},  # type: ignore[index]
            "generations": [rank.generation for rank in world.devices],
            "same_children": [rank.info().pid == pid for rank, pid in zip(world.devices, pids, strict=True)],
        }
    if device == "cuda":
        restart = restarted()
        found["torch_distributed_s"] = round(restart, 2)
        found["sooner"] = {"value": round(restart / (late[0] - killed_at), 1), "must": MUST["sooner"]}
    return found


def restarted() -> float:
    """Return the seconds in which two processes with ``torch.distributed`` alone start, load the same model, and answer once."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "WORLD_SIZE": "2"}
    began = time.perf_counter()
    ranks = [subprocess.Popen([sys.executable, "-c", _BY_HAND], env={**environment, "RANK": str(rank)}) for rank in range(2)]
    if sum(abs(rank.wait(60)) for rank in ranks):
        raise RuntimeError("the twin has failed")
    return time.perf_counter() - began


_BY_HAND = f"""
import os
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
up = (torch.randn({HIDDEN // 2}, {WIDTH}) / 32).cuda()
down = (torch.randn({WIDTH}, {HIDDEN // 2}) / 32).cuda()
y = torch.relu(torch.randn(64, {WIDTH}).cuda() @ up.T) @ down.T
dist.all_reduce(y)
y.cpu()
os._exit(0)
"""


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--only", default="reduce,loss", help="what is measured, with commas")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    found: dict[str, Any] = {"device": arguments.device, "ranks": arguments.ranks}
    if "reduce" in wanted:
        found["reduce"] = asyncio.run(measure_reduce(arguments.device, arguments.ranks, arguments.seconds))
    if "loss" in wanted:
        found["loss"] = asyncio.run(measure_loss(arguments.device, arguments.ranks, arguments.clients, arguments.seconds))
    if "decoder" in wanted:
        found["decoder"] = decoder_ranks.measure(arguments.device, arguments.seconds)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
