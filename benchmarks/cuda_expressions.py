"""Expressions of ``device.xp`` on a GPU: a chain of 8 functions beside one, and a small network beside PyTorch's eager mode.

``python benchmarks/cuda_expressions.py [--rounds 5] [--profile N] [--json FILE]``; needs torch. Each subject is awaited, or synchronized, after every call. The
subjects take turns in blocks, and the median block counts. Compilation is apart: the first call of each is printed by itself. Parts of the network, and a
profile of it, say where its time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import accel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

WIDTHS, BATCH = (784, 1024, 1024, 10), 256
ELEMENTS = 1 << 24
"""Of float32: 64 MiB."""
CALLS = 60
"""In a block of one subject."""

BUDGETS = {"chain of 8 against one": ("chain of 8", "chain of 1", 1.3), "MLP against PyTorch": ("MLP", "MLP, PyTorch", 1.15)}


async def _seconds(call: Callable[[], Awaitable[object]]) -> float:
    """Return the median time of a call in a block of them."""
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[CALLS // 6 :])


Subjects: TypeAlias = "dict[str, Callable[[], Awaitable[Any]]]"


def chains(flat: accel.Array) -> Subjects:
    """Return chains of functions of elements."""

    def chain(length: int) -> accel.Array:
        y = flat
        for number in range(length):
            y = y * 0.75 if number % 2 else y + 0.5
        return y

    return {"chain of 1": lambda: _awaited(chain(1)), "chain of 8": lambda: _awaited(chain(8))}


def networks(device: accel.Device, x: accel.Array, ws: Sequence[accel.Array], bs: Sequence[accel.Array]) -> Subjects:
    """Return the network as an expression, as the batch that the expression is sent as, and its first product."""

    def network() -> accel.Array:
        y = x
        for w, b in zip(ws[:-1], bs[:-1], strict=True):
            y = (y @ w + b).relu()
        return y @ ws[-1] + bs[-1]

    async def batched() -> None:
        async with device.batch() as batch:
            y = x.ref
            for w, b in zip(ws[:-1], bs[:-1], strict=True):
                y = batch.linalg.matmul(y, w.ref, bias=b.ref, activation="relu")
            batch.linalg.matmul(y, ws[-1].ref, bias=bs[-1].ref)

    async def built() -> accel.Array:
        return network()

    return {
        "MLP": lambda: _awaited(network()),
        "MLP, not awaited": built,
        "MLP as a batch": batched,
        "its first product": lambda: device.linalg.matmul(x.ref, ws[0].ref, bias=bs[0].ref),
    }


async def recorded(device: accel.Device, x: accel.Array, ws: Sequence[accel.Array], bs: Sequence[accel.Array]) -> Subjects:
    """Return the network as one recorded graph, and as a function of that: what is left when nothing is planned or built for a call."""

    async def record() -> tuple[accel.Graph, accel.AccelRef]:
        async with device.graph() as graph:
            y = x.ref
            for w, b in zip(ws[:-1], bs[:-1], strict=True):
                y = graph.linalg.matmul(y, w.ref, bias=b.ref, activation="relu")
            return graph, graph.linalg.matmul(y, ws[-1].ref, bias=bs[-1].ref)

    graph, _ = await record()
    other, result = await record()
    function = other.into_function((), (result,))
    operands = [each.ref for each in (x, *ws, *bs)]
    return {"MLP as a graph": graph.replay, "MLP as a function": lambda: function(*operands)}


def twins(arrays: Sequence[np.ndarray[Any, Any]]) -> Subjects:
    """Return the same in PyTorch's eager mode."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    there = [torch.from_numpy(each).cuda() for each in arrays]
    x, ws, bs = there[0], there[1 : len(WIDTHS)], there[len(WIDTHS) :]

    async def eager() -> Any:
        with torch.inference_mode():
            y = x
            for w, b in zip(ws[:-1], bs[:-1], strict=True):
                y = torch.relu(y @ w + b)
            y = y @ ws[-1] + bs[-1]
        torch.cuda.synchronize()
        return y

    async def first() -> None:
        with torch.inference_mode():
            torch.addmm(bs[0], x, ws[0])
        torch.cuda.synchronize()

    return {"MLP, PyTorch": eager, "the same, PyTorch": first}


async def measure(rounds: int, profile: int) -> dict[str, list[float]]:
    """Return the seconds of each subject's blocks. ``profile`` is how many lines of a profile are printed."""
    rng = np.random.default_rng()
    weights = [rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5) for shape in itertools.pairwise(WIDTHS)]
    biases = [rng.standard_normal(width, np.float32) for width in WIDTHS[1:]]
    arrays = [rng.standard_normal((BATCH, WIDTHS[0]), np.float32), *weights, *biases]
    async with accel.System() as system:
        device = await system.open_device("cuda")
        xp = device.xp
        flat = await xp.asarray(rng.standard_normal(ELEMENTS, np.float32))
        x, *layers = await accel.evaluate(*[xp.asarray(each) for each in arrays])
        network = device, x, layers[: len(weights)], layers[len(weights) :]
        subjects = chains(flat) | networks(*network) | await recorded(*network) | twins(arrays)
        for name, call in subjects.items():
            began = time.perf_counter()
            await call()
            print(f"first {name:18} {1e3 * (time.perf_counter() - began):9.2f} ms, with compilation")
        found_by_both = await (await subjects["MLP"]()).numpy(), (await subjects["MLP, PyTorch"]()).cpu().numpy()
        np.testing.assert_allclose(*found_by_both, rtol=1e-3, atol=1e-4)
        found: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, call in subjects.items():
                found[name].append(await _seconds(call))
        if profile:
            profiler = cProfile.Profile()
            profiler.enable()
            await _seconds(subjects["MLP"])
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(profile)
        return found


async def _awaited(array: accel.Array) -> accel.Array:
    return await array


def main() -> int:
    """Measure, print, and return 1 if a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each subject (default %(default)s)")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print N lines of cProfile's table of the network's calls")
    parser.add_argument("--json", type=Path, help="write the seconds of the blocks there")
    given = parser.parse_args()
    found = asyncio.run(measure(given.rounds, given.profile))
    for name, blocks in found.items():
        print(f"{name:20} {1e6 * statistics.median(blocks):9.1f} us")
    is_kept = True
    for name, (subject, twin, most) in BUDGETS.items():
        ratio = statistics.median(found[subject]) / statistics.median(found[twin])
        is_kept = is_kept and ratio <= most
        print(f"{name:26} {ratio:6.3f}x  must {most:g}x {'ok' if ratio <= most else 'BROKEN'}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
