"""Element types: numpy's and ml_dtypes' names, sizes and codecs, one enum.

The narrow floats and their conversions are those of the `ml_dtypes <https://github.com/jax-ml/ml_dtypes>`_ package.
"""

from __future__ import annotations

import enum
import inspect
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import ml_dtypes
import numpy as np

from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "COMPLEX_OF",
    "FLOATS",
    "REAL_OF",
    "WIDE",
    "WIDE_FLOATS",
    "DType",
    "DTypeLike",
    "check_awaited",
    "flattened",
    "is_masked",
    "native",
    "placed",
    "rounded",
]

DTypeLike: TypeAlias = Any
"""Whatever :meth:`DType.of` takes: a :class:`DType`, a name, a numpy dtype, a scalar type."""

Kind: TypeAlias = Literal["float", "integer", "unsigned", "bool", "complex"]


_BY_FLOAT32 = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"})

_PREFIXES: tuple[tuple[str, Kind], ...] = (
    ("float", "float"),
    ("bfloat", "float"),
    ("int", "integer"),
    ("uint", "unsigned"),
    ("complex", "complex"),
)


def _kind(name: str) -> Kind:
    if name == "bool":
        return "bool"
    for prefix, kind in _PREFIXES:
        if name.startswith(prefix):
            return kind
    raise AssertionError(name)


class DType(enum.Enum):
    """The type of a buffer's elements; a member's value is the name that numpy or ml_dtypes gives it."""

    # Members are looked up in tables for each op: by identity, as they are compared, and not by a hash computed in Python.
    __hash__ = object.__hash__  # no member

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT4_E2M1FN = "float4_e2m1fn"
    """Four bits of value in a byte each, as ml_dtypes stores them: not the packed form that some kernels read."""
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    __hash__ = object.__hash__  # noqa: PIE794, PIE796  # no member
    """Of the member, which is one object: Enum's hashes its name anew each time."""

    numpy: np.dtype[Any]
    """The numpy dtype of the same elements."""
    itemsize: int
    """Bytes of one element."""
    kind: Kind
    """``"float"``, ``"integer"``, ``"unsigned"``, ``"bool"`` or ``"complex"``."""

    def __init__(self, name: str) -> None:
        self.numpy = np.dtype(getattr(ml_dtypes, name, name))
        self.itemsize = self.numpy.itemsize
        self.kind = _kind(name)

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise InvalidArgumentError(
            f"{value!r} is not a name of a DType", remedy=f"DType.of takes numpy's; here it is {', '.join(_BY_NAME)}."
        )

    @property
    def is_floating(self) -> bool:
        """Whether the elements are real floating-point numbers."""
        return self.kind == "float"

    @property
    def is_complex(self) -> bool:
        """Whether the elements are complex numbers."""
        return self.kind == "complex"

    @property
    def is_integer(self) -> bool:
        """Whether the elements are signed or unsigned integers (booleans are not)."""
        return self.kind in ("integer", "unsigned")

    @property
    def is_extended(self) -> bool:
        """Whether numpy needs ml_dtypes to know the type."""
        return hasattr(ml_dtypes, self.value)

    @classmethod
    def of(cls, like: DTypeLike) -> DType:
        """Return the element type that ``like`` names.

        Parameters
        ----------
        like
            A :class:`DType`, one of its names, a numpy dtype or scalar type, or any string that numpy understands (``"f4"``, ``"single"``,
            ``"float"``, which is float64).

        Raises
        ------
        InvalidArgumentError
            If numpy does not know it, if it is not one of ours (objects, strings, dates, long doubles, structures), or if its byte
            order is not this machine's.
        """
        if isinstance(like, cls):
            return like
        try:
            return _BY_NUMPY[like]
        except (KeyError, TypeError):
            return _parse(like)


_BY_NUMPY: dict[Any, DType] = {member.numpy: member for member in DType}
FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
"""Floats that are computed with everywhere."""

WIDE_FLOATS = (DType.FLOAT32, DType.FLOAT64)
REAL_OF = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}
"""Complex dtypes -> those of their parts."""

COMPLEX_OF = {part: dtype for dtype, part in REAL_OF.items()}
"""Dtypes of parts -> those of complex numbers."""

WIDE = (*WIDE_FLOATS, *REAL_OF)
"""The four dtypes of every BLAS and LAPACK."""


_BY_NAME: dict[str, DType] = {member.value: member for member in DType}


def _parse(like: DTypeLike) -> DType:
    if isinstance(like, str) and like in _BY_NAME:
        return _BY_NAME[like]
    if like is None:
        raise InvalidArgumentError("None is not a dtype", remedy="Name one, such as 'float32'.")
    try:
        dtype = np.dtype(like)
    except Exception as error:  # by what it is told, numpy raises nearly anything
        dimensions = " Several dimensions are one tuple, such as (3, 4)." * isinstance(like, int)
        raise InvalidArgumentError(f"{like!r} is not a dtype", remedy=f"Use one of {', '.join(_BY_NAME)}.{dimensions}") from error
    if not dtype.isnative:
        raise InvalidArgumentError(
            f"{dtype.str!r} is not in this machine's byte order", remedy="Convert it: array.astype(array.dtype.newbyteorder('='))."
        )
    member = _BY_NUMPY.get(dtype)
    if member is None:
        raise InvalidArgumentError(f"{dtype} has no counterpart on a device", remedy=f"Convert it to one of {', '.join(_BY_NAME)}.")
    return member


def _check_converted(array: object, result: np.ndarray[Any, Any]) -> None:
    """Refuse what numpy makes an array of that is not what was given."""
    if is_masked(array):
        raise InvalidArgumentError(
            "array is masked, and a device's buffers have no masks", remedy="Give array.filled(value), or array.data."
        )
    if result.dtype.hasobject:
        check_awaited("array", array)
        what = "None" if array is None else f"a {type(array).__name__} of objects" if result.ndim else f"a {type(array).__name__}"
        raise InvalidArgumentError(
            f"array is {what}, not numbers", remedy="Give an array, or anything that numpy makes a numeric array of."
        )


def is_masked(array: object) -> bool:
    """Whether it is an array of numpy's with a mask."""
    masked = sys.modules.get("numpy.ma")  # numpy imports it at first use, which takes a moment
    return masked is not None and isinstance(array, masked.MaskedArray)


def check_awaited(name: str, value: object) -> None:
    """Raise :class:`InvalidArgumentError` if ``value`` is a coroutine: its ``await`` was forgotten."""
    if inspect.iscoroutine(value):
        call = value.__qualname__.rpartition(".")[2]
        value.close()  # it will not be awaited, and is not to be warned of
        raise InvalidArgumentError(f"{name} is the coroutine of {call}(...), not its result", remedy="Await it first.")


MOST_DIMENSIONS = 64
"""Of an array of numpy."""


def flattened(name: str, value: Any) -> tuple[list[Any], tuple[int, ...], set[type]]:
    """Return what is in nested lists, in one, with their shape, and the types that are in it. No array is made.

    Raises
    ------
    InvalidArgumentError
        If the lists of one depth are not of one length, or too deep.
    """
    level: list[Any] = [value]
    shape: tuple[int, ...] = ()
    while True:
        kinds = set(map(type, level))
        are_lists = [issubclass(kind, (list, tuple)) for kind in kinds]
        if not any(are_lists):
            return level, shape, kinds
        if not all(are_lists):  # arrays may be among them
            level = [each.tolist() if hasattr(each, "tolist") else each for each in level]
            are_lists = [isinstance(each, (list, tuple)) for each in level]
        if not all(are_lists) or len(set(map(len, level))) != 1:
            _refuse_ragged(name, level, shape)
        if len(shape) == MOST_DIMENSIONS:
            raise InvalidArgumentError(f"{name} is nested more than {MOST_DIMENSIONS} deep", remedy="Give lists of numbers.")
        shape = (*shape, len(level[0]))
        level = list(chain.from_iterable(level))


def _refuse_ragged(name: str, level: Sequence[Any], shape: tuple[int, ...]) -> NoReturn:
    said = [f"a list of {len(each)}" if isinstance(each, (list, tuple)) else f"a {type(each).__name__}" for each in level]
    other = next(place for place, each in enumerate(said) if each != said[0])
    raise InvalidArgumentError(
        f"{placed(name, other, shape)} is {said[other]}, and {placed(name, 0, shape)} is {said[0]}",
        remedy="Give numbers, or lists of one length.",
    )


def placed(name: str, place: int, shape: tuple[int, ...]) -> str:
    """Return the text for one element of ``name``, an array of ``shape``; ``place`` counts in C order."""
    return f"{name}[{', '.join(map(str, np.unravel_index(place, shape)))}]" if shape else name


def rounded(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return ``array`` converted to ``dtype``, rounded once, to the nearest: ml_dtypes converts wide numbers by way of float32, which rounds twice."""
    if dtype.name in _BY_FLOAT32 and array.dtype.kind in "fiu" and array.dtype.itemsize >= 4 and array.dtype != np.float32:
        array = _to_odd(array)
    return array.astype(dtype, copy=False)


def _to_odd(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return float32: of the two next to a number that it cannot hold, the one whose last bit is 1. Rounding that is rounding the number itself."""
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8:
        # float64 need not hold them: the low bits of large ones become one bit that says whether there are any.
        high = (array >> 16) | ((array & 0xFFFF) != 0)
        array = np.where(high >> 16 == array >> 63, array, high << 16)
    wide = array.astype(np.float64)
    with np.errstate(over="ignore"):
        near = np.asarray(wide.astype(np.float32))
    back, bits = near.astype(np.float64), near.view(np.uint32)
    is_off = (back != wide) & (wide == wide)
    bits -= is_off & (abs(back) > abs(wide))
    bits |= is_off
    return near


def native(array: Any) -> np.ndarray[Any, Any]:
    """Return ``array`` as a C-contiguous numpy array in this machine's byte order, without a copy where it already is one.

    Parameters
    ----------
    array
        Anything ``np.asarray`` takes. Shape (0-d and empty too) and dtype are kept; only byte order and memory layout change.

    Raises
    ------
    InvalidArgumentError
        If it cannot be read as an array, is masked, or its elements have no :class:`DType`.
    """
    if isinstance(array, (list, tuple)) and any(issubclass(kind, (str, bytes)) for kind in flattened("array", array)[2]):
        # Of one long string and many short ones numpy would make an array of as many long ones.
        raise InvalidArgumentError("array has text in it, not only numbers", remedy="Give numbers, or nested lists of them.")
    try:
        result = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of tensors, which say what to call
        on_device = hasattr(array, "__cuda_array_interface__")
        remedy = "It is in device memory: use it as it is, ref = await device.wrap(array)." if on_device else "Pass an array-like."
        raise InvalidArgumentError(f"array is a {type(array).__name__} that cannot be read as an array: {error}", remedy=remedy) from error
    if result is not array:
        _check_converted(array, result)
    if not result.dtype.isnative:
        result = result.astype(result.dtype.newbyteorder("="))
    DType.of(result.dtype)
    # ascontiguousarray would turn a 0-d array into a 1-d one.
    return result if result.flags.c_contiguous else np.array(result, order="C", copy=True)
