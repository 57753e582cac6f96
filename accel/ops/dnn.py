"""Neural network ops."""

from __future__ import annotations

from typing import ClassVar

from accel.ops.attention import Attention, AttentionGrad, AttentionWithStats, PagedAttention, RaggedAttention
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
from accel.ops.family import Family
from accel.ops.loss import CrossEntropy, CrossEntropyGrad
from accel.ops.namespace import M, OpNamespace, method
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

__all__ = ["DnnOps"]


class DnnOps(OpNamespace[M]):
    """Neural network ops: float16, bfloat16, float32, float64."""

    __slots__ = ()

    library: ClassVar = "dnn"

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


FAMILY = Family(DnnOps)
