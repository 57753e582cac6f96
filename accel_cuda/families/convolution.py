"""Convolutions and their gradients by cuDNN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from accel import DType, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.cudnn import Cudnn, Room

__all__ = ["CUDNN_TYPES", "GRADS", "ConvolutionWork", "convolve", "fill"]

CUDNN_TYPES = {DType.FLOAT16: "HALF", DType.BFLOAT16: "BFLOAT16", DType.FLOAT32: "FLOAT", DType.FLOAT64: "DOUBLE"}
"""What cuDNN calls element types."""

GRADS = {f"conv{rank}d_{of}_grad": of for rank in (1, 2, 3) for of in ("input", "filter")}
"""Kind of a gradient -> what it is the gradient of."""

_ROUNDING = ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION")
# Transforms lose digits, and spread what is no number over a tile of the result.
_TRANSFORMS = ("FFT", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")


@dataclass(frozen=True, eq=False)
class ConvolutionWork:
    """What decides how a convolution is made: the key of its plan, by identity.

    Shapes have the channels in their second place, and one dimension is the second of two.

    Attributes
    ----------
    input, filter, output : tuple of int
    before, after : tuple of int
        The padding.
    has_bias, is_last, allow_tf32 : bool
        As the op says.
    makes : str
        Which of the arrays is made: ``"output"``, or the gradient of the ``"input"`` or the ``"filter"``.
    """

    dtype: DType
    input: tuple[int, ...]
    filter: tuple[int, ...]
    output: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    has_bias: bool = False
    is_last: bool = False
    allow_tf32: bool = False
    makes: str = "output"

    @classmethod
    def of(cls, op: Any) -> ConvolutionWork:
        """Return what an op asks for."""
        x, w, y = op.sizes()
        borders = op.padding
        before, after = (tuple([pair[end] for pair in borders]) for end in (0, 1))
        steps = before, after, op.stride, op.dilation
        if len(x) == 3:
            x, w, y = ((shape[0], shape[1], 1, shape[2]) for shape in (x, w, y))
            before, after, stride, dilation = (0, *before), (0, *after), (1, *op.stride), (1, *op.dilation)
            steps = before, after, stride, dilation
        if op.kind in GRADS:
            return cls(op.dtype(), x, w, y, *steps, is_last=op.channels_last, allow_tf32=op.allow_tf32, makes=GRADS[op.kind])
        return cls(op.dtype(), x, w, y, *steps, op.bias is not None, op.channels_last, op.allow_tf32)

    @cached_property
    def is_for_cudnn(self) -> bool:
        """Whether there is something to compute."""
        return 0 not in (*self.input, *self.filter, *self.output)

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """The bytes of what a plan calls 1 to 4: two operands, the bias and the result."""
        size = self.dtype.itemsize
        x, w, y = (size * math.prod(shape) for shape in (self.input, self.filter, self.output))
        if self.makes == "input":
            return {1: y, 2: w, 3: 0, 4: x}
        return {1: x, 2: y, 3: 0, 4: w} if self.makes == "filter" else {1: x, 2: w, 3: size * self.filter[0], 4: y}

    @property
    def own_nbytes(self) -> int:
        """What is made for cuDNN besides the operands: nothing."""
        return 0

    def request(self) -> dict[str, Any]:
        """See :meth:`accel_cuda.families.cudnn.Work.request`."""
        without = list(_ROUNDING + _TRANSFORMS)
        if self.dtype is DType.FLOAT32 and not self.allow_tf32:
            without.append("TENSOR_CORE")
        return {
            "op": "convolution",
            "makes": self.makes,
            "dtype": CUDNN_TYPES[self.dtype],
            "input": self.input,
            "filter": self.filter,
            "output": self.output,
            "bias": (1, self.filter[0], *(1,) * (len(self.filter) - 2)) if self.has_bias else None,
            "channels_last": self.is_last,
            "before": self.before,
            "after": self.after,
            "stride": self.stride,
            "dilation": self.dilation,
            "without": without,
        }


def convolve(stream: CudaStream, cudnn: Cudnn, work: ConvolutionWork, x: int, w: int, bias: int, y: int, room: Room) -> None:
    """Enqueue a convolution, or a gradient of one, into ``y``. May block where the plan is new.

    Parameters
    ----------
    x, w, y
        Addresses of input, filter and result; of a gradient, of its two operands in the op's order, and of its result.
    bias
        Address, or 0 for none.
    room
        What it works in; see :meth:`Cudnn.run`.

    Raises
    ------
    UnsupportedError
        If cuDNN does not offer it.
    """
    cudnn.run(stream, work, {1: x, 2: w, 3: bias, 4: y}, room, _refuse)


def fill(stream: CudaStream, work: ConvolutionWork, y: int) -> None:
    """Enqueue a convolution of no channels, or a gradient of nothing, which are 0.

    Raises
    ------
    UnsupportedError
        If there is a bias.
    """
    if work.has_bias:
        _refuse(stream, "no channels")
    stream.fill(y, bytes(1), work.sizes[4])


def _refuse(stream: CudaStream, reason: str) -> NoReturn:
    raise UnsupportedError(
        f"cuDNN does not offer this convolution, or this gradient of one: {reason}",
        library="cudnn",
        device=stream.context.description.spec,
        remedy="Use other sizes, another order of the channels, or another dtype.",
    )
