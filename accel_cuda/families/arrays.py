"""The ``arrays`` family on a GPU: one launch for each piece that is copied."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from accel import UnsupportedError
from accel.ops import ArraysOps
from accel.ops.pieces import kinds_of_pieces
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.families.kernels import CODES, bits, launch_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.backend import Kernel
    from accel.ops.indexed import Walk

__all__ = ["PART", "copy_pieces", "count_pieces", "moved", "widened"]

Shape = tuple[int, ...]

# As in arrays.cu.
_DIMS, _OPERANDS, _BLOCK, _WIDEST = 8, 2, 256, 16
_ALL = 1 << 64
_PADDINGS = {"edge": 0, "reflect": 1, "symmetric": 2, "wrap": 3}
_MODES = {"raise": 0, "wrap": 1, "clip": 2}


class _Move(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("number", ctypes.c_uint64 * 2),
        ("size", ctypes.c_int64),
        ("dims", ctypes.c_int64),
        ("lengths", ctypes.c_int64 * _DIMS),
        ("steps", (ctypes.c_int64 * _DIMS) * _OPERANDS),
    )


@lru_cache(maxsize=1024)
def moved(lengths: Shape, steps: Shape, target_steps: Shape, itemsize: int, alignment: int) -> tuple[int, Shape, Shape, Shape]:
    """Return how elements, at least one, are moved with as few axes and as large elements as can be: bytes of an element, lengths, steps and steps of targets.

    Parameters
    ----------
    lengths, steps, target_steps
        Along each axis, in elements.
    itemsize
        Bytes of an element.
    alignment
        Bytes of which the first source's and the first target's addresses are multiples.
    """
    axes: list[tuple[int, int, int]] = []
    for axis in zip(lengths, steps, target_steps, strict=True):
        length, step, target = axis
        if length == 1:
            continue
        if axes and axes[-1][1:] == (step * length, target * length):
            axes[-1] = axes[-1][0] * length, step, target
        else:
            axes.append(axis)
    axes = axes or [(1, 1, 1)]
    while itemsize < _WIDEST and _has_pairs(axes) and alignment % (2 * itemsize) == 0:
        *outer, (length, step, target) = axes
        axes = [*((each, first // 2, second // 2) for each, first, second in outer), (length // 2, step, target)]
        itemsize *= 2
    found = tuple(zip(*axes, strict=True))
    return itemsize, found[0], found[1], found[2]


def _has_pairs(axes: list[tuple[int, int, int]]) -> bool:
    """Return whether pairs of neighbours can be moved as one element."""
    *outer, (length, step, target) = axes
    return step == target == 1 and length % 2 == 0 and not any(first % 2 or second % 2 for _, first, second in outer)


def copy_pieces(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue an op of pieces."""
    stream = lane.stream
    made = (*plan.writes, *plan.creates)
    stream.ready()
    filled = op.filled()
    if filled is not None:
        stream.fill(outputs[0], filled, math.prod(made[0].shape))
    for piece in op.pieces():
        size = math.prod(piece.lengths)
        if not size:
            continue
        itemsize = made[piece.output].dtype.itemsize
        target = outputs[piece.output] + piece.target * itemsize
        source = 0 if piece.input is None else inputs[piece.input] + piece.start * itemsize
        alignment = itemsize if piece.input is None else math.gcd(source, target, _WIDEST)
        width, lengths, steps, target_steps = moved(piece.lengths, piece.steps, piece.target_steps, itemsize, alignment)
        if len(lengths) > _DIMS:
            raise UnsupportedError(
                f"{op.kind} moves elements along {len(lengths)} axes", remedy="Reshape the array to fewer dimensions.", op=op.kind
            )
        move = _Move(x=source, y=target, size=math.prod(lengths), dims=len(lengths))
        move.lengths[: len(lengths)] = lengths
        move.steps[0][: len(steps)] = steps
        move.steps[1][: len(steps)] = target_steps
        if piece.input is None:
            ctypes.memmove(ctypes.addressof(move.number), op.number(), itemsize)
        stream.launch_with(stream.functions[f"move_{width}"], (-(-move.size // _BLOCK), 1), (_BLOCK, 1), move)


class _Frame(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("size", "dims", "mode")),
        *((name, ctypes.c_int64 * _DIMS) for name in ("lengths", "before", "inner", "steps")),
    )


def _pad(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue a padding: with a number as an op of pieces, with elements of x by a kernel that finds each."""
    if op.mode == "constant":
        copy_pieces(lane, op, plan, inputs, outputs)
        return
    x, shape = op.x, op.shape()
    if 0 in shape:
        return
    if len(shape) > _DIMS:
        raise UnsupportedError(f"pad of {len(shape)} dimensions", remedy="Reshape the array to fewer dimensions.", op=op.kind)
    frame = _Frame(x=inputs[0], y=outputs[0], size=math.prod(shape), dims=len(shape), mode=_PADDINGS[op.mode])
    for field, values in ((frame.lengths, shape), (frame.before, op.before()), (frame.inner, x.shape), (frame.steps, x.strides)):
        field[: len(shape)] = values
    stream = lane.stream
    stream.ready()
    function = stream.functions[f"pad_{x.dtype.itemsize}"]
    stream.launch_with(function, (-(-frame.size // _BLOCK), 1), (_BLOCK, 1), frame)


def _triangle(is_lower: bool) -> Kernel:
    def kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        x = op.x
        launch_each(
            lane.stream, f"triangle_{x.dtype.itemsize}", x.size, inputs[0], outputs[0], x.size, *x.shape[-2:], op.k % _ALL, int(is_lower)
        )

    return kernel


def _ramp(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    count, start, step, last = op.ramp()
    if count:
        words = (int(start) % _ALL, int(step) % _ALL) if op.dtype.is_integer else (bits(start), bits(step))
        end = 0 if last is None else bits(last)
        launch_each(lane.stream, f"ramp_{CODES[op.dtype]}", count, outputs[0], count, *words, end, int(last is not None))


class _Spots(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("indices", ctypes.c_uint64),
        ("others", ctypes.c_uint64),
        ("number", ctypes.c_uint64 * 2),
        ("status", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("size", "length", "behind", "count")),
        ("steps", ctypes.c_int64 * 3),
        ("places", ctypes.c_int64 * 3),
        ("mode", ctypes.c_int64),
    )


def widened(walk: Walk, itemsize: int, alignment: int) -> tuple[Walk, int]:
    """Return a walk with as large elements as can be, and their bytes: runs behind the axis are moved as a whole if they all have one index.

    Parameters
    ----------
    walk
        Where elements are.
    itemsize
        Bytes of an element.
    alignment
        Bytes of which the addresses of both arrays are multiples.
    """
    behind, (first, along, last) = walk.behind, walk.places
    while (
        not walk.steps[2]
        and behind % 2 == first % 2 == along % 2 == 0
        and last == 1
        and itemsize < _WIDEST
        and alignment % (2 * itemsize) == 0
    ):
        behind, first, along, itemsize = behind // 2, first // 2, along // 2, 2 * itemsize
    return replace(walk, behind=behind, places=(first, along, last)), itemsize


def _at_indices(lane: Any, op: Any, name: str, walk: Walk, x: int, indices: int, others: int, outputs: Sequence[int]) -> None:
    """Enqueue one of the kernels of elements at indices."""
    mode = getattr(op, "mode", "raise")
    if not walk.size:
        return
    spots = _Spots(x=x, indices=indices, others=others, size=walk.size, length=walk.length, behind=walk.behind, count=walk.count)
    spots.steps[:] = walk.steps
    spots.places[:] = walk.places
    spots.mode = _MODES[mode]
    if mode == "raise":
        spots.status = outputs[1]
    if not others:
        number = op.number()
        ctypes.memmove(ctypes.addressof(spots.number), number, len(number))
    stream = lane.stream
    stream.ready()
    function = stream.functions[f"{name}_{CODES[op.indices.dtype]}"]
    stream.launch_with(function, (-(-walk.size // _BLOCK), 1), (_BLOCK, 1), spots)


def _gather(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    walk, itemsize = widened(op.walk(), op.x.dtype.itemsize, math.gcd(inputs[0], outputs[0], _WIDEST))
    _at_indices(lane, op, f"gather_{itemsize}", walk, inputs[0], inputs[1], outputs[0], outputs)


def _put(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    walk, itemsize, values = op.walk(), op.x.dtype.itemsize, inputs[1] if len(inputs) > 1 else 0
    if values:
        walk, itemsize = widened(walk, itemsize, math.gcd(outputs[0], values, _WIDEST))
    _at_indices(lane, op, f"put_{itemsize}", walk, outputs[0], inputs[0], values, outputs)


def _scatter(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    dtype = op.x.dtype
    name = f"scatter_{CODES[dtype] if dtype.is_floating else f'u{8 * dtype.itemsize}'}"
    _at_indices(lane, op, name, op.walk(), outputs[0], inputs[0], inputs[1] if len(inputs) > 1 else 0, outputs)


def count_pieces(op: Any) -> int:
    """Return how many commands an op of pieces enqueues."""
    return len(op.pieces()) + (op.filled() is not None)


_COPYING = kinds_of_pieces(ArraysOps)
_KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(_COPYING, copy_pieces),
    "pad": _pad,
    "tril": _triangle(True),
    "triu": _triangle(False),
    "arange": _ramp,
    "linspace": _ramp,
    "take": _gather,
    "take_along_axis": _gather,
    "put_along_axis": _put,
    "scatter_add": _scatter,
}

PART = CudaPart(
    kernels=_KERNELS,
    programs=(Source("arrays", lambda code: ("arrays.cu", ""), functions=("move", "pad", "triangle", "ramp", "gather", "put", "scatter")),),
    program="arrays",
    commands=dict.fromkeys(_COPYING, count_pieces),
)
