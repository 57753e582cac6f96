"""Norms for training, gradients of norms and of softmax, and dropout, by kernels of the backend's own: bound by memory, as norms are, and without a plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accel_cuda.core.family import Source
from accel_cuda.families.cudnn import Room
from accel_cuda.families.kernels import CODES, bits, clear, program_for
from accel_cuda.families.normalization import columns_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel import DType
    from accel.backend import Kernel

__all__ = ["KERNELS", "PROGRAM", "SOURCES", "WORKING", "scratch_nbytes"]

_THREADS, _COLUMNS, _ROWS_AT_ONCE = 256, 32, 8
_WARP, _BLOCK, _LARGEST, _FEW, _LONG, _GRANULE = 32, 128, 512, 4, 16, 16
_BLOCKS = 528
"""Number of blocks that keep a GPU busy: sums are cut into this many parts."""
_MEAN, _VARIANCE, _GRADIENTS, _ROW_GRADIENTS = range(4)
_KINDS = {_MEAN: "mean", _VARIANCE: "variance", _GRADIENTS: "gradients", _ROW_GRADIENTS: "rowgradients"}
_ROWS = {"layer_norm_grad": "layer", "rms_norm_grad": "rms", "group_norm_grad": "group", "instance_norm_grad": "group"}
"""Norms of rows, and which kernel has the gradient of ``x``."""


def _launch(lane: Any, name: str, dtype: DType, blocks: int, block: tuple[int, int], *arguments: int) -> None:
    lane.stream.launch_wide(lane.stream.functions[f"{name}_{CODES[dtype]}"], (blocks, 1), block, 0, *arguments)


def _width(dtype: DType) -> int:
    """Return the bytes of the type that is computed in."""
    return max(dtype.itemsize, 4)


def _chunks(outer: int, channels: int, each: int) -> tuple[bool, int, int]:
    """Return whether each block takes one channel, into how many chunks sums are cut, and how many blocks there are of one chunk."""
    is_wide = each >= _COLUMNS
    blocks = max(1, channels if is_wide else -(-channels // _COLUMNS))
    most = outer * each // (8 * _THREADS) if is_wide else outer // (4 * _ROWS_AT_ONCE)
    return is_wide, max(1, min(-(-_BLOCKS // blocks), most)), blocks


def _lanes(packs: int) -> tuple[int, int]:
    """Return how many threads a row of packs, or of single elements, has, and how many a block."""
    width = _LARGEST if packs > _LONG * _WARP else min(_WARP, 1 << max(0, -(-packs // _FEW) - 1).bit_length())
    return width, width if width > _WARP else _BLOCK


def scratch_nbytes(op: Any) -> int:
    """Return how many bytes an op works in: for statistics of rows or channels, and for sums of chunks."""
    if not op.x.size:
        return 0
    (outer, channels, each), width = op.middle(), _width(op.x.dtype)
    _, chunks, _ = _chunks(outer, channels, each)
    room = Room()
    room.take(width * (2 * op.rows().rows if op.kind in _ROWS else 4 * channels))
    room.take(width * 2 * chunks * channels)
    return room.end


def _sums(
    lane: Any,
    op: Any,
    kind: int,
    arrays: tuple[int, int],
    stats: tuple[int, int],
    partial: int,
    to: int,
    made: Sequence[int],
    groups: int = 1,
) -> None:
    """Enqueue two sums for each channel.

    Parameters
    ----------
    arrays, stats
        Addresses of gradient and ``x``, and of means and factors.
    partial, to, made
        Where sums of chunks are, where the sums go, and the results that are made of them.
    groups
        Of channels that have statistics together, if these are of rows.
    """
    (outer, channels, each), dtype = op.middle(), op.x.dtype
    is_wide, chunks, blocks = _chunks(outer, channels, each)
    sizes = outer, channels, each, chunks, groups
    block = (_THREADS, 1) if is_wide else (_COLUMNS, _ROWS_AT_ONCE)
    _launch(
        lane, f"training_{_KINDS[kind]}_{'wide' if is_wide else 'narrow'}", dtype, blocks * chunks, block, *arrays, *stats, partial, *sizes
    )
    first, second = (*made, 0, 0)[:2]
    finish = partial, to, first, second, channels, chunks, outer * each, kind, bits(op.eps)
    _launch(lane, "training_finish", dtype, -(-channels // _THREADS), (_THREADS, 1), *finish)


def _of_rows(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    dtype, stream = op.x.dtype, lane.stream
    grad, x, weight = (*inputs, 0)[:3]
    out, *made, scratch = outputs
    stream.ready()
    if not op.x.size:
        nbytes = math.prod(op.norm().parameters()[0].shape) * dtype.itemsize
        clear(stream, *[(address, nbytes) for address in made])
        return
    rows, length, groups, each = op.rows()
    room, step = Room(scratch), rows * _width(dtype)
    mean = room.take(2 * step)
    pack = _GRANULE // dtype.itemsize
    is_packed = not (length % pack or (grad | x | out) % _GRANULE)
    if is_packed and weight:
        # A pack has as many weights as elements, or, of channels, one.
        is_packed = not (each % pack if _ROWS[op.kind] == "group" else weight % _GRANULE)
    width, threads = _lanes(length // pack if is_packed else length)
    arguments = grad, x, weight, out, mean, mean + step, rows, length, groups, each, width, bits(op.eps)
    name = f"training_rows_{_ROWS[op.kind]}_{'packed' if is_packed else 'single'}"
    _launch(lane, name, dtype, -(-rows // (threads // width)), (threads, 1), *arguments)
    _, channels, _ = middle = op.middle()
    _, chunks, _ = _chunks(*middle)
    partial = room.take(2 * chunks * channels * _width(dtype))
    _sums(lane, op, _ROW_GRADIENTS, (grad, x), (mean, mean + step), partial, 0, made, groups)


def _batch_norm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    (outer, channels, each), dtype = op.middle(), op.x.dtype
    if not channels:
        return
    is_grad = op.kind == "batch_norm_grad"
    grad, x, *given = inputs if is_grad else (0, *inputs)
    weight = given.pop(0) if op.weight is not None else 0
    bias = given[0] if given else 0
    out, first, second, scratch = outputs
    lane.stream.ready()
    room, step = Room(scratch), channels * _width(dtype)
    stats = room.take(4 * step)
    _, chunks, _ = _chunks(outer, channels, each)
    partial = room.take(2 * chunks * step)
    _sums(lane, op, _MEAN, (0, x), (0, 0), partial, stats, () if is_grad else (first,))
    _sums(lane, op, _VARIANCE, (0, x), (stats, 0), partial, stats + step, () if is_grad else (second,))
    if is_grad:
        _sums(lane, op, _GRADIENTS, (grad, x), (stats, stats + step), partial, stats + 2 * step, (first, second))
    arguments = grad, x, out, stats, weight, bias, op.x.size, channels, each, outer * each
    name = "training_unapply" if is_grad else "training_apply"
    _launch(lane, name, dtype, -(-op.x.size // _THREADS), (_THREADS, 1), *arguments)


def _softmax_grad(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if not op.y.size:
        return
    (grad, y), out, dtype = inputs, outputs[0], op.y.dtype
    outer, length, inner = op.middle()
    pack = _GRANULE // dtype.itemsize
    is_packed = not ((length if inner == 1 else inner) % pack or (grad | y | out) % _GRANULE)
    each = pack if is_packed else 1
    lane.stream.ready()
    name = f"training_{'log' if op.kind == 'log_softmax_grad' else 'exp'}"
    if inner == 1:
        width, threads = _lanes(length // each)
        sizes = outer, length, width, 1, 0
        name, blocks, block = f"{name}_rows", -(-outer // (threads // width)), (threads, 1)
    else:
        beside, along, tiles, blocks = columns_of(outer, length, inner, each)
        sizes = outer, length, 0, inner, tiles
        name, block = f"{name}_columns", (beside, along)
    _launch(lane, f"{name}_{'packed' if is_packed else 'single'}", dtype, blocks, block, grad, y, out, *sizes)


def _dropout(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if not op.x.size:
        return
    lane.stream.ready()
    arguments = inputs[0], outputs[0], op.x.size, op.key(), op.offset, op.least(), bits(op.scale())
    blocks = -(-(op.offset + op.x.size) // 4) - op.offset // 4
    _launch(lane, "dropout_any", op.x.dtype, -(-blocks // _THREADS), (_THREADS, 1), *arguments)


WORKING: Mapping[str, Kernel] = {
    **dict.fromkeys(_ROWS, _of_rows),
    **dict.fromkeys(("batch_norm_train", "batch_norm_grad"), _batch_norm),
}
"""Kernels that work in memory beside operands and results."""
KERNELS: Mapping[str, Kernel] = {**dict.fromkeys(("softmax_grad", "log_softmax_grad"), _softmax_grad), "dropout": _dropout}


PROGRAM = {
    **dict.fromkeys(WORKING, program_for("training")),
    **dict.fromkeys(("softmax_grad", "log_softmax_grad"), program_for("training", "y")),
    "dropout": program_for("dropout"),
}
SOURCES = (
    Source("training", lambda code: ("normalize.cu", "training.cu", f"TRAINING({code})"), "normalize", on_demand=True),
    Source("dropout", lambda code: ("philox.cuh", "dropout.cu", f"DROPOUT({code})"), "normalize", on_demand=True),
)
