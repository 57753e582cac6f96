"""Attention over arrays, over several sequences in one array, and over keys and values in pages.

For training there is attention with the statistics that its gradients need, and the gradients.
"""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from accel.dtype import DType
from accel.enums import Causal
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, OutOp, Plan, Shape, Spec, op, operand, plan_of, planned, same_dtype, to_real
from accel.ops.fields import Conversion, to_int, to_integer, unless_none
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Attention", "AttentionGrad", "AttentionWithStats", "PagedAttention", "RaggedAttention"]

T_co = TypeVar("T_co", covariant=True)

_ALIGNED = 16


def _causal(name: str, value: object) -> Causal:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, str) and value == "bottom_right":
        return "bottom_right"
    raise InvalidArgumentError(f"{name} is {value!r:.100}", remedy="Use False, True or 'bottom_right'.")


_OPTIONS: Mapping[str, Conversion] = {
    "scale": unless_none(to_real),
    "causal": Conversion(_causal, frozenset({bool})),
    "window": unless_none(to_integer("Give an int, or None.")),
}


@op("dnn", convert=_OPTIONS)
class AttentionForm(OutOp):
    """``softmax(scale * q @ k^T) @ v``: what its forms share."""

    q: AccelRef
    k: AccelRef
    v: AccelRef
    _: KW_ONLY
    scale: float | None = None
    causal: Causal = False
    window: int | None = None

    def multiplier(self) -> float:
        """Return what the scores are multiplied by."""
        dim = self.q.shape[-1]
        return dim**-0.5 if self.scale is None and dim else float(self.scale or 0.0)

    def _checked(self, ndim: int) -> DType:
        """Return the dtype; raise unless operands of ``ndim`` dimensions and options fit together."""
        q, k, v = operand("q", self.q, ndim=ndim), operand("k", self.k, ndim=ndim), operand("v", self.v, ndim=ndim)
        heads, kv_heads = q.shape[1], k.shape[1]
        has_heads = heads % kv_heads == 0 if kv_heads else not heads
        if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or not has_heads:
            raise InvalidArgumentError(
                f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together",
                remedy="Give q and k one head dimension, k and v as many heads as q or a divisor of them, and v as many elements as k.",
            )
        if self.window is not None and (self.window < 1 or self.causal is False):
            raise InvalidArgumentError(
                f"window is {self.window} with causal={self.causal!r}",
                remedy="Give a window of at least 1 and causal=True or 'bottom_right'.",
            )
        return q.dtype if q.dtype is k.dtype is v.dtype else same_dtype(q=q, k=k, v=v)

    def _planned(self, dtype: DType, **others: AccelRef) -> Plan:
        """Return the plan of an op that reads ``others`` besides q, k and v."""
        q, k, v = self.q, self.k, self.v
        shape = (*q.shape[:-1], v.shape[-1])
        if self.out is None and not others:
            return plan_of(((q, k, v), (), (Spec(shape, dtype),), "attention", dtype, False, None))
        return planned(self.out, {"q": q, "k": k, "v": v, **others}, shape, dtype, "attention")


def _numbers(name: str, ref: AccelRef, shape: Shape) -> AccelRef:
    """Return a ref of int32 numbers, one for each place of ``shape``."""
    operand(name, ref, ndim=len(shape))
    if ref.dtype is not DType.INT32 or ref.shape != shape:
        raise InvalidArgumentError(f"{name} is {ref.dtype.value}{list(ref.shape)}", remedy=f"Give int32{list(shape)}.")
    return ref


@op()
class Attention(AttentionForm):
    """``softmax(scale * q @ k^T + bias) @ v`` per batch and head. A query that sees no key gives zeros, also where a bias of -infinity hides all.

    Parameters
    ----------
    q
        (batch, heads, seq_q, head_dim).
    k
        (batch, kv_heads, seq_kv, head_dim). With fewer heads than q, each of them serves as many neighbouring heads of q (GQA; MQA with one).
    v
        (batch, kv_heads, seq_kv, value_dim). Where no query sees it, it is finite all the same: a device may multiply it by 0.
    scale
        Multiplies the scores; ``None`` means ``head_dim ** -0.5``.
    causal
        See :data:`accel.enums.Causal`. With lengths, they stand for seq_q and seq_kv.
    window
        How many keys a query sees at most, up to the last that ``causal`` lets it see; ``None`` for all.
    bias
        Added to the scores: (batch, heads, seq_q, seq_kv), each of the first three may be 1; in the dtype of q. -infinity hides a key from a query, which must
        see another one.
    lengths_q, lengths_kv
        int32 (batch,): how many queries, and how many keys, a batch has. The rest of k and v is not seen, and the rest of the result is zeros. Numbers
        below 0 are taken as 0, and those beyond seq_q and seq_kv as these.
    out
        (batch, heads, seq_q, value_dim).
    """

    _: KW_ONLY
    bias: AccelRef | None = None
    lengths_q: AccelRef | None = None
    lengths_kv: AccelRef | None = None

    def takes_strided(self, ref: AccelRef) -> bool:
        """See :meth:`KernelOp.takes_strided`: heads that were split off and transposed are read where they are, if rows begin at multiples of 16 bytes."""
        *steps, last = ref.strides
        is_aligned = not (ref.offset % _ALIGNED or ref.alignment % _ALIGNED) and all(
            step >= 0 and step * ref.dtype.itemsize % _ALIGNED == 0 for step in steps
        )
        return last == 1 and is_aligned and (ref is self.q or ref is self.k or ref is self.v)

    def plan(self) -> Plan:
        dtype = self._checked(4)
        if self.k.shape[0] != self.q.shape[0]:
            raise InvalidArgumentError(
                f"q has {self.q.shape[0]} batches and k {self.k.shape[0]}", remedy="Give q, k and v of one batch size."
            )
        if self.bias is None is self.lengths_q is self.lengths_kv:  # mostly there are none
            return self._planned(dtype)
        others: dict[str, AccelRef] = {}
        if self.bias is not None:
            bias = others["bias"] = operand("bias", self.bias, ndim=4)
            whole = *self.q.shape[:3], self.k.shape[2]
            fits = all(given in (1, full) for given, full in zip(bias.shape[:3], whole[:3], strict=True))
            if not fits or bias.shape[3] != whole[3] or bias.dtype is not dtype:
                raise InvalidArgumentError(
                    f"bias is {bias.dtype.value}{list(bias.shape)}",
                    remedy=f"Give {dtype.value}{list(whole)}, or 1 in place of some of the first three.",
                )
        for name, lengths in (("lengths_q", self.lengths_q), ("lengths_kv", self.lengths_kv)):
            if lengths is not None:
                others[name] = _numbers(name, lengths, self.q.shape[:1])
        return self._planned(dtype, **others)


@op(convert={"longest_q": to_int, "longest_kv": to_int})
class RaggedAttention(AttentionForm):
    """Attention within sequences that lie one behind the other in one array, without padding.

    Parameters
    ----------
    q
        (tokens, heads, head_dim).
    k, v
        (tokens_kv, kv_heads, head_dim), and the same with value_dim.
    offsets_q, offsets_kv
        int32 (sequences + 1,): where each sequence begins, and the number of tokens at the end. They rise, from 0 to tokens and tokens_kv. Numbers out of
        this range are taken as its ends, and a sequence that ends before it begins as empty; results of tokens that are in no sequence, or in several, are
        undefined.
    longest_q, longest_kv
        At least the length of the longest sequence; longer ones give undefined results. A device may prepare for these numbers, which takes time once: round
        them up to a few values.
    scale, causal, window
        As for ``attention``, in each sequence.
    out
        (tokens, heads, value_dim).
    """

    offsets_q: AccelRef
    offsets_kv: AccelRef
    _: KW_ONLY
    longest_q: int
    longest_kv: int

    def plan(self) -> Plan:
        dtype = self._checked(3)
        count = operand("offsets_q", self.offsets_q, ndim=1).size
        if not count:
            raise InvalidArgumentError("offsets_q is empty", remedy="Give one number more than there are sequences.")
        if min(self.longest_q, self.longest_kv) < 0:
            raise InvalidArgumentError(
                f"longest_q is {self.longest_q} and longest_kv {self.longest_kv}", remedy="Give the length of the longest sequence."
            )
        offsets = {name: _numbers(name, ref, (count,)) for name, ref in (("offsets_q", self.offsets_q), ("offsets_kv", self.offsets_kv))}
        return self._planned(dtype, **offsets)


@op()
class PagedAttention(AttentionForm):
    """Attention over keys and values in pages of a cache, which each sequence has in any order.

    Parameters
    ----------
    q
        (batch, heads, seq_q, head_dim).
    k, v
        The cache: (pages, kv_heads, page_size, head_dim), and the same with value_dim.
    table
        int32 (batch, most_pages): which pages hold a batch's keys, in order. Entries beyond its length are not used. Numbers below 0 are taken as 0, and those
        that are no page as the last page.
    lengths_kv
        int32 (batch,): how many keys each batch has, at most most_pages * page_size. Numbers below 0 are taken as 0, and those beyond that as the most.
    scale, causal, window
        As for ``attention``, with ``lengths_kv`` for seq_kv.
    out
        (batch, heads, seq_q, value_dim).
    """

    table: AccelRef
    lengths_kv: AccelRef

    def plan(self) -> Plan:
        dtype = self._checked(4)
        batch, most = self.q.shape[0], operand("table", self.table, ndim=2).shape[1]
        table = _numbers("table", self.table, (batch, most))
        return self._planned(dtype, table=table, lengths_kv=_numbers("lengths_kv", self.lengths_kv, (batch,)))


def _stats(q: AccelRef) -> Spec:
    """Return what the statistics of queries are."""
    return Spec(q.shape[:3], DType.FLOAT64 if q.dtype is DType.FLOAT64 else DType.FLOAT32)


@op("dnn", convert=_OPTIONS)
class _Training(FamilyOp[T_co]):
    """What attention and its gradient share, for training."""

    _: KW_ONLY
    scale: float | None = None
    causal: Causal = False
    window: int | None = None

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
