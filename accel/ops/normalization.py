"""Softmax, and norms: rows of elements that are brought to one scale, each row by itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import NamedTuple, cast

from accel.errors import InvalidArgumentError
from accel.ops.base import OutOp, Plan, Shape, op, operand, planned, same_dtype, to_real, to_shape
from accel.ops.fields import to_axis, to_integer
from accel.ops.pieces import axis_of, lines_of
from accel.ref import AccelRef

__all__ = [
    "BatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "LogSoftmax",
    "Norm",
    "NormRows",
    "Parameter",
    "RmsNorm",
    "RowNorm",
    "Softmax",
    "rows_of_groups",
    "to_groups",
    "trailing_rows",
]


class NormRows(NamedTuple):
    """Rows of an array. Element i of row r has the weight and the bias number ``r % groups * (length // each) + i // each``.

    Attributes
    ----------
    rows, length
        How many rows, and elements of each.
    groups
        After how many rows weights are the same again.
    each
        How many elements, one behind the other, have one weight.
    """

    rows: int
    length: int
    groups: int = 1
    each: int = 1


@op("dnn", convert={"axis": to_axis})
class _AlongAxis(OutOp):
    """An op on ``x`` along one axis."""

    x: AccelRef
    axis: int = -1

    def middle(self) -> tuple[int, int, int]:
        """Return how many elements are before, along and behind the axis."""
        return lines_of(self.x.shape, self.axis)

    def plan(self) -> Plan:
        x = operand("x", self.x)
        axis_of(self.axis, len(x.shape))
        return planned(self.out, {"x": x}, x.shape, x.dtype, "normalize", in_place=("x",))


@op()
class Softmax(_AlongAxis):
    """``exp(x)``, divided by its sum along ``axis``. ``out`` may be ``x``."""


@op()
class LogSoftmax(_AlongAxis):
    """``x - log(sum(exp(x)))`` along ``axis``. ``out`` may be ``x``."""


class Parameter(NamedTuple):
    """A weight, or another array of numbers that belong to elements of ``x``, of the shape that it must have; ``None`` where it is left out."""

    name: str
    ref: AccelRef | None
    shape: Shape


@op("dnn", convert={"eps": to_real})
class Norm(OutOp):
    """An op that moves and scales elements of ``x``, and then multiplies by a weight and adds a bias."""

    x: AccelRef
    _: KW_ONLY
    eps: float = 1e-5

    @abstractmethod
    def parameters(self) -> tuple[Parameter, ...]:
        """Return what the op takes beside ``x``, in the order in which kernels do; raise if ``x`` does not have such a shape."""

    def addresses(self, inputs: Sequence[int]) -> list[int]:
        """Return the address of ``x``, and of each parameter or 0, given those of what the op reads."""
        x, *given = inputs
        following = iter(given)
        return [x, *(0 if each.ref is None else next(following) for each in self.parameters())]

    def plan(self) -> Plan:
        x = operand("x", self.x)
        reads = {"x": x}
        if not 0 <= self.eps < math.inf:
            raise InvalidArgumentError(f"eps is {self.eps}", remedy="Give a small number that is not negative, such as 1e-5.")
        for name, ref, shape in self.parameters():
            if ref is None:
                continue
            if operand(name, ref).shape != shape:
                raise InvalidArgumentError(f"{name} has shape {ref.shape}, and {shape} is needed", remedy="Reshape it.")
            reads[name] = ref
        return planned(self.out, reads, x.shape, same_dtype(**reads), "normalize", in_place=("x",))


class RowNorm(Norm):
    """A norm of rows, each by itself."""

    __slots__ = ()

    @abstractmethod
    def rows(self) -> NormRows:
        """Return the rows."""


def trailing_rows(x: AccelRef, normalized_shape: int | Sequence[int]) -> NormRows:
    """Return the rows of an array whose last dimensions are normalized together."""
    shape = cast("Shape", normalized_shape)
    return NormRows(math.prod(x.shape[: -len(shape)]), math.prod(shape))


@op(convert={"normalized_shape": to_shape})
class _OfLast(RowNorm):
    """A norm of the last dimensions together."""

    normalized_shape: int | Sequence[int]
    weight: AccelRef | None = None

    def trailing(self) -> Shape:
        """Return ``normalized_shape``, if ``x`` ends so."""
        shape = cast("Shape", self.normalized_shape)
        if not shape or self.x.shape[-len(shape) :] != shape:
            raise InvalidArgumentError(
                f"x has shape {self.x.shape}, which does not end in normalized_shape {shape}",
                remedy="Give the last dimensions of x.",
            )
        return shape

    def rows(self) -> NormRows:
        return trailing_rows(self.x, self.normalized_shape)


@op()
class LayerNorm(_OfLast):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, of the last dimensions together. ``out`` may be ``x``.

    Parameters
    ----------
    x
        Any shape that ends in ``normalized_shape``.
    normalized_shape
        The last dimensions of ``x``, over which the mean and the variance are taken; an int for the last one. The variance is that of all elements: ddof 0.
    weight, bias
        Of shape ``normalized_shape``; ``None`` leaves the step out.
    eps
        Keeps the divisor from 0.
    out
        As ``x``.
    """

    bias: AccelRef | None = None

    def parameters(self) -> tuple[Parameter, ...]:
        shape = self.trailing()
        return Parameter("weight", self.weight, shape), Parameter("bias", self.bias, shape)


@op()
class RmsNorm(_OfLast):
    """``x / sqrt(mean(x**2) + eps) * weight``, of the last dimensions together. ``out`` may be ``x``.

    Parameters
    ----------
    x
        Any shape that ends in ``normalized_shape``.
    normalized_shape
        The last dimensions of ``x``, over which the mean is taken; an int for the last one.
    weight
        Of shape ``normalized_shape``; ``None`` leaves the step out.
    eps
        Keeps the divisor from 0.
    out
        As ``x``.
    """

    _: KW_ONLY
    eps: float = 1e-6

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("weight", self.weight, self.trailing()),)


_GROUPS = "Give (N, C, ...), and a number of groups that divides C."

to_groups = to_integer(_GROUPS)


def rows_of_groups(x: AccelRef, groups: int) -> NormRows:
    """Return the rows of an (N, C, ...) array whose channels form ``groups`` groups."""
    count, channels, *spatial = x.shape
    each = math.prod(spatial)
    return NormRows(count * groups, channels // groups * each, groups, each)


@op(convert={"num_groups": to_groups})
class GroupNorm(RowNorm):
    """Each group of channels of ``x`` scaled as by a layer norm, with one weight and bias for each channel. ``out`` may be ``x``.

    Parameters
    ----------
    x
        (N, C, ...).
    num_groups
        How many groups the channels are in; it divides C.
    weight, bias
        Of shape (C,); ``None`` leaves the step out.
    eps
        Keeps the divisor from 0.
    out
        As ``x``.
    """

    num_groups: int
    weight: AccelRef | None = None
    bias: AccelRef | None = None

    def parameters(self) -> tuple[Parameter, ...]:
        x, groups = self.x, self.num_groups
        if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
            raise InvalidArgumentError(f"x has shape {x.shape}, and num_groups is {groups}", remedy=_GROUPS)
        return Parameter("weight", self.weight, x.shape[1:2]), Parameter("bias", self.bias, x.shape[1:2])

    def rows(self) -> NormRows:
        return rows_of_groups(self.x, self.num_groups)


@op()
class InstanceNorm(RowNorm):
    """Each channel of each image of ``x`` scaled as by a layer norm, with one weight and bias for each channel. ``out`` may be ``x``.

    Parameters
    ----------
    x
        (N, C, ...).
    weight, bias
        Of shape (C,); ``None`` leaves the step out.
    eps
        Keeps the divisor from 0.
    out
        As ``x``.
    """

    weight: AccelRef | None = None
    bias: AccelRef | None = None

    def parameters(self) -> tuple[Parameter, ...]:
        x = self.x
        if x.ndim < 3:
            raise InvalidArgumentError(f"x has shape {x.shape}", remedy="Give (N, C, ...) with at least one spatial dimension.")
        return Parameter("weight", self.weight, x.shape[1:2]), Parameter("bias", self.bias, x.shape[1:2])

    def rows(self) -> NormRows:
        return rows_of_groups(self.x, self.x.shape[1])


@op(convert={"axis": to_axis})
class BatchNorm(Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` with the statistics of training, one number for each channel. ``out`` may be ``x``.

    Parameters
    ----------
    x
        (N, C, ...), or channels along another ``axis``.
    mean, var
        Of shape (C,).
    weight, bias
        Of shape (C,); ``None`` leaves the step out.
    axis
        Which axis of ``x`` has the channels.
    eps
        Keeps the divisor from 0.
    out
        As ``x``.
    """

    mean: AccelRef
    var: AccelRef
    weight: AccelRef | None = None
    bias: AccelRef | None = None
    _: KW_ONLY
    axis: int = 1

    def middle(self) -> tuple[int, int, int]:
        """Return how many elements are before, along and behind the axis of channels."""
        return lines_of(self.x.shape, self.axis)

    def parameters(self) -> tuple[Parameter, ...]:
        given = {"mean": operand("mean", self.mean), "var": operand("var", self.var), "weight": self.weight, "bias": self.bias}
        shape = (self.middle()[1],)
        return tuple([Parameter(name, ref, shape) for name, ref in given.items()])
