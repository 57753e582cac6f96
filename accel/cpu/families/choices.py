"""Elements in random order, and random elements; and the samples of these ops."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.words import key_of, philox, wide
from accel.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.cpu.views import Array
    from accel.family import Sample

__all__ = ["pick", "samples"]

_NO_WEIGHT, _TOO_FEW = 1, 2


def pick(drawn: Callable[[Any], Array], op: Any, operands: list[Array], results: list[Array]) -> None:
    """Write the result of an op, and the status of its weights; ``drawn`` makes the numbers of an op of a distribution."""
    source, (length, count), way = op.source(), op.counts(), op.way()
    weights: Any = None
    if not count:
        return
    if getattr(op, "p", None) is not None:
        weights, status = operands[-1].astype(np.float64), results[1]
        is_weight = (weights >= 0) & (weights < np.inf)
        if not is_weight.all():
            status[()] |= _NO_WEIGHT
            weights[~is_weight] = 0
        # By a power of 2, which rounds nothing, so that sums neither overflow nor lose digits.
        weights = np.ldexp(weights, -np.frexp(weights.max(initial=0.0))[1])
        if np.count_nonzero(weights) < (1 if op.replace else count):
            status[()] |= _TOO_FEW
    stream = partial(SimpleNamespace, key=op.key, offset=op.offset)
    if way == "ordered":
        keys = drawn(stream(kind="pairs", size=length) if weights is None else stream(kind="clocks", size=length))
        if weights is not None:
            with np.errstate(divide="ignore"):  # of a weight of 0 the logarithm puts the key behind all others
                keys = np.log(-np.log(keys)) - np.log(weights)
        chosen = np.argsort(keys, kind="stable")[:count]
    elif way == "weighed":
        sums = np.cumsum(weights)
        total = sums[-1]
        places = np.minimum(drawn(stream(kind="fractions", size=count)) * total, np.nextafter(total, 0))
        chosen = np.minimum(np.searchsorted(sums, places, side="right"), length - 1)
    else:
        chosen = drawn(stream(kind="integers", size=count, high=length))
    if isinstance(source, int):
        results[0][...] = chosen.reshape(results[0].shape)
        return
    before, behind = op.lines()
    x, out = operands[0].reshape(before, length, behind), results[0].reshape(before, count, behind)
    np.take(x, chosen, axis=1, out=out, mode="clip")


def _pairs(key: int, offset: int, count: int) -> Array:
    blocks = np.arange(offset // 2, (offset + count) // 2 + 1, dtype=np.uint64)
    return wide(philox(key, blocks)).reshape(-1)[offset % 2 :][:count]


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples."""
    for n, offset in ((1, 0), (2, 5), (1001, 3), (70_000, 1 << 40)):
        seed = int(rng.integers(1 << 63))
        place: dict[str, Any] = {"seed": seed, "offset": offset}
        what = f"n={n} offset={offset} seed={seed}"
        pairs = _pairs(key_of(seed, "permutation"), offset, n)
        order = np.array(sorted(range(n), key=lambda i: int(pairs[i])))
        yield sampling.sample("permutation", what, (), order, arguments=(n,), **place)
        few = (n + 1) // 2
        yield _choice(what, (), order[:few], place, few, arguments=(n,), replace=False)
        pairs = _pairs(key_of(seed, "choice"), offset, n)
        weights = (rng.integers(0, 5, n) / 4).astype((np.float32, np.float64)[n % 2])  # whose sums are exact
        weights[rng.integers(n)] = 1
        fractions = (pairs >> np.uint64(11)).astype(np.float64) * 2.0**-53
        sums = np.cumsum(weights.astype(np.float64))
        found = np.searchsorted(sums, np.minimum(fractions * sums[-1], np.nextafter(sums[-1], 0)), side="right")
        x = rng.standard_normal((n, 3)).astype(np.float32)
        yield _choice(f"weighed {what}", (x, weights), x[found], place, n, names=("p",))
        clocks = -np.log(((pairs >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52) / np.maximum(weights.astype(np.float64), 1e-300)
        few = min(few, int(np.count_nonzero(weights)))
        operands = x[:, 0].astype(np.float64), weights.astype((np.float64, np.float32)[n % 2])
        expected = x[np.argsort(clocks)[:few], :1].astype(float)
        yield _choice(f"weighed once {what}", operands, expected, place, (few, 1), names=("p",), replace=False)
        words = philox(key_of(seed, "integers 4"), np.arange(offset // 4, (offset + 64) // 4 + 1, dtype=np.uint64)).reshape(-1)[
            offset % 4 :
        ][:64]
        y = rng.integers(0, 99, (2, 16, 5)).astype(np.uint8)
        at = (words.astype(np.uint64) * np.uint64(16) >> np.uint64(32)).astype(np.int64).reshape(8, 8)
        yield _choice(f"drawn {what}", (y,), y[:, at], place, (8, 8), axis=1)
        far = (_pairs(key_of(seed, "integers 2"), offset, 64) >> np.uint64(24)).astype(np.int64)
        yield _choice(f"of many {what}", (), far, place, 64, arguments=(1 << 40,))
        pairs = _pairs(key_of(seed, "permutation"), offset, 16)
        for dtype in (DType.UINT8, DType.FLOAT16, DType.INT32, DType.COMPLEX64, DType.COMPLEX128):
            z = y.astype(dtype.numpy)
            moved = np.take(z, np.argsort(pairs), axis=1).astype(z.dtype)
            yield sampling.sample("permutation", f"{dtype.value} {what}", (z,), moved, axis=-2, **place)


def _choice(what: str, operands: tuple[Array, ...], expected: Array, place: dict[str, Any], shape: Any, **options: Any) -> Sample:
    return sampling.sample("choice", what, operands, expected, shape=shape, **place, **options)
