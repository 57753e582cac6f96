"""Softmax and norms on a GPU, by kernels of the backend's own.

cuDNN's maintained interface has norms but no softmax, and plans each shape for up to seconds. All of these ops are bound by memory: a kernel that reads a row
once and writes it once is as fast as any, takes any shape, and needs no plan.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from accel import DType
from accel.ops.normalization import NormRows
from accel_cuda.core.family import Source
from accel_cuda.families.kernels import CODES, bits, program_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["KERNELS", "PROGRAM", "SOURCES", "columns_of", "row_launch"]

_WARP, _BLOCK, _LARGEST = 32, 128, 512
_GRANULE = 16
# As in normalize.cu: how many packs, and single elements, a thread holds of a row, of a short one and at most.
_FEW = {True: 2, False: 4}
_COLUMN_THREADS, _COLUMNS, _EACH = 512, 8, 16
_CHANNEL_THREADS = 256


def _held(dtype: DType, is_packed: bool) -> int:
    """Return how many packs, or single elements, a thread holds of a row at most: 16 elements, 32 if they are packed and take one register each."""
    if is_packed:
        return 4 if dtype.itemsize == 2 else 8
    return 8 if dtype is DType.FLOAT64 else 16


@lru_cache(maxsize=1024)
def row_launch(name: str, rows: int, length: int, dtype: DType, is_packed: bool) -> tuple[str, int, int, int]:
    """Return how rows, which are not empty, are shared out: the kernel, threads of a row, threads of a block, and blocks.

    Parameters
    ----------
    name
        What is computed.
    rows, length
        How many, and elements of each.
    dtype
        Of the elements.
    is_packed
        Whether elements are taken 16 bytes at a time.
    """
    packs = length * dtype.itemsize // _GRANULE if is_packed else length
    few, many = _FEW[is_packed], _held(dtype, is_packed)
    if packs <= few * _WARP:
        which, width = "few", 1 << max(0, -(-packs // few) - 1).bit_length()
    elif packs <= many * _LARGEST:
        which, width = "many", -(-packs // (many * _WARP)) * _WARP
    else:
        which, width = "streamed", _LARGEST
    threads = _BLOCK if width <= _WARP else width
    kernel = f"{name}_{'packed' if is_packed else 'single'}_{which}_{CODES[dtype]}"
    return kernel, width, threads, -(-rows // (threads // width))


def _enqueue_rows(lane: Any, name: str, dtype: DType, addresses: Sequence[int], output: int, rows: NormRows, eps: int = 0) -> None:
    """Enqueue a kernel of rows; ``eps`` is the bits of one."""
    stream, (x, weight, bias) = lane.stream, (*addresses, 0, 0)[:3]
    pack = _GRANULE // dtype.itemsize
    is_packed = not (rows.length % pack or (x | output) % _GRANULE)
    # A pack has one weight, or as many as elements.
    if is_packed and (weight or bias):
        is_packed = not ((weight | bias) % _GRANULE if rows.each == 1 else rows.each % pack)
    kernel, width, threads, blocks = row_launch(name, rows.rows, rows.length, dtype, is_packed)
    stream.ready()
    channels = rows.length // rows.each
    stream.launch(stream.functions[kernel], blocks, threads, x, output, weight, bias, *rows, channels, width, eps)


@lru_cache(maxsize=1024)
def columns_of(outer: int, length: int, inner: int, pack: int) -> tuple[int, int, int, int]:
    """Return how a softmax along the middle axis is shared out: threads of a block beside each other and along the axis, tiles of columns, and blocks."""
    packs = inner // pack
    beside = 1 << (packs - 1).bit_length()
    along = min(_COLUMN_THREADS // min(_COLUMNS, beside), 1 << max(0, -(-length // _EACH) - 1).bit_length())
    beside = min(_COLUMN_THREADS // along, beside)
    tiles = -(-packs // beside)
    return beside, along, tiles, outer * tiles


def _softmax(name: str) -> Kernel:
    def kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        dtype, (outer, length, inner) = op.x.dtype, op.middle()
        if not (outer and length and inner):
            return
        if inner == 1:
            _enqueue_rows(lane, name, dtype, inputs, outputs[0], NormRows(outer, length))
            return
        pack = _GRANULE // dtype.itemsize
        is_packed = not (inner % pack or (inputs[0] | outputs[0]) % _GRANULE)
        beside, along, tiles, blocks = columns_of(outer, length, inner, pack if is_packed else 1)
        stream = lane.stream
        stream.ready()
        function = stream.functions[f"{name}_{'packed' if is_packed else 'single'}_columns_{CODES[dtype]}"]
        stream.launch_wide(function, (blocks, 1), (beside, along), 0, inputs[0], outputs[0], length, inner, tiles)

    return kernel


def _norm(name: str) -> Kernel:
    def kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if op.x.size:
            _enqueue_rows(lane, name, op.x.dtype, op.addresses(inputs), outputs[0], op.rows(), bits(op.eps))

    return kernel


def _batch_norm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    dtype, (_, channels, each) = op.x.dtype, op.middle()
    if not op.x.size:
        return
    x, *parameters = op.addresses(inputs)
    is_packed = not (x | outputs[0]) % _GRANULE
    blocks = -(-op.x.size // (_CHANNEL_THREADS * (_GRANULE // dtype.itemsize if is_packed else 1)))
    stream = lane.stream
    stream.ready()
    function = stream.functions[f"norm_channels_{'packed' if is_packed else 'single'}_{CODES[dtype]}"]
    stream.launch(function, blocks, _CHANNEL_THREADS, x, outputs[0], *parameters, op.x.size, channels, each, bits(op.eps))


KERNELS: Mapping[str, Kernel] = {
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("softmax_log"),
    "rms_norm": _norm("norm_rms"),
    **dict.fromkeys(("layer_norm", "group_norm", "instance_norm"), _norm("norm")),
    "batch_norm": _batch_norm,
}


def _source(name: str) -> Source:
    def text(code: str) -> tuple[str, ...]:
        dtype = next(dtype for dtype, each in CODES.items() if each == code)
        return "normalize.cu", f"{name.upper()}({code}, {_held(dtype, True)}, {_held(dtype, False)})"

    return Source(name, text, "normalize", on_demand=True)


PROGRAM = {kind: program_for("softmax" if kind.endswith("softmax") else "norm") for kind in KERNELS}
SOURCES = (_source("softmax"), _source("norm"))
