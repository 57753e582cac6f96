"""All-reduces of processes of this machine by torch.distributed and gloo alone: the twin of a world of CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["measure"]

_RANK = """
import json, os, sys, time
import torch
import torch.distributed as dist
path, rank, ranks, seconds, sizes = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
found = {}
for nbytes in sizes:
    x = torch.ones(nbytes // 4)
    dist.all_reduce(x)
    spans, spent = [], 0.0
    count = torch.ones(1)
    while count.item():
        dist.barrier()
        began = time.perf_counter()
        for _ in range(32):
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        spans.append(time.perf_counter() - began)
        spent += spans[-1]
        count.fill_(float(spent < seconds or len(spans) < 3))
        dist.broadcast(count, 0)
    found[nbytes] = sorted(spans)[len(spans) // 2] / 32 * 1e6
if rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads do not end well
"""


def measure(ranks: int, sizes: Sequence[int], seconds: float) -> dict[str, float]:
    """Return, by bytes, the microseconds of one all-reduce of 32 in a row: the median."""
    with tempfile.TemporaryDirectory() as folder:
        given = [json.dumps([f"{folder}/store", rank, ranks, seconds, list(sizes)]) for rank in range(ranks)]
        running = [subprocess.Popen([sys.executable, "-c", _RANK, argument], stdout=subprocess.PIPE, text=True) for argument in given]
        told = [process.communicate(timeout=60 + 10 * seconds * len(sizes))[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("the twin has failed")
    found: dict[str, float] = json.loads(told[0])
    return found
