"""Functions of arrays, element by element."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np

from accel.dtype import DType, DTypeLike
from accel.enums import BinaryName, BinaryOp, UnaryName, UnaryOp, result_dtype
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, Spec, element, op, operand, plan_of, planned, same_dtype
from accel.ops.family import Family
from accel.ops.fields import to_dtype, to_member
from accel.ops.fused import CONVERSIONS, Fused
from accel.ops.namespace import M, OpNamespace, method
from accel.ref import AccelRef
from accel.views import broadcast

__all__ = ["Binary", "Cast", "Clip", "ElementwiseOps", "Unary", "Where"]


Operand: TypeAlias = AccelRef | complex | np.generic
"""A ref, or a number, which is taken in the dtype of the refs beside it."""

Array = np.ndarray[Any, np.dtype[Any]]

# Built once: the hot path looks a capability's name up instead of putting it together.
_UNARY = {op: f"unary.{op.value}" for op in UnaryOp}
_BINARY = {op: f"binary.{op.value}" for op in BinaryOp}


def _refs(**operands: object) -> dict[str, AccelRef]:
    """Return those operands that are refs; raise if there is none, or one is neither a ref nor a number."""
    refs = {}
    for name, value in operands.items():
        if isinstance(value, AccelRef):
            refs[name] = value
        elif not isinstance(value, (complex, float, int, np.generic)):
            operand(name, value)
    if not refs:
        name, value = next(iter(operands.items()))
        operand(name, value)
    return refs


def _arguments(dtype: DType, **operands: object) -> tuple[AccelRef | Array, ...]:
    """Return the operands as kernels read them: refs, and numbers as 0-d arrays of ``dtype``, which are not written."""
    return tuple([value if isinstance(value, AccelRef) else _element(name, value, dtype) for name, value in operands.items()])


def _element(name: str, value: object, dtype: DType) -> Array:
    if type(value) is float or type(value) is int:
        return _known_element(name, value, math.copysign(1.0, value) if value == 0 else 0.0, dtype)
    return element(name, value, dtype)


@functools.lru_cache(maxsize=1024, typed=True)
def _known_element(name: str, value: float, sign: float, dtype: DType) -> Array:
    """Return a number that ops have over and over again; ``sign`` tells one zero from the other."""
    return element(name, value, dtype)


@op("elementwise")
class _OfElements(OutOp):
    """An op that takes its operands as they lie."""

    def takes_strided(self, ref: AccelRef) -> bool:
        return True


@op(convert={"op": to_member(UnaryOp)})
class Unary(_OfElements):
    """``op(x)``, in the dtype of x; tests such as isnan give bool. ``out`` may be ``x``.

    Parameters
    ----------
    op
        One of :class:`~accel.UnaryOp` or its name, which is numpy's, scipy's (erf), or of an activation: relu, sigmoid, gelu, gelu_tanh, silu, softplus,
        leaky_relu (slope 0.01), elu (alpha 1).
    x
        Any shape.
    out
        Buffer to write.
    """

    op: UnaryName | UnaryOp
    x: AccelRef

    def is_plain(self) -> bool:
        """Return whether neither operand nor result is strided."""
        return not (self.x.is_strided or (self.out is not None and self.out.is_strided))

    def plan(self) -> Plan:
        x, op = operand("x", self.x), cast("UnaryOp", self.op)
        made = result_dtype(op, x.dtype)
        if self.out is None:  # mostly there is none
            return plan_of(((x,), (), (Spec(x.shape, made),), _UNARY[op], x.dtype, False, None))
        return planned(self.out, {"x": x}, x.shape, made, _UNARY[op], of=x.dtype, in_place=("x",))


@op(convert={"op": to_member(BinaryOp)})
class Binary(_OfElements):
    """``op(x, y)``, broadcast as in numpy, in the operands' one dtype; comparisons and logic give bool. ``out`` may be an operand of its shape.

    Parameters
    ----------
    op
        One of :class:`~accel.BinaryOp` or its name: add, sub, mul, div, max, min, pow, remainder; equal, not_equal, less, less_equal, greater,
        greater_equal; of bool logical_and, logical_or, logical_xor.
    x, y
        Refs of one dtype, or one of the two a number, which that dtype can hold.
    out
        Buffer to write.
    """

    op: BinaryName | BinaryOp
    x: Operand
    y: Operand

    @property
    def dtype(self) -> DType:
        """The operands' dtype."""
        return (self.x if isinstance(self.x, AccelRef) else operand("y", self.y)).dtype

    def is_plain(self) -> bool:
        """Return whether both operands are refs of one shape, and none is strided."""
        x, y, out = self.x, self.y, self.out
        if out is None and type(x) is AccelRef is type(y):  # mostly they are so
            return x.shape == y.shape
        if not (isinstance(x, AccelRef) and isinstance(y, AccelRef)):
            return False
        return x.shape == y.shape and not x.is_strided and not y.is_strided and (out is None or not out.is_strided)

    def arguments(self) -> tuple[AccelRef | Array, ...]:
        """Return the operands as kernels read them: refs, and numbers as 0-d arrays."""
        return _arguments(self.dtype, x=self.x, y=self.y)

    def plan(self) -> Plan:
        x, y, op = self.x, self.y, cast("BinaryOp", self.op)
        if isinstance(x, AccelRef) and isinstance(y, AccelRef):
            dtype = x.dtype if x.dtype is y.dtype else same_dtype(x=x, y=y)
            if self.out is None and x.shape == y.shape:  # mostly they are so
                return plan_of(((x, y), (), (Spec(x.shape, result_dtype(op, dtype)),), _BINARY[op], dtype, False, None))
            refs, shape = {"x": x, "y": y}, broadcast(x.shape, y.shape)
        else:
            refs = _refs(x=x, y=y)
            (ref,) = refs.values()
            shape, dtype = ref.shape, ref.dtype
            _arguments(dtype, x=x, y=y)
        return planned(self.out, refs, shape, result_dtype(op, dtype), _BINARY[op], of=dtype, in_place=("x", "y"))


@op()
class Where(_OfElements):
    """Elements of ``x`` where ``condition`` is true, else of ``y``, broadcast as in numpy. ``out`` may be an operand of its shape.

    Parameters
    ----------
    condition
        Of bool.
    x, y
        Refs of one dtype, or one of the two a number, which that dtype can hold.
    out
        Buffer to write.
    """

    condition: AccelRef
    x: Operand
    y: Operand

    def arguments(self) -> tuple[AccelRef | Array, ...]:
        """Return the operands as kernels read them: refs, and numbers as 0-d arrays."""
        x = self.x if isinstance(self.x, AccelRef) else operand("y", self.y)
        return self.condition, *_arguments(x.dtype, x=self.x, y=self.y)

    def plan(self) -> Plan:
        condition, refs = operand("condition", self.condition), _refs(x=self.x, y=self.y)
        if condition.dtype is not DType.BOOL:
            raise InvalidArgumentError(
                f"condition is {condition.dtype.value}", remedy="Compare first: device.elementwise.binary('not_equal', condition, 0)."
            )
        dtype = same_dtype(**refs)
        self.arguments()
        shape = broadcast(condition.shape, *[ref.shape for ref in refs.values()])
        return planned(self.out, {"condition": condition, **refs}, shape, dtype, "where", in_place=("condition", *refs))


@op()
class Clip(_OfElements):
    """``x`` with elements below ``min`` set to it, and then elements above ``max``, broadcast as in numpy. ``out`` may be an operand of its shape.

    Parameters
    ----------
    x
        Any shape.
    min, max
        Refs of the dtype of ``x``, or numbers, which that dtype can hold; ``None`` for no limit.
    out
        Buffer to write.
    """

    x: AccelRef
    min: Operand | None = None
    max: Operand | None = None

    def arguments(self) -> tuple[AccelRef | Array, ...]:
        """Return the operands as kernels read them: refs, and numbers as 0-d arrays."""
        x, least, most = self._operands()
        return _arguments(self.x.dtype, x=x, min=least, max=most)

    def _operands(self) -> tuple[Operand, Operand, Operand]:
        """Return x and its limits: where there is none, the limits of the dtype."""
        least, most = self.min, self.max
        if least is None or most is None:
            dtype = self.x.dtype
            ends = (np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max) if dtype.is_integer else (-math.inf, math.inf)
            least, most = ends[0] if least is None else least, ends[1] if most is None else most
        return self.x, least, most

    def plan(self) -> Plan:
        operand("x", self.x)
        x, least, most = self._operands()
        refs = _refs(x=x, min=least, max=most)
        dtype = same_dtype(**refs)
        self.arguments()
        return planned(self.out, refs, broadcast(*[ref.shape for ref in refs.values()]), dtype, "clip", in_place=tuple(refs))


@op(convert={"dtype": to_dtype})
class Cast(_OfElements):
    """The elements of ``x`` as ``dtype``.

    Floats are rounded to the nearest, and towards zero for integers. What an integer type cannot hold, NaN included, gives any value. True is 1, and all
    but 0 is true. Complex numbers become complex ones or bool.

    Parameters
    ----------
    x
        Any shape.
    dtype
        Of the result: any but the 8-bit and 4-bit floats.
    out
        Buffer to write; not ``x``, unless the dtype is the same.
    """

    x: AccelRef
    dtype: DTypeLike

    def arguments(self) -> tuple[AccelRef | Array, ...]:
        """Return the operand."""
        return (self.x,)

    def plan(self) -> Plan:
        x, dtype = operand("x", self.x), DType.of(self.dtype)
        if dtype.value not in CONVERSIONS:
            raise UnsupportedError(f"cast to {dtype.value} is not offered", remedy=f"It takes {', '.join(CONVERSIONS)}.")
        if x.dtype.is_complex and not dtype.is_complex and dtype is not DType.BOOL:
            raise InvalidArgumentError(f"cast of {x.dtype.value} to {dtype.value} would drop the imaginary part", remedy="Cast to complex.")
        return planned(self.out, {"x": x}, x.shape, dtype, "cast", of=x.dtype, in_place=("x",))


class ElementwiseOps(OpNamespace[M]):
    """Functions of arrays, element by element, in the operands' dtype: nothing is converted but by ``cast``."""

    __slots__ = ()

    library: ClassVar = "elementwise"
    aliases: ClassVar = {
        **{op.value: f".unary({op.value!r}, x)" for op in UnaryOp},
        **{op.value: f".binary({op.value!r}, x, y)" for op in BinaryOp},
        "astype": ".cast(x, dtype)",
        "maximum": ".binary('max', x, y)",
        "minimum": ".binary('min', x, y)",
    }

    unary = method(Unary)
    binary = method(Binary)
    where = method(Where)
    clip = method(Clip)
    cast = method(Cast)
    fused = method(Fused)


FAMILY = Family(ElementwiseOps)
