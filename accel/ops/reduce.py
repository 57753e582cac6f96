"""Reductions along axes, or over everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar

from accel.enums import EXTREMES, ReduceName, ReduceOp, result_dtype
from accel.errors import InvalidArgumentError
from accel.ops.base import OutOp, Plan, Shape, op, operand, planned
from accel.ops.family import Family
from accel.ops.fields import Conversion, integer, member, to_flag, to_integer, to_member, unless_none
from accel.ops.namespace import M, OpNamespace, method
from accel.ref import AccelRef

__all__ = ["Reduce", "ReduceOps"]


_CAPABILITY = {op: f"reduce.{op.value}" for op in ReduceOp}
_REMEDY = "Give numbers of dimensions, from 0 or, counted from the end, from -1; or None for all of them."
_INDICES = frozenset({ReduceOp.ARGMAX, ReduceOp.ARGMIN})
_SPREADS = frozenset({ReduceOp.VAR, ReduceOp.STD})


def _axes(name: str, value: Any) -> int | Shape:
    """Return the number of one axis, or the tuple of several."""
    if isinstance(value, (tuple, list)):
        return tuple([integer(name, each, _REMEDY) for each in value])
    return integer(name, value, _REMEDY)


@op(
    "reduce",
    convert={
        "op": to_member(ReduceOp),
        "axis": unless_none(Conversion(_axes, frozenset({int}))),
        "keepdims": to_flag,
        "ddof": to_integer("Give a whole number."),
    },
)
class Reduce(OutOp):
    """``op`` along ``axis``, in the dtype of x; any and all give bool, argmax and argmin int64.

    Parameters
    ----------
    op
        What to compute: sum, mean, max, min, prod, var, std, any, all, argmax, argmin or logsumexp.
    x
        Any shape.
    axis
        One or several dimensions, counted from the end where negative; ``None`` reduces over everything. argmax and argmin take one, or ``None``.
    keepdims
        Whether reduced dimensions stay, with length 1.
    ddof
        What var and std subtract from the number of elements that they divide by.
    out
        Buffer to write; not ``x``.
    """

    op: ReduceName | ReduceOp
    x: AccelRef
    _: KW_ONLY
    axis: int | Sequence[int] | None = None
    keepdims: bool = False
    ddof: int = 0

    def axes(self) -> Shape:
        """Return the reduced axes, counted from the first one, in order."""
        ndim = len(self.x.shape)
        if self.axis is None:
            return tuple(range(ndim))
        axes: Any = (self.axis,) if isinstance(self.axis, int) else self.axis
        for axis in axes:
            if not -ndim <= axis < ndim:
                raise InvalidArgumentError(f"axis {axis} is not one of the {ndim} dimension(s) of x", remedy=_REMEDY)
        if len(axes) == 1:
            return (axes[0] % ndim,)
        counted = sorted(axis % ndim for axis in axes)
        if len(set(counted)) < len(counted):
            raise InvalidArgumentError(f"axis {self.axis} names a dimension twice", remedy=_REMEDY)
        return tuple(counted)

    def runs(self) -> tuple[tuple[int, bool, int], ...]:
        """Return the axes, those joined that can be: lengths, whether they are reduced, and strides. The first one is kept."""
        axes, runs = self.axes(), [(1, False, 0)]
        for axis, (length, stride) in enumerate(zip(self.x.shape, self.x.strides, strict=True)):
            is_reduced = axis in axes
            before, was_reduced, step = runs[-1]
            if length == 1:
                continue
            if was_reduced == is_reduced and (before == 1 or step == stride * length):
                runs[-1] = before * length, is_reduced, stride
            else:
                runs.append((length, is_reduced, stride))
        return tuple(runs)

    def middle(self) -> tuple[int, int, int] | None:
        """Return the lengths before, of, and after the reduced axes as they are in memory, or ``None``.

        That is if ``x``, with its axes in some order, is contiguous, the reduced axes are neighbours, and ``ddof`` is 0.
        """
        shape, axis = self.x.shape, self.axis
        if self.ddof:
            return None
        if self.x.is_strided:
            return self._middle_of_turned()
        if axis is None:
            return 1, self.x.size, 1
        if isinstance(axis, int):
            axis %= len(shape)
            return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        lengths = [length for length, _, _ in self.runs()]
        if len(lengths) > 3:
            return None
        outer, length, inner = (*lengths, 1, 1)[:3]
        return outer, length, inner

    def _middle_of_turned(self) -> tuple[int, int, int] | None:
        """Return :meth:`middle` of a view whose axes are in another order in memory; kept ones must not be, nor reduced ones for indices."""
        runs = [run for run in self.runs() if run[0] > 1]
        for kept_or_reduced in (False, True) if member(ReduceOp, self.op) in _INDICES else (False,):
            strides = [stride for _, is_reduced, stride in runs if is_reduced is kept_or_reduced]
            if strides != sorted(strides, reverse=True):
                return None
        expected, lengths = 1, [1]
        lying = sorted(runs, key=lambda run: run[2])
        for length, _, stride in lying:
            if stride != expected:
                return None
            expected *= length
        was_reduced = False
        for length, is_reduced, _ in reversed(lying):
            if is_reduced is was_reduced:
                lengths[-1] *= length
            else:
                lengths.append(length)
            was_reduced = is_reduced
        if len(lengths) > 3:
            return None
        outer, middle, inner = (*lengths, 1, 1)[:3]
        return outer, middle, inner

    def takes_strided(self, ref: AccelRef) -> bool:
        return ref is not self.out

    def plan(self) -> Plan:
        x, axes = operand("x", self.x), self.axes()
        reduction = member(ReduceOp, self.op)
        if reduction in _INDICES and self.axis is not None and len(axes) != 1:
            raise InvalidArgumentError(f"{reduction.value} along axes {axes}", remedy="Give one axis, or None for all elements.")
        if self.ddof and reduction not in _SPREADS:
            raise InvalidArgumentError(f"{reduction.value} has no ddof", remedy="Leave it out.")
        if reduction in EXTREMES and any(x.shape[axis] == 0 for axis in axes):
            raise InvalidArgumentError(f"{reduction.value} over no elements has no value", remedy="Leave empty buffers out.")
        result = tuple([1 if axis in axes else length for axis, length in enumerate(x.shape) if self.keepdims or axis not in axes])
        return planned(self.out, {"x": x}, result, result_dtype(reduction, x.dtype), _CAPABILITY[reduction], of=x.dtype)


class ReduceOps(OpNamespace[M]):
    """Reductions; the namespace itself is called: ``device.reduce("sum", x, axis=1)``."""

    __slots__ = ()

    library: ClassVar = "reduce"
    aliases: ClassVar = {op.value: f"({op.value!r}, x, axis=...)" for op in ReduceOp}

    __call__ = method(Reduce)


FAMILY = Family(ReduceOps)
