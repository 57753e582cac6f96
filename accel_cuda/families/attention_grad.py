"""Gradients of attention: by cuDNN for 16-bit floats, as far as it offers them, else by two kernels of the backend's own."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from accel import UnsupportedError
from accel_cuda.core.family import Source
from accel_cuda.families.attention import CAUSAL, GRADIENT_TENSORS, AttentionSteps
from accel_cuda.families.kernels import CODES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.attention import AttentionWork
    from accel_cuda.families.cudnn import Cudnn, Room

__all__ = ["SOURCES", "attend_backward"]

_WARPS, _SHARED, _LIMIT = 4, 48 << 10, 2**31 - 1

_OF_Q, _OF_K, _OF_V, _MADE = range(4, 8)  # numbers of tensors in cuDNN's plans


class _Backward(ctypes.Structure):
    """What the kernels call Backward."""

    _fields_ = (
        ("pointers", ctypes.c_void_p * 9),
        ("numbers", ctypes.c_int64 * 9),
        ("steps", AttentionSteps * 3),
        ("scale", ctypes.c_double),
    )


def attend_backward(stream: CudaStream, cudnn: Cudnn | None, work: AttentionWork, pointers: Mapping[int, int], room: Room) -> None:
    """Enqueue the gradients of attention. May block where a plan is new, or the backend's own kernels are not loaded.

    Parameters
    ----------
    cudnn
        cuDNN, if the work is for it.
    pointers
        Number of a tensor -> address.
    room
        What it works in.
    """
    sizes = work.sizes
    if not (sizes[_OF_Q] and sizes[_OF_K] and sizes[_MADE]):
        for uid in (_OF_Q, _OF_K, _OF_V):  # nothing was attended to, or nothing came of it
            if sizes[uid]:
                stream.fill(pointers[uid], bytes(1), sizes[uid])
        return
    if cudnn is None:
        _launch(stream, work, pointers)
    else:
        cudnn.run(stream, work, pointers, room, lambda stream, _: _launch(stream, work, pointers))


def _launch(stream: CudaStream, work: AttentionWork, pointers: Mapping[int, int]) -> None:
    (batch, heads, seq_q, dim), (_, kv_heads, seq_kv, value_dim) = work.q.shape, work.v.shape
    stream.ready()
    width = max(work.dtype.itemsize, 4)
    row = width * (dim + value_dim + 64)
    if row > _SHARED or batch * max(heads * seq_q, kv_heads * seq_kv) > _LIMIT:
        raise UnsupportedError(
            f"gradients of attention of {work.q.shape} and {work.v.shape} are too large for one launch",
            op=work.form,
            device=stream.context.description.spec,
        )
    warps = min(_WARPS, _SHARED // row)
    arguments = _Backward()
    arguments.pointers[:] = [pointers[uid] for uid in GRADIENT_TENSORS]
    arguments.numbers[:] = (batch, heads, kv_heads, seq_q, seq_kv, dim, value_dim, CAUSAL[work.causal], work.window or 0)
    arguments.steps[:] = [AttentionSteps(*each.strides[:3]) for each in (work.q, work.k, work.v)]
    arguments.scale = work.scale
    for name, rows, shared in (("queries", heads * seq_q, dim + 32), ("keys", kv_heads * seq_kv, dim + value_dim + 64)):
        function = stream.functions[f"backward_{name}_{CODES[work.dtype]}"]
        stream.launch_with(function, (-(batch * rows // -warps), 1), (32 * warps, 1), arguments, warps * width * shared)


SOURCES = (Source("backward", lambda code: ("attention_grad.cu", f"BACKWARD({code})"), "attention", on_demand=True),)
