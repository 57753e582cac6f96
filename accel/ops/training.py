"""Norms for training, gradients of norms and of softmax, and dropout."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import TypeVar

from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, OutOp, Plan, Shape, Spec, op, operand, planned, same_dtype, to_real, to_shape
from accel.ops.draws import key_of
from accel.ops.fields import to_axis, to_int
from accel.ops.normalization import (
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    NormRows,
    RmsNorm,
    RowNorm,
    rows_of_groups,
    to_groups,
    trailing_rows,
)
from accel.ops.pieces import axis_of, lines_of
from accel.ref import AccelRef

__all__ = [
    "BatchNormGrad",
    "BatchNormTrain",
    "Dropout",
    "GroupNormGrad",
    "InstanceNormGrad",
    "LayerNormGrad",
    "LogSoftmaxGrad",
    "RmsNormGrad",
    "SoftmaxGrad",
]

T_co = TypeVar("T_co", covariant=True)

_END, _LONGEST = 1 << 64, 1 << 62


def _check_grad(grad: AccelRef, name: str, of: AccelRef) -> None:
    if operand("grad", grad).shape != operand(name, of).shape:
        raise InvalidArgumentError(f"grad has shape {grad.shape}, and {name} {of.shape}", remedy="Give the gradient of the op's result.")
    same_dtype(**{"grad": grad, name: of})


@op("dnn", convert={"eps": to_real})
class RowNormGrad(FamilyOp[T_co]):
    """The gradient of a norm of rows: of ``x``, of the weight, and of the bias if the norm has one."""

    grad: AccelRef
    x: AccelRef
    _: KW_ONLY
    eps: float = 1e-5

    @abstractmethod
    def norm(self) -> RowNorm:
        """Return the op that this is the gradient of."""

    @abstractmethod
    def rows(self) -> NormRows:
        """Return the rows, which are those of the norm."""

    def middle(self) -> tuple[int, int, int]:
        """Return how many elements are before, along and behind the axis of weights of an ``x`` that is not empty."""
        rows = self.rows()
        return rows.rows // rows.groups, rows.groups * (rows.length // rows.each), rows.each

    def plan(self) -> Plan:
        norm = self.norm()
        plan = norm.plan()
        _check_grad(self.grad, "x", self.x)
        sums = tuple([Spec(each.shape, self.x.dtype) for each in norm.parameters()])
        return plan._replace(reads=(self.grad, *plan.reads), creates=(*plan.creates, *sums))


@op(convert={"normalized_shape": to_shape})
class _OfRows(RowNormGrad[T_co]):
    """What gradients of norms of the last dimensions share."""

    normalized_shape: int | Sequence[int]
    weight: AccelRef | None = None

    def rows(self) -> NormRows:
        return trailing_rows(self.x, self.normalized_shape)


@op()
class LayerNormGrad(_OfRows[tuple[AccelRef, AccelRef, AccelRef]]):
    """The gradients of ``x``, weight and bias of ``layer_norm``. The bias itself is not needed.

    Parameters
    ----------
    grad
        Gradient of the result, as ``x``.
    x, normalized_shape, weight, eps
        Those of ``layer_norm``. Without a weight, the second result is the gradient of one of ones.
    """

    def norm(self) -> RowNorm:
        return LayerNorm(self.x, self.normalized_shape, self.weight, eps=self.eps)


@op()
class RmsNormGrad(_OfRows[tuple[AccelRef, AccelRef]]):
    """The gradients of ``x`` and weight of ``rms_norm``.

    Parameters
    ----------
    grad
        Gradient of the result, as ``x``.
    x, normalized_shape, weight, eps
        Those of ``rms_norm``. Without a weight, the second result is the gradient of one of ones.
    """

    _: KW_ONLY
    eps: float = 1e-6

    def norm(self) -> RowNorm:
        return RmsNorm(self.x, self.normalized_shape, self.weight, eps=self.eps)


@op(convert={"num_groups": to_groups})
class GroupNormGrad(RowNormGrad[tuple[AccelRef, AccelRef, AccelRef]]):
    """The gradients of ``x``, weight and bias of ``group_norm``. The bias itself is not needed.

    Parameters
    ----------
    grad
        Gradient of the result, as ``x``.
    x, num_groups, weight, eps
        Those of ``group_norm``. Without a weight, the second result is the gradient of one of ones.
    """

    num_groups: int
    weight: AccelRef | None = None

    def norm(self) -> RowNorm:
        return GroupNorm(self.x, self.num_groups, self.weight, eps=self.eps)

    def rows(self) -> NormRows:
        return rows_of_groups(self.x, self.num_groups)


@op()
class InstanceNormGrad(RowNormGrad[tuple[AccelRef, AccelRef, AccelRef]]):
    """The gradients of ``x``, weight and bias of ``instance_norm``. The bias itself is not needed.

    Parameters
    ----------
    grad
        Gradient of the result, as ``x``.
    x, weight, eps
        Those of ``instance_norm``. Without a weight, the second result is the gradient of one of ones.
    """

    weight: AccelRef | None = None

    def norm(self) -> RowNorm:
        return InstanceNorm(self.x, self.weight, eps=self.eps)

    def rows(self) -> NormRows:
        return rows_of_groups(self.x, self.x.shape[1])


@op("dnn", convert={"axis": to_int, "eps": to_real})
class _OfChannels(FamilyOp[tuple[AccelRef, AccelRef, AccelRef]]):
    """What the norm of channels and its gradient share."""

    _: KW_ONLY
    axis: int = 1
    eps: float = 1e-5

    @abstractmethod
    def operands(self) -> dict[str, AccelRef]:
        """Return what is read before weight and bias; ``x`` is among it."""

    def middle(self) -> tuple[int, int, int]:
        """Return how many elements are before, along and behind the axis of channels."""
        shape = self.operands()["x"].shape
        found = lines_of(shape, self.axis)
        if not found[0] * found[2]:
            raise InvalidArgumentError(f"x has shape {shape}: its channels have no elements", remedy="Leave empty batches out.")
        return found

    def _of_channels(self, **given: AccelRef | None) -> Plan:
        """Return the plan of an op that reads ``given`` too, one number each for each channel."""
        reads = self.operands()
        x, (_, channels, _) = reads["x"], self.middle()
        for name, ref in given.items():
            if ref is None:
                continue
            if operand(name, ref).shape != (channels,):
                raise InvalidArgumentError(f"{name} has shape {ref.shape}, and ({channels},) is needed", remedy="Reshape it.")
            reads[name] = ref
        same_dtype(**reads)
        for_channels = Spec((channels,), x.dtype)
        return Plan(tuple(reads.values()), (), (Spec(x.shape, x.dtype), for_channels, for_channels), "normalize", x.dtype)


@op()
class BatchNormTrain(_OfChannels):
    """``batch_norm`` with the mean and the variance of ``x`` itself, which are the second and the third result.

    The variance is that of all elements: ddof 0. Running statistics are a fused function of these: ``running + momentum * (mean - running)``.

    Parameters
    ----------
    x
        (N, C, ...), or channels along another ``axis``; each channel has at least one element.
    weight, bias
        Of shape (C,); ``None`` leaves the step out.
    axis
        Which axis of ``x`` has the channels.
    eps
        Keeps the divisor from 0.
    """

    x: AccelRef
    weight: AccelRef | None = None
    bias: AccelRef | None = None

    def operands(self) -> dict[str, AccelRef]:
        return {"x": operand("x", self.x)}

    def plan(self) -> Plan:
        return self._of_channels(weight=self.weight, bias=self.bias)


@op()
class BatchNormGrad(_OfChannels):
    """The gradients of ``x``, weight and bias of ``batch_norm_train``; its statistics are those of ``x``, and are computed again.

    Parameters
    ----------
    grad
        Gradient of the first result, as ``x``.
    x, weight, axis, eps
        Those of ``batch_norm_train``.
    """

    grad: AccelRef
    x: AccelRef
    weight: AccelRef | None = None

    def operands(self) -> dict[str, AccelRef]:
        return {"grad": self.grad, "x": operand("x", self.x)}

    def plan(self) -> Plan:
        _check_grad(self.grad, "x", self.x)
        return self._of_channels(weight=self.weight)


@op("dnn", convert={"axis": to_axis})
class _OfSoftmax(OutOp):
    """What gradients of softmax and of its logarithm share."""

    grad: AccelRef
    y: AccelRef
    axis: int = -1

    def middle(self) -> Shape:
        """Return how many elements are before, along and behind the axis."""
        return lines_of(self.y.shape, self.axis)

    def plan(self) -> Plan:
        grad, y = self.grad, operand("y", self.y)
        _check_grad(grad, "y", y)
        axis_of(self.axis, y.ndim)
        return planned(self.out, {"grad": grad, "y": y}, y.shape, y.dtype, "normalize", in_place=("grad", "y"))


@op()
class SoftmaxGrad(_OfSoftmax):
    """The gradient of the operand of ``y = softmax(x, axis)``: ``(grad - sum(grad * y)) * y``. ``out`` may be ``grad`` or ``y``."""


@op()
class LogSoftmaxGrad(_OfSoftmax):
    """The gradient of the operand of ``y = log_softmax(x, axis)``: ``grad - exp(y) * sum(grad)``. ``out`` may be ``grad`` or ``y``."""


@op("dnn", convert={"p": to_real, "seed": to_int, "offset": to_int})
class Dropout(OutOp):
    """``x / (1 - p)`` where a number drawn for the element is at least ``p``, else 0, also for NaN. ``out`` may be ``x``.

    The numbers are those of ``rng.uniform``, in float32, with the same ``seed`` and ``offset``. The gradient is the same op: of the gradient, with the same
    numbers. A graph draws the same ones at each replay.

    Parameters
    ----------
    x
        Any shape.
    p
        The share that is dropped, from 0 to 1.
    seed
        From 0 to 2**64 - 1.
    offset
        How many numbers of the seed's stream are skipped.
    out
        As ``x``.
    """

    x: AccelRef
    p: float = 0.5
    _: KW_ONLY
    seed: int
    offset: int = 0

    def key(self) -> int:
        """Return the key of the blocks of words that numbers are made of."""
        return key_of(self.seed, "uniform 4")

    def least(self) -> int:
        """Return below which the upper 24 bits of a word drop the element."""
        return math.ceil(self.p * 2**24)

    def scale(self) -> float:
        """Return what elements that stay are multiplied by."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def plan(self) -> Plan:
        x = operand("x", self.x)
        if not 0 <= self.p <= 1:
            raise InvalidArgumentError(f"p is {self.p}", remedy="Give a share from 0 to 1.")
        if not (0 <= self.seed < _END and 0 <= self.offset < _LONGEST):
            raise InvalidArgumentError(
                f"seed is {self.seed} and offset {self.offset}", remedy="Give a seed from 0 to 2**64 - 1, and an offset from 0."
            )
        return planned(self.out, {"x": x}, x.shape, x.dtype, "normalize", in_place=("x",))
