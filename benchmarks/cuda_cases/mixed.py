"""P14 on a GPU: a service's mix beside PyTorch, whose events are queried in each iteration of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel import System, UnsupportedError
from benchmarks.cases.mixed import SIZES, judge, matrices_of, measure, products_of

if TYPE_CHECKING:
    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.rig import Rig

__all__ = ["STREAMS", "TORCH_ONE", "TORCH_POOL", "mixed"]

STREAMS = 8
TORCH_POOL = f"PyTorch, event.query, {STREAMS} streams in turn"
TORCH_ONE = "PyTorch, event.query, one stream"


async def mixed(rig: Rig, bench: Bench) -> None:
    """P14: against PyTorch on 8 streams; PyTorch on one stream is measured beside."""
    torch = rig.torch(bench)
    if torch is None:
        raise UnsupportedError("P14 has no twin", remedy="Install PyTorch: pip install torch.")
    matrices = matrices_of(bench, SIZES)
    async with System("bench") as system:
        subjects = await products_of(system, bench, matrices)
        subjects |= {TORCH_POOL: torch.products(matrices, STREAMS), TORCH_ONE: torch.products(matrices, 1)}
        found = await measure(bench, subjects, SIZES)
    judge(bench, found, TORCH_POOL)
    torch.release()
