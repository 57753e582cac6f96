"""The ``elementwise`` family on a GPU: kernels of the backend's own. Operands of one shape go through the compute interface; others are broadcast here."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import BinaryOp, ComputeBackend, DType, UnaryOp, UnsupportedError
from accel.compute import result_dtype
from accel.views import broadcast, strides_of
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.families.kernels import CODES, instances

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.ops import Binary, Cast, Clip, Unary, Where

__all__ = ["PART", "collapsed"]

Shape = tuple[int, ...]

# As in strided.cu.
_DIMS, _OPERANDS, _BLOCK, _PACK = 8, 3, 256, 16

_UNARY = {dtype: f"unary_{code}" for dtype, code in CODES.items()}
_BINARY = {dtype: f"binary_{code}" for dtype, code in CODES.items()}
_BROADCAST = {dtype: f"broadcast_{code}" for dtype, code in CODES.items()}
_BY_SIZE = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "c128"}


class _Walk(ctypes.Structure):
    _fields_ = (
        ("y", ctypes.c_uint64),
        ("operand", ctypes.c_uint64 * _OPERANDS),
        ("number", (ctypes.c_uint64 * 2) * _OPERANDS),
        ("size", ctypes.c_int64),
        ("packs", ctypes.c_int64),
        ("dims", ctypes.c_int64),
        ("lengths", ctypes.c_int64 * _DIMS),
        ("strides", (ctypes.c_int64 * _DIMS) * _OPERANDS),
    )


@lru_cache(maxsize=1024)
def collapsed(shape: Shape, operands: tuple[Shape, ...]) -> tuple[Shape, tuple[Shape, ...]]:
    """Return the fewest dimensions in which operands of these shapes can be walked through, and the operands' strides in them, in elements.

    Parameters
    ----------
    shape
        What the operands are broadcast to; no length is 0.
    operands
        Shapes of operands.
    """
    lengths: list[int] = []
    strides: list[list[int]] = [[] for _ in operands]
    every = [strides_of(each, shape) for each in operands]
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            continue
        here = [each[axis] for each in every]
        if lengths and all(step == each[-1] * lengths[-1] for step, each in zip(here, strides, strict=True)):
            lengths[-1] *= shape[axis]
            continue
        lengths.append(shape[axis])
        for step, each in zip(here, strides, strict=True):
            each.append(step)
    return tuple(reversed(lengths)) or (1,), tuple(tuple(reversed(each)) or (0,) for each in strides)


@lru_cache(maxsize=1024)
def _walk(shape: Shape, operands: tuple[Shape, ...], pack: int) -> bytes:
    """Return the sizes of a walk; ``packs`` says whether packs of so many elements lie together, wherever operands begin."""
    lengths, strides = collapsed(shape, operands)
    if len(lengths) > _DIMS:
        raise UnsupportedError(
            f"operands of shapes {', '.join(map(str, operands))} are broadcast along too many axes",
            remedy="Reshape them to fewer dimensions.",
        )
    packs = pack > 1 and (len(lengths) == 1 or lengths[-1] % pack == 0)
    packs = packs and all(each[-1] == 0 or (each[-1] == 1 and not any(step % pack for step in each[:-1])) for each in strides)
    walk = _Walk(size=math.prod(lengths), packs=packs, dims=len(lengths))
    walk.lengths[: len(lengths)] = lengths
    for number, each in enumerate(strides):
        walk.strides[number][: len(each)] = each
    return bytes(walk)


def _launch(lane: Any, name: str, arguments: Sequence[Any], inputs: Sequence[int], output: int, itemsize: int) -> None:
    """Enqueue one of the kernels of strided.cu on operands that are broadcast; ``itemsize`` is that of the result."""
    shapes = tuple([each.shape for each in arguments])
    shape = broadcast(*shapes)
    if 0 in shape:
        return
    pack = _PACK // max(itemsize, *[each.dtype.itemsize for each in arguments])
    walk = _Walk.from_buffer_copy(_walk(shape, shapes, pack))
    walk.y = output
    packs, addresses = walk.packs and output % (pack * itemsize) == 0, iter(inputs)
    for number, each in enumerate(arguments):
        if isinstance(each, np.ndarray):
            ctypes.memmove(ctypes.addressof(walk.number[number]), each.ctypes.data, each.nbytes)
            continue
        address = walk.operand[number] = next(addresses)
        packs = packs and (walk.strides[number][walk.dims - 1] == 0 or address % (pack * each.dtype.itemsize) == 0)
    walk.packs = packs
    stream = lane.stream
    stream.ready()
    blocks = -(-walk.size // (_BLOCK * (pack if packs else 1)))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(walk))
    stream.launch_with(stream.functions[name], (blocks, 1), (_BLOCK, 1), 0, parameters)


def _binary(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.is_plain():
        lane.compute.binary(op.op, *inputs, outputs[0], op.x.size, dtype=op.x.dtype)
    else:
        itemsize = result_dtype(op.op, op.dtype).itemsize
        _launch(lane, f"broadcast_{op.op.value}_{CODES[op.dtype]}", op.arguments(), inputs, outputs[0], itemsize)


def _where(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    arguments = op.arguments()
    itemsize = arguments[1].dtype.itemsize
    _launch(lane, f"where_{itemsize}", arguments, inputs, outputs[0], itemsize)


def _clip(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    _launch(lane, f"broadcast_clip_{CODES[op.x.dtype]}", op.arguments(), inputs, outputs[0], op.x.dtype.itemsize)


def _cast(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    _launch(lane, f"cast_{CODES[op.x.dtype]}_{CODES[op.dtype]}", op.arguments(), inputs, outputs[0], op.dtype.itemsize)


def _program_of_unary(op: Unary) -> str:
    return _UNARY.get(op.x.dtype, "")


def _program_of_binary(op: Binary) -> str:
    return (_BINARY if op.is_plain() else _BROADCAST).get(op.dtype, "")


def _program_of_where(op: Where) -> str:
    return "where"


def _program_of_clip(op: Clip) -> str:
    return _BROADCAST.get(op.x.dtype, "")


def _program_of_cast(op: Cast) -> str:
    return f"cast_{CODES.get(op.x.dtype, '')}"


def _casts(code: str) -> str:
    """Return the lines that make the kernels from one element type to all others."""
    source = next(dtype for dtype, name in CODES.items() if name == code)
    targets = (each for each in CODES if not source.is_complex or each.is_complex or each is DType.BOOL)
    return "\n".join(f"CAST({code}, {CODES[each]})" for each in targets)


def _broadcasts(code: str) -> tuple[str, ...]:
    clips = f"CLIP({code})" if any(CODES[dtype] == code for dtype in ComputeBackend.CAPABILITIES["clip"]) else ""
    return "elementwise.cu", "strided.cu", f"{instances('BROADCAST', BinaryOp, 'binary', code)}\n{clips}"


def _wheres(code: str) -> tuple[str, ...]:
    return "elementwise.cu", "strided.cu", "\n".join(f"WHERE({size}, {name})" for size, name in _BY_SIZE.items())


_SOURCES = (
    Source("unary", lambda code: ("elementwise.cu", instances("UNARY", UnaryOp, "unary", code)), "unary."),
    Source("binary", lambda code: ("elementwise.cu", instances("BINARY", BinaryOp, "binary", code)), "binary."),
    Source("broadcast", _broadcasts, "binary.", on_demand=True),
    Source("where", _wheres),
    Source("cast", lambda code: ("elementwise.cu", "strided.cu", _casts(code)), "cast", on_demand=True),
)

PART = CudaPart(
    kernels={"binary": _binary, "where": _where, "clip": _clip, "cast": _cast},
    programs=_SOURCES,
    program={
        "unary": _program_of_unary,
        "binary": _program_of_binary,
        "where": _program_of_where,
        "clip": _program_of_clip,
        "cast": _program_of_cast,
    },
)
