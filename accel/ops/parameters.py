"""The parameters of kernels that users write: their types, and numbers as the bytes that a launch takes."""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.values import converted, number

__all__ = ["Parameter", "packed", "parse_parameter"]

_WORD = 8
_MASK = (1 << 64) - 1
_FLOATS = {DType.FLOAT16: struct.Struct("<e"), DType.FLOAT32: struct.Struct("<f"), DType.FLOAT64: struct.Struct("<d")}
_INT64 = (-(1 << 63), (1 << 64) - 1)
_TYPES = "Use a dtype's name, such as 'int64', or a pointer, such as 'float32*', 'const float32*' or 'void*'."


@dataclass(frozen=True, slots=True)
class Parameter:
    """The type of one parameter.

    Parameters
    ----------
    dtype
        Of the number, or of the elements behind the pointer; ``None`` for ``void*``.
    is_pointer
        Whether it takes a ref.
    is_const
        Whether the kernel only reads what is behind the pointer.
    limits
        The least and the largest integer; ``None`` for other types.
    """

    dtype: DType | None
    is_pointer: bool = False
    is_const: bool = False
    limits: tuple[int, int] | None = None

    def __str__(self) -> str:
        text = "void" if self.dtype is None else self.dtype.value
        return f"{'const ' * self.is_const}{text}{'*' * self.is_pointer}"

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return _WORD if self.is_pointer or self.dtype is None else self.dtype.itemsize

    def words(self, name: str, value: object) -> tuple[int, ...]:
        """Return a number as little-endian words of 8 bytes, converted to this type.

        Raises
        ------
        InvalidArgumentError
            If it is no number, or this type cannot hold it.
        """
        dtype = self.dtype
        assert dtype is not None, "a pointer takes no number"
        if self.limits is not None:
            return (self._integer(name, value),)
        coder = _FLOATS.get(dtype)
        if coder is not None and type(value) is float:
            try:
                return (int.from_bytes(coder.pack(value), "little"),)
            except OverflowError:
                raise self._beyond(name, value) from None
        return self._converted(name, value, dtype)

    def _integer(self, name: str, value: object) -> int:
        least, largest = self.limits or _INT64
        if isinstance(value, np.bool_):
            value = bool(value)
        try:
            whole = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidArgumentError(f"{name} is {value!r}, and the parameter is {self}", remedy="Give an int.") from None
        if not least <= whole <= largest:
            raise self._beyond(name, value)
        return whole & _MASK

    def _converted(self, name: str, value: object, dtype: DType) -> tuple[int, ...]:
        return _words(converted(name, number(name, value), dtype).tobytes())

    def _beyond(self, name: str, value: object) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{name} is {value!r}, which {self} cannot hold", remedy="Give a smaller number, or widen the parameter."
        )


@lru_cache(maxsize=1024)
def parse_parameter(text: str) -> Parameter:
    """Return the type that ``text`` names: ``"int64"``, ``"float32*"``, ``"const float32*"``, ``"void*"``.

    Raises
    ------
    InvalidArgumentError
        If it names none.
    """
    body, star, rest = text.partition("*")
    words = body.split()
    is_const = "const" in words
    names = [word for word in words if word != "const"]
    if rest.strip() or len(names) != 1 or words.count("const") > 1:
        raise InvalidArgumentError(f"{text!r} is not the type of a parameter", remedy=_TYPES)
    if names[0] == "void" and star:
        return Parameter(None, is_pointer=True, is_const=is_const)
    try:
        # By name alone: numpy would take "float" for float64, which in CUDA C++ it is not.
        dtype = DType(names[0])
    except ValueError:
        raise InvalidArgumentError(f"{text!r} is not the type of a parameter", remedy=_TYPES) from None
    if star:
        return Parameter(dtype, is_pointer=True, is_const=is_const)
    if dtype is DType.BOOL:
        return Parameter(dtype, limits=(0, 1))
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)
        return Parameter(dtype, limits=(int(limits.min), int(limits.max)))
    return Parameter(dtype)


def packed(name: str, value: object, size: int | None) -> tuple[int, ...]:
    """Return a number whose type says how many bytes it has, as little-endian words of 8 bytes.

    Parameters
    ----------
    name
        What it is, for errors.
    value
        A numpy or ml_dtypes scalar, or a Python bool (1 byte), int or float (8 bytes).
    size
        Bytes of the parameter; ``None`` where that is not known.

    Raises
    ------
    InvalidArgumentError
        If it is none of these, or does not have that size.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if type(value) is bool:
        data = bytes((value,))
    elif type(value) is int:
        if not _INT64[0] <= value <= _INT64[1]:
            raise InvalidArgumentError(f"{name} is {value}, which 8 bytes cannot hold", remedy="Give a smaller number.")
        data = (value & _MASK).to_bytes(_WORD, "little")
    elif type(value) is float:
        data = _FLOATS[DType.FLOAT64].pack(value)
    elif isinstance(value, np.generic) and not value.dtype.hasobject:
        data = value.tobytes()
    else:
        raise InvalidArgumentError(
            f"{name} is a {type(value).__name__}", remedy="Give a ref (await device.put(array)) or a number, such as np.float32(x)."
        )
    if size is not None and len(data) != size:
        raise InvalidArgumentError(
            f"{name} is a {type(value).__name__} of {len(data)} byte(s), and the parameter has {size}", remedy=_sized(value, size)
        )
    return _words(data)


def _sized(value: Any, size: int) -> str:
    kind = "float" if isinstance(value, (float, np.floating)) else "int"
    names = {("float", 2): "float16", ("float", 4): "float32", ("float", 8): "float64", ("int", 1): "int8", ("int", 2): "int16"}
    name = names.get((kind, size), {4: "int32", 8: "int64"}.get(size))
    if name is None:
        return "Give a numpy scalar of that size (for a struct, an np.void of its dtype)."
    return f"Give np.{name}(x), or the types of the parameters when the kernel is compiled."


def _words(data: bytes) -> tuple[int, ...]:
    if len(data) <= _WORD:
        return (int.from_bytes(data, "little"),)
    return tuple([int.from_bytes(data[start : start + _WORD], "little") for start in range(0, len(data), _WORD)])
