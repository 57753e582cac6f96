"""Pooling on a GPU, by one kernel of the backend's own for one to three dimensions and both orders: cuDNN's maintained interface has none."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from accel import ComputeBackend
from accel_cuda.core.family import Source
from accel_cuda.families.kernels import CODES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["KERNELS", "PROGRAM", "SOURCES"]

_AXES, _THREADS, _GRANULE = 3, 256, 16


class _Pool(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("size", ctypes.c_int64),
        ("behind", ctypes.c_int64),
        *((name, ctypes.c_int64 * _AXES) for name in ("sizes", "counts", "window", "stride", "ahead")),
        ("counts_padding", ctypes.c_int64),
    )


def _pool(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    windows, (before, behind), dtype = op.windows(), op.ends(), op.x.dtype
    if not op.x.size:
        return
    pack = _GRANULE // dtype.itemsize
    is_packed = not (behind % pack or (inputs[0] | outputs[0]) % _GRANULE)
    packs = behind // pack if is_packed else behind
    sizes = _Pool(inputs[0], outputs[0], before * math.prod(windows.counts) * packs, packs, counts_padding=op.counts_padding())
    # Axes that are not there have one element.
    for name, nothing in (("sizes", 1), ("counts", 1), ("window", 1), ("stride", 1), ("before", 0)):
        values = getattr(windows, name)
        field = getattr(sizes, "ahead" if name == "before" else name)
        field[:] = (nothing,) * (_AXES - len(values)) + values
    stream = lane.stream
    stream.ready()
    name = f"pool_{'largest' if op.kind == 'max_pool' else 'mean'}_{'packed' if is_packed else 'single'}_{CODES[dtype]}"
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(sizes))
    stream.launch_with(stream.functions[name], (-(-sizes.size // _THREADS), 1), (_THREADS, 1), 0, parameters)


def _program(op: Any) -> str:
    return _PROGRAMS.get(op.x.dtype, "")


_PROGRAMS = {dtype: f"pool_{CODES[dtype]}" for dtype in ComputeBackend.CAPABILITIES["pool"]}

KERNELS: Mapping[str, Kernel] = {"max_pool": _pool, "avg_pool": _pool}
PROGRAM = dict.fromkeys(KERNELS, _program)
SOURCES = (Source("pool", lambda code: ("pool.cu", f"POOL({code})"), "pool", on_demand=True),)
