"""Attention for training: with the statistics that its gradients need, and the gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, TypeVar

from accel.dtype import DType
from accel.enums import Causal
from accel.errors import InvalidArgumentError
from accel.ops.attention import Attention
from accel.ops.base import FamilyOp, Plan, Spec, op, operand
from accel.ops.fields import set_fields
from accel.ref import AccelRef

__all__ = ["AttentionGrad", "AttentionWithStats"]


def _stats(q: AccelRef) -> Spec:
    """Return what the statistics of queries are."""
    return Spec(q.shape[:3], DType.FLOAT64 if q.dtype is DType.FLOAT64 else DType.FLOAT32)


T_co = TypeVar("T_co", covariant=True)


@op("dnn")
class _Training(FamilyOp[T_co]):
    """What attention and its gradient share, for training."""

    _: KW_ONLY
    scale: float | None = None
    causal: Causal = False
    window: int | None = None

    def __post_init__(self) -> None:
        """Convert ``scale`` and ``window``."""
        forward = self.forward()
        set_fields(self, scale=forward.scale, window=forward.window)

    def forward(self) -> Attention:
        """Return the op without statistics."""
        mine: Any = self
        return Attention(mine.q, mine.k, mine.v, scale=self.scale, causal=self.causal, window=self.window)


@op()
class AttentionWithStats(_Training[tuple[AccelRef, AccelRef]]):
    """``attention``, and the logarithm of the sum of the exponentials of each query's scores: what ``attention_grad`` needs.

    The second result is (batch, heads, seq_q) of float32, or of float64 for float64 operands. It is -infinity for a query that sees no key.

    Parameters
    ----------
    q, k, v, scale, causal, window
        As for ``attention``.
    """

    q: AccelRef
    k: AccelRef
    v: AccelRef

    def takes_strided(self, ref: AccelRef) -> bool:
        return self.forward().takes_strided(ref)

    def plan(self) -> Plan:
        plan = self.forward().plan()
        return plan._replace(creates=(*plan.creates, _stats(self.q)))


@op()
class AttentionGrad(_Training[tuple[AccelRef, AccelRef, AccelRef]]):
    """The gradients of q, k and v of ``attention``.

    Parameters
    ----------
    grad
        Gradient of ``attended``.
    q, k, v, scale, causal, window
        Those of ``attention_with_stats``.
    attended, stats
        What ``attention_with_stats`` gave.
    """

    grad: AccelRef
    q: AccelRef
    k: AccelRef
    v: AccelRef
    attended: AccelRef
    stats: AccelRef

    def takes_strided(self, ref: AccelRef) -> bool:
        others = (self.grad, self.attended, self.stats)
        return not any(ref is other for other in others) and self.forward().takes_strided(ref)

    def plan(self) -> Plan:
        plan = self.forward().plan()
        (made,), stats = plan.creates, _stats(self.q)
        for name, ref, shape, dtype in (
            ("grad", self.grad, made.shape, made.dtype),
            ("attended", self.attended, made.shape, made.dtype),
            ("stats", self.stats, stats.shape, stats.dtype),
        ):
            if operand(name, ref).shape != shape or ref.dtype is not dtype:
                raise InvalidArgumentError(
                    f"{name} is {ref.dtype.value}{list(ref.shape)}",
                    remedy=f"Give {dtype.value}{list(shape)}, as attention_with_stats does.",
                )
        creates = tuple([Spec(ref.shape, ref.dtype) for ref in (self.q, self.k, self.v)])
        return plan._replace(reads=(self.grad, *plan.reads, self.attended, self.stats), creates=creates)
