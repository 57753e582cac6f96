"""The exported encoder as a torch module, for devices on which ONNX Runtime does not compute.

The process in which the model lives imports this module, and the service's process does not: that takes seconds.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from examples.semantic_search.encoder import DIMENSIONS
from examples.semantic_search.tokens import VOCABULARY


class TorchEncoder(nn.Module):
    """What ``model.onnx`` computes; its parameters have the names that they have there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(VOCABULARY, DIMENSIONS, dtype=torch.float16))
        self.weight = nn.Parameter(torch.zeros(VOCABULARY))
        self.w1 = nn.Parameter(torch.zeros(DIMENSIONS, 2 * DIMENSIONS))
        self.b1 = nn.Parameter(torch.zeros(2 * DIMENSIONS))
        self.w2 = nn.Parameter(torch.zeros(2 * DIMENSIONS, DIMENSIONS))
        self.b2 = nn.Parameter(torch.zeros(DIMENSIONS))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors, float32 (batch, DIMENSIONS), of ids, int64 (batch, length)."""
        weights = self.weight[input_ids]
        summed = (weights.unsqueeze(1) @ self.embedding[input_ids].float()).squeeze(1)
        mean = summed / (weights.sum(dim=1, keepdim=True) + 1e-6)
        change = functional.gelu(mean @ self.w1 + self.b1) @ self.w2 + self.b2
        return functional.normalize(mean + change, dim=-1)
