"""Convolutions of one to three dimensions, and their gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from accel.errors import InvalidArgumentError
from accel.ops.base import OutOp, Plan, Shape, as_shape, check_tf32, op, operand, planned, same_dtype
from accel.ops.fields import convert_fields, set_fields, to_flag, to_int
from accel.ops.windows import LONGEST, Padding, Steps, borders_of, counts_of, steps_of
from accel.ref import AccelRef

if TYPE_CHECKING:
    from accel.dtype import DType

__all__ = [
    "Conv1d",
    "Conv1dFilterGrad",
    "Conv1dInputGrad",
    "Conv2d",
    "Conv2dFilterGrad",
    "Conv2dInputGrad",
    "Conv3d",
    "Conv3dFilterGrad",
    "Conv3dInputGrad",
]


@op("dnn", convert={"channels_last": to_flag, "groups": to_int})
class ConvolutionForm(OutOp):
    """What a convolution and its gradients share: how filters move over images."""

    rank: ClassVar[int]

    _: KW_ONLY
    stride: Steps = 1
    padding: Padding = 0
    dilation: Steps = 1
    groups: int = 1
    channels_last: bool = False
    allow_tf32: bool = False

    def __post_init__(self) -> None:
        """Convert the options."""
        convert_fields(self)
        rank = self.rank
        stride, dilation = steps_of("stride", self.stride, rank), steps_of("dilation", self.dilation, rank)
        set_fields(self, stride=stride, padding=borders_of(self.padding, rank), dilation=dilation)

    @abstractmethod
    def dtype(self) -> DType:
        """Return the dtype of operands and result."""

    @abstractmethod
    def given(self) -> tuple[Shape, Shape]:
        """Return the shapes of input and filter as they are in memory."""

    def sizes(self) -> tuple[Shape, Shape, Shape]:
        """Return the shapes of input, filter and result with the channels in their second place, wherever they are in memory."""
        x, w = self.given()
        form: Any = self  # its fields are converted
        if self.channels_last:
            x, w = (x[0], x[-1], *x[1:-1]), (w[0], w[-1], *w[1:-1])
        return _sizes(x, w, form.stride, form.padding, form.dilation, self.groups)

    def in_memory(self, shape: Shape) -> Shape:
        """Return one of :meth:`sizes` as it is in memory."""
        return (shape[0], *shape[2:], shape[1]) if self.channels_last else shape

    def _convolved(self, shape: Shape, **refs: AccelRef) -> Plan:
        """Return the plan of an op that reads ``refs`` and makes an array of one of :meth:`sizes`."""
        dtype = same_dtype(**refs)
        check_tf32(self.allow_tf32, dtype)
        return planned(self.out, refs, self.in_memory(shape), dtype, "conv2d_forward")


@op()
class Convolution(ConvolutionForm):
    """A convolution; what those of one to three dimensions share."""

    input: AccelRef
    filter: AccelRef
    _: KW_ONLY
    bias: AccelRef | None = None
    activation: Literal["relu"] | None = None

    def dtype(self) -> DType:
        return self.input.dtype

    def given(self) -> tuple[Shape, Shape]:
        return self.input.shape, self.filter.shape

    def plan(self) -> Plan:
        refs = {"input": operand("input", self.input, ndim=self.rank + 2), "filter": operand("filter", self.filter, ndim=self.rank + 2)}
        _, _, shape = self.sizes()
        if self.bias is not None:
            refs["bias"] = operand("bias", self.bias, ndim=1)
            if self.bias.shape != shape[1:2]:
                raise InvalidArgumentError(f"bias has shape {self.bias.shape}", remedy=f"Give one number for each of {shape[1]} filters.")
        if self.activation not in (None, "relu"):
            raise InvalidArgumentError(f"activation is {self.activation!r}", remedy="Use 'relu', or apply a function to the result.")
        return self._convolved(shape, **refs)


def _dimensions(name: str, shape: int | Sequence[int], rank: int) -> Shape:
    """Return a shape of ``rank`` spatial dimensions and two others."""
    dimensions = as_shape(shape)
    if len(dimensions) != rank + 2:
        raise InvalidArgumentError(f"{name} is {shape!r}", remedy=f"Give {rank + 2} dimensions: those of the convolution's {name[:-6]}.")
    return dimensions


@op()
class InputGrad(ConvolutionForm):
    """The gradient of a convolution's input."""

    grad: AccelRef
    filter: AccelRef
    input_shape: Sequence[int]

    def __post_init__(self) -> None:
        """Convert the options and ``input_shape``."""
        ConvolutionForm.__post_init__(self)
        set_fields(self, input_shape=_dimensions("input_shape", self.input_shape, self.rank))

    def dtype(self) -> DType:
        return self.grad.dtype

    def given(self) -> tuple[Shape, Shape]:
        return cast("Shape", self.input_shape), self.filter.shape

    def plan(self) -> Plan:
        grad, w = operand("grad", self.grad), operand("filter", self.filter, ndim=self.rank + 2)
        x_shape, _, y_shape = self.sizes()
        _check_grad(grad, self.in_memory(y_shape))
        return self._convolved(x_shape, grad=grad, filter=w)


@op()
class FilterGrad(ConvolutionForm):
    """The gradient of a convolution's filter."""

    input: AccelRef
    grad: AccelRef
    filter_shape: Sequence[int]

    def __post_init__(self) -> None:
        """Convert the options and ``filter_shape``."""
        ConvolutionForm.__post_init__(self)
        set_fields(self, filter_shape=_dimensions("filter_shape", self.filter_shape, self.rank))

    def dtype(self) -> DType:
        return self.grad.dtype

    def given(self) -> tuple[Shape, Shape]:
        return self.input.shape, cast("Shape", self.filter_shape)

    def plan(self) -> Plan:
        x, grad = operand("input", self.input, ndim=self.rank + 2), operand("grad", self.grad)
        _, w_shape, y_shape = self.sizes()
        _check_grad(grad, self.in_memory(y_shape))
        return self._convolved(w_shape, input=x, grad=grad)


def _check_grad(grad: AccelRef, shape: Shape) -> None:
    if grad.shape != shape:
        raise InvalidArgumentError(
            f"grad has shape {grad.shape}, and the convolution's result {shape}", remedy="Give the shapes and options of the convolution."
        )


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


@op()
class Conv1d(Convolution):
    """1-d cross-correlation, and what may follow it: ``bias`` and ``activation``.

    Parameters
    ----------
    input, filter, out
        As for ``conv2d``, with one dimension where that has two.
    bias, stride, padding, dilation, groups, activation, channels_last, allow_tf32
        As for ``conv2d``.
    """

    rank: ClassVar[int] = 1


@op()
class Conv2d(Convolution):
    """2-d cross-correlation, and what may follow it: ``bias`` and ``activation``.

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

    rank: ClassVar[int] = 2


@op()
class Conv3d(Convolution):
    """3-d cross-correlation, and what may follow it: ``bias`` and ``activation``.

    Parameters
    ----------
    input, filter, out
        As for ``conv2d``, with three dimensions where that has two.
    bias, stride, padding, dilation, groups, activation, channels_last, allow_tf32
        As for ``conv2d``.
    """

    rank: ClassVar[int] = 3


@op()
class Conv2dInputGrad(InputGrad):
    """The gradient of ``conv2d``'s input: what a loss changes by per element of it.

    Parameters
    ----------
    grad
        Gradient of the result: (N, K, P, Q).
    filter
        (K, C / groups, R, S).
    input_shape
        Shape of the input: several may give the same P and Q.
    stride, padding, dilation, groups, channels_last, allow_tf32
        Those of the convolution. With ``channels_last`` all arrays, and ``input_shape``, have the channels last.
    out
        (N, C, H, W).
    """

    rank: ClassVar[int] = 2


@op()
class Conv1dInputGrad(InputGrad):
    """The gradient of ``conv1d``'s input: what a loss changes by per element of it.

    Parameters
    ----------
    grad, filter, input_shape, out
        As for ``conv2d_input_grad``, with one dimension where that has two.
    stride, padding, dilation, groups, channels_last, allow_tf32
        Those of the convolution.
    """

    rank: ClassVar[int] = 1


@op()
class Conv3dInputGrad(InputGrad):
    """The gradient of ``conv3d``'s input: what a loss changes by per element of it.

    Parameters
    ----------
    grad, filter, input_shape, out
        As for ``conv2d_input_grad``, with three dimensions where that has two.
    stride, padding, dilation, groups, channels_last, allow_tf32
        Those of the convolution.
    """

    rank: ClassVar[int] = 3


@op()
class Conv2dFilterGrad(FilterGrad):
    """The gradient of ``conv2d``'s filter, summed over all images.

    Parameters
    ----------
    input
        (N, C, H, W).
    grad
        Gradient of the result: (N, K, P, Q).
    filter_shape
        Shape of the filter: several may give the same P and Q.
    stride, padding, dilation, groups, channels_last, allow_tf32
        Those of the convolution. With ``channels_last`` all arrays, and ``filter_shape``, have the channels last.
    out
        (K, C / groups, R, S).
    """

    rank: ClassVar[int] = 2


@op()
class Conv1dFilterGrad(FilterGrad):
    """The gradient of ``conv1d``'s filter, summed over all images.

    Parameters
    ----------
    input, grad, filter_shape, out
        As for ``conv2d_filter_grad``, with one dimension where that has two.
    stride, padding, dilation, groups, channels_last, allow_tf32
        Those of the convolution.
    """

    rank: ClassVar[int] = 1


@op()
class Conv3dFilterGrad(FilterGrad):
    """The gradient of ``conv3d``'s filter, summed over all images.

    Parameters
    ----------
    input, grad, filter_shape, out
        As for ``conv2d_filter_grad``, with three dimensions where that has two.
    stride, padding, dilation, groups, channels_last, allow_tf32
        Those of the convolution.
    """

    rank: ClassVar[int] = 3
