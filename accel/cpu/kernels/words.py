"""Streams of random words, as :mod:`accel.ops.rng` defines them: blocks of four 32-bit words, each to be had without those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from accel.cpu.views import Array

__all__ = ["GENERATORS", "Stream", "philox", "philox_blocks", "xorwow_blocks"]

Stream: TypeAlias = Callable[[int, int, int], Iterator[Array]]
"""``stream(seed, first, count)`` yields arrays of shape (some blocks, 4), together ``count`` of them from block ``first`` on."""

_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LOW, _HIGH = (0, 1) if np.little_endian else (1, 0)

_CHUNK = 1 << 13
"""Blocks that are computed at once: what they need stays in the second-level cache."""

_LANES, _STEPS = 1 << 12, 1 << 6
_SEGMENT = _LANES * _STEPS
_WEYL = np.uint32(362437)


def philox(seed: int, blocks: Array, attempt: int = 0, purpose: int = 0) -> Array:
    """Return the words of Philox4x32-10 for each of ``blocks`` (uint64), as (len(blocks), 4) uint32."""
    counter = blocks.view(_U32).reshape(-1, 2)
    words = [counter[:, _LOW], counter[:, _HIGH], np.full(len(blocks), attempt, _U32), np.full(len(blocks), purpose, _U32)]
    keys = [seed & _MASK, seed >> 32]
    products = [np.empty(len(blocks), _U64), np.empty(len(blocks), _U64)]
    for _ in range(_ROUNDS):
        for product, word, multiplier in zip(products, words[::2], _MULTIPLIERS, strict=True):
            np.multiply(word, multiplier, out=product)
        first, second = (product.view(_U32).reshape(-1, 2) for product in products)
        odd = second[:, _HIGH] ^ words[1], first[:, _HIGH] ^ words[3]
        for word, key in zip(odd, keys, strict=True):
            word ^= np.uint32(key)
        words = [odd[0], second[:, _LOW].copy(), odd[1], first[:, _LOW].copy()]
        keys = [(key + step) & _MASK for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return np.stack(words, axis=1)


def philox_blocks(seed: int, first: int, count: int) -> Iterator[Array]:
    """See :data:`Stream`."""
    for start in range(first, first + count, _CHUNK):
        yield philox(seed, np.arange(start, min(start + _CHUNK, first + count), dtype=_U64))


def xorwow_blocks(seed: int, first: int, count: int) -> Iterator[Array]:
    """See :data:`Stream`."""
    end = first + count
    for segment in range(first // _SEGMENT, -(-end // _SEGMENT)):
        base = segment * _SEGMENT
        yield from _segment(seed, segment, max(first - base, 0), min(end - base, _SEGMENT))


def _segment(seed: int, segment: int, first: int, end: int) -> Iterator[Array]:
    """Yield the blocks of one segment from ``first`` up to ``end``."""
    lanes = np.arange(segment * _LANES, (segment + 1) * _LANES, dtype=_U64)
    seeds = [philox(seed, lanes, plane, 1) for plane in (0, 1)]
    state = [*seeds[0].T.copy(), seeds[1][:, 0].copy()]
    weyl = seeds[1][:, 1].copy()
    # A state of zeros would stay one.
    state[0][~np.any(state, axis=0)] = 1
    for step in range(-(-end // _LANES)):
        block = np.empty((_LANES, 4), _U32)
        for word in range(4):
            t, v = state[0] ^ (state[0] >> 2), state[4]
            state = [*state[1:], (v ^ (v << 4)) ^ (t ^ (t << 1))]
            weyl += _WEYL
            np.add(state[4], weyl, out=block[:, word])
        start = step * _LANES
        if start + _LANES > first:
            yield block[max(first - start, 0) : end - start]


GENERATORS: dict[str, Stream] = {"philox": philox_blocks, "xorwow": xorwow_blocks}
"""Name -> stream."""
