"""Losses of classifiers, and their gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import OutOp, Plan, op, operand, planned, same_dtype
from accel.ops.fields import to_int
from accel.ref import AccelRef

__all__ = ["CrossEntropy", "CrossEntropyGrad"]


def _check_labels(logits: AccelRef, labels: AccelRef) -> None:
    if logits.ndim < 1 or not logits.shape[-1]:
        raise InvalidArgumentError(f"logits have shape {logits.shape}", remedy="Give (..., classes), with at least one class.")
    if labels.dtype not in (DType.INT32, DType.INT64) or labels.shape != logits.shape[:-1]:
        raise InvalidArgumentError(
            f"labels are {labels.dtype.value}{list(labels.shape)}",
            remedy=f"Give int32 or int64{list(logits.shape[:-1])}: the number of a class for each row.",
        )


@op("dnn", convert={"ignore_index": to_int})
class CrossEntropy(OutOp):
    """``-log(softmax(logits))`` at each row's label: one loss for each row. ``reduce("mean", ...)`` makes one number of them.

    Parameters
    ----------
    logits
        (..., classes).
    labels
        int32 or int64 (...): the class of each row, from 0. The loss of a label that is no class is NaN.
    ignore_index
        The label of rows that do not count: their loss is 0.
    out
        As ``labels``, in the dtype of ``logits``.
    """

    logits: AccelRef
    labels: AccelRef
    _: KW_ONLY
    ignore_index: int = -100

    def plan(self) -> Plan:
        logits, labels = operand("logits", self.logits), operand("labels", self.labels)
        _check_labels(logits, labels)
        return planned(self.out, {"logits": logits, "labels": labels}, labels.shape, logits.dtype, "normalize")


@op("dnn", convert={"ignore_index": to_int})
class CrossEntropyGrad(OutOp):
    """The gradient of the logits of ``cross_entropy``: ``(softmax(logits) - 1 at the label) * grad``. ``out`` may be ``logits``.

    Parameters
    ----------
    grad
        Gradient of each row's loss, in the shape of ``labels`` and the dtype of ``logits``: 1 / rows for all, if the mean is minimized.
    logits, labels, ignore_index
        Those of ``cross_entropy``. Rows that do not count have the gradient 0, and those whose label is no class have NaN.
    out
        As ``logits``.
    """

    grad: AccelRef
    logits: AccelRef
    labels: AccelRef
    _: KW_ONLY
    ignore_index: int = -100

    def plan(self) -> Plan:
        grad, logits, labels = operand("grad", self.grad), operand("logits", self.logits), operand("labels", self.labels)
        _check_labels(logits, labels)
        if grad.shape != labels.shape:
            raise InvalidArgumentError(f"grad has shape {grad.shape}, and labels {labels.shape}", remedy="Give one number for each row.")
        reads = {"grad": grad, "logits": logits, "labels": labels}
        return planned(self.out, reads, logits.shape, same_dtype(grad=grad, logits=logits), "normalize", in_place=("logits",))
