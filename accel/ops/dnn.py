"""Neural network ops."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from accel.compute import Causal
from accel.errors import InvalidArgumentError
from accel.ops.base import KernelOp, Plan, Shape, factor, not_aliased, operand, result_in, same_dtype
from accel.ref import AccelRef

__all__ = ["Attention", "Conv2d"]


_LONGEST = 2**31


def _pair(name: str, value: object) -> tuple[int, int]:
    """Return (vertical, horizontal) given both, or one number that means both."""
    try:
        if isinstance(value, (tuple, list)):
            vertical, horizontal = map(operator.index, value)
        else:
            vertical = horizontal = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give an int, or (vertical, horizontal).") from None
    return vertical, horizontal


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
        (vertical, horizontal); one number, which means both, becomes two when the op is checked.
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
            raise InvalidArgumentError(
                f"input has {channels} channels and filter has {filter_channels}", remedy="Give (N, C, H, W) and (K, C, R, S) with one C."
            )
        if min(self.stride) < 1 or min(self.padding) < 0:
            raise InvalidArgumentError(
                f"stride is {self.stride} and padding {self.padding}", remedy="Give a stride of at least 1 and a padding of at least 0."
            )
        if max(*self.stride, *(extent + 2 * padding for extent, padding in zip(size, self.padding, strict=True))) >= _LONGEST:
            raise InvalidArgumentError(
                f"an image of {size} with padding {self.padding} and stride {self.stride} is too large",
                remedy=f"Keep strides, and padded images in each direction, below {_LONGEST}: kernels count in 32 bits.",
            )
        p, q = (
            (extent + 2 * padding - reach) // stride + 1
            for extent, padding, reach, stride in zip(size, self.padding, window, self.stride, strict=True)
        )
        if p < 1 or q < 1 or min(window) < 1:
            raise InvalidArgumentError(
                f"a filter of {window} does not fit into {size} padded by {self.padding}", remedy="Give a smaller filter or more padding."
            )
        return n, k, p, q

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, w = operand("input", self.input, ndim=4), operand("filter", self.filter, ndim=4)
        dtype = same_dtype(input=x, filter=w)
        # The op is frozen for its users; this changes how the numbers are written, and not which they are.
        object.__setattr__(self, "stride", _pair("stride", self.stride))
        object.__setattr__(self, "padding", _pair("padding", self.padding))
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
            raise InvalidArgumentError(
                f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together",
                remedy="Give q as (batch, heads, seq_q, head_dim), and k and v as (batch, heads, seq_kv, head_dim).",
            )
        if self.scale is not None:
            object.__setattr__(self, "scale", factor("scale", self.scale, dtype))
        if self.causal not in (False, True, "bottom_right"):
            raise InvalidArgumentError(f"causal is {self.causal!r}", remedy="Use False, True or 'bottom_right'.")
        not_aliased(self.out, q=q, k=k, v=v)
        writes, creates = result_in(self.out, q.shape, dtype)
        return Plan((q, k, v), writes, creates, "attention", dtype)
