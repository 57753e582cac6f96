"""Neural network ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from accel.errors import UnsupportedError
from accel.ops.attention import Attention, PagedAttention, RaggedAttention
from accel.ops.attention_grad import AttentionGrad, AttentionWithStats
from accel.ops.convolution import (
    Conv1d,
    Conv1dFilterGrad,
    Conv1dInputGrad,
    Conv2d,
    Conv2dFilterGrad,
    Conv2dInputGrad,
    Conv3d,
    Conv3dFilterGrad,
    Conv3dInputGrad,
)
from accel.ops.family import Family, KernelLane
from accel.ops.loss import CrossEntropy, CrossEntropyGrad
from accel.ops.namespace import OpNamespace, method
from accel.ops.normalization import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LogSoftmax, RmsNorm, Softmax
from accel.ops.pooling import AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad
from accel.ops.training import (
    BatchNormGrad,
    BatchNormTrain,
    Dropout,
    GroupNormGrad,
    InstanceNormGrad,
    LayerNormGrad,
    LogSoftmaxGrad,
    RmsNormGrad,
    SoftmaxGrad,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.ops.base import Plan

__all__ = ["DnnOps"]

M = TypeVar("M")


class DnnOps(OpNamespace[M]):
    """Neural network ops: float16, bfloat16, float32, float64."""

    __slots__ = ()

    library: ClassVar[str] = "dnn"

    attention = method(Attention)
    ragged_attention = method(RaggedAttention)
    paged_attention = method(PagedAttention)
    attention_with_stats = method(AttentionWithStats)
    attention_grad = method(AttentionGrad)
    conv1d = method(Conv1d)
    conv2d = method(Conv2d)
    conv3d = method(Conv3d)
    conv1d_input_grad = method(Conv1dInputGrad)
    conv2d_input_grad = method(Conv2dInputGrad)
    conv3d_input_grad = method(Conv3dInputGrad)
    conv1d_filter_grad = method(Conv1dFilterGrad)
    conv2d_filter_grad = method(Conv2dFilterGrad)
    conv3d_filter_grad = method(Conv3dFilterGrad)
    softmax = method(Softmax)
    log_softmax = method(LogSoftmax)
    layer_norm = method(LayerNorm)
    rms_norm = method(RmsNorm)
    group_norm = method(GroupNorm)
    instance_norm = method(InstanceNorm)
    batch_norm = method(BatchNorm)
    softmax_grad = method(SoftmaxGrad)
    log_softmax_grad = method(LogSoftmaxGrad)
    layer_norm_grad = method(LayerNormGrad)
    rms_norm_grad = method(RmsNormGrad)
    group_norm_grad = method(GroupNormGrad)
    instance_norm_grad = method(InstanceNormGrad)
    batch_norm_train = method(BatchNormTrain)
    batch_norm_grad = method(BatchNormGrad)
    dropout = method(Dropout)
    max_pool = method(MaxPool)
    avg_pool = method(AvgPool)
    max_pool_grad = method(MaxPoolGrad)
    avg_pool_grad = method(AvgPoolGrad)
    cross_entropy = method(CrossEntropy)
    cross_entropy_grad = method(CrossEntropyGrad)


def _conv2d(lane: KernelLane, op: Conv2d, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Convolve, as far as compute interfaces can."""
    x, w, y = op.sizes()
    borders = op.borders()
    is_plain = op.bias is None and op.activation is None and not op.channels_last and (op.groups, *op.dilations()) == (1, 1, 1)
    if not is_plain or any(before != after for before, after in borders):
        raise _not_plain(op, "without bias, activation, groups, dilation, channels_last, and with the same padding at both ends")
    padding = [before for before, _ in borders]
    lane.compute.conv2d_forward(inputs[0], x, inputs[1], w, outputs[0], y, op.strides(), padding, dtype=op.input.dtype)


def _attention(lane: KernelLane, op: Attention, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Attend, as far as compute interfaces can."""
    batch, heads, seq_q, dim = op.q.shape
    if len(inputs) > 3 or op.window is not None or op.k.shape[1] != heads or op.v.shape[3] != dim:
        raise _not_plain(op, "without bias, lengths and window, and with as many heads, of one size, in k and v as in q")
    seq_kv = op.k.shape[2]
    q, k, v = inputs
    lane.compute.attention(q, k, v, outputs[0], batch, heads, seq_q, seq_kv, dim, op.multiplier(), op.causal, dtype=op.q.dtype)


def _not_plain(op: Any, what: str) -> UnsupportedError:
    return UnsupportedError(f"the backend offers {op.kind} {what}", library=op.library, op=op.kind, remedy="Use another backend.")


FAMILY = Family(DnnOps, {"conv2d": _conv2d, "attention": _attention})
"""Convolution and attention."""
