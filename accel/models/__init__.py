"""Models on a device: inputs of bounded shapes, durable weights, and adapters to frameworks."""

from __future__ import annotations

from accel.models.adapters.base import Adapter, ModelSource
from accel.models.adapters.group import ModelGroup
from accel.models.model import Model, Rows
from accel.models.outputs import OutputSpecs
from accel.models.tensor_spec import Buckets, TensorSpec
from accel.models.world_function import RefGroup

__all__ = ["Adapter", "Buckets", "Model", "ModelGroup", "ModelSource", "OutputSpecs", "RefGroup", "Rows", "TensorSpec"]
