"""What can be asked of dtypes and of a namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, dtype_of, is_number
from accel.expressions.linear import LinearFunctions
from accel.expressions.promotion import DEFAULT, KINDS, NUMBERS, promoted, real_of

__all__ = ["DTypeFunctions", "FloatInfo", "IntegerInfo", "NamespaceInfo"]


@dataclass(frozen=True)
class FloatInfo:
    """Limits of a float dtype; of a complex one, those of its parts."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IntegerInfo:
    """Limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


class NamespaceInfo:
    """What a namespace can do."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def capabilities(self) -> dict[str, Any]:
        """Return what is offered: masks and shapes that depend on values, and arrays of up to 64 dimensions, as numpy has them."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> Any:
        """Return the device."""
        return self._device

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        """Return the dtypes of arrays that are made of Python's numbers."""
        return {name: DEFAULT[name] for name in ("real floating", "complex floating", "integral", "indexing")}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        """Return the standard's dtypes of a kind, or of several, by their names; float16 and bfloat16 are not of the standard."""
        every: dict[str, DType] = {dtype.value: dtype for dtype in (DType.BOOL, *NUMBERS) if dtype not in (DType.FLOAT16, DType.BFLOAT16)}
        return every if kind is None else {name: dtype for name, dtype in every.items() if _is_of(dtype, kind)}

    def devices(self) -> list[Any]:
        """Return the device."""
        return [self._device]


class DTypeFunctions(LinearFunctions):
    """Functions of dtypes."""

    def isdtype(self, dtype: DType, kind: Any) -> bool:
        """Return whether a dtype is another one, is of a named kind, or either of several."""
        return _is_of(DType.of(dtype), kind)

    def can_cast(self, from_: Any, to: DType, /) -> bool:
        """Return whether promotion converts a dtype, or that of an array, to another one."""
        source = from_.dtype if isinstance(from_, Array) else DType.of(from_)
        try:
            return promoted(source, DType.of(to)) is DType.of(to)
        except InvalidArgumentError:
            return False

    def result_type(self, *arrays_and_dtypes: Any) -> DType:
        """Return the dtype that arrays, dtypes and numbers are promoted to."""
        numbers = [each for each in arrays_and_dtypes if is_number(each)]
        dtypes = [each.dtype if isinstance(each, Array) else DType.of(each) for each in arrays_and_dtypes if not is_number(each)]
        if not dtypes:
            raise InvalidArgumentError("numbers have no dtype", remedy="Give an array or a dtype besides.")
        like = self.make((), promoted(*dtypes), None)
        return dtype_of(like, *numbers)

    def finfo(self, type: Any, /) -> FloatInfo:  # the standard's name
        """Return the limits of a float or complex dtype, or of an array's."""
        dtype = real_of(type.dtype if isinstance(type, Array) else DType.of(type))
        if not dtype.is_floating:
            raise InvalidArgumentError(f"{dtype.value} is no float", remedy="Use iinfo.")
        finfo: Any = ml_dtypes.finfo
        of = finfo(dtype.numpy)
        return FloatInfo(8 * dtype.itemsize, float(of.eps), float(of.max), float(of.min), float(of.smallest_normal), dtype)

    def iinfo(self, type: Any, /) -> IntegerInfo:  # the standard's name
        """Return the limits of an integer dtype, or of an array's."""
        dtype = type.dtype if isinstance(type, Array) else DType.of(type)
        if not dtype.is_integer:
            raise InvalidArgumentError(f"{dtype.value} is no integer", remedy="Use finfo.")
        of = np.iinfo(dtype.numpy)
        return IntegerInfo(of.bits, int(of.max), int(of.min), dtype)

    def __array_namespace_info__(self) -> NamespaceInfo:
        """Return what the namespace can do."""
        return NamespaceInfo(self.device)


def _is_of(dtype: DType, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(_is_of(dtype, each) for each in kind)
    if isinstance(kind, DType):
        return dtype is kind
    if kind not in KINDS:
        raise InvalidArgumentError(f"{kind!r} is no kind of dtypes", remedy=f"Use one of {', '.join(map(repr, KINDS))}.")
    return dtype in KINDS[kind]
