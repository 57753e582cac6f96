"""Losses on a GPU, by kernels of the backend's own: cuDNN has none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accel import DType
from accel_cuda.core.family import Source
from accel_cuda.families.kernels import CODES, program_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["KERNELS", "PROGRAM", "SOURCES"]

_WARP, _BLOCK, _LARGEST, _GRANULE = 32, 128, 512, 16
_FEW = 4
"""Packs, or elements, of a row that a lane takes at least, if the row has as many."""
_LONG = 16
"""How many a lane takes at most, before a row takes a block."""


def _enqueue(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    *leading, length = op.logits.shape
    rows, dtype = math.prod(leading), op.logits.dtype
    if not rows:
        return
    grad, x, labels = inputs if op.kind == "cross_entropy_grad" else (0, *inputs)
    pack = _GRANULE // dtype.itemsize
    is_packed = not (length % pack or (x | (outputs[0] if grad else 0)) % _GRANULE)
    packs = length // pack if is_packed else length
    width = _LARGEST if packs > _LONG * _WARP else min(_WARP, 1 << max(0, -(-packs // _FEW) - 1).bit_length())
    threads = width if width > _WARP else _BLOCK
    stream = lane.stream
    stream.ready()
    name = f"loss_{'grad' if grad else 'value'}_{'packed' if is_packed else 'single'}_{CODES[dtype]}"
    sizes = rows, length, width, op.ignore_index, op.labels.dtype is DType.INT64
    stream.launch(stream.functions[name], -(-rows // (threads // width)), threads, grad, x, labels, outputs[0], *sizes)


KERNELS: Mapping[str, Kernel] = {"cross_entropy": _enqueue, "cross_entropy_grad": _enqueue}
PROGRAM = dict.fromkeys(KERNELS, program_for("loss", "logits"))
SOURCES = (Source("loss", lambda code: ("normalize.cu", "loss.cu", f"LOSS({code})"), "normalize", on_demand=True),)
