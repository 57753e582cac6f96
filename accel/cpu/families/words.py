"""Streams of random words, as :mod:`accel.ops.rng` defines them: blocks of four 32-bit words, each computed from its index alone."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.cpu.views import Array

__all__ = ["key_of", "philox", "philox_blocks", "wide"]

_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LOW, _HIGH = (0, 1) if np.little_endian else (1, 0)

_CHUNK = 1 << 13
"""Blocks per array: their intermediate values fit the second-level cache."""


def key_of(seed: int, stream: str) -> int:
    """Return the key of a stream, for samples: kernels have it from their ops."""
    return seed ^ int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")


def philox(key: int, blocks: Array, attempt: int = 0, last: int = 0) -> Array:
    """Return the words of Philox4x32-10 for the counters (block, attempt, last), as (len(blocks), 4) uint32. ``blocks`` is uint64."""
    counter = blocks.view(_U32).reshape(-1, 2)
    words = [counter[:, _LOW], counter[:, _HIGH], np.full(len(blocks), attempt, _U32), np.full(len(blocks), last, _U32)]
    keys = [key & _MASK, key >> 32]
    products = [np.empty(len(blocks), _U64), np.empty(len(blocks), _U64)]
    for _ in range(_ROUNDS):
        for product, word, multiplier in zip(products, words[::2], _MULTIPLIERS, strict=True):
            np.multiply(word, multiplier, out=product)
        first, second = (product.view(_U32).reshape(-1, 2) for product in products)
        odd = second[:, _HIGH] ^ words[1], first[:, _HIGH] ^ words[3]
        for word, part in zip(odd, keys, strict=True):
            word ^= np.uint32(part)
        words = [odd[0], second[:, _LOW].copy(), odd[1], first[:, _LOW].copy()]
        keys = [(part + step) & _MASK for part, step in zip(keys, _KEY_STEPS, strict=True)]
    return np.stack(words, axis=1)


def philox_blocks(key: int, first: int, count: int) -> Iterator[Array]:
    """Yield arrays of shape (blocks, 4), together ``count`` blocks of the stream of ``key`` from block ``first`` on."""
    for start in range(first, first + count, _CHUNK):
        yield philox(key, np.arange(start, min(start + _CHUNK, first + count), dtype=_U64))


def wide(words: Array) -> Array:
    """Return pairs of words as one each, the first word the lower half."""
    low, high = words[:, 0::2].astype(_U64), words[:, 1::2].astype(_U64)
    result: Array = low | high << np.uint64(32)
    return result
