"""Neural network ops."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from accel.compute import Causal
from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, Shape, factor, not_aliased, operand, result_in, same_dtype
from accel.ops.family import Family, KernelLane
from accel.ops.fields import integer, set_fields
from accel.ops.namespace import OpNamespace, method
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FAMILY", "Attention", "Conv2d", "DnnOps"]

M = TypeVar("M")

_LONGEST = 2**31


def _pair(name: str, value: object) -> tuple[int, int]:
    """Return (vertical, horizontal) given both, or one number that means both."""
    remedy = "Give an int, or (vertical, horizontal)."
    if not isinstance(value, (tuple, list)):
        value = (value, value)
    if len(value) != 2:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy=remedy)
    return integer(name, value[0], remedy), integer(name, value[1], remedy)


@dataclass(frozen=True, eq=False, slots=True)
class Conv2d(FamilyOp):
    """2-d cross-correlation.

    Parameters
    ----------
    input
        (N, C, H, W).
    filter
        (K, C, R, S).
    stride, padding
        (vertical, horizontal), or one number that means both.
    out
        (N, K, P, Q) with ``P = (H + 2 * padding[0] - R) // stride[0] + 1``, Q likewise.
    """

    library: ClassVar[str] = "dnn"
    kind: ClassVar[str] = "conv2d"

    input: AccelRef
    filter: AccelRef
    _: KW_ONLY
    stride: int | tuple[int, int] = (1, 1)
    padding: int | tuple[int, int] = (0, 0)
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``stride`` and ``padding``."""
        stride, padding = self.steps()
        set_fields(self, stride=stride, padding=padding)

    def steps(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return stride and padding, each (vertical, horizontal)."""
        return _pair("stride", self.stride), _pair("padding", self.padding)

    def output_shape(self) -> Shape:
        """Return (N, K, P, Q)."""
        n, channels, *size = self.input.shape
        k, filter_channels, *window = self.filter.shape
        if channels != filter_channels:
            raise InvalidArgumentError(
                f"input has {channels} channels and filter has {filter_channels}", remedy="Give (N, C, H, W) and (K, C, R, S) with one C."
            )
        stride, padding = self.steps()
        if min(stride) < 1 or min(padding) < 0:
            raise InvalidArgumentError(
                f"stride is {stride} and padding {padding}", remedy="Give a stride of at least 1 and a padding of at least 0."
            )
        if max(*stride, *(extent + 2 * border for extent, border in zip(size, padding, strict=True))) >= _LONGEST:
            raise InvalidArgumentError(
                f"an image of {size} with padding {padding} and stride {stride} is too large",
                remedy=f"Keep strides, and padded images in each direction, below {_LONGEST}: kernels count in 32 bits.",
            )
        p, q = (
            (extent + 2 * border - reach) // step + 1 for extent, border, reach, step in zip(size, padding, window, stride, strict=True)
        )
        if p < 1 or q < 1 or min(window) < 1:
            raise InvalidArgumentError(
                f"a filter of {window} does not fit into {size} padded by {padding}", remedy="Give a smaller filter or more padding."
            )
        return n, k, p, q

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, w = operand("input", self.input, ndim=4), operand("filter", self.filter, ndim=4)
        dtype = same_dtype(input=x, filter=w)
        not_aliased(self.out, input=x, filter=w)
        writes, creates = result_in(self.out, self.output_shape(), dtype)
        return Plan((x, w), writes, creates, "conv2d_forward", dtype)


@dataclass(frozen=True, eq=False, slots=True)
class Attention(FamilyOp):
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
    _: KW_ONLY
    scale: float | None = None
    causal: Causal = False
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``scale``."""
        if self.scale is not None:
            set_fields(self, scale=factor("scale", self.scale, DType.FLOAT64))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        q, k, v = operand("q", self.q, ndim=4), operand("k", self.k, ndim=4), operand("v", self.v, ndim=4)
        dtype = same_dtype(q=q, k=k, v=v)
        if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
            raise InvalidArgumentError(
                f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together",
                remedy="Give q as (batch, heads, seq_q, head_dim), and k and v as (batch, heads, seq_kv, head_dim).",
            )
        if self.causal not in (False, True, "bottom_right"):
            raise InvalidArgumentError(f"causal is {self.causal!r}", remedy="Use False, True or 'bottom_right'.")
        not_aliased(self.out, q=q, k=k, v=v)
        writes, creates = result_in(self.out, q.shape, dtype)
        return Plan((q, k, v), writes, creates, "attention", dtype)


class DnnOps(OpNamespace[M]):
    """Neural network ops: float16, bfloat16, float32, float64."""

    __slots__ = ()

    library: ClassVar[str] = "dnn"

    conv2d = method(Conv2d)
    attention = method(Attention)


def _conv2d(lane: KernelLane, op: Conv2d, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Convolve."""
    lane.compute.conv2d_forward(
        inputs[0], op.input.shape, inputs[1], op.filter.shape, outputs[0], op.output_shape(), *op.steps(), dtype=op.input.dtype
    )


def _attention(lane: KernelLane, op: Attention, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Attend."""
    batch, heads, seq_q, head_dim = op.q.shape
    scale = head_dim**-0.5 if op.scale is None and head_dim else float(op.scale or 0.0)
    lane.compute.attention(
        inputs[0], inputs[1], inputs[2], outputs[0], batch, heads, seq_q, op.k.shape[2], head_dim, scale, op.causal, dtype=op.q.dtype
    )


FAMILY = Family(DnnOps, {"conv2d": _conv2d, "attention": _attention})
