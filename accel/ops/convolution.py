"""Convolutions of one to three dimensions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import ClassVar, Literal, cast

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, Shape, not_aliased, operand, result_in, same_dtype
from accel.ops.fields import integer, set_fields
from accel.ops.windows import LONGEST, Padding, Steps, borders_of, counts_of, steps_of
from accel.ref import AccelRef

__all__ = ["Conv1d", "Conv2d", "Conv3d", "Convolution"]


@dataclass(frozen=True, eq=False, slots=True)
class Convolution(FamilyOp):
    """A convolution; what those of one to three dimensions share."""

    library: ClassVar[str] = "dnn"
    rank: ClassVar[int]

    input: AccelRef
    filter: AccelRef
    _: KW_ONLY
    bias: AccelRef | None = None
    stride: Steps = 1
    padding: Padding = 0
    dilation: Steps = 1
    groups: int = 1
    activation: Literal["relu"] | None = None
    channels_last: bool = False
    allow_tf32: bool = False
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``stride``, ``padding``, ``dilation`` and ``groups``."""
        groups = integer("groups", self.groups, "Give an int.")
        stride, dilation = steps_of("stride", self.stride, self.rank), steps_of("dilation", self.dilation, self.rank)
        set_fields(self, stride=stride, padding=borders_of(self.padding, self.rank), dilation=dilation, groups=groups)

    def strides(self) -> tuple[int, ...]:
        """Return the stride in each dimension."""
        return cast("tuple[int, ...]", self.stride)

    def dilations(self) -> tuple[int, ...]:
        """Return the dilation in each dimension."""
        return cast("tuple[int, ...]", self.dilation)

    def borders(self) -> tuple[tuple[int, int], ...]:
        """Return how much is padded (before, after) in each dimension."""
        return cast("tuple[tuple[int, int], ...]", self.padding)

    def sizes(self) -> tuple[Shape, Shape, Shape]:
        """Return the shapes of input, filter and result with the channels in their second place, wherever they are in memory."""
        x, w = self.input.shape, self.filter.shape
        if self.channels_last:
            x, w = (x[0], x[-1], *x[1:-1]), (w[0], w[-1], *w[1:-1])
        return _sizes(x, w, self.strides(), self.borders(), self.dilations(), self.groups)

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        refs = {"input": operand("input", self.input, ndim=self.rank + 2), "filter": operand("filter", self.filter, ndim=self.rank + 2)}
        _, _, shape = self.sizes()
        if self.bias is not None:
            refs["bias"] = operand("bias", self.bias, ndim=1)
            if self.bias.shape != shape[1:2]:
                raise InvalidArgumentError(f"bias has shape {self.bias.shape}", remedy=f"Give one number for each of {shape[1]} filters.")
        dtype = same_dtype(**refs)
        if self.activation not in (None, "relu"):
            raise InvalidArgumentError(f"activation is {self.activation!r}", remedy="Use 'relu', or apply a function to the result.")
        if self.allow_tf32 and dtype is not DType.FLOAT32:
            raise InvalidArgumentError(f"allow_tf32 is given for {dtype.value}", remedy="Leave it out: only float32 is computed in TF32.")
        not_aliased(self.out, **refs)
        n, filters, *pixels = shape
        writes, creates = result_in(self.out, (n, *pixels, filters) if self.channels_last else shape, dtype)
        return Plan(tuple(refs.values()), writes, creates, "conv2d_forward", dtype)


@lru_cache(maxsize=1024)
def _sizes(
    x: Shape, w: Shape, strides: tuple[int, ...], borders: tuple[tuple[int, int], ...], dilations: tuple[int, ...], groups: int
) -> tuple[Shape, Shape, Shape]:
    """Return the shapes of input, filter and result; raise if they do not fit. An op is asked several times each time it runs."""
    (n, channels, *size), (filters, filter_channels, *window) = x, w
    if min(*dilations, groups) < 1 or max(dilations) >= LONGEST:
        raise InvalidArgumentError(f"dilation is {dilations} and groups {groups}", remedy="Give small numbers of at least 1.")
    if channels != filter_channels * groups or filters % groups:
        raise InvalidArgumentError(
            f"an input of {channels} channels, and {filters} filters of {filter_channels}, in {groups} group(s)",
            remedy="Give filters whose channels, times groups, are the input's; groups divide the number of filters.",
        )
    reach = [(extent - 1) * step + 1 for extent, step in zip(window, dilations, strict=True)]
    return x, w, (n, filters, *counts_of(size, reach, strides, borders))


@dataclass(frozen=True, eq=False, slots=True)
class Conv1d(Convolution):
    """1-d cross-correlation, with ``bias`` and ``activation`` in the same kernel.

    Parameters
    ----------
    input, filter, out
        As for ``conv2d``, with one dimension where that has two.
    bias, stride, padding, dilation, groups, activation, channels_last, allow_tf32
        As for ``conv2d``.
    """

    kind: ClassVar[str] = "conv1d"
    rank: ClassVar[int] = 1


@dataclass(frozen=True, eq=False, slots=True)
class Conv2d(Convolution):
    """2-d cross-correlation, with ``bias`` and ``activation`` in the same kernel.

    Parameters
    ----------
    input
        (N, C, H, W).
    filter
        (K, C / groups, R, S).
    bias
        (K,), or ``None``.
    stride, dilation
        (vertical, horizontal), or one number that means both.
    padding
        Zeros around each image: (vertical, horizontal), or one number that means both. Where both ends differ, a dimension has (before, after):
        ``((0, 1), (0, 1))``.
    groups
        Channels and filters are cut into as many groups; each filter sees the channels of its group. With ``groups=C`` the convolution is depthwise.
    activation
        ``"relu"`` or ``None``.
    channels_last
        The input is (N, H, W, C), the filter (K, R, S, C / groups), and the result (N, P, Q, K): the order in which GPUs are fastest.
    allow_tf32
        Permits a device to round the factors of float32 arrays to TF32; see ``blas.gemm``. Rejected with any other dtype.
    out
        (N, K, P, Q) with ``P = (H + before + after - dilation[0] * (R - 1) - 1) // stride[0] + 1``, Q likewise.
    """

    kind: ClassVar[str] = "conv2d"
    rank: ClassVar[int] = 2


@dataclass(frozen=True, eq=False, slots=True)
class Conv3d(Convolution):
    """3-d cross-correlation, with ``bias`` and ``activation`` in the same kernel.

    Parameters
    ----------
    input, filter, out
        As for ``conv2d``, with three dimensions where that has two.
    bias, stride, padding, dilation, groups, activation, channels_last, allow_tf32
        As for ``conv2d``.
    """

    kind: ClassVar[str] = "conv3d"
    rank: ClassVar[int] = 3
