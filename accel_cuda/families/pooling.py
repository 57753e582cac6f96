"""Pooling and its gradients on a GPU, by kernels of the backend's own for one to three dimensions and both orders: cuDNN's maintained interface has none.

A gradient is gathered: a thread asks all windows that an element is in. So sums have one order, and nothing is added by two threads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accel_cuda.core.family import Source
from accel_cuda.families.kernels import CODES, program_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["KERNELS", "PROGRAM", "SOURCES"]

_AXES, _THREADS, _GRANULE = 3, 256, 16


def _pool(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    windows, (before, behind), dtype = op.windows(), op.ends(), plan.dtype
    if not math.prod(op.pooled()):
        return
    grad, x = (inputs[0], inputs[-1]) if op.kind in _GRADS else (0, inputs[0])
    made = windows.sizes if grad else windows.counts
    pack = _GRANULE // dtype.itemsize
    is_packed = not (behind % pack or (grad | x | outputs[0]) % _GRANULE)
    packs = behind // pack if is_packed else behind
    size = before * math.prod(made) * packs
    axes: list[int] = []
    # Axes that are not there have one element.
    for name, nothing in (("sizes", 1), ("counts", 1), ("window", 1), ("stride", 1), ("before", 0)):
        values = getattr(windows, name)
        axes += (nothing,) * (_AXES - len(values)) + values
    stream = lane.stream
    stream.ready()
    name = f"pool_{_WHICH[op.kind]}_{'packed' if is_packed else 'single'}_{CODES[dtype]}"
    arguments = x, outputs[0], grad, size, packs, *axes, op.counts_padding()
    stream.launch(stream.functions[name], -(-size // _THREADS), _THREADS, *arguments)


_GRADS = {"max_pool_grad": "largest_grad", "avg_pool_grad": "mean_grad"}
_WHICH = {"max_pool": "largest", "avg_pool": "mean", **_GRADS}


KERNELS: Mapping[str, Kernel] = dict.fromkeys(_WHICH, _pool)
PROGRAM = {kind: program_for("pool", "grad" if kind in _GRADS else "x") for kind in KERNELS}
SOURCES = (Source("pool", lambda code: ("pool.cu", f"POOL({code})"), "pool", on_demand=True),)
