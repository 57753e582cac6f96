"""Functions of one or two arrays, element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel.compute import BinaryOp, UnaryOp
from accel.errors import InvalidArgumentError
from accel.ops.base import KernelOp, Plan, in_place_or_apart, operand, plan_of, result_in, same_dtype
from accel.ref import AccelRef

__all__ = ["Binary", "Unary"]

# Built once: the hot path looks a capability's name up instead of putting it together.
_UNARY = {op: f"unary.{op.value}" for op in UnaryOp}
_BINARY = {op: f"binary.{op.value}" for op in BinaryOp}


@dataclass(frozen=True, eq=False, slots=True)
class Unary(KernelOp):
    """``op(x)``, in the dtype of x; ``out`` may be ``x``."""

    library: ClassVar[str] = "elementwise"
    kind: ClassVar[str] = "unary"

    op: UnaryOp
    x: AccelRef
    out: AccelRef | None = None

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, out = self.x, self.out
        if type(x) is not AccelRef:  # nearly always it is
            operand("x", x)
        writes, creates = result_in(out, x.shape, x.dtype)
        if out is not None and out is not x and out.buffer == x.buffer:
            in_place_or_apart(out, x=x)
        return plan_of(((x,), writes, creates, _UNARY[self.op], x.dtype, False))


@dataclass(frozen=True, eq=False, slots=True)
class Binary(KernelOp):
    """``op(x, y)`` for arrays of one shape and dtype; ``out`` may be either."""

    library: ClassVar[str] = "elementwise"
    kind: ClassVar[str] = "binary"

    op: BinaryOp
    x: AccelRef
    y: AccelRef
    out: AccelRef | None = None

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
        return plan_of(((x, y), writes, creates, _BINARY[self.op], dtype, False))
