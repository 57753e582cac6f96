"""Attention: which kernel takes a call, how its work is cut into blocks, and the launches.

Tiled kernels keep a block's queries and read the keys and values once for all of them. For few queries there are kernels that only stream keys and values.
Where the queries of all heads make too few blocks for the device, the keys are split too: each block leaves its part in the stream's workspace, and a last
kernel puts the parts together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel import DType, InvalidArgumentError, UnsupportedError, arguments
from accel_cuda.core.compute_memory import WORKSPACE
from accel_cuda.families.kernels import CODES
from accel_cuda.families.kernels.attention import ATTENTION_DIMS, ATTENTION_GROUPS, ATTENTION_TILES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from accel.compute import Causal
    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.kernels.attention import AttentionTile

__all__ = ["AttentionPlan", "attend", "attention_plan"]

_CAUSAL: tuple[Causal, ...] = (False, True, "bottom_right")
_LIMIT = 2**31 - 1
_DOUBLE = struct.Struct("d")
_FINISH_THREADS, _FINISH_ELEMENTS = 256, 32
# Up to this number, each query is computed by itself: for more, reading keys and values again for each takes longer than a tile that is mostly empty.
_FEW = {DType.FLOAT16: 1, DType.BFLOAT16: 1, DType.FLOAT32: 4, DType.FLOAT64: 4}
_ROW_THREADS, _ROW_BLOCKS, _ROW_KEYS = 128, 32, 512
_FEWEST_TILES, _MOST_SPLITS = 4, 256
_SIMPLE_ROWS, _SIMPLE_WARPS, _SIMPLE_SHARED = 4, 4, 48 << 10


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One launch, and the one that puts its parts together if ``splits`` is more than 1.

    Attributes
    ----------
    kernel : str
        ``"attention_grouped"``, ``"attention_tiled"``, ``"rowwise_attention"`` or ``"attention_simple"``.
    dim : int
        The head dimension that the kernel was made for; 0 for any.
    grid : tuple of int
    threads, shared : int
        Of each block; ``shared`` in bytes.
    splits, each : int
        Among how many blocks the keys are split, and what each has: tiles of keys with tiled kernels, keys with rowwise ones.
    """

    kernel: str
    dim: int
    grid: tuple[int, int]
    threads: int
    shared: int
    splits: int
    each: int


def attention_plan(
    dtype: DType, groups: int, seq_q: int, seq_kv: int, head_dim: int, *, multiprocessors: int, shared_limit: int, kernels: Collection[str]
) -> AttentionPlan | None:
    """Return how attention of ``groups`` heads is computed, or ``None`` if no kernel takes it.

    Parameters
    ----------
    multiprocessors, shared_limit
        How many the device has; bytes of shared memory that one block can have.
    kernels
        Which of ``"attention_grouped"`` and ``"attention_tiled"`` the device's architecture has.
    """
    dim = next((each for each in ATTENTION_DIMS if head_dim <= each), 0)
    # Parts are as wide as what is computed in, with two more numbers a row.
    part = groups * seq_q * (head_dim + 2) * max(dtype.itemsize, 4)
    most = max(1, min(_MOST_SPLITS, WORKSPACE // part))
    if dim and seq_q <= _FEW[dtype]:
        rows = groups * seq_q
        each, splits = _split(seq_kv, rows, _ROW_BLOCKS * multiprocessors, min(most, -(-seq_kv // _ROW_KEYS)))
        return AttentionPlan("rowwise_attention", dim, (rows, splits), _ROW_THREADS, 0, splits, each)
    for kernel, width, tile in _tiles(dtype, dim):
        if kernel not in kernels or tile.shared > shared_limit:
            continue
        blocks, tiles = groups * -(-seq_q // tile.rows), -(-seq_kv // tile.keys)
        # Parts cost a launch and their way through memory: not for less than twice the blocks.
        room = tile.blocks * multiprocessors // blocks
        each, splits = _split(tiles, 1, room, min(most, tiles // _FEWEST_TILES))
        return AttentionPlan(kernel, width, (blocks, splits), tile.threads, tile.shared, splits, each)
    warp = (2 * _SIMPLE_ROWS * head_dim + _SIMPLE_ROWS * 32) * max(dtype.itemsize, 4)
    if warp > shared_limit:
        return None
    warps = max(1, min(_SIMPLE_WARPS, _SIMPLE_SHARED // warp))
    blocks = -(-groups * -(-seq_q // _SIMPLE_ROWS) // warps)
    return AttentionPlan("attention_simple", 0, (blocks, 1), 32 * warps, warps * warp, 1, 0)


def _tiles(dtype: DType, dim: int) -> Iterator[tuple[str, int, AttentionTile]]:
    """Yield the kernels for heads of ``dim``, the fastest first: their names, what they are made for, and their tiles."""
    wide = max(dim, min(each for _, each in ATTENTION_GROUPS))
    if dim and (dtype, wide) in ATTENTION_GROUPS:
        yield "attention_grouped", wide, ATTENTION_GROUPS[dtype, wide]
    if dim:
        yield "attention_tiled", dim, ATTENTION_TILES[dtype, dim]


def _split(pieces: int, blocks: int, wanted: int, most: int) -> tuple[int, int]:
    """Return how many ``pieces`` each split has, and how many splits that makes: ``wanted`` blocks where ``blocks`` there are of each, ``most`` at most."""
    splits = max(1, min(most, -(-wanted // blocks)))
    each = -(-pieces // splits)
    return each, -(-pieces // each)


def attend(
    stream: CudaStream,
    workspace: int,
    pointers: tuple[int, int, int, int],
    sizes: tuple[int, int, int, int, int],
    scale: float,
    causal: Causal,
    dtype: DType,
) -> None:
    """Check the arguments and enqueue ``O = softmax(scale * Q K^T) V``.

    Parameters
    ----------
    workspace
        Device memory of :data:`~accel_cuda.core.compute_memory.WORKSPACE` bytes, used in the stream's order.
    pointers
        q, k, v, o.
    sizes
        batch, heads, seq_q, seq_kv, head_dim.

    Raises
    ------
    InvalidArgumentError
        A negative size, a pointer that is none, or an unknown ``causal``.
    UnsupportedError
        If a row does not fit the device's shared memory, or there are more blocks than a launch can have.
    """
    op = "attention"
    (q, k, v, o), (batch, heads, seq_q, seq_kv, head_dim) = pointers, sizes
    arguments.not_negative(op, batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim)
    if causal not in _CAUSAL:
        raise InvalidArgumentError(f"causal is {causal!r}", op=op, remedy="Use False, True or 'bottom_right'.")
    groups = batch * heads
    if not (groups and seq_q and head_dim):
        return
    arguments.pointers(op, o=o)
    if not seq_kv:
        stream.fill(o, bytes(1), groups * seq_q * head_dim * dtype.itemsize)
        return
    arguments.pointers(op, q=q, k=k, v=v)
    # How many keys query 0 sees, before those that do not exist are taken off; each further query sees one more.
    first = seq_kv if causal is False else 1 if causal is True else 1 + seq_kv - seq_q
    stream.ready()
    _launch(stream, workspace, pointers, groups, seq_q, seq_kv, head_dim, first, scale, dtype)


def _families(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return which tiled kernels the sources have for a compute capability."""
    return ("attention_tiled", "attention_grouped")[: (capability >= (8, 0)) + (capability == (9, 0))]


def _launch(
    stream: CudaStream, workspace: int, pointers: tuple[int, int, int, int], groups: int, seq_q: int, seq_kv: int, head_dim: int, first: int,
    scale: float, dtype: DType,
) -> None:  # fmt: skip
    context = stream.context
    device, functions, code = context.description.spec, stream.functions, CODES[dtype]
    plan = attention_plan(
        dtype, groups, seq_q, seq_kv, head_dim, multiprocessors=context.multiprocessors, shared_limit=context.shared_limit,
        kernels=_families(context.capability),
    )  # fmt: skip
    if plan is None:
        raise UnsupportedError(f"attention with head_dim {head_dim} does not fit shared memory", op="attention", device=device)
    rows = groups * seq_q
    if plan.grid[0] > _LIMIT or rows * head_dim > _LIMIT * _FINISH_ELEMENTS:
        raise UnsupportedError(f"attention of {rows} queries takes more blocks than one launch can have", op="attention", device=device)
    name = f"{plan.kernel}_{code}_{plan.dim}" if plan.dim else f"{plan.kernel}_{code}"
    count = rows if plan.kernel == "rowwise_attention" else groups
    bits = int.from_bytes(_DOUBLE.pack(scale), "little")
    numbers = (workspace, count, seq_q, seq_kv, head_dim, first, bits, plan.splits, plan.each)
    stream.launch_wide(functions[name], plan.grid, (plan.threads, 1), plan.shared, *pointers, *numbers)
    if plan.splits > 1:
        blocks = -(-rows * head_dim // _FINISH_ELEMENTS)
        numbers = (workspace, pointers[3], rows, seq_q, seq_kv, head_dim, first, plan.splits, 0)
        stream.launch_wide(functions[f"finish_attention_{code}"], (blocks, 1), (_FINISH_THREADS, 1), 0, *numbers)
