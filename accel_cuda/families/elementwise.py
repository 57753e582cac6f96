"""The ``elementwise`` family on a GPU: kernels of the backend's own.

Contiguous operands of one shape go through the compute interface; what is broadcast, strided, or a number is walked through here.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel import BinaryOp, DType, StridedRef, UnaryOp, UnsupportedError
from accel.enums import CAPABILITIES, result_dtype
from accel.ops.fused import types_of
from accel.views import broadcast, steps_of, strides_of
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.families.fused import name_of, source_of
from accel_cuda.families.kernels import CODES, instances, program_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.ops import Unary
    from accel.ops.fused import Instruction
    from accel_cuda.core.driver import Handle
    from accel_cuda.core.stream import CudaStream

__all__ = ["PART", "collapsed"]

Shape = tuple[int, ...]

# As in strided.cu.
_DIMS, _OPERANDS, _BLOCK, _PACK, _NUMBER = 8, 3, 256, 16, 16

_UNARY = {dtype: f"unary_{code}" for dtype, code in CODES.items()}
_SPREAD = {dtype: f"spread_{code}" for dtype, code in CODES.items()}
_BINARY = {dtype: f"binary_{code}" for dtype, code in CODES.items()}
_BROADCAST = {dtype: f"broadcast_{code}" for dtype, code in CODES.items()}
_BY_SIZE = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "c128"}


@lru_cache
def _walk_type(operands: int) -> Any:
    """Return the class of walks over a number of operands."""

    class Walk(ctypes.Structure):
        _fields_ = (
            ("number", (ctypes.c_uint64 * 2) * operands),
            ("y", ctypes.c_uint64),
            ("operand", ctypes.c_uint64 * operands),
            ("size", ctypes.c_int64),
            ("packs", ctypes.c_int64),
            ("dims", ctypes.c_int64),
            ("lengths", ctypes.c_int64 * _DIMS),
            ("strides", (ctypes.c_int64 * _DIMS) * operands),
            ("is_spread", ctypes.c_int64),
            ("targets", ctypes.c_int64 * _DIMS),
            ("unused", ctypes.c_uint64 * (1 - operands % 2)),  # the device's is aligned to 16 bytes
        )

    return Walk


_Walk = _walk_type(_OPERANDS)


@lru_cache(maxsize=1024)
def collapsed(shape: Shape, every: tuple[Shape, ...]) -> tuple[Shape, tuple[Shape, ...]]:
    """Return the fewest dimensions in which operands can be walked through, and the operands' strides in them, in elements.

    Parameters
    ----------
    shape
        What the operands are broadcast to; no length is 0.
    every
        Strides of each operand in that shape.
    """
    lengths: list[int] = []
    strides: list[list[int]] = [[] for _ in every]
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


class _Route(NamedTuple):
    """How a walk goes over operands of certain shapes: the bytes of its sizes, and for each operand whether its last dimension is one element."""

    walk: bytes
    size: int
    pack: int
    are_repeated: tuple[bool, ...]


@lru_cache(maxsize=1024)
def _route(operands: tuple[tuple[Shape, Shape | None], ...], target: Shape | None, itemsize: int, kind: Any) -> _Route:
    """Return the walk over operands of these shapes and strides (``None`` in C order); ``pack`` is 1 if elements must be taken one by one.

    Parameters
    ----------
    operands
        Shapes, and strides, in elements.
    target
        Strides of the result.
    itemsize
        Bytes of the largest element.
    kind
        The class of the walk.
    """
    shape = broadcast(*[each for each, _ in operands])
    if 0 in shape:
        return _Route(b"", 0, 1, ())
    every = [strides_of(each, shape, steps) for each, steps in operands]
    lengths, strides = collapsed(shape, (*every, target or steps_of(shape)))
    if len(lengths) > _DIMS:
        raise UnsupportedError(
            f"operands of shapes {', '.join(str(each) for each, _ in operands)} are walked through along too many axes",
            remedy="Reshape them to fewer dimensions.",
        )
    pack = _PACK // itemsize
    packs = len(lengths) == 1 or lengths[-1] % pack == 0
    packs = packs and all(each[-1] == 0 or (each[-1] == 1 and not any(step % pack for step in each[:-1])) for each in strides)
    walk = kind(size=math.prod(lengths), dims=len(lengths))
    walk.lengths[: len(lengths)] = lengths
    *sources, targets = strides
    for number, each in enumerate(sources):
        walk.strides[number][: len(each)] = each
    if target is not None:
        walk.is_spread, walk.targets[: len(targets)] = 1, targets
    return _Route(bytes(walk), walk.size, pack if packs else 1, tuple([each[-1] == 0 for each in sources]))


def _launch(
    lane: Any, op: Any, function: Handle, arguments: Sequence[Any], inputs: Sequence[int], output: int, itemsize: int, kind: Any = _Walk
) -> None:
    """Enqueue one of the kernels of strided.cu on operands that are broadcast; ``itemsize`` is that of the result, ``kind`` the class of its walk."""
    operands, largest = [], itemsize
    target = op.out.strides if isinstance(op.out, StridedRef) else None
    for each in arguments:
        operands.append((each.shape, each.strides if isinstance(each, StridedRef) else None))
        largest = max(largest, each.dtype.itemsize)
    sizes, size, pack, are_repeated = _route(tuple(operands), target, largest, kind)
    if not size:
        return
    walk = kind.from_buffer_copy(sizes)
    walk.y = output
    packs, addresses = pack > 1 and output % (pack * itemsize) == 0, iter(inputs)
    for number, (each, is_repeated) in enumerate(zip(arguments, are_repeated, strict=True)):
        if isinstance(each, np.ndarray):
            ctypes.memmove(ctypes.addressof(walk.number) + number * _NUMBER, each.tobytes(), each.nbytes)
            continue
        address = walk.operand[number] = next(addresses)
        packs = packs and (is_repeated or address % (pack * each.dtype.itemsize) == 0)
    walk.packs = packs
    stream = lane.stream
    stream.ready()
    blocks = -(-size // (_BLOCK * (pack if packs else 1)))
    stream.launch_with(function, (blocks, 1), (_BLOCK, 1), walk)


class _Plain(NamedTuple):
    """The kernel of contiguous elements: its name, how many elements a thread takes, and the bytes of a result."""

    name: str
    per_thread: int
    nbytes: int


# Of all there are: to make one is slower than to find it.
_PLAIN: dict[tuple[UnaryOp | BinaryOp, DType], _Plain] = {
    (op, dtype): _Plain(f"{form}_{op.value}_{code}", max(1, 16 // dtype.itemsize), result_dtype(op, dtype).itemsize)
    for form, members in (("unary", UnaryOp), ("binary", BinaryOp))
    for op in members
    for dtype, code in CODES.items()
}


def _enqueue(stream: CudaStream, op: UnaryOp | BinaryOp, dtype: DType, inputs: Sequence[int], output: int, n: int) -> None:
    """Enqueue a function of each of n contiguous elements of the operands."""
    if n:
        name, per_thread, nbytes = _PLAIN[op, dtype]
        stream.ready()
        # Threads are counted from the aligned address before the first result.
        ahead = output % (per_thread * nbytes) // nbytes
        stream.launch(stream.functions[name], -(-(n + ahead) // (per_thread * _BLOCK)), _BLOCK, *inputs, output, n)


def enqueue_unary(stream: CudaStream, op: UnaryOp, dtype: DType, input: int, output: int, n: int) -> None:
    """Enqueue a function of each of n contiguous elements; the result may be written over them."""
    _enqueue(stream, op, dtype, (input,), output, n)


def _unary(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = op.x
    if op.is_plain():
        _enqueue(lane.stream, op.op, x.dtype, inputs, outputs[0], x.size)
    else:
        function = lane.stream.functions[f"spread_{op.op.value}_{CODES[x.dtype]}"]
        _launch(lane, op, function, (x,), inputs, outputs[0], result_dtype(op.op, x.dtype).itemsize)


def _binary(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.is_plain():
        _enqueue(lane.stream, op.op, op.x.dtype, inputs, outputs[0], op.x.size)
    else:
        dtype = op.dtype
        itemsize = result_dtype(op.op, dtype).itemsize
        _launch(lane, op, lane.stream.functions[f"broadcast_{op.op.value}_{CODES[dtype]}"], op.arguments(), inputs, outputs[0], itemsize)


def _where(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    arguments = op.arguments()
    itemsize = arguments[1].dtype.itemsize
    _launch(lane, op, lane.stream.functions[f"where_{itemsize}"], arguments, inputs, outputs[0], itemsize)


def _clip(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    _launch(lane, op, lane.stream.functions[f"broadcast_clip_{CODES[op.x.dtype]}"], op.arguments(), inputs, outputs[0], op.x.dtype.itemsize)


def _cast(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    _launch(
        lane,
        op,
        lane.stream.functions[f"cast_{CODES[op.x.dtype]}_{CODES[op.dtype]}"],
        op.arguments(),
        inputs,
        outputs[0],
        op.dtype.itemsize,
    )


def _fused(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    dtypes = op.dtypes()
    name, itemsize, walk = _fused_kernel(op.program, dtypes)
    function = lane.stream.functions.made(name, lambda: source_of(op.program, dtypes))
    arguments = [np.asarray(each) if isinstance(each, np.generic) else each for each in op.operands]
    _launch(lane, op, function, arguments, inputs, outputs[0], itemsize, walk)


@lru_cache(maxsize=1024)
def _fused_kernel(program: tuple[Instruction, ...], dtypes: tuple[DType, ...]) -> tuple[str, int, Any]:
    """Return the name of a kernel, bytes of an element of its result, and the class of its walk."""
    return name_of(program, dtypes), types_of(program, dtypes)[-1].itemsize, _walk_type(len(dtypes))


def _lacks_fused(lane: Any, op: Any) -> bool:
    return _fused_kernel(op.program, op.dtypes())[0] not in lane.stream.functions


def _program_of_unary(op: Unary) -> str:
    return (_UNARY if op.is_plain() else _SPREAD).get(op.x.dtype, "")


def _program_of_binary(op: Any) -> str:
    return _BINARY.get(op.x.dtype, "") if op.is_plain() else _BROADCAST.get(op.dtype, "")


def _casts(code: str) -> str:
    """Return the lines that make the kernels from one element type to all others."""
    source = next(dtype for dtype, name in CODES.items() if name == code)
    targets = (each for each in CODES if not source.is_complex or each.is_complex or each is DType.BOOL)
    return "\n".join(f"CAST({code}, {CODES[each]})" for each in targets)


def _broadcasts(code: str) -> tuple[str, ...]:
    clips = f"CLIP({code})" if any(CODES[dtype] == code for dtype in CAPABILITIES["clip"]) else ""
    return "elementwise.cu", "strided.cu", f"{instances('BROADCAST', BinaryOp, 'binary', code)}\n{clips}"


def _spreads(code: str) -> tuple[str, ...]:
    return "elementwise.cu", "strided.cu", instances("SPREAD", UnaryOp, "unary", code)


def _wheres(code: str) -> tuple[str, ...]:
    return "elementwise.cu", "strided.cu", "\n".join(f"WHERE({size}, {name})" for size, name in _BY_SIZE.items())


_SOURCES = (
    Source("unary", lambda code: ("elementwise.cu", instances("UNARY", UnaryOp, "unary", code)), "unary."),
    Source("spread", _spreads, "unary.", on_demand=True),
    Source("binary", lambda code: ("elementwise.cu", instances("BINARY", BinaryOp, "binary", code)), "binary."),
    Source("broadcast", _broadcasts, "binary.", on_demand=True),
    Source("where", _wheres),
    Source("cast", lambda code: ("elementwise.cu", "strided.cu", _casts(code)), "cast", on_demand=True),
)

PART = CudaPart(
    kernels={"unary": _unary, "binary": _binary, "where": _where, "clip": _clip, "cast": _cast, "fused": _fused},
    lacks={"fused": _lacks_fused},
    programs=_SOURCES,
    program={
        "unary": _program_of_unary,
        "binary": _program_of_binary,
        "where": "where",
        "clip": program_for("broadcast"),
        "cast": program_for("cast"),
    },
)
