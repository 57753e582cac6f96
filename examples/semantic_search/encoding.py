"""The encoder on a device: a model that is loaded once, and served in batches to many tasks."""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel.models.adapters.onnx import OnnxAdapter
from examples.semantic_search.encoder import MODEL
from examples.semantic_search.tokens import DOCUMENT_LENGTH, QUERY_LENGTH, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Mapping

POISON = [1 << 50]
"""A row that the tokenizer never makes: it names an embedding far behind the last one."""


class UncheckedEncoder(OnnxAdapter):
    """The encoder, with a lookup that trusts its indices.

    ONNX Runtime checks them, and such a request would merely fail. Many kernels do not, and then it ends the process: this class reads where a wrong
    index says.
    """

    def run(self, inputs: Mapping[str, accel.Operand]) -> Any:
        """Compute the vectors."""
        highest = int(np.asarray(inputs["input_ids"]).max())
        if highest >= VOCABULARY:
            ctypes.string_at(4 * highest, 4)
        return super().run(inputs)


async def load_encoder(device: accel.Device) -> accel.Model:
    """Load the encoder, ready for batches of up to 64 queries or documents: by ONNX Runtime on a CPU, by torch elsewhere."""
    inputs = {"input_ids": accel.TensorSpec(("batch", "length"), "int64", pad=0)}
    buckets = {"batch": (1, 8, 64), "length": (8, QUERY_LENGTH, DOCUMENT_LENGTH)}
    if device.info().backend == "cpu":
        return await device.load_model(UncheckedEncoder, options={"path": MODEL}, inputs=inputs, buckets=buckets)
    from examples.semantic_search.torch_encoder import TorchEncoder, exported_weights

    return await device.load_model(TorchEncoder, weights=await asyncio.to_thread(exported_weights), inputs=inputs, buckets=buckets)
