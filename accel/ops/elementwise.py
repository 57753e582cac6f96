"""Functions of one or two arrays, element by element."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from accel.compute import BinaryName, BinaryOp, UnaryName, UnaryOp
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, in_place_or_apart, operand, plan_of, result_in, same_dtype
from accel.ops.family import Family, KernelLane
from accel.ops.fields import member, set_fields
from accel.ops.namespace import OpNamespace, method
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FAMILY", "Binary", "ElementwiseOps", "Unary"]

M = TypeVar("M")

# Built once: the hot path looks a capability's name up instead of putting it together.
_UNARY = {op: f"unary.{op.value}" for op in UnaryOp}
_BINARY = {op: f"binary.{op.value}" for op in BinaryOp}


@dataclass(frozen=True, eq=False, slots=True)
class Unary(FamilyOp):
    """``op(x)``, in the dtype of x: relu, sigmoid, tanh, exp, log, sqrt, abs or neg. ``out`` may be ``x``."""

    library: ClassVar[str] = "elementwise"
    kind: ClassVar[str] = "unary"

    op: UnaryName | UnaryOp
    x: AccelRef
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``op``."""
        if type(self.op) is not UnaryOp:
            set_fields(self, op=member(UnaryOp, self.op))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, out = self.x, self.out
        if type(x) is not AccelRef:  # nearly always it is
            operand("x", x)
        writes, creates = result_in(out, x.shape, x.dtype)
        if out is not None and out is not x and out.buffer == x.buffer:
            in_place_or_apart(out, x=x)
        return plan_of(((x,), writes, creates, _UNARY[member(UnaryOp, self.op)], x.dtype, False, None))


@dataclass(frozen=True, eq=False, slots=True)
class Binary(FamilyOp):
    """``op(x, y)`` for arrays of one shape and dtype: add, sub, mul, div, max or min. ``out`` may be an operand."""

    library: ClassVar[str] = "elementwise"
    kind: ClassVar[str] = "binary"

    op: BinaryName | BinaryOp
    x: AccelRef
    y: AccelRef
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``op``."""
        if type(self.op) is not BinaryOp:
            set_fields(self, op=member(BinaryOp, self.op))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, y, out = operand("x", self.x), operand("y", self.y), self.out
        dtype = same_dtype(x=x, y=y)
        if x.shape != y.shape:
            raise InvalidArgumentError(
                f"x has shape {x.shape} and y has {y.shape}", remedy="Give both the same shape; nothing is broadcast."
            )
        writes, creates = result_in(out, x.shape, dtype)
        if out is not None and (out.buffer == x.buffer or out.buffer == y.buffer):
            in_place_or_apart(out, x=x, y=y)
        return plan_of(((x, y), writes, creates, _BINARY[member(BinaryOp, self.op)], dtype, False, None))


class ElementwiseOps(OpNamespace[M]):
    """Functions of one or two arrays, element by element, in the operands' dtype."""

    __slots__ = ()

    library: ClassVar[str] = "elementwise"
    aliases: ClassVar[Mapping[str, str]] = {
        **{op.value: f".unary({op.value!r}, x)" for op in UnaryOp},
        **{op.value: f".binary({op.value!r}, x, y)" for op in BinaryOp},
    }

    unary = method(Unary)
    binary = method(Binary)


def _unary(lane: KernelLane, op: Unary, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Apply a function of one element."""
    lane.compute.unary(member(UnaryOp, op.op), inputs[0], outputs[0], op.x.size, dtype=op.x.dtype)


def _binary(lane: KernelLane, op: Binary, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Apply a function of two elements."""
    lane.compute.binary(member(BinaryOp, op.op), inputs[0], inputs[1], outputs[0], op.x.size, dtype=op.x.dtype)


FAMILY = Family(ElementwiseOps, {"unary": _unary, "binary": _binary})
