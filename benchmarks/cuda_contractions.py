"""Contractions on a GPU, four ways: ``python benchmarks/cuda_contractions.py [--json FILE]``.

``device.tensor`` with cuTENSOR's wheel, and without it; PyTorch's einsum; and CuPy's. Times are the
device's for one call, on random data, the shortest of several runs: a graph of many calls less one
of few; by CuPy, which is not captured, calls in a row. The last column is how many times as fast
the first is as the best of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accel import System
from accel_cuda.families import tensor
from benchmarks.cuda_cases.families import data_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel import Device

_FEW, _MANY = 1, 6
_ROUNDS = 5


class Case(NamedTuple):
    """One call."""

    what: str
    subscripts: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str


CASES = (
    Case("a chain of matrices", "ij,jk,kl->il", ((4096, 512), (512, 4096), (4096, 4096)), "float32"),
    Case("scores of attention", "bhqd,bhkd->bhqk", ((8, 16, 1024, 64),) * 2, "bfloat16"),
    Case("scores, heads between", "bqhd,bkhd->bhqk", ((4, 2048, 32, 128),) * 2, "bfloat16"),
    Case("values, heads between", "bhqk,bkhd->bqhd", ((4, 16, 1024, 1024), (4, 1024, 16, 64)), "float16"),
    Case("a network of two tensors", "abc,cde->abde", ((64, 96, 256), (256, 96, 64)), "float32"),
    Case("the same, transposed", "abc,dce->eadb", ((64, 96, 256), (96, 256, 64)), "float32"),
    Case("all orders reversed", "abcd,dcbe->ea", ((96,) * 4,) * 2, "float32"),
    Case("coupled cluster, 4-D", "ikac,kjcb->ijab", ((32, 32, 64, 64), (32, 32, 64, 64)), "float64"),
    Case("coupled cluster, 6-D", "gdab,efgc->abcdef", ((24, 16, 20, 20), (20, 20, 24, 16)), "float32"),
    Case("a step of DMRG", "lwm,lsp,wstv,mtq->pvq", ((256, 8, 256), (256, 4, 256), (8, 4, 4, 8), (256, 4, 256)), "complex64"),
)
"""What was chosen before anything was measured."""

MOVES = (
    Case("axes in another order", "abcd->dbca", ((64, 96, 64, 96),), "float32"),
    Case("the first axis last", "abc->bca", ((512, 256, 256),), "bfloat16"),
    Case("sums of the middle", "abcd->da", ((96,) * 4,), "float32"),
    Case("elements, one transposed", "abc,cba->abc", ((256,) * 3,) * 2, "float32"),
)
"""What moves, sums or multiplies elements alone."""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--only", default="", help="measure cases whose subscripts or names have this")
    parser.add_argument("--autotune", action="store_true", help="measure cuTENSOR with autotune=True too")
    options = parser.parse_args()
    cases = [case for case in (*CASES, *MOVES) if options.only in case.subscripts or options.only in case.what]
    rows: list[dict[str, Any]] = [
        {"what": case.what, "subscripts": case.subscripts, "shapes": case.shapes, "dtype": case.dtype} for case in cases
    ]
    for _ in range(2):  # each way after the others too: a GPU that is warm computes at another speed
        asyncio.run(ours("cuTENSOR", cases, rows))
        if options.autotune:
            asyncio.run(ours("autotuned", cases, rows, autotune=True))
        with mock.patch.object(tensor, "version_of", return_value=None):
            asyncio.run(ours("without", cases, rows))
        for name, measure in (("PyTorch", torch_times), ("CuPy", cupy_times)):
            theirs(name, measure, cases, rows)
    print_table(rows)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def theirs(name: str, measure: Callable[[Any, Case], float | None], cases: list[Case], rows: list[dict[str, Any]]) -> None:
    """Measure another library, if it is there."""
    try:
        module = importlib.import_module({"PyTorch": "torch", "CuPy": "cupy"}[name])
    except ImportError:
        return
    for case, row in zip(cases, rows, strict=True):
        try:
            note(row, name, measure(module, case))
        except Exception as error:  # what it has not the memory for, or does not offer
            note(row, name, None)
            print(f"{name}, {case.subscripts}: {error}", file=sys.stderr)


def note(row: dict[str, Any], name: str, seconds: float | None) -> None:
    """Keep the shortest time."""
    row[name] = min((found for found in (row.get(name), seconds) if found is not None), default=None)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the times in microseconds, and how many times as fast ours is."""
    ways = [name for name in ("cuTENSOR", "autotuned", "without", "PyTorch", "CuPy") if any(name in row for row in rows)]
    print(f"| what | subscripts | dtype | {' | '.join(ways)} | beside the best |", "|---" * (len(ways) + 4) + "|", sep="\n")
    for row in rows:
        others = [row[name] for name in ways[1:] if name != "autotuned" and row.get(name)]
        row["ratio"] = min(others) / row["cuTENSOR"] if row.get("cuTENSOR") and others else None
        times = ["-" if row.get(name) is None else f"{row[name] * 1e6:,.0f}" for name in ways]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(f"| {row['what']} | `{row['subscripts']}` | {row['dtype']} | {' | '.join(times)} | {ratio} |")


async def ours(name: str, cases: list[Case], rows: list[dict[str, Any]], **options: Any) -> None:
    """Measure ``device.tensor`` as it is now."""
    async with System("contractions") as system:
        device = await system.open_device("cuda")
        for case, row in zip(cases, rows, strict=True):
            refs = [await device.put(data_of(np.random.default_rng(n), (shape, case.dtype))) for n, shape in enumerate(case.shapes)]
            await device.tensor.einsum(case.subscripts, *refs, **options)  # plans are made, and candidates tried
            few, many = [await our_graph(device, case, refs, count, options) for count in (_FEW, _MANY)]
            note(row, name, (many - few) / (_MANY - _FEW))
            for ref in refs:
                await device.free(ref)


async def our_graph(device: Device, case: Case, refs: list[Any], count: int, options: dict[str, Any]) -> float:
    """Return the shortest time of a graph of some calls."""
    async with device.graph() as graph:
        for _ in range(count):
            graph.tensor.einsum(case.subscripts, *refs, **options)
    try:
        found = float("inf")
        for _ in range(_ROUNDS + 1):
            began = time.perf_counter()
            await graph.replay()
            found = min(found, time.perf_counter() - began)
        return found
    finally:
        await graph.aclose()


def torch_times(torch: Any, case: Case) -> float:
    """Return the seconds of one call of PyTorch's einsum."""
    tensors = []
    for n, shape in enumerate(case.shapes):
        data = data_of(np.random.default_rng(n), (shape, "float32" if case.dtype == "bfloat16" else case.dtype))
        tensors.append(torch.from_numpy(data).to("cuda").to(getattr(torch, case.dtype)))

    def captured(count: int) -> float:
        graph = torch.cuda.CUDAGraph()
        torch.einsum(case.subscripts, *tensors)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            kept = [torch.einsum(case.subscripts, *tensors).contiguous() for _ in range(count)]
        found = shortest(graph.replay, torch.cuda.synchronize)
        kept.clear()
        return found

    few, many = captured(_FEW), captured(_MANY)
    tensors.clear()
    torch.cuda.empty_cache()
    return (many - few) / (_MANY - _FEW)


def cupy_times(cupy: Any, case: Case) -> float | None:
    """Return the seconds of one call of CuPy's einsum; it has no bfloat16."""
    if case.dtype == "bfloat16":
        return None
    arrays = [cupy.asarray(data_of(np.random.default_rng(n), (shape, case.dtype))) for n, shape in enumerate(case.shapes)]

    def calls(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                cupy.ascontiguousarray(cupy.einsum(case.subscripts, *arrays))

        return run

    synchronize = cupy.cuda.get_current_stream().synchronize
    few, many = (shortest(calls(count), synchronize) for count in (_FEW, _MANY))
    arrays.clear()
    cupy.get_default_memory_pool().free_all_blocks()
    return (many - few) / (_MANY - _FEW)


def shortest(run: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Return the shortest time of a run, in seconds, after one that does not count."""
    found = float("inf")
    for n in range(_ROUNDS + 1):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        if n:
            found = min(found, time.perf_counter() - began)
    return found


if __name__ == "__main__":
    main()
