"""Fourier transforms through scipy, or numpy where scipy is not installed: both keep single precision, and scipy is faster for many small ones."""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.arrays import copy_pieces
from accel.cpu.views import array
from accel.dtype import DType
from accel.errors import BackendUnavailableError
from accel.family import BackendPart, Sample
from accel.ops.fft import FftOps
from accel.ops.pieces import kinds_of_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accel.cpu.views import Array

__all__ = ["PART", "transform"]

# Calls of scipy, one level of one element's transform; and what sends the first one to the stream's thread: an import takes tenths of a second.
_CALL, _LEVEL, _IMPORT = 15e-6, 1e-9, 1.0

_CONJUGATES = {"hfft": "irfft", "ihfft": "rfft"}
_OTHER_WAY = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


@cache
def _library() -> Any:
    return importlib.import_module("scipy.fft" if importlib.util.find_spec("scipy") else "numpy.fft")


def transform(kind: str, source: Any, destination: Any, axes: tuple[int, ...], norm: str, lengths: tuple[int, ...] | None) -> None:
    """Write the transform ``kind`` of an array into another, which may be the same; ``lengths`` of the result where the source does not tell."""
    if kind in _CONJUGATES:  # numpy has these for one axis
        kind, norm = _CONJUGATES[kind], _OTHER_WAY[norm]
        if kind == "irfft":
            source = np.conj(source)
        made = getattr(_library(), f"{kind}n")(source, s=lengths, axes=axes, norm=norm)
        destination[...] = made if kind == "irfft" else np.conj(made)
        return
    function = getattr(_library(), f"{kind}n")
    destination[...] = function(source, s=lengths, axes=axes, norm=norm)


def _kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    result = op.spec()
    size = math.prod(result.shape)
    if not size:
        return
    source, destination = array(inputs[0], op.x.shape, op.x.dtype.numpy), array(outputs[0], result.shape, result.dtype.numpy)
    lengths = op.lengths() if op.kind in ("irfft", "hfft") else None
    levels = sum(math.log2(length) + 1 for length in op.lengths())
    cost = _CALL + max(size, op.x.size) * levels * _LEVEL * (np.dtype(op.x.dtype.numpy).itemsize / 8)
    if not _library.cache_info().currsize:
        cost += _IMPORT
    lane.stream.submit(partial(transform, op.kind, source, destination, op.counted(), op.norm, lengths), cost)


def _cosine(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if importlib.util.find_spec("scipy") is None:
        raise BackendUnavailableError(f"{op.kind} needs scipy on the CPU", remedy="In a checkout: pip install '.[cpu]'.")
    before, length, behind = op.lines()
    if not (size := before * length * behind):
        return
    source, destination = (array(each, (before, length, behind), op.x.dtype.numpy) for each in (inputs[0], outputs[0]))

    def work() -> None:
        destination[...] = getattr(_library(), op.kind)(source, op.type, axis=1, norm=op.norm)

    cost = _CALL + size * (math.log2(length) + 1) * _LEVEL + (0.0 if _library.cache_info().currsize else _IMPORT)
    lane.stream.submit(work, cost)


def _convolve(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    extent, dtype = op.extent(), op.a.dtype.numpy
    if not extent.batch:
        return
    a, b = array(inputs[0], (extent.batch_a, *extent.a), dtype), array(inputs[1], (extent.batch_b, *extent.b), dtype)
    out = array(outputs[0], (extent.batch, *extent.result), dtype)

    def work() -> None:
        axes = tuple(range(1, a.ndim))
        other = np.conj(np.flip(b, axes)) if op.is_turned else b
        there, back = (getattr(_library(), f"{name}fftn" if dtype.kind == "c" else f"{name}rfftn") for name in ("", "i"))
        made = back(there(a, s=extent.padded, axes=axes) * there(other, s=extent.padded, axes=axes), s=extent.padded, axes=axes)
        out[...] = made[(slice(None), *(slice(start, start + n) for start, n in zip(extent.starts, extent.result, strict=True)))]

    size = 3 * extent.batch * math.prod(extent.padded)
    cost = _CALL + size * (math.log2(size) + 1) * _LEVEL + (0.0 if _library.cache_info().currsize else _IMPORT)
    lane.stream.submit(work, cost)


def _frequencies(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    count, positive = op.counts()
    out = array(outputs[0], (count,), op.dtype.numpy)

    def work() -> None:
        places = np.arange(count)
        places[positive:] -= op.n
        out[...] = places * op.step()

    lane.stream.submit(work, costs.elements(2 * count, out.dtype))


def _transformed(kind: str, options: dict[str, Any], fft: Any, x: Any) -> Any:
    return getattr(fft, kind)(x, **options)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...] = (
        ((1,), (-1,), "backward"),
        ((12,), (0,), "ortho"),
        ((3, 101), (-1,), "forward"),
        ((4, 6, 5), (0, 2), "backward"),
        ((4, 6, 10), (2, 0, 1), "ortho"),
    )
    for real, spectrum in ((DType.FLOAT32, DType.COMPLEX64), (DType.FLOAT64, DType.COMPLEX128)):
        for shape, axes, norm in cases:
            error = 8 * sampling.sums(real, round(math.log2(math.prod(shape))))
            options: dict[str, Any] = {"axes": axes, "norm": norm}
            what = f"{spectrum.value}{list(shape)} axes={axes} norm={norm}"
            z, x = sampling.random(rng, shape, spectrum), sampling.random(rng, shape, real)
            for kind in ("fft", "ifft"):
                expected = getattr(np.fft, f"{kind}n")(sampling.wide(z), **options)
                yield Sample(f"{kind} {what}", partial(_transformed, kind, options), (z,), expected, error)
            half = np.fft.rfftn(sampling.wide(x), **options)
            yield Sample(f"rfft {what}", partial(_transformed, "rfft", options), (x,), half, error)
            back = partial(_transformed, "irfft", {**options, "n": shape[axes[-1]]})
            # Twice rounded: the spectrum of a real array is the operand.
            yield Sample(f"irfft {what}", back, (half.astype(spectrum.numpy),), sampling.wide(x), 2 * error)
            other = {**options, "norm": _OTHER_WAY[norm]}
            there = partial(_transformed, "hfft", {**other, "n": shape[axes[-1]]})
            yield Sample(f"hfft {what}", there, (np.conj(half).astype(spectrum.numpy),), sampling.wide(x), 2 * error)
            yield Sample(f"ihfft {what}", partial(_transformed, "ihfft", other), (x,), np.conj(half), error)
    for dtype in (*sampling.FLOATS, *sampling.COMPLEX):
        if not dtype.is_complex:
            yield from _cosines(rng, dtype)
        yield from _convolutions(rng, dtype)
        shifts: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (((5,), None), ((4, 7), (1,)), ((3, 4, 5), (0, 2)))
        for shape, chosen in shifts:
            x = sampling.random(rng, shape, dtype)
            for kind in ("fftshift", "ifftshift"):
                yield Sample(
                    f"{kind} {dtype.value}{list(shape)}",
                    partial(_transformed, kind, {"axes": chosen}),
                    (x,),
                    getattr(np.fft, kind)(x, chosen),
                )
    for n in (1, 2, 7, 1000):
        for kind in ("fftfreq", "rfftfreq"):
            for dtype in sampling.FLOATS:
                made = partial(_frequencies_of, kind, n, 0.25, dtype)
                yield Sample(f"{kind} {n} {dtype.value}", made, (), getattr(np.fft, kind)(n, 0.25), sampling.sums(dtype))


def _frequencies_of(kind: str, n: int, d: float, dtype: DType, fft: Any) -> Any:
    return getattr(fft, kind)(n, d, dtype)


def _sums(x: Array, number: int, *, is_sine: bool, is_orthogonal: bool = False) -> Array:
    """Return the sums of a cosine or sine transform along the axis 1, by their definition."""
    length = x.shape[1]
    n, k = np.arange(length, dtype=x.dtype), np.arange(length, dtype=x.dtype)[:, None]
    pi = x.dtype.type(4) * np.arctan(x.dtype.type(1))
    weights = np.full(length, 2, x.dtype)
    if is_sine:
        angle = {1: (k + 1) * (n + 1) / (length + 1), 2: (k + 1) * (2 * n + 1) / (2 * length), 3: (2 * k + 1) * (n + 1) / (2 * length)}
        if number == 3:
            weights[-1] = 1
    else:
        angle = {1: k * n / max(length - 1, 1), 2: k * (2 * n + 1) / (2 * length), 3: (2 * k + 1) * n / (2 * length)}
        if number in (1, 3):
            weights[0] = 1
        if number == 1:
            weights[-1] = 1
    angle[4] = (2 * k + 1) * (2 * n + 1) / (4 * length)
    matrix = (np.sin if is_sine else np.cos)(pi * angle[number])
    if is_orthogonal:
        if number == 1 and not is_sine:
            ends = np.where((n == 0) | (n == length - 1), np.sqrt(x.dtype.type(0.5)), x.dtype.type(1))
            matrix *= ends * ends[:, None]
        matrix /= np.sqrt((matrix * matrix).sum(axis=0 if number == 3 else 1, keepdims=True))
    else:
        matrix *= weights
    result: Array = np.einsum("kn,bnq->bkq", matrix, x)
    return result


def _cosines(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for shape, axis in (((1, 2, 1), 1), ((1, 16, 1), 1), ((3, 17, 1), 1), ((2, 12, 5), 1), ((1, 9, 4), 1), ((1, 1, 3), 1)):
        x = sampling.random(rng, shape, dtype)
        wide, length = sampling.wide(x), shape[axis]
        for number in (1, 2, 3, 4):
            for kind in ("dct", "dst"):
                if kind == "dct" and number == 1 and length < 2:
                    continue
                what, options = f"{dtype.value}{list(shape)} type={number}", {"type": number, "axis": axis}
                error = 8 * sampling.sums(dtype, round(math.log2(length)) + 1)
                sums = _sums(wide, number, is_sine=kind == "dst")
                yield Sample(f"{kind} {what}", partial(_transformed, kind, options), (x,), sums, error)
                count = 2 * (length if number != 1 else length + (1 if kind == "dst" else -1))
                inverse = {1: 1, 2: 3, 3: 2, 4: 4}[number]
                back = partial(_transformed, f"i{kind}", {"type": inverse, "axis": axis})
                yield Sample(f"i{kind} {what}", back, (x,), sums / count, error)
                straight = _sums(wide, number, is_sine=kind == "dst", is_orthogonal=True)
                yield Sample(f"{kind} {what} ortho", partial(_transformed, kind, {**options, "norm": "ortho"}), (x,), straight, error)
                back = partial(_transformed, f"i{kind}", {"type": inverse, "axis": axis, "norm": "ortho"})
                yield Sample(f"i{kind} {what} ortho", back, (x,), straight, error)
                scaled = partial(_transformed, kind, {**options, "norm": "forward"})
                yield Sample(f"{kind} {what} forward", scaled, (x,), sums / count, error)


def _convolutions(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    cases: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None], ...] = (
        ((1,), (1,), None),
        ((33,), (7,), None),
        ((5,), (12,), None),
        ((3, 20), (3, 4), (1,)),
        ((3, 20), (1, 4), (-1,)),
        ((9, 8), (3, 5), None),
        ((1, 6, 7), (2, 3, 3), (1, 2)),
        ((4, 5, 6), (2, 3, 2), None),
    )
    for shape_a, shape_b, axes in cases:
        a, b = sampling.random(rng, shape_a, dtype), sampling.random(rng, shape_b, dtype)
        wide_a, wide_b = sampling.wide(a), sampling.wide(b)
        count = len(shape_a) if axes is None else len(axes)
        error = 8 * sampling.sums(dtype, round(math.log2(math.prod(shape_a))) + 4)
        for kind in ("convolve", "correlate"):
            other = np.conj(np.flip(wide_b, tuple(range(-count, 0)))) if kind == "correlate" else wide_b
            whole = _convolved(wide_a, other, count)
            for mode in ("full", "same", "valid"):
                part: Any = [...]
                for n, m in zip(shape_a[-count:], shape_b[-count:], strict=True):
                    start = {"full": 0, "same": (m - 1) // 2, "valid": min(n, m) - 1}[mode]
                    part.append(slice(start, start + {"full": n + m - 1, "same": n, "valid": abs(n - m) + 1}[mode]))
                expected = whole[tuple(part)]
                call = partial(_convolving, kind, {"mode": mode, "axes": axes})
                yield Sample(
                    f"{kind} {dtype.value}{list(shape_a)} with {list(shape_b)} {mode}",
                    call,
                    (a, b),
                    expected,
                    error,
                    terms=float(np.abs(whole).max()),
                )


def _convolved(a: Array, b: Array, count: int) -> Array:
    """Return the whole convolution along the last ``count`` axes, by its definition."""
    batch = np.broadcast_shapes(a.shape[:-count], b.shape[:-count])
    lengths = [n + m - 1 for n, m in zip(a.shape[-count:], b.shape[-count:], strict=True)]
    result: Array = np.zeros((*batch, *lengths), a.dtype)
    for place in np.ndindex(*b.shape[-count:]):
        part: Any = (..., *(slice(start, start + n) for start, n in zip(place, a.shape[-count:], strict=True)))
        factor: Any = (..., *place)
        result[part] += a * b[factor][(..., *(None,) * count)]
    return result


def _convolving(kind: str, options: dict[str, Any], fft: Any, a: Any, b: Any) -> Any:
    return getattr(fft, kind)(a, b, **options)


PART = BackendPart(
    {
        **dict.fromkeys(("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"), _kernel),
        **dict.fromkeys(("dct", "idct", "dst", "idst"), _cosine),
        **dict.fromkeys(("convolve", "correlate"), _convolve),
        **dict.fromkeys(kinds_of_pieces(FftOps), copy_pieces),
        **dict.fromkeys(("fftfreq", "rfftfreq"), _frequencies),
    },
    wheels=("scipy",),
    samples=_samples,
)
