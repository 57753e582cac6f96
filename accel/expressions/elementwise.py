"""Functions of elements, as the Python array API standard has them, and the activations of neural networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, apply, cast, dtype_of, floor_divide, is_number, where
from accel.expressions.functions import Functions
from accel.expressions.promotion import COMPLEX, DEFAULT, INTEGERS, UNSIGNED

__all__ = ["ElementwiseFunctions"]

Unary: TypeAlias = Callable[[Any, Array], Array]
Binary: TypeAlias = Callable[[Any, Any, Any], Array]

_WHOLE = frozenset((DType.BOOL, *INTEGERS))
_COMPLEX = frozenset(COMPLEX)


def _named(function: Any, name: str, what: str) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = what
    return function


def _floating(name: str, instruction: str = "") -> Unary:
    """Return a function of floats; integers are converted to the default float."""

    def call(self: Any, x: Array, /) -> Array:
        return apply(instruction or name, cast(x, DEFAULT["real floating"]) if x.dtype in _WHOLE else x)

    return _named(call, name, f"{name} of each element.")  # type: ignore[no-any-return]


def _rounding(name: str, instruction: str = "") -> Unary:
    """Return a function that leaves integers as they are."""

    def call(self: Any, x: Array, /) -> Array:
        return x if x.dtype in _WHOLE else apply(instruction or name, x)

    return _named(call, name, f"{name} of each element; integers stay as they are.")  # type: ignore[no-any-return]


def _testing(name: str, of_integers: bool) -> Unary:
    """Return a test, which is the same for all integers."""

    def call(self: Any, x: Array, /) -> Array:
        if x.dtype in _WHOLE:
            return apply("equal" if of_integers else "not_equal", x, x)
        return apply(name, x)

    return _named(call, name, f"{name} of each element.")  # type: ignore[no-any-return]


def _unary(name: str, instruction: str = "", *, dtype: DType | None = None) -> Unary:
    def call(self: Any, x: Array, /) -> Array:
        return apply(instruction or name, x if dtype is None else cast(x, dtype))

    return _named(call, name, f"{name} of each element.")  # type: ignore[no-any-return]


def _binary(name: str, instruction: str = "", *, dtype: DType | None = None, floating: bool = False) -> Binary:
    def call(self: Any, x1: Any, x2: Any, /) -> Array:
        wanted = dtype
        if floating and isinstance(x1, Array | int | float | complex) and isinstance(x2, Array | int | float | complex):
            found = dtype_of(x1, x2) if isinstance(x1, Array) or isinstance(x2, Array) else None
            wanted = DEFAULT["real floating"] if found in _WHOLE else None
        return apply(instruction or name, x1, x2, dtype=wanted)

    return _named(call, name, f"{name} of elements, which are promoted and broadcast; one of the two may be a number.")  # type: ignore[no-any-return]


class ElementwiseFunctions(Functions):
    """Functions of elements."""

    # The standard's; several are operators too.
    acos = _floating("acos")
    acosh = _floating("acosh")
    add = _binary("add")
    asin = _floating("asin")
    asinh = _floating("asinh")
    atan = _floating("atan")
    atan2 = _binary("atan2", floating=True)
    atanh = _floating("atanh")
    bitwise_and = _binary("bitwise_and")
    bitwise_invert = _unary("bitwise_invert", "invert")
    bitwise_left_shift = _binary("bitwise_left_shift", "left_shift")
    bitwise_or = _binary("bitwise_or")
    bitwise_right_shift = _binary("bitwise_right_shift", "right_shift")
    bitwise_xor = _binary("bitwise_xor")
    ceil = _rounding("ceil")
    copysign = _binary("copysign", floating=True)
    cos = _floating("cos")
    cosh = _floating("cosh")
    divide = _binary("divide", "div", floating=True)
    equal = _binary("equal")
    exp = _floating("exp")
    expm1 = _floating("expm1")
    floor = _rounding("floor")
    greater = _binary("greater")
    greater_equal = _binary("greater_equal")
    hypot = _binary("hypot", floating=True)
    isfinite = _testing("isfinite", of_integers=True)
    isinf = _testing("isinf", of_integers=False)
    isnan = _testing("isnan", of_integers=False)
    less = _binary("less")
    less_equal = _binary("less_equal")
    log = _floating("log")
    log1p = _floating("log1p")
    log2 = _floating("log2")
    log10 = _floating("log10")
    logaddexp = _binary("logaddexp", floating=True)
    logical_and = _binary("logical_and", dtype=DType.BOOL)
    logical_not = _unary("logical_not", dtype=DType.BOOL)
    logical_or = _binary("logical_or", dtype=DType.BOOL)
    logical_xor = _binary("logical_xor", dtype=DType.BOOL)
    maximum = _binary("maximum", "max")
    minimum = _binary("minimum", "min")
    multiply = _binary("multiply", "mul")
    nextafter = _binary("nextafter", floating=True)
    not_equal = _binary("not_equal")
    pow = _binary("pow")
    remainder = _binary("remainder")
    signbit = _floating("signbit")
    sin = _floating("sin")
    sinh = _floating("sinh")
    sqrt = _floating("sqrt")
    subtract = _binary("subtract", "sub")
    tan = _floating("tan")
    tanh = _floating("tanh")
    trunc = _rounding("trunc")

    # Of neural networks.
    elu = _floating("elu")
    erf = _floating("erf")
    gelu = _floating("gelu")
    gelu_tanh = _floating("gelu_tanh")
    leaky_relu = _floating("leaky_relu")
    rsqrt = _floating("rsqrt")
    sigmoid = _floating("sigmoid")
    silu = _floating("silu")
    softplus = _floating("softplus")

    def abs(self, x: Array, /) -> Array:
        """Absolute values; of complex numbers real ones."""
        return x if x.dtype in UNSIGNED else apply("abs", x)

    def negative(self, x: Array, /) -> Array:
        """``-x``; of unsigned integers what is added to ``x`` to get 0, beyond the largest number."""
        return apply("sub", 0, x) if x.dtype in UNSIGNED else apply("neg", x)

    def floor_divide(self, x1: Any, x2: Any, /) -> Array:
        """Return the largest whole numbers that are not above ``x1 / x2``; of integers 0 where ``x2`` is 0."""
        return floor_divide(x1, x2)

    def sign(self, x: Array, /) -> Array:
        """-1, 0 or 1; of a complex number the number divided by its absolute value."""
        if x.dtype in UNSIGNED:
            return cast(apply("not_equal", x, 0), x.dtype)
        return apply("sign", x)

    def relu(self, x: Array, /) -> Array:
        """``x`` where it is positive, else 0."""
        return apply("max", x, 0) if x.dtype in UNSIGNED else apply("relu", x)

    def positive(self, x: Array, /) -> Array:
        """``x``."""
        return x

    def square(self, x: Array, /) -> Array:
        """``x * x``."""
        return apply("mul", x, x)

    def reciprocal(self, x: Array, /) -> Array:
        """``1 / x``."""
        return self.divide(1, x)

    def conj(self, x: Array, /) -> Array:
        """Complex conjugates."""
        return apply("conj", x) if x.dtype in _COMPLEX else x

    def real(self, x: Array, /) -> Array:
        """Real parts."""
        return apply("real", x) if x.dtype in _COMPLEX else x

    def imag(self, x: Array, /) -> Array:
        """Imaginary parts; of real numbers 0."""
        return apply("imag", x) if x.dtype in _COMPLEX else apply("mul", x, 0)

    def round(self, x: Array, /) -> Array:
        """Return the nearest integers; halves to even ones."""
        if x.dtype in _WHOLE:
            return x
        if x.dtype in _COMPLEX:
            imaginary = apply("round", apply("imag", x))
            return cast(apply("round", apply("real", x)), x.dtype) + cast(imaginary, x.dtype) * 1j
        return apply("round", x)

    def clip(self, x: Array, /, min: Any = None, max: Any = None) -> Array:  # the standard's names
        """``x`` with elements below ``min`` set to it, and elements above ``max`` set to that; in the dtype of ``x``.

        A float limit of integers is refused, and so is an integer that the dtype cannot hold.
        """
        for limit, name in ((min, "max"), (max, "min")):
            if limit is None:
                continue
            if is_number(limit) and x.dtype in INTEGERS and isinstance(limit, float) and math.isinf(limit):
                continue
            x = apply(name, x, cast(limit, x.dtype) if isinstance(limit, Array) else limit, dtype=x.dtype)
        return x

    def where(self, condition: Any, x1: Any, x2: Any, /) -> Array:
        """Elements of ``x1`` where ``condition`` is true, else of ``x2``; they are promoted and broadcast, and may be numbers."""
        if is_number(x1) and is_number(x2):
            raise InvalidArgumentError("x1 and x2 are numbers, which have no dtype", remedy="Make an array of one: xp.asarray(1.0).")
        return where(cast(condition, DType.BOOL), x1, x2)

    def astype(self, x: Array, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
        """``x`` converted to ``dtype``. Arrays are immutable: ``copy`` makes no difference to values."""
        self.check_device(device)
        return cast(x, DType.of(dtype))
