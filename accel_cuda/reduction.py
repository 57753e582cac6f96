"""How a reduction is cut into launches: which kernel, what grid, how many chunks of the axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Launch", "launches"]

_BLOCK = 256
_BLOCKS_PER_MULTIPROCESSOR = 4
_GROUP_LIMIT = 1024
_CHUNK_ROUNDING = 64


@dataclass(frozen=True, slots=True)
class Launch:
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

    kind: Literal["group", "rows", "each", "each_packed", "column", "column_packed", "finish"]
    grid: tuple[int, int]
    block: tuple[int, int]
    sizes: tuple[int, ...]
    is_partial: bool = False


def launches(outer: int, length: int, inner: int, itemsize: int, multiprocessors: int, *, is_aligned: bool) -> list[Launch]:
    """Return the launches for an ``[outer, length, inner]`` array of elements of ``itemsize`` bytes, none of the sizes 0.

    ``is_aligned`` says that the array starts at a multiple of 16 bytes.
    """
    wanted = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
    lanes = max(1, 16 // itemsize)
    if inner == 1 and (length <= _GROUP_LIMIT or outer >= 64 * wanted):
        return [_group(outer, length, lanes)]
    if inner == 1:
        # A chunk keeps every thread busy for a few loads of 16 bytes.
        chunk, chunks = _cut(length, outer, wanted, 4 * _BLOCK * lanes)
        first = Launch("rows", (outer, chunks), (_BLOCK, 1), (length, chunk), chunks > 1)
    else:
        pack = lanes if is_aligned and inner % lanes == 0 else 1
        if outer * inner >= wanted * _BLOCK * pack and (inner >= 32 or length <= 32):
            blocks = -(-outer * inner // (_BLOCK * pack))
            return [Launch("each" if pack == 1 else "each_packed", (blocks, 1), (_BLOCK, 1), (outer, length, inner))]
        width, height = _tile(length, inner // pack)
        tiles = -(-inner // (width * pack))
        chunk, chunks = _cut(length, outer * tiles, wanted, 16 * height)
        kind: Literal["column", "column_packed"] = "column" if pack == 1 else "column_packed"
        first = Launch(kind, (outer * tiles, chunks), (width, height), (outer, length, inner, tiles, chunk), chunks > 1)
    if chunks == 1:
        return [first]
    return [first, _finish(chunks, outer * inner)]


def _group(rows: int, length: int, lanes: int) -> Launch:
    per_thread = lanes if length % lanes == 0 else 4
    width = min(32, _power(-(-length // per_thread)))
    return Launch("group", (-(-rows * width // _BLOCK), 1), (_BLOCK, 1), (rows, length, width))


def _finish(chunks: int, results: int) -> Launch:
    width, height = _tile(chunks, results)
    tiles = -(-results // width)
    return Launch("finish", (tiles, 1), (width, height), (1, chunks, results, tiles, chunks))


def _tile(length: int, inner: int) -> tuple[int, int]:
    """Return the width and height of a block: as wide as the columns need, and never higher than the axis."""
    width = min(_BLOCK, max(_power(inner) if inner < _BLOCK else 32, _BLOCK // _power(length)))
    return width, _BLOCK // width


def _cut(length: int, blocks: int, wanted: int, least: int) -> tuple[int, int]:
    """Return the size and number of chunks with which ``blocks`` blocks become about ``wanted``."""
    chunks = min(-(-wanted // blocks), max(1, length // least))
    if chunks == 1:
        return length, 1
    chunk = -(-length // (chunks * _CHUNK_ROUNDING)) * _CHUNK_ROUNDING
    return chunk, -(-length // chunk)


def _power(value: int) -> int:
    """Return the least power of two that is not below ``value``."""
    return 1 << max(value - 1, 0).bit_length()
