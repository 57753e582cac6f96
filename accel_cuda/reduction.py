"""How a reduction is cut into launches: which kernel, what grid, how many chunks of the axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

__all__ = ["Launch", "launches"]

_BLOCK = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
_CHUNK_ROUNDING = 64
_BANKS = 32
# Bytes that a block brings into shared memory at once, and of the longest row, or slice, of which it brings several.
_TILE, _SHORT = 24576, 8192
# Bytes of the widest rows that strips are cut of: a thread takes 4 bytes of one.
_NARROW = 4 * _BLOCK
_PARTIALS = 32 << 20
_WIDEST = 16


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

    kind: Literal["group", "brief", "rows", "slices", "strips", "each", "each_odd", "column", "column_odd", "finish"]
    grid: tuple[int, int]
    block: tuple[int, int]
    sizes: tuple[int, ...]
    is_partial: bool = False


@lru_cache(maxsize=1024)
def launches(outer: int, length: int, inner: int, itemsize: int, multiprocessors: int, *, is_aligned: bool) -> tuple[Launch, ...]:
    """Return the launches for an ``[outer, length, inner]`` array of elements of ``itemsize`` bytes, none of the sizes 0.

    ``is_aligned`` says that the array and the result start at multiples of 16 bytes.
    """
    wanted = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
    if inner == 1:
        first = _of_rows(outer, length, itemsize, wanted, is_aligned=is_aligned)
    elif length * inner * itemsize <= _SHORT and inner * itemsize <= _NARROW:
        first = _slices(outer, length, inner, itemsize)
    elif inner * itemsize <= _NARROW:
        first = _strips(outer, length, inner, itemsize, wanted)
    else:
        first = _of_columns(outer, length, inner, itemsize, wanted, is_aligned=is_aligned)
    return (first, _finish(first.grid[1], outer * inner)) if first.is_partial else (first,)


def _of_rows(rows: int, length: int, itemsize: int, wanted: int, *, is_aligned: bool) -> Launch:
    lanes, nbytes = max(1, 16 // itemsize), length * itemsize
    if is_aligned and length % lanes == 0 and (nbytes <= _SHORT or rows >= 32 * wanted):
        width = min(32, _power(-(-length // (4 * lanes))))
        return Launch("group", (-(-rows * width // _BLOCK), 1), (_BLOCK, 1), (rows, length, _shift(width)))
    if nbytes <= _SHORT:
        per_block = min(rows, _TILE // nbytes)
        width = _lanes(per_block, nbytes, itemsize)
        return Launch("brief", (-(-rows // per_block), 1), (_BLOCK, 1), (rows, length, per_block, _shift(width)))
    # A chunk keeps every thread busy for a few loads of 16 bytes.
    chunk, chunks = _cut(length, rows, 2 * wanted, 8 * _BLOCK * lanes)
    return Launch("rows", (rows, chunks), (_BLOCK, 1), (length, chunk), chunks > 1)


def _slices(outer: int, length: int, inner: int, itemsize: int) -> Launch:
    per_block = min(outer, _TILE // (length * inner * itemsize))
    groups = per_block * -(-inner // max(1, 4 // itemsize))
    width = min(32, _power(length), _power(max(1, _BLOCK // groups) + 1) // 2)
    return Launch("slices", (-(-outer // per_block), 1), (_BLOCK, 1), (outer, length, inner, per_block, _shift(width)))


def _strips(outer: int, length: int, inner: int, itemsize: int, wanted: int) -> Launch:
    per_tile = _TILE // 2 // (inner * itemsize)
    limit = max(1, _PARTIALS // (outer * inner * _WIDEST))
    chunks = max(1, min(2 * wanted // outer, length // (2 * per_tile), limit))
    chunk = -(-length // chunks)
    chunks = -(-length // chunk)
    return Launch("strips", (outer, chunks), (_BLOCK, 1), (outer, length, inner, chunk), chunks > 1)


def _of_columns(outer: int, length: int, inner: int, itemsize: int, wanted: int, *, is_aligned: bool) -> Launch:
    lanes = max(1, 16 // itemsize)
    is_odd = not (is_aligned and inner % lanes == 0)
    # Results that are not aligned are cut where they would be: one more pack in a row.
    groups = (inner + lanes - 1) // lanes + is_odd
    if outer * groups >= 2 * wanted * _BLOCK or length < 8:
        blocks = -(-outer * groups // _BLOCK)
        return Launch("each_odd" if is_odd else "each", (blocks, 1), (_BLOCK, 1), (outer, length, inner, groups))
    width, height = 32, _BLOCK // 32
    tiles = -(-inner // (width * lanes))
    limit = max(1, _PARTIALS // (outer * inner * _WIDEST))
    chunks = max(1, min(2 * wanted // (outer * tiles), length // (8 * height), limit))
    chunk = -(-length // chunks)
    chunks = -(-length // chunk)
    kind: Literal["column", "column_odd"] = "column_odd" if is_odd else "column"
    return Launch(kind, (outer * tiles, chunks), (width, height), (outer, length, inner, tiles, chunk), chunks > 1)


def _finish(chunks: int, results: int) -> Launch:
    # High blocks: what matters is how many partial results one thread takes, one after the other.
    height = min(_BLOCK if results < 8 else 64, _power(chunks))
    width = _BLOCK // height
    tiles = -(-results // width)
    return Launch("finish", (tiles, 1), (width, height), (1, chunks, results, tiles, chunks))


def _lanes(rows: int, nbytes: int, itemsize: int) -> int:
    """Return how many threads take one of a block's rows from shared memory: the least work, with all of them busy."""
    words, reads = max(1, nbytes // max(4, itemsize)), 2 if itemsize < 4 else 1

    def work(width: int) -> int:
        banks = [0] * _BANKS
        for place in range(_BANKS):
            row, lane = divmod(place, width)
            banks[(row * nbytes // 4 + lane * max(1, itemsize // 4)) % _BANKS] += 1
        return width * (-(-words // width) * (5 + 2 * reads * max(banks)) + 12 + 5 * _shift(width))

    # The greatest power of two with which no thread is left over is the least that keeps all of them busy.
    return min((1 << shift for shift in range(6) if 2 * rows << shift > _BLOCK or shift == 5), key=work)


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
