"""How the tiled attention kernels are cut: one choice for each element type and bucket of head dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from accel import DType

__all__ = ["ATTENTION_DIMS", "ATTENTION_GROUPS", "ATTENTION_TILES", "AttentionTile"]

ATTENTION_DIMS = (32, 64, 128, 256)
"""Head dimensions that there are kernels for; others are filled up with zeros to the next of these."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """What a block of a tiled kernel does.

    Attributes
    ----------
    tall, keys, lines, blocks : int
        The kernel's parameters: how many queries (16 of them with tensor cores) one thread's or warp's share is tall, keys at a time, warps with tensor
        cores, groups of 4 warps where these run beside them, half warps without, and blocks that are to fit a multiprocessor.
    rows, threads, shared : int
        Queries and threads of a block, and its bytes of dynamic shared memory.
    """

    tall: int
    keys: int
    lines: int
    blocks: int
    rows: int
    threads: int
    shared: int


def _mma(dim: int, tall: int, keys: int, lines: int, blocks: int) -> AttentionTile:
    rows = 16 * tall * lines
    return AttentionTile(tall, keys, lines, blocks, rows, 32 * lines, 2 * dim * (rows + 2 * keys))


def _fma(dim: int, itemsize: int, tall: int, keys: int, lines: int, blocks: int) -> AttentionTile:
    rows = tall * lines
    # Rows of queries and keys end in a gap of 16 bytes, rows of weights in one of 64.
    elements = (rows + keys) * (dim + 16 // itemsize) + keys * dim + rows * (keys + 64 // itemsize)
    return AttentionTile(tall, keys, lines, blocks, rows, 16 * lines, itemsize * elements)


def _grouped(dim: int, keys: int, lines: int, blocks: int) -> AttentionTile:
    rows = 64 * lines
    return AttentionTile(1, keys, lines, blocks, rows, 128 * lines, 2 * dim * (rows + 4 * keys))


ATTENTION_GROUPS: dict[tuple[DType, int], AttentionTile] = {
    (dtype, dim): _grouped(dim, *numbers)
    for dtype in (DType.FLOAT16, DType.BFLOAT16)
    for dim, numbers in {64: (64, 1, 4), 128: (64, 1, 2)}.items()
}
"""(element type, head dimension) -> tile of the kernels whose products run beside the warps, on the architecture that has such."""

ATTENTION_TILES: dict[tuple[DType, int], AttentionTile] = {
    **{
        (dtype, dim): _mma(dim, *numbers)
        for dtype in (DType.FLOAT16, DType.BFLOAT16)
        for dim, numbers in {32: (2, 64, 4, 2), 64: (2, 64, 4, 2), 128: (2, 32, 4, 2), 256: (1, 32, 8, 1)}.items()
    },
    **{
        (DType.FLOAT32, dim): _fma(dim, 4, *numbers)
        for dim, numbers in {32: (8, 64, 8, 3), 64: (8, 64, 8, 3), 128: (8, 32, 8, 2), 256: (4, 32, 16, 1)}.items()
    },
    **{
        (DType.FLOAT64, dim): _fma(dim, 8, *numbers)
        for dim, numbers in {32: (4, 32, 16, 2), 64: (4, 32, 16, 2), 128: (4, 32, 16, 1), 256: (2, 32, 16, 1)}.items()
    },
}
"""(element type, head dimension of :data:`ATTENTION_DIMS`) -> tile."""
