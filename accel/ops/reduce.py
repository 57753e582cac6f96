"""Reductions along one axis, or over everything."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from accel.compute import ReduceName, ReduceOp
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, Shape, not_aliased, operand, result_in
from accel.ops.family import Family, KernelLane
from accel.ops.fields import integer, member, set_fields
from accel.ops.namespace import OpNamespace, method
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FAMILY", "Reduce", "ReduceOps"]

M = TypeVar("M")

_CAPABILITY = {op: f"reduce.{op.value}" for op in ReduceOp}
_AXIS = "Give the number of one dimension, from 0 or, counted from the end, from -1; or None for all of them."


@dataclass(frozen=True, eq=False, slots=True)
class Reduce(FamilyOp):
    """``op`` along ``axis``, in the dtype of x.

    Parameters
    ----------
    op
        What to compute: sum, mean, max or min.
    x
        Any shape.
    axis
        Counted from the end where negative; ``None`` reduces over everything.
    keepdims
        Whether reduced dimensions stay, with length 1.
    out
        Buffer to write; not ``x``.
    """

    library: ClassVar[str] = "reduce"
    kind: ClassVar[str] = "reduce"

    op: ReduceName | ReduceOp
    x: AccelRef
    _: KW_ONLY
    axis: int | None = None
    keepdims: bool = False
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``op`` and ``axis``."""
        if type(self.op) is not ReduceOp:
            set_fields(self, op=member(ReduceOp, self.op))
        if self.axis is not None and type(self.axis) is not int:
            set_fields(self, axis=integer("axis", self.axis, _AXIS))

    def flattened(self) -> tuple[Shape, int]:
        """Return the shape and the axis that the kernel reduces: with ``axis=None``, all elements as one dimension."""
        return ((self.x.size,), 0) if self.axis is None else (self.x.shape, self.axis % len(self.x.shape))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, axis = operand("x", self.x), self.axis
        if not isinstance(self.keepdims, (bool, np.bool_)):
            raise InvalidArgumentError(f"keepdims is {self.keepdims!r}", remedy="Give True or False.")
        if axis is not None and not -len(x.shape) <= axis < len(x.shape):
            raise InvalidArgumentError(f"axis {axis} is not one of the {len(x.shape)} dimension(s) of x", remedy=_AXIS)
        shape, reduced = self.flattened()
        reduction = member(ReduceOp, self.op)
        if reduction in (ReduceOp.MAX, ReduceOp.MIN) and shape[reduced] == 0:
            raise InvalidArgumentError(f"{reduction.value} over no elements has no value", remedy="Leave empty buffers out.")
        not_aliased(self.out, x=x)
        if self.keepdims:
            result = (1,) * len(x.shape) if axis is None else (*x.shape[:reduced], 1, *x.shape[reduced + 1 :])
        else:
            result = () if axis is None else (*x.shape[:reduced], *x.shape[reduced + 1 :])
        writes, creates = result_in(self.out, result, x.dtype)
        return Plan((x,), writes, creates, _CAPABILITY[reduction], x.dtype)


class ReduceOps(OpNamespace[M]):
    """Reductions; the namespace itself is called: ``device.reduce("sum", x, axis=1)``."""

    __slots__ = ()

    library: ClassVar[str] = "reduce"
    aliases: ClassVar[Mapping[str, str]] = {op.value: f"({op.value!r}, x, axis=...)" for op in ReduceOp}

    __call__ = method(Reduce)


def _reduce(lane: KernelLane, op: Reduce, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Reduce one axis."""
    shape, axis = op.flattened()
    lane.compute.reduce(member(ReduceOp, op.op), inputs[0], outputs[0], shape, axis, dtype=op.x.dtype)


FAMILY = Family(ReduceOps, {"reduce": _reduce})
