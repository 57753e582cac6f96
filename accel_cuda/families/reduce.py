"""The ``reduce`` family on a GPU: how a reduction is cut into launches, which are kernels of the backend's own."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from accel import ReduceOp, UnsupportedError
from accel.enums import result_dtype
from accel.ops.fields import member
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.core.stream import WORKSPACE, lacks_workspace
from accel_cuda.families.kernels import CODES, instances

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel import DType
    from accel.ops import Reduce
    from accel_cuda.core.stream import CudaStream

__all__ = ["BASIC", "PART", "ReductionLaunch", "enqueue_fold", "launches"]

_BLOCK = 256
_WARP = 32
_BLOCKS_PER_MULTIPROCESSOR = 4
_CHUNK_ROUNDING = 64
_BANKS = 32
_GRANULE = 16
# Bytes that a block brings into shared memory at once, and of the longest row, or slice, of which it brings several.
_TILE, _SHORT = 24576, 8192
# Bytes of one span, how many a block brings at once, and how many make a block worth its beginning.
_SPAN, _SLOTS, _ENOUGH = 2048, 11, 33
# Results that a block makes of slices at a time: four a thread.
_AT_ONCE = 4 * _BLOCK
_PARTIALS = 32 << 20
_WIDEST = 16


@dataclass(frozen=True, slots=True)
class ReductionLaunch:
    """One launch.

    Parameters
    ----------
    kind
        Which kernel.
    grid, block
        Blocks, and threads of each.
    sizes
        The kernel's integer arguments between the pointers and the divisor.
    is_partial
        Whether it leaves partial results, which a launch of ``"finish"`` takes up.
    """

    kind: Literal["brief", "group", "rows", "slices", "spans", "finish"]
    grid: tuple[int, int]
    block: tuple[int, int]
    sizes: tuple[int, ...]
    is_partial: bool = False


@lru_cache(maxsize=1024)
def launches(outer: int, length: int, inner: int, itemsize: int, multiprocessors: int) -> tuple[ReductionLaunch, ...]:
    """Return the launches for an ``[outer, length, inner]`` array of elements of ``itemsize`` bytes, none of the sizes 0."""
    wanted = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
    if inner == 1:
        first = _of_rows(outer, length, itemsize, wanted)
    elif length * inner * itemsize <= _SHORT:
        first = _slices(outer, length, inner, itemsize)
    else:
        first = _spans(outer, length, inner, itemsize, wanted)
    return (first, _finish(first.grid[1], outer * inner)) if first.is_partial else (first,)


def _of_rows(rows: int, length: int, itemsize: int, wanted: int) -> ReductionLaunch:
    nbytes = length * itemsize
    if nbytes > _SHORT:
        # A chunk keeps every thread busy for a few granules.
        chunk, chunks = _cut(length, rows, 4 * wanted, 8 * _BLOCK * max(1, _GRANULE // itemsize))
        return ReductionLaunch("rows", (rows, chunks), (_BLOCK, 1), (length, chunk), chunks > 1)
    per_block = min(rows, _TILE // nbytes)
    # Single elements are cheaper than granules that belong to two rows; of rows that begin in the same banks they are not.
    if nbytes >= (48 if itemsize == 1 else 64) or nbytes % 32 == 0:
        width = min(_WARP, _power(-(-nbytes // ((4 if nbytes < 256 else 8) * _GRANULE))))
        return ReductionLaunch("group", (-(-rows // per_block), 1), (_BLOCK, 1), (rows, length, per_block, _shift(width)))
    return ReductionLaunch("brief", (-(-rows // per_block), 1), (_BLOCK, 1), (rows, length, per_block))


def _slices(outer: int, length: int, inner: int, itemsize: int) -> ReductionLaunch:
    per_block = min(outer, _TILE // (length * inner * itemsize))
    width = _lanes(per_block, length, inner, itemsize)
    return ReductionLaunch("slices", (-(-outer // per_block), 1), (_BLOCK, 1), (outer, length, inner, per_block, _shift(width)))


def _spans(outer: int, length: int, inner: int, itemsize: int, wanted: int) -> ReductionLaunch:
    room = _SPAN // itemsize
    fold = max(1, min(length, room // inner))
    spans = -(-length // fold)
    columns = fold * inner
    if fold == 1:
        # Tiles of the same width, that begin where lines of the cache do if rows do.
        line = 128 // itemsize
        columns = min(room, -(-inner // (-(-inner // room) * line)) * line)
    tiles = -(-inner // columns)
    pieces = outer * tiles
    limit = max(1, _PARTIALS // (outer * inner * _WIDEST))
    chunks = max(1, min(_shares(pieces, wanted), spans // (3 * _SLOTS), limit))
    chunk = -(-spans // chunks)
    chunks = -(-spans // chunk)
    each = max(1, min(_ENOUGH // spans, pieces // (4 * wanted))) if fold == 1 else 1
    sizes = outer, length, inner, fold, tiles, columns, each, chunk
    return ReductionLaunch("spans", (-(-pieces // each), chunks), (_BLOCK, 1), sizes, chunks > 1)


def _shares(pieces: int, wanted: int) -> int:
    """Return into how many chunks pieces are cut: such that all of the device is busy to the end, with few blocks."""

    def cost(chunks: int) -> float:
        waves = -(-pieces * chunks // wanted)
        return waves * wanted / (pieces * chunks) + 0.02 * waves

    return min(range(1, max(2, 4 * wanted // pieces + 1)), key=cost)


def _finish(chunks: int, results: int) -> ReductionLaunch:
    # High blocks: what matters is how many partial results one thread takes, one after the other.
    height = min(_BLOCK if results <= 512 else 64, _power(-(-chunks // 8)))
    width = _BLOCK // height
    return ReductionLaunch("finish", (-(-results // width), 1), (width, height), (chunks, results))


def _lanes(slices: int, length: int, inner: int, itemsize: int) -> int:
    """Return how many threads share the elements of one of a block's results: the least work, with as few waiting for the same banks as can be."""

    def work(width: int) -> int:
        banks: list[set[int]] = [set() for _ in range(_BANKS)]
        for place in range(_WARP):
            result, lane = divmod(place, width)
            word = (result // inner * length * inner + lane * inner + result % inner) * itemsize // 4
            banks[word % _BANKS].add(word)
        passes = -(-slices * inner * width // _AT_ONCE)
        return passes * (-(-length // width) * (12 + 16 * max(map(len, banks))) + 50 + 16 * _shift(width))

    return min((1 << shift for shift in range(6)), key=work)


def _cut(length: int, blocks: int, wanted: int, least: int) -> tuple[int, int]:
    """Return the size and number of chunks with which ``blocks`` blocks become about ``wanted``."""
    chunks = max(1, min(wanted // blocks, length // least))
    if chunks == 1:
        return length, 1
    chunk = -(-length // (chunks * _CHUNK_ROUNDING)) * _CHUNK_ROUNDING
    return chunk, -(-length // chunk)


def _power(value: int) -> int:
    """Return the least power of two that is not below ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def _shift(width: int) -> int:
    """Return the logarithm of a power of two."""
    return width.bit_length() - 1


# What fold.cu has, as there.
_DIMS, _LARGEST_STATE = 8, 24
_LEAST_EACH, _FOLDS_PER_MULTIPROCESSOR = 8, 8
_MOST_CHUNKS, _LIMIT = 65535, 2**31 - 1
BASIC = frozenset({ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.MIN})
"""The reductions whose kernels :func:`launches` tells of; all others, and axes that are no neighbours, are folded."""
_NOTHING = {ReduceOp.PROD: 1, ReduceOp.ALL: 1, ReduceOp.LOGSUMEXP: -math.inf}
_NOTHING |= dict.fromkeys((ReduceOp.MEAN, ReduceOp.VAR, ReduceOp.STD), math.nan)

Runs = tuple[tuple[int, bool, int], ...]
"""Lengths of axes, whether they are reduced, and strides in elements."""


class _Fold(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "y", "states")),
        *((name, ctypes.c_int64) for name in ("results", "length", "chunk", "ddof", "width", "are_neighbours", "packs")),
        ("kept_dims", ctypes.c_int64),
        ("kept_lengths", ctypes.c_int64 * _DIMS),
        ("kept_strides", ctypes.c_int64 * _DIMS),
        ("folded_dims", ctypes.c_int64),
        ("folded_lengths", ctypes.c_int64 * _DIMS),
        ("folded_strides", ctypes.c_int64 * _DIMS),
    )


@lru_cache(maxsize=1024)
def _fold_of(runs: Runs, ddof: int, itemsize: int, multiprocessors: int) -> tuple[bytes, int, int]:
    """Return the sizes of a reduction, none 0, of an array whose address is aligned; and the blocks along its results and chunks."""
    kept: list[tuple[int, int]] = []
    folded: list[tuple[int, int]] = []
    for length, is_reduced, stride in reversed(runs):
        if length > 1:
            (folded if is_reduced else kept).append((length, stride))
    if max(len(kept), len(folded)) > _DIMS:
        raise UnsupportedError(
            f"axes of lengths {[length for length, _, _ in runs]} are reduced here and there", remedy="Reduce fewer at a time."
        )
    are_neighbours = not folded or not kept or abs(folded[0][1]) < abs(kept[0][1])
    kept, folded = kept or [(1, 0)], folded or [(1, 0)]
    results, length = (math.prod(each for each, _ in axes) for axes in (kept, folded))
    if are_neighbours:
        width = min(_BLOCK, max(_power(-(-length // _LEAST_EACH)), min(_WARP, _power(length))))
    else:
        width = min(_BLOCK // min(_WARP, _power(results)), _power(length))
    blocks = -(-results * width // _BLOCK)
    limit = min(_MOST_CHUNKS, length // (width * _LEAST_EACH), WORKSPACE // (results * _LARGEST_STATE))
    pack = max(1, _GRANULE // itemsize)
    chunk = -(-length // max(1, min(_FOLDS_PER_MULTIPROCESSOR * multiprocessors // blocks, limit)))
    chunk = -(-chunk // pack) * pack
    packs = are_neighbours and len(folded) == 1 and folded[0][1] == 1 and not any(stride % pack for _, stride in kept)
    fold = _Fold(results=results, length=length, chunk=chunk, ddof=ddof, width=width, are_neighbours=are_neighbours, packs=packs)
    fold.kept_dims, fold.folded_dims = len(kept), len(folded)
    for axes, lengths, strides in ((kept, fold.kept_lengths, fold.kept_strides), (folded, fold.folded_lengths, fold.folded_strides)):
        for place, (each, step) in enumerate(reversed(axes)):
            lengths[place], strides[place] = each, step
    return bytes(fold), blocks, -(-length // chunk)


def enqueue_fold(
    stream: CudaStream, workspace: int, op: ReduceOp, input: int, output: int, runs: Runs, dtype: DType, *, ddof: int = 0
) -> None:
    """Enqueue a reduction of an array with axes of these lengths, some of which are reduced."""
    results = math.prod(length for length, is_reduced, _ in runs if not is_reduced)
    if not results:
        return
    made = result_dtype(op, dtype)
    if 0 in (length for length, _, _ in runs):
        stream.fill(output, made.numpy.type(_NOTHING.get(op, 0)).tobytes(), results)
        return
    context = stream.ready()
    sizes, blocks, chunks = _fold_of(runs, ddof, dtype.itemsize, context.multiprocessors)
    if blocks > _LIMIT:
        raise UnsupportedError(
            f"{results} results are too many for one reduction", op=f"reduce.{op.value}", device=context.description.spec
        )
    fold = _Fold.from_buffer_copy(sizes)
    fold.x, fold.y, fold.states = input, output, workspace
    fold.packs = fold.packs and input % _GRANULE == 0
    name = f"fold_{op.value}_{CODES[dtype]}"
    stream.launch_with(stream.functions[name], (blocks, chunks), (_BLOCK, 1), fold)
    if chunks > 1:
        stream.launch_with(stream.functions[f"{name}_end"], (results, 1), (_BLOCK, 1), fold)


def _reduce(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    stream, function, dtype, middle = lane.stream, op.op, op.x.dtype, op.middle()
    workspace = stream.prepare_workspace()  # also where it is not used: once it is there, this never blocks
    if middle is None or function not in BASIC:
        runs = op.runs() if middle is None else _runs_of(*middle)
        enqueue_fold(stream, workspace, function, inputs[0], outputs[0], runs, dtype, ddof=op.ddof)
        return
    outer, length, inner = middle
    if not (outer and inner):
        return
    is_mean = function is ReduceOp.MEAN
    context = stream.ready()
    if not length:
        stream.fill(outputs[0], dtype.numpy.type(math.nan if is_mean else 0).tobytes(), outer * inner)
        return
    for each in launches(outer, length, inner, dtype.itemsize, context.multiprocessors):
        if each.grid[0] > _LIMIT:
            raise UnsupportedError(f"an array of shape {op.x.shape} has too many rows", op=op.kind, device=context.description.spec)
        source, target = workspace if each.kind == "finish" else inputs[0], workspace if each.is_partial else outputs[0]
        kernel = stream.functions[f"reduce_{each.kind}_{_PROGRAMS[function, dtype]}"]
        stream.launch_wide(kernel, each.grid, each.block, 0, source, target, *each.sizes, length if is_mean else 0)


def _runs_of(outer: int, length: int, inner: int) -> tuple[tuple[int, bool, int], ...]:
    """Return the axes of ``[outer, length, inner]`` as lengths, whether they are reduced, and how far neighbours are apart."""
    return (outer, False, length * inner), (length, True, inner), (inner, False, 1)


# A mean is a sum with a divisor.
_PROGRAMS = {(op, dtype): f"{'sum' if op is ReduceOp.MEAN else op.value}_{code}" for op in BASIC for dtype, code in CODES.items()}


def _program(op: Reduce) -> str:
    name = _PROGRAMS.get((member(ReduceOp, op.op), op.x.dtype))
    return name if name is not None and op.middle() is not None else f"fold_{CODES.get(op.x.dtype, '')}"


def _source(op: ReduceOp) -> Source:
    files = "tiles.cuh", "reduce.cu", "reduce_spans.cu"
    return Source(op.value, lambda code: (*files, instances("REDUCE", (op,), "reduce", code)), f"reduce.{op.value}")


_FOLDS = Source("fold", lambda code: ("fold.cu", instances("FOLD", ReduceOp, "reduce", code)), "reduce.", on_demand=True)

PART = CudaPart(
    kernels={"reduce": _reduce},
    programs=(_source(ReduceOp.SUM), _source(ReduceOp.MAX), _source(ReduceOp.MIN), _FOLDS),
    program={"reduce": _program},
    lacks={"reduce": lacks_workspace},
    commands={"reduce": 2},
    workspaces=1,
)
