"""A torch model of several ranks for tests, which a child process can import."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from accel.models import ModelGroup

WIDE = 16
SPLIT = {"up.*": 0, "down.weight": 1}


class Mlp(nn.Module):
    """Two layers: each rank has a part of the hidden units, and the answer is the sum over the ranks."""

    def __init__(self, group: ModelGroup | None = None) -> None:
        super().__init__()
        self._group = group
        wide = WIDE // (1 if group is None else group.size)
        self.up = nn.Linear(5, wide, dtype=torch.float64)
        self.down = nn.Linear(wide, 3, bias=False, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return (y if self._group is None else self._group.all_reduce(y)) * self.scale
