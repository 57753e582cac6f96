"""Cumulative operations through numpy; float16 and bfloat16 in float32."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.precision import one_by_one, wider
from accel.cpu.kernels import kernel, touches
from accel.dtype import DType
from accel.family import BackendPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.cpu.views import Array
    from accel.family import Sample

__all__ = ["PART"]

_FUNCTIONS: dict[str, np.ufunc] = {"cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum, "cummin": np.minimum}
_INTEGERS = (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64)


def _scan(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, out = (each.view(op.element().numpy).reshape(op.lines()) for each in (*operands, *results))
    x = x.astype(_accumulator(op.kind, x, x.shape[1]), copy=False)
    made = _FUNCTIONS[op.kind].accumulate(x, 1, dtype=x.dtype)
    if op.exclusive:
        out[:, 1:] = made[:, :-1]
        out[:, 0] = np.frombuffer(op.neutral(), out.dtype)[0]
    else:
        out[...] = made


def _accumulator(kind: str, x: Array, length: int) -> np.dtype[Any]:
    return one_by_one(x.dtype, length) if kind in ("cumsum", "cumprod") else wider(x.dtype)


def _segments(op: Any, operands: list[Array], results: list[Array]) -> None:
    (x, offsets), (out, status) = operands, results
    begins, ends = offsets[:-1], offsets[1:]
    wrong = (begins < 0) | (ends < begins) | (ends > len(x))
    if wrong.any():
        status[:] = 1, np.flatnonzero(wrong)[0]
        return
    out[...] = np.frombuffer(op.neutral(), out.dtype)[0]
    is_full = begins < ends
    if is_full.any():
        values = x[: offsets[-1]].astype(_accumulator(op.cumulative(), x, int((ends - begins).max())), copy=False)
        out[is_full] = _FUNCTIONS[op.cumulative()].reduceat(values, begins[is_full], 0, values.dtype).astype(out.dtype)


def _complex_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in sampling.COMPLEX:
        for shape, axis in (((3, 5, 4), 1), ((2000, 3), 0), ((3000,), 0), ((2, 5000), 1)):
            x = sampling.random(rng, shape, dtype)
            expected, error = np.cumsum(sampling.wide(x), axis), sampling.sums(dtype, shape[axis])
            yield sampling.sample("cumsum", f"{dtype.value}{list(shape)} axis={axis}", (x,), expected, error, axis=axis)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    shapes: tuple[tuple[tuple[int, ...], int], ...] = (
        ((1,), 0),
        ((0,), 0),
        ((5000,), -1),
        ((3, 7, 5), 1),
        ((40, 33), -1),
        ((2, 3000), 1),
        ((300, 4), 0),
    )
    yield from _segment_samples(rng)
    yield from _complex_samples(rng)
    for kind in _FUNCTIONS:
        for dtype in (*sampling.ALL_FLOATS, *_INTEGERS):
            for shape, axis in shapes:
                x = sampling.random(rng, shape, dtype)
                if kind == "cumprod" and not dtype.is_integer:
                    x = np.asarray(1 + 0.01 * np.asarray(x, np.float64), dtype.numpy)
                if not dtype.is_integer and kind in ("cummax", "cummin") and x.size > 1000:
                    x.flat[-5] = np.nan
                exclusive = bool(axis)
                error = sampling.sums(dtype, 64) if kind in ("cumsum", "cumprod") else 0.0
                expected, what = _expected(kind, x, axis, exclusive), f"{dtype.value}{list(shape)} axis={axis}"
                yield sampling.sample(kind, what, (x,), expected, error, axis=axis, exclusive=exclusive)


def _segment_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for op, kind in (("sum", "cumsum"), ("prod", "cumprod"), ("max", "cummax"), ("min", "cummin")):
        for dtype in (*sampling.ALL_FLOATS, *_INTEGERS):
            for shape, count in (((1000,), 9), ((70, 5), 1), ((3,), 0), ((0,), 2)):
                x = sampling.random(rng, shape, dtype)
                if kind == "cumprod" and not dtype.is_integer:
                    x = np.asarray(1 + 0.01 * np.asarray(x, np.float64), dtype.numpy)
                offsets = np.sort(rng.integers(0, shape[0] + 1, count + 1))
                offsets[count // 2 :][:2] = offsets[count // 2]  # one is empty
                parts = [_expected(kind, x[begin:end], 0, end == begin)[-1:] for begin, end in itertools.pairwise(offsets)]
                nothing = _expected(kind, np.zeros((1, *shape[1:]), x.dtype), 0, True)
                expected = np.concatenate([nothing[:0], *(part if len(part) else nothing for part in parts)])
                error = sampling.sums(dtype, 64) if kind in ("cumsum", "cumprod") else 0.0
                what = f"{op} {dtype.value}{list(shape)}"
                yield sampling.sample("segment_reduce", what, (x, offsets), expected, error, names=("x", "offsets"), op=op)


def _expected(kind: str, x: Array, axis: int, exclusive: bool) -> Array:
    values = sampling.wide(x) if x.dtype.kind != "u" else x.astype(np.uint64)
    limits: Any = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
    least, most = (limits.min, limits.max) if limits else (-np.inf, np.inf)
    start = {"cumsum": 0, "cumprod": 1, "cummax": least, "cummin": most}[kind]
    with np.errstate(all="ignore"):
        made = np.asarray(_FUNCTIONS[kind].accumulate(values, axis))
    if exclusive:
        made = np.roll(made, 1, axis)
        made[(slice(None),) * (axis % x.ndim) + (slice(0, 1),)] = np.asarray(start).astype(made.dtype)
    return made.astype(x.dtype) if x.dtype.kind in "iu" else made


_KERNELS = {**dict.fromkeys(_FUNCTIONS, kernel(_scan, touches(4))), "segment_reduce": kernel(_segments, touches(4))}

PART = BackendPart(_KERNELS, samples=_samples)
