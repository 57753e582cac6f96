"""Numbers from outside, taken by value: what a dtype can hold is converted, and anything else refused, with its place and the range.

Inputs of models, bodies of requests, padding and scalars of ops are all converted here. Kinds and lengths are looked at before an array is made: what a client
sent costs time and memory in proportion to its length, whatever it is.
"""

from __future__ import annotations

import contextlib
import math
import operator
import reprlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import ml_dtypes
import numpy as np

from accel.dtype import DType, check_awaited, flattened, is_masked, placed, rounded
from accel.errors import AccelError, InvalidArgumentError
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import TypeIs

__all__ = ["check_choice", "check_count", "check_flag", "check_seconds", "check_timeout", "converted", "number"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_PLAIN = {bool, int, float, complex}
_WITHOUT_INFINITY = (DType.FLOAT8_E4M3FN, DType.FLOAT4_E2M1FN)


def number(name: str, value: object) -> Any:
    """Return ``value`` as an int, a float or a complex, whichever it is; numpy's and ml_dtypes' scalars and 0-d arrays are numbers too.

    Raises
    ------
    InvalidArgumentError
        If it is no number, or a real one beyond the range of a float64.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    kind = type(value)
    try:
        # In this order: a complex of numpy's has a __float__, which drops the imaginary part.
        if isinstance(value, (complex, np.complexfloating)):
            return complex(value)
        if isinstance(value, np.bool_):
            return int(value)
        if not isinstance(value, (np.ndarray, AccelRef)):
            if hasattr(kind, "__index__"):
                with contextlib.suppress(TypeError):  # a tensor of a float has the method, too
                    return int(operator.index(cast("int", value)))
            if hasattr(kind, "__float__"):
                return float(cast("float", value))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"{name} is {_shown(value)}: {error}", remedy="Give a finite number.") from error
    raise InvalidArgumentError(f"{name} is {_shown(value)}, which is not a number", remedy="Give an int, a float or a complex.")


def check_choice(name: str, value: object, *choices: str) -> None:
    """Raise unless ``value`` is one of these texts: not an array that compares with them element by element, and not what has no hash.

    Raises
    ------
    InvalidArgumentError
        It says which there are.
    """
    if not isinstance(value, str) or value not in choices:
        *most, last = map(repr, choices)
        raise InvalidArgumentError(f"{name} is {_shown(value)}", remedy=f"Use {', '.join(most)} or {last}.")


def check_count(name: str, value: int, least: int = 1, *, remedy: str | None = None) -> int:
    """Return ``value`` if it is an int of at least ``least``.

    Raises
    ------
    InvalidArgumentError
        It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{name} is {value!r:.80}", remedy=remedy or f"Give an int of at least {least}.")
    return value


def check_seconds(name: str, value: object, *, or_zero: bool = True, or_endless: bool = False) -> None:
    """Raise unless ``value`` is a number of seconds, at least 0.

    Parameters
    ----------
    or_zero, or_endless
        Whether it may be 0, and infinite.

    Raises
    ------
    InvalidArgumentError
        It is not.
    """
    if not _is_time(value) or value < 0 or (value == 0 and not or_zero) or (value == math.inf and not or_endless):
        raise InvalidArgumentError(f"{name} is {value!r:.80}", remedy=f"Give seconds, {'at least' if or_zero else 'above'} 0.")


def check_timeout(value: object) -> None:
    """Raise unless ``value`` is a timeout: seconds, which may be infinite, and have no time left where they are not above 0; or ``None``.

    Raises
    ------
    InvalidArgumentError
        It is not.
    """
    if value is not None and not _is_time(value):
        raise InvalidArgumentError(f"timeout is {value!r:.80}", remedy="Give seconds, or None to wait as long as it takes.")


def _is_time(value: object) -> TypeIs[float]:
    """Return whether it is a number that can be added to a clock's: not NaN, and no int that is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max or abs(value) == math.inf


def check_flag(name: str, value: object) -> None:
    """Raise unless ``value`` is a bool.

    Raises
    ------
    InvalidArgumentError
        It is not.
    """
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {value!r:.80}", remedy="Give True or False.")


def converted(
    name: str, value: Any, dtype: DType, *, copy: bool = False, finite: bool = False, to_infinity: bool = False, argument: str | None = None
) -> Array:
    """Return numbers as an array of ``dtype``.

    Integer types take whole numbers in their range and boolean ones 0 and 1, whatever the numbers are written as. Floats take the nearest that they have.

    Parameters
    ----------
    name
        What errors call it.
    value
        A number, nested lists of numbers, or an array of any library that numpy knows.
    dtype
        Of the array.
    copy
        Return an array that shares no memory with ``value``.
    finite
        Refuse NaN and infinities.
    to_infinity
        Let numbers beyond a float's range become infinite, as numpy has it, instead of refusing them.
    argument
        The ``argument`` of errors.

    Raises
    ------
    InvalidArgumentError
        If something is no number, or beyond the range, or lists are not of one length.
    """
    if type(value) is np.ndarray and value.dtype == dtype.numpy and not finite:
        return value.copy() if copy else value
    check_awaited(name, value)
    try:
        with np.errstate(all="ignore"):
            result = _Conversion(name, dtype, finite, to_infinity).of(value)
    except InvalidArgumentError as error:
        error.argument = argument
        raise
    return result.copy() if copy and not isinstance(value, (list, tuple)) else result


@dataclass(slots=True)
class _Conversion:
    """What is wanted of numbers; the parameters are those of :func:`converted`."""

    name: str
    dtype: DType
    finite: bool
    to_infinity: bool

    def of(self, value: Any) -> Array:
        """Convert anything."""
        if isinstance(value, (list, tuple)) or _is_single(type(value)):
            return self._of_flat(*flattened(self.name, value))
        try:
            array = np.asarray(value)
        except AccelError:
            raise
        except Exception as error:  # arrays of other libraries raise anything
            raise InvalidArgumentError(
                f"{self.name} is no array: {error}", remedy="Give numbers, or an array of them in host memory."
            ) from error
        if is_masked(value):
            raise InvalidArgumentError(f"{self.name} is masked, and inputs have no masks", remedy="Give array.filled(value).")
        return self._of_array(array)

    def _of_flat(self, level: list[Any], shape: tuple[int, ...], kinds: set[type]) -> Array:
        if not kinds <= _PLAIN:
            if len(kinds) == 1 and issubclass(next(iter(kinds)), (np.number, np.bool_)):  # as list(array) has them
                return self._of_array(np.array(level).reshape(shape))
            if not all(map(_is_single, kinds)):
                return self._of_arrays(level, shape)
            level = [each if type(each) in _PLAIN else number(placed(self.name, i, shape), each) for i, each in enumerate(level)]
            kinds = set(map(type, level))
        if complex in kinds and not self.dtype.is_complex:
            self._refuse_first(level, shape, lambda each: type(each) is complex)
        if self.dtype.is_integer or self.dtype is DType.BOOL:
            return self._of_whole(level, shape, float in kinds)
        try:
            wide = np.array(level, np.complex128 if self.dtype.is_complex else np.float64)
        except OverflowError:
            self._refuse_first(level, shape, _is_beyond_float64)
        return self._as_floats(wide.reshape(shape))

    def _of_whole(self, level: list[Any], shape: tuple[int, ...], has_floats: bool) -> Array:
        least, most = self._limits
        if has_floats:
            level = [int(each) if type(each) is float and each.is_integer() else each for each in level]
            if any(type(each) is float for each in level):
                self._refuse_first(level, shape, lambda each: type(each) is float)
        try:
            made = np.array(level, np.uint8 if self.dtype is DType.BOOL else self.dtype.numpy)
        except OverflowError:
            made = None
        if made is None or (self.dtype is DType.BOOL and made.max(initial=0) > 1):
            self._refuse_first(level, shape, lambda each: not least <= each <= most)
        return made.astype(self.dtype.numpy, copy=False).reshape(shape)

    def _of_arrays(self, level: list[Any], shape: tuple[int, ...]) -> Array:
        """Convert a flat list that has arrays in it."""
        rows = [replace(self, name=placed(self.name, i, shape)).of(each) for i, each in enumerate(level)]
        for i, row in enumerate(rows):
            if row.shape != rows[0].shape:
                raise InvalidArgumentError(
                    f"{placed(self.name, i, shape)} has shape {row.shape}, and {placed(self.name, 0, shape)} has {rows[0].shape}",
                    remedy="Give arrays of one shape.",
                )
        return np.stack(rows).reshape(shape + rows[0].shape)

    def _of_array(self, array: Array) -> Array:
        kind = array.dtype.kind
        if kind == "O":
            content = array.tolist()
            return self._of_flat(*flattened(self.name, content if array.ndim else number(self.name, content)))
        is_number = kind in "biufc" or (kind == "V" and array.dtype.fields is None and hasattr(ml_dtypes, array.dtype.name))
        if not is_number or (kind == "c" and not self.dtype.is_complex):
            raise InvalidArgumentError(f"{self.name} is of dtype {array.dtype}, not {self.dtype.value}", remedy=f"Give {self._range}.")
        if not (self.dtype.is_integer or self.dtype is DType.BOOL):
            return self._as_floats(array)
        least, most = self._limits
        if kind in "biu":
            if array.size and not (least <= int(array.min()) and int(array.max()) <= most):
                self._refuse_where((array < least) | (array > most), array)
        else:
            wide = array if array.dtype.itemsize >= 8 else array.astype(np.float64)
            # The largest number of a wide type is no float64; the number after it is a power of 2, which is.
            is_held = (wide >= least) & (wide < float(most + 1)) & (np.trunc(wide) == wide)
            if not is_held.all():
                self._refuse_where(~is_held, array)
        return array.astype(self.dtype.numpy, copy=False)

    def _as_floats(self, wide: Array) -> Array:
        """Convert to a float or complex dtype."""
        result = rounded(wide, self.dtype.numpy)
        if not self.finite and (self.to_infinity or wide.dtype == result.dtype):
            return result
        is_finite = np.isfinite(result)
        if self.dtype not in _WITHOUT_INFINITY and is_finite.all():
            return result
        beyond = ~is_finite if self.finite else ~is_finite & np.isfinite(wide)
        if self.dtype in _WITHOUT_INFINITY:
            beyond |= np.isinf(wide)
        if self.dtype is DType.FLOAT4_E2M1FN:  # it has no NaN either, and its conversion stays finite
            beyond |= ~(abs(wide) <= self._largest)
        if beyond.any():
            self._refuse_where(beyond, wide)
        return result

    @property
    def _largest(self) -> float:
        """The largest number of a float or complex dtype."""
        finfo: Any = ml_dtypes.finfo
        return float(finfo(self.dtype.numpy).max)

    @property
    def _limits(self) -> tuple[int, int]:
        """The range of an integer or boolean dtype."""
        if self.dtype is DType.BOOL:
            return 0, 1
        info = np.iinfo(self.dtype.numpy)
        return int(info.min), int(info.max)

    @property
    def _range(self) -> str:
        """What the dtype takes, in words."""
        if self.dtype is DType.BOOL:
            return "false and true, or 0 and 1"
        if self.dtype.is_integer:
            return "whole numbers from {} to {}".format(*self._limits)
        kind = "complex numbers" if self.dtype.is_complex else "numbers"
        return f"{'finite ' if self.finite else ''}{kind} up to {self._largest:.4g} in magnitude"

    def _refuse_first(self, level: list[Any], shape: tuple[int, ...], is_wrong: Callable[[Any], bool]) -> NoReturn:
        place = next(i for i, each in enumerate(level) if is_wrong(each))
        self._refuse(level[place], place, shape)

    def _refuse_where(self, wrong: Array, array: Array) -> NoReturn:
        place = int(np.argmax(wrong))
        self._refuse(number(self.name, array.flat[place]), place, array.shape)

    def _refuse(self, value: object, place: int, shape: tuple[int, ...]) -> NoReturn:
        raise InvalidArgumentError(
            f"{placed(self.name, place, shape)} is {_shown(value)}, which {self.dtype.value} cannot hold",
            remedy=f"Give {self._range}, or another dtype.",
        )


def _is_single(kind: type) -> bool:
    """Whether values of a type are one number, or none, and not arrays of numbers."""
    if issubclass(kind, (np.generic, str, bytes, dict, set, type(None))):
        return True
    return (hasattr(kind, "__float__") or hasattr(kind, "__index__")) and not hasattr(kind, "__array__")


def _is_beyond_float64(value: Any) -> bool:
    try:
        complex(value)
    except OverflowError:
        return True
    return False


def _shown(value: object) -> str:
    """Return a short text for a value of any size."""
    try:
        return reprlib.repr(value)
    except Exception:  # a repr() may raise anything; Python's own does for integers of thousands of digits
        return f"a {type(value).__name__}"
