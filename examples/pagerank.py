"""PageRank on any device: a power iteration with a sparse matrix, recorded as a graph that is replayed until the ranks stand still.

Run: ``pip install '.[cpu]'``, in a checkout, then ``python examples/pagerank.py``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

import accel

try:
    from scipy import sparse
except ImportError:
    sys.exit("This example needs scipy: pip install '.[cpu]'")

PAGES, LINKS, FOLLOWED, STEPS = 20_000, 200_000, 0.85, 8

Array = np.ndarray[Any, Any]


def web(rng: np.random.Generator) -> Any:
    """Return links as a matrix: column j has the chances that a reader of page j goes to page i. Few pages have many links; some lead nowhere."""
    targets = (PAGES * rng.random(LINKS) ** 3).astype(int)
    sources = rng.integers(0, PAGES, LINKS)
    links = sparse.coo_array((np.ones(LINKS), (targets, sources)), shape=(PAGES, PAGES)).tocsr()
    links.data[:] = 1  # a page that is linked twice counts once
    out = links.sum(axis=0)
    return (links @ sparse.diags_array(1 / np.maximum(out, 1))).tocsr()


async def ranks(device: accel.Device, chances: Any) -> tuple[Array, int]:
    """Return how likely a reader is on each page, and how many steps were taken.

    Where a page leads nowhere, or a reader does not follow its links, the next page is any. So what a step loses comes back in equal parts.
    """
    matrix, rank = await device.sparse.put(chances), await device.put(np.full(PAGES, 1 / PAGES))
    share, one, steps = np.float64(1 / PAGES), np.float64(1), 0
    async with device.graph() as graph:
        before, followed = graph.zeros((PAGES,), "float64"), graph.zeros((PAGES,), "float64")
        for _ in range(STEPS):
            graph.copy(rank, before)
            graph.sparse.spmv(matrix, rank, alpha=FOLLOWED, out=followed)
            total = graph.reduce("sum", followed)
            graph.elementwise.fused((("sub", 1, 2), ("mul", 4, 3), ("add", 0, 5)), (followed, one, total, share), out=rank)
        change = graph.blas.asum(graph.elementwise.binary("sub", rank, before))
    moved = 1.0
    while moved > 1e-10:
        await graph.replay()
        moved, steps = float(await device.get(change)), steps + STEPS
        print(f"  step {steps:3}: change {moved:.1e}")
    await graph.aclose()
    return await device.get(rank), steps


def reference(chances: Any, steps: int) -> Array:
    """Return the same by scipy."""
    rank = np.full(PAGES, 1 / PAGES)
    for _ in range(steps):
        followed = FOLLOWED * (chances @ rank)
        rank = followed + (1 - followed.sum()) / PAGES
    return rank


async def main() -> int:
    """Run the example and return its exit status."""
    chances = web(np.random.default_rng())
    async with accel.System() as system:
        device = await system.open_device("auto", libraries=("sparse", "blas", "elementwise", "reduce"))
        print(f"{device.name}: {PAGES} pages, {chances.nnz} links")
        found, steps = await ranks(device, chances)
    expected = reference(chances, steps)
    first = np.argsort(found)[::-1][:5]
    print("first pages:", ", ".join(f"{page} ({found[page]:.5f})" for page in first))
    print("they are chances:", bool(np.isclose(found.sum(), 1)))
    print("the same as scipy's:", np.allclose(found, expected, rtol=1e-9))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
