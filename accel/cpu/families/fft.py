"""Fourier transforms through scipy, or numpy where scipy is not installed: both keep single precision, and scipy is faster for many small ones."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.arrays import copy_pieces
from accel.cpu.kernels import LateModule, kernel, touches
from accel.dtype import DType
from accel.family import BackendPart
from accel.ops.fft import FftOps
from accel.ops.pieces import kinds_of_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.cpu.views import Array
    from accel.family import Sample

__all__ = ["PART", "transform"]

# Calls of scipy, and one level of one element's transform.
_CALL, _LEVEL = 15e-6, 1e-9

_CONJUGATES = {"hfft": "irfft", "ihfft": "rfft"}
_OTHER_WAY = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


_library, _scipy = LateModule("scipy.fft", "numpy.fft"), LateModule("scipy.fft")


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


def _transform(op: Any, operands: list[Array], results: list[Array]) -> None:
    lengths = op.lengths() if op.kind in ("irfft", "hfft") else None
    transform(op.kind, operands[0], results[0], op.counted(), op.norm, lengths)


def _transform_cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    levels: float = sum(math.log2(length) + 1 for length in op.lengths())
    size = max(operands[0].size, results[0].size)
    return _CALL + size * levels * _LEVEL * (operands[0].itemsize / 8) + _library.seconds(op.kind)


def _cosine(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, out = (each.reshape(op.lines()) for each in (*operands, *results))
    out[...] = getattr(_scipy(), op.kind)(x, op.type, axis=1, norm=op.norm)


def _cosine_cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    _, length, _ = op.lines()
    return _CALL + operands[0].size * (math.log2(length) + 1) * _LEVEL + _scipy.seconds(op.kind)


def _convolve(op: Any, operands: list[Array], results: list[Array]) -> None:
    extent = op.extent()
    a, b = operands[0].reshape(extent.batch_a, *extent.a), operands[1].reshape(extent.batch_b, *extent.b)
    axes = tuple(range(1, a.ndim))
    other = np.conj(np.flip(b, axes)) if op.is_turned else b
    there, back = (getattr(_library(), f"{name}fftn" if a.dtype.kind == "c" else f"{name}rfftn") for name in ("", "i"))
    made = back(there(a, s=extent.padded, axes=axes) * there(other, s=extent.padded, axes=axes), s=extent.padded, axes=axes)
    part = made[(slice(None), *(slice(start, start + n) for start, n in zip(extent.starts, extent.result, strict=True)))]
    results[0][...] = part.reshape(results[0].shape)


def _convolve_cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    extent = op.extent()
    size: int = 3 * extent.batch * math.prod(extent.padded)
    return _CALL + size * (math.log2(size) + 1) * _LEVEL + _library.seconds(op.kind)


def _frequencies(op: Any, operands: list[Array], results: list[Array]) -> None:
    count, positive = op.counts()
    places = np.arange(count)
    places[positive:] -= op.n
    results[0][...] = places * op.step()


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
                yield sampling.sample(kind, what, (z,), expected, error, **options)
            half = np.fft.rfftn(sampling.wide(x), **options)
            yield sampling.sample("rfft", what, (x,), half, error, **options)
            n = shape[axes[-1]]
            # Twice rounded: the spectrum of a real array is the operand.
            yield sampling.sample("irfft", what, (half.astype(spectrum.numpy),), sampling.wide(x), 2 * error, n=n, **options)
            options["norm"] = _OTHER_WAY[norm]
            yield sampling.sample("hfft", what, (np.conj(half).astype(spectrum.numpy),), sampling.wide(x), 2 * error, n=n, **options)
            yield sampling.sample("ihfft", what, (x,), np.conj(half), error, **options)
    for dtype in (*sampling.FLOATS, *sampling.COMPLEX):
        if not dtype.is_complex:
            yield from _cosines(rng, dtype)
        yield from _convolutions(rng, dtype)
        shifts: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (((5,), None), ((4, 7), (1,)), ((3, 4, 5), (0, 2)))
        for shape, chosen in shifts:
            x = sampling.random(rng, shape, dtype)
            for kind in ("fftshift", "ifftshift"):
                yield sampling.sample(kind, f"{dtype.value}{list(shape)}", (x,), getattr(np.fft, kind)(x, chosen), axes=chosen)
    for n in (1, 2, 7, 1000):
        for kind in ("fftfreq", "rfftfreq"):
            for dtype in sampling.FLOATS:
                expected, error = getattr(np.fft, kind)(n, 0.25), sampling.sums(dtype)
                yield sampling.sample(kind, f"{n} {dtype.value}", (), expected, error, arguments=(n, 0.25, dtype))


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
    inverse = {1: 1, 2: 3, 3: 2, 4: 4}
    for shape, axis in (((1, 2, 1), 1), ((1, 16, 1), 1), ((3, 17, 1), 1), ((2, 12, 5), 1), ((1, 9, 4), 1), ((1, 1, 3), 1)):
        x = sampling.random(rng, shape, dtype)
        wide, length = sampling.wide(x), shape[axis]
        for number in (1, 2, 3, 4):
            for kind in ("dct", "dst"):
                if kind == "dct" and number == 1 and length < 2:
                    continue
                what, error = f"{dtype.value}{list(shape)} type={number}", 8 * sampling.sums(dtype, round(math.log2(length)) + 1)
                there, back = (
                    partial(sampling.sample, kind, type=number, axis=axis),
                    partial(sampling.sample, f"i{kind}", type=inverse[number], axis=axis),
                )
                sums = _sums(wide, number, is_sine=kind == "dst")
                yield there(what, (x,), sums, error)
                count = 2 * (length if number != 1 else length + (1 if kind == "dst" else -1))
                yield back(what, (x,), sums / count, error)
                straight = _sums(wide, number, is_sine=kind == "dst", is_orthogonal=True)
                yield there(f"{what} ortho", (x,), straight, error, norm="ortho")
                yield back(f"{what} ortho", (x,), straight, error, norm="ortho")
                yield there(f"{what} forward", (x,), sums / count, error, norm="forward")


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
                what, terms = f"{dtype.value}{list(shape_a)} with {list(shape_b)} {mode}", float(np.abs(whole).max())
                yield sampling.sample(kind, what, (a, b), whole[tuple(part)], error, terms, mode=mode, axes=axes)


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


PART = BackendPart(
    {
        **dict.fromkeys(("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"), kernel(_transform, _transform_cost)),
        **dict.fromkeys(("dct", "idct", "dst", "idst"), kernel(_cosine, _cosine_cost)),
        **dict.fromkeys(("convolve", "correlate"), kernel(_convolve, _convolve_cost)),
        **dict.fromkeys(kinds_of_pieces(FftOps), copy_pieces),
        **dict.fromkeys(("fftfreq", "rfftfreq"), kernel(_frequencies, touches(2))),
    },
    wheels=("scipy",),
    samples=_samples,
)
