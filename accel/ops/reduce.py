"""Reductions along one axis, or over everything."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from accel.compute import ReduceOp
from accel.errors import InvalidArgumentError
from accel.ops.base import KernelOp, Plan, Shape, not_aliased, operand, result_in
from accel.ref import AccelRef

__all__ = ["Reduce"]

_CAPABILITY = {op: f"reduce.{op.value}" for op in ReduceOp}
_AXIS = "Give the number of one dimension, from 0 or, counted from the end, from -1; or None for all of them."


def _index(axis: object) -> int:
    try:
        return operator.index(axis)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"axis is {axis!r}", remedy=_AXIS) from None


@dataclass(frozen=True, eq=False, slots=True)
class Reduce(KernelOp):
    """``op`` along ``axis``, in the dtype of x.

    Parameters
    ----------
    op
        What to compute.
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

    op: ReduceOp
    x: AccelRef
    axis: int | None = None
    keepdims: bool = False
    out: AccelRef | None = None

    def flattened(self) -> tuple[Shape, int]:
        """Return the shape and the axis that the kernel reduces: with ``axis=None``, all elements as one dimension."""
        return ((self.x.size,), 0) if self.axis is None else (self.x.shape, self.axis % len(self.x.shape))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, axis = operand("x", self.x), self.axis
        if not isinstance(self.keepdims, (bool, np.bool_)):
            raise InvalidArgumentError(f"keepdims is {self.keepdims!r}", remedy="Give True or False.")
        if axis is not None:
            if type(axis) is not int:
                # The op is frozen for its users; this changes how the number is written, and not which it is.
                object.__setattr__(self, "axis", axis := _index(axis))
            if not -len(x.shape) <= axis < len(x.shape):
                raise InvalidArgumentError(f"axis {axis} is not one of the {len(x.shape)} dimension(s) of x", remedy=_AXIS)
        shape, reduced = self.flattened()
        if self.op in (ReduceOp.MAX, ReduceOp.MIN) and shape[reduced] == 0:
            raise InvalidArgumentError(f"{self.op.value} over no elements has no value", remedy="Leave empty buffers out.")
        not_aliased(self.out, x=x)
        if self.keepdims:
            result = (1,) * len(x.shape) if axis is None else (*x.shape[:reduced], 1, *x.shape[reduced + 1 :])
        else:
            result = () if axis is None else (*x.shape[:reduced], *x.shape[reduced + 1 :])
        writes, creates = result_in(self.out, result, x.dtype)
        return Plan((x,), writes, creates, _CAPABILITY[self.op], x.dtype)
