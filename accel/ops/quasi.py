"""Sobol's sequence: points that fill a cube more evenly than random ones do.

The directions are an operand, an array of 33 words for each dimension: 32 directions, and a shift behind them. Point i is the shift and those directions,
joined by exclusive or, that the bits of i's Gray code choose. A word is 32 bits behind the binary point. So a kernel needs no table, and scrambled points are
those of scrambled directions.
"""

from __future__ import annotations

import secrets
from dataclasses import KW_ONLY
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from accel.dtype import WIDE_FLOATS, DType, DTypeLike
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, op, operand, planned
from accel.ops.draws import whole
from accel.ops.fields import flag, set_fields
from accel.ref import AccelRef

__all__ = ["Sobol", "sobol_directions"]

Array = np.ndarray[Any, np.dtype[Any]]

_BITS = 32
_DIMENSIONS = 1024


@cache
def _table() -> tuple[Array, Array]:
    """Return primitive polynomials and initial numbers by Joe and Kuo, *Constructing Sobol sequences with better two-dimensional projections*, 2008."""
    with resources.as_file(resources.files("accel.ops") / "joe_kuo.npz") as path, np.load(path) as table:
        return table["polynomials"].astype(np.int64), table["starts"].astype(np.uint32)


def sobol_directions(d: int, *, scramble: bool = False, seed: int | None = None) -> Array:
    """Return the directions of Sobol's sequence in ``d`` dimensions, as :meth:`device.rng.sobol` takes them: put them on a device.

    They are those of ``scipy.stats.qmc.Sobol``, by Joe and Kuo (new-joe-kuo-6.21201). May take a second for all dimensions.

    Parameters
    ----------
    d
        From 1 to 1024.
    scramble
        Whether they are scrambled as scipy does: multiplied by random triangular matrices of bits, and shifted. Such points are as even as others, and an
        integral by them is right on average.
    seed
        From 0 to 2**64 - 1: of the scrambling. ``None``: one from the system's entropy. The numbers that it gives are not scipy's.

    Returns
    -------
    numpy.ndarray
        (d, 33), uint32.
    """
    d = whole("d", d, 1, _DIMENSIONS + 1)
    flag("scramble", scramble)
    if seed is not None and not scramble:
        raise InvalidArgumentError("seed is given, and nothing is scrambled", remedy="Give scramble=True, or leave seed out.")
    polynomials, starts = _table()
    result = np.zeros((d, _BITS + 1), np.uint32)
    numbers = result[:, :_BITS]
    numbers[0] = 1
    for row in range(1, d):
        polynomial = int(polynomials[row])
        degree = polynomial.bit_length() - 1
        m = [int(start) for start in starts[row, :degree]]
        for k in range(degree, _BITS):
            new = m[k - degree]
            for i in range(1, degree + 1):
                if polynomial >> (degree - i) & 1:
                    new ^= m[k - i] << i
            m.append(new)
        numbers[row] = m
    numbers <<= np.arange(_BITS - 1, -1, -1, dtype=np.uint32)
    if scramble:
        _scramble(result, secrets.randbits(64) if seed is None else whole("seed", seed, 0, 1 << 64))
    return result


def _scramble(directions: Array, seed: int) -> None:
    """Multiply the bits of each direction, the highest first, by a lower triangular matrix of its dimension, and draw the shifts."""
    rng = np.random.default_rng(seed)
    places = np.arange(_BITS - 1, -1, -1, dtype=np.uint32)
    for row in directions:
        matrix = np.tril(rng.integers(0, 2, (_BITS, _BITS), np.uint32), -1) + np.eye(_BITS, dtype=np.uint32)
        bits = row[:_BITS, None] >> places & np.uint32(1)
        row[:_BITS] = ((bits @ matrix.T & np.uint32(1)) << places).sum(axis=1, dtype=np.uint32)
        row[_BITS] = rng.integers(0, 1 << 32, dtype=np.uint32)


@op("rng")
class Sobol(OutOp):
    """``n`` points of Sobol's sequence, from 0 up to, and without, 1: (n, d), float32 or float64.

    Parameters
    ----------
    directions
        (d, 33), uint32: what :func:`accel.ops.sobol_directions` returns.
    n
        How many points; even are ``2**k`` points from a multiple of ``2**k`` on.
    dtype
        Of the points. float32 has the upper 24 of their 32 bits.
    offset
        How many points of the sequence are skipped; it has 2**32.
    out
        Buffer to write.
    """

    directions: AccelRef
    n: int
    dtype: DTypeLike = DType.FLOAT32
    _: KW_ONLY
    offset: int = 0

    def __post_init__(self) -> None:
        offset = whole("offset", self.offset, 0, 1 << _BITS)
        set_fields(self, dtype=DType.of(self.dtype), offset=offset, n=whole("n", self.n, 0, (1 << _BITS) - offset + 1))

    def plan(self) -> Plan:
        directions, dtype = operand("directions", self.directions, ndim=2), DType.of(self.dtype)
        if dtype not in WIDE_FLOATS:
            raise UnsupportedError(f"sobol points are not offered in {dtype.value}", remedy="Use float32 or float64.")
        if directions.dtype is not DType.UINT32 or directions.shape[1] != _BITS + 1:
            raise InvalidArgumentError(
                f"directions are {directions.dtype.value}{list(directions.shape)}",
                remedy="Put accel.ops.sobol_directions(d) on the device.",
            )
        return planned(self.out, {"directions": directions}, (self.n, directions.shape[0]), dtype)
