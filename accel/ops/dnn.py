"""Neural network ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel.compute import Causal
from accel.errors import InvalidArgumentError
from accel.ops.base import KernelOp, Plan, Shape, not_aliased, operand, result_in, same_dtype
from accel.ref import AccelRef

__all__ = ["Attention", "Conv2d"]


@dataclass(frozen=True, eq=False, slots=True)
class Conv2d(KernelOp):
    """2-d cross-correlation.

    Parameters
    ----------
    input
        (N, C, H, W).
    filter
        (K, C, R, S).
    stride, padding
        (vertical, horizontal).
    out
        (N, K, P, Q) with ``P = (H + 2 * padding[0] - R) // stride[0] + 1``, Q likewise.
    """

    library: ClassVar[str] = "dnn"
    kind: ClassVar[str] = "conv2d"

    input: AccelRef
    filter: AccelRef
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    out: AccelRef | None = None

    def output_shape(self) -> Shape:
        """Return (N, K, P, Q)."""
        n, channels, *size = self.input.shape
        k, filter_channels, *window = self.filter.shape
        if channels != filter_channels:
            raise InvalidArgumentError(f"input has {channels} channels and filter has {filter_channels}")
        if min(self.stride) < 1 or min(self.padding) < 0:
            raise InvalidArgumentError(f"stride {self.stride} must be positive and padding {self.padding} not negative")
        p, q = (
            (extent + 2 * padding - reach) // stride + 1
            for extent, padding, reach, stride in zip(size, self.padding, window, self.stride, strict=True)
        )
        if p < 1 or q < 1 or min(window) < 1:
            raise InvalidArgumentError(f"a filter of {window} does not fit into {size} padded by {self.padding}")
        return n, k, p, q

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, w = operand("input", self.input, ndim=4), operand("filter", self.filter, ndim=4)
        dtype = same_dtype(input=x, filter=w)
        not_aliased(self.out, input=x, filter=w)
        writes, creates = result_in(self.out, self.output_shape(), dtype)
        return Plan((x, w), writes, creates, "conv2d_forward", dtype)


@dataclass(frozen=True, eq=False, slots=True)
class Attention(KernelOp):
    """``softmax(scale * q @ k^T) @ v`` per batch and head.

    Parameters
    ----------
    q
        (batch, heads, seq_q, head_dim).
    k, v
        (batch, heads, seq_kv, head_dim).
    scale
        Multiplies the scores; ``None`` means ``head_dim ** -0.5``.
    causal
        See :data:`accel.compute.Causal`.
    out
        As ``q``.
    """

    library: ClassVar[str] = "dnn"
    kind: ClassVar[str] = "attention"

    q: AccelRef
    k: AccelRef
    v: AccelRef
    scale: float | None = None
    causal: Causal = False
    out: AccelRef | None = None

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        q, k, v = operand("q", self.q, ndim=4), operand("k", self.k, ndim=4), operand("v", self.v, ndim=4)
        dtype = same_dtype(q=q, k=k, v=v)
        if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
            raise InvalidArgumentError(f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
        if self.causal not in (False, True, "bottom_right"):
            raise InvalidArgumentError(f"causal is {self.causal!r}", remedy="Use False, True or 'bottom_right'.")
        not_aliased(self.out, q=q, k=k, v=v)
        writes, creates = result_in(self.out, q.shape, dtype)
        return Plan((q, k, v), writes, creates, "attention", dtype)
