"""Fourier transforms through scipy, or numpy where scipy is not installed: both keep single precision, and scipy is faster for many small ones."""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.views import array
from accel.dtype import DType
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PART", "transform"]

# Calls of scipy, one level of one element's transform; and what sends the first one to the stream's thread: an import takes tenths of a second.
_CALL, _LEVEL, _IMPORT = 15e-6, 1e-9, 1.0


@cache
def _library() -> Any:
    return importlib.import_module("scipy.fft" if importlib.util.find_spec("scipy") else "numpy.fft")


def transform(kind: str, source: Any, destination: Any, axes: tuple[int, ...], norm: str, lengths: tuple[int, ...] | None) -> None:
    """Write the transform ``kind`` of an array into another, which may be the same; ``lengths`` of the result where the source does not tell."""
    function = getattr(_library(), f"{kind}n")
    destination[...] = function(source, s=lengths, axes=axes, norm=norm)


def _kernel(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    result = op.spec()
    size = math.prod(result.shape)
    if not size:
        return
    source, destination = array(inputs[0], op.x.shape, op.x.dtype.numpy), array(outputs[0], result.shape, result.dtype.numpy)
    lengths = op.lengths() if op.kind == "irfft" else None
    levels = sum(math.log2(length) + 1 for length in op.lengths())
    cost = _CALL + max(size, op.x.size) * levels * _LEVEL * (np.dtype(op.x.dtype.numpy).itemsize / 8)
    if not _library.cache_info().currsize:
        cost += _IMPORT
    lane.stream.submit(partial(transform, op.kind, source, destination, op.counted(), op.norm, lengths), cost)


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


PART = BackendPart(dict.fromkeys(("fft", "ifft", "rfft", "irfft"), _kernel), samples=_samples)
