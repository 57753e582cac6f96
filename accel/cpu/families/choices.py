"""Elements in random order, and random elements; and the samples of these ops."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families.words import key_of, philox, wide
from accel.cpu.views import Array, array
from accel.dtype import DType
from accel.family import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["pick", "samples"]

_NO_WEIGHT, _TOO_FEW = 1, 2


def pick(op: Any, drawn: Callable[[Any], Array], inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Write the result of an op, and the status of its weights; ``drawn`` makes the numbers of an op of a distribution."""
    source, (length, count), way = op.source(), op.counts(), op.way()
    weights: Any = None
    if not count:
        return
    if getattr(op, "p", None) is not None:
        weights, status = array(inputs[-1], (length,), op.p.dtype.numpy).astype(np.float64), array(outputs[1], (), np.dtype(np.int32))
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
        array(outputs[0], (count,), np.dtype(np.int64))[...] = chosen
        return
    before, behind = op.lines()
    x = array(inputs[0], (before, length, behind), source.dtype.numpy)
    np.take(x, chosen, axis=1, out=array(outputs[0], (before, count, behind), source.dtype.numpy), mode="clip")


def _called(kind: str, options: dict[str, Any], rng: Any, *refs: Any) -> Any:
    first, *p = refs or (options["n"],)
    more = {name: value for name, value in options.items() if name != "n"}
    return getattr(rng, kind)(first, **more, **({"p": p[0]} if p else {}))


def _pairs(key: int, offset: int, count: int) -> Array:
    blocks = np.arange(offset // 2, (offset + count) // 2 + 1, dtype=np.uint64)
    return wide(philox(key, blocks)).reshape(-1)[offset % 2 :][:count]


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples."""
    for n, offset in ((1, 0), (2, 5), (1001, 3), (70_000, 1 << 40)):
        seed = int(rng.integers(1 << 63))
        options: dict[str, Any] = {"n": n, "seed": seed, "offset": offset}
        what = f"n={n} offset={offset} seed={seed}"
        pairs = _pairs(key_of(seed, "permutation"), offset, n)
        order = np.array(sorted(range(n), key=lambda i: int(pairs[i])))
        yield Sample(f"permutation {what}", partial(_called, "permutation", options), (), order)
        few = (n + 1) // 2
        yield Sample(f"choice {what}", partial(_called, "choice", {**options, "shape": few, "replace": False}), (), order[:few])
        pairs = _pairs(key_of(seed, "choice"), offset, n)
        weights = (rng.integers(0, 5, n) / 4).astype((np.float32, np.float64)[n % 2])  # whose sums are exact
        weights[rng.integers(n)] = 1
        fractions = (pairs >> np.uint64(11)).astype(np.float64) * 2.0**-53
        sums = np.cumsum(weights.astype(np.float64))
        found = np.searchsorted(sums, np.minimum(fractions * sums[-1], np.nextafter(sums[-1], 0)), side="right")
        x = rng.standard_normal((n, 3)).astype(np.float32)
        weighed = partial(_called, "choice", {"seed": seed, "offset": offset, "shape": n})
        yield Sample(f"choice weighed {what}", weighed, (x, weights), x[found])
        clocks = -np.log(((pairs >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52) / np.maximum(weights.astype(np.float64), 1e-300)
        few = min(few, int(np.count_nonzero(weights)))
        once = partial(_called, "choice", {"seed": seed, "offset": offset, "shape": (few, 1), "replace": False})
        yield Sample(
            f"choice weighed once {what}",
            once,
            (x[:, 0].astype(np.float64), weights.astype((np.float64, np.float32)[n % 2])),
            x[np.argsort(clocks)[:few], :1].astype(float),
        )
        words = philox(key_of(seed, "integers 4"), np.arange(offset // 4, (offset + 64) // 4 + 1, dtype=np.uint64)).reshape(-1)[
            offset % 4 :
        ][:64]
        y = rng.integers(0, 99, (2, 16, 5)).astype(np.uint8)
        at = (words.astype(np.uint64) * np.uint64(16) >> np.uint64(32)).astype(np.int64).reshape(8, 8)
        drawn = partial(_called, "choice", {"seed": seed, "offset": offset, "shape": (8, 8), "axis": 1})
        yield Sample(f"choice drawn {what}", drawn, (y,), y[:, at])
        wide_call = partial(_called, "choice", {"n": 1 << 40, "seed": seed, "offset": offset, "shape": 64})
        yield Sample(
            f"choice of many {what}", wide_call, (), (_pairs(key_of(seed, "integers 2"), offset, 64) >> np.uint64(24)).astype(np.int64)
        )
        pairs = _pairs(key_of(seed, "permutation"), offset, 16)
        for dtype in (DType.UINT8, DType.FLOAT16, DType.INT32, DType.COMPLEX64, DType.COMPLEX128):
            z = y.astype(dtype.numpy)
            moved = partial(_called, "permutation", {"seed": seed, "offset": offset, "axis": -2})
            yield Sample(f"permutation {dtype.value} {what}", moved, (z,), np.take(z, np.argsort(pairs), axis=1).astype(z.dtype))
