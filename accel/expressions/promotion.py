"""Which dtype several dtypes have in common: the rules of the Python array API standard, with two floats of 16 bits more."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from accel.dtype import FLOATS, REAL_OF, DType
from accel.errors import InvalidArgumentError

__all__ = [
    "COMPLEX",
    "COMPLEX_RANK",
    "DEFAULT",
    "FLOATS",
    "FLOAT_RANK",
    "INTEGERS",
    "INTEGER_RANK",
    "KINDS",
    "NUMBERS",
    "SIGNED",
    "UNSIGNED",
    "default_of",
    "kind_of",
    "promoted",
    "real_of",
]

SIGNED = (DType.INT8, DType.INT16, DType.INT32, DType.INT64)
UNSIGNED = (DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64)
COMPLEX = tuple(REAL_OF)
INTEGERS = SIGNED + UNSIGNED
NUMBERS = INTEGERS + FLOATS + COMPLEX

KINDS: dict[str, tuple[DType, ...]] = {
    "bool": (DType.BOOL,),
    "signed integer": SIGNED,
    "unsigned integer": UNSIGNED,
    "integral": INTEGERS,
    "real floating": FLOATS,
    "complex floating": COMPLEX,
    "numeric": NUMBERS,
}
"""Names of kinds of dtypes, as ``isdtype`` takes them -> their dtypes."""

DEFAULT = {
    "real floating": DType.FLOAT32,
    "complex floating": DType.COMPLEX64,
    "integral": DType.INT64,
    "indexing": DType.INT64,
}
"""The dtypes of arrays that are made of Python's numbers, and of indices."""

BOOL_RANK, INTEGER_RANK, FLOAT_RANK, COMPLEX_RANK = range(4)
_RANKS = {
    DType.BOOL: BOOL_RANK,
    **dict.fromkeys(INTEGERS, INTEGER_RANK),
    **dict.fromkeys(FLOATS, FLOAT_RANK),
    **dict.fromkeys(COMPLEX, COMPLEX_RANK),
}


def real_of(dtype: DType) -> DType:
    """Return the type of a complex number's parts; of other dtypes, the dtype itself."""
    return REAL_OF.get(dtype, dtype)


def kind_of(number: type) -> int:
    """Return the rank of a class of numbers, Python's or numpy's: of bool, of integers, of floats, or of complex numbers."""
    if issubclass(number, (bool, np.bool_)):
        return BOOL_RANK
    if issubclass(number, (int, np.integer)):
        return INTEGER_RANK
    return COMPLEX_RANK if issubclass(number, (complex, np.complexfloating)) else FLOAT_RANK


def default_of(kind: int) -> DType:
    """Return the dtype of an array that is made of Python numbers of that kind."""
    return (DType.BOOL, DEFAULT["integral"], DEFAULT["real floating"], DEFAULT["complex floating"])[kind]


@lru_cache(maxsize=1024)
def promoted(*dtypes: DType) -> DType:
    """Return the dtype that holds the values of all ``dtypes``.

    Integers beside floats take the floats' dtype, and float16 beside bfloat16 gives float32; the standard leaves both open.

    Raises
    ------
    InvalidArgumentError
        If there is none: for uint64 beside signed integers, and for 8-bit floats beside others.
    """
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = _of_two(result, dtype)
    return result


def _of_two(a: DType, b: DType) -> DType:
    if a is b:
        return a
    if a not in _RANKS or b not in _RANKS:
        raise _without(a, b)
    if _RANKS[a] < _RANKS[b]:
        a, b = b, a
    if _RANKS[b] < _RANKS[a] and not (a.is_complex and b.is_floating):
        return a
    if a.is_complex:
        return DType.COMPLEX128 if DType.FLOAT64 in (real_of(a), real_of(b)) else DType.COMPLEX64
    if a.is_floating:
        return DType.FLOAT32 if a.itemsize == b.itemsize else max(a, b, key=lambda each: each.itemsize)
    if a.kind == b.kind:
        return max(a, b, key=lambda each: each.itemsize)
    signed, unsigned = (a, b) if a.kind == "integer" else (b, a)
    wide = [each for each in SIGNED if each.itemsize > unsigned.itemsize]
    if not wide:
        raise _without(a, b)
    return max(signed, wide[0], key=lambda each: each.itemsize)


def _without(a: DType, b: DType) -> InvalidArgumentError:
    return InvalidArgumentError(f"no dtype holds both {a.value} and {b.value}", remedy="Convert one of them: xp.astype(x, dtype).")
