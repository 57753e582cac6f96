"""Modules of torch for the GPU tests of models, which a child process can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS, WIDTH, CLASSES = 1000, 64, 10


class Encoder(nn.Module):
    """Token ids to vectors, and how many ids are no padding. An id out of range asserts on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5, persistent=False)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> Any:
        mask = (ids != 0).unsqueeze(-1)
        hidden = self.layers(self.tokens(ids), src_key_padding_mask=ids == 0) * mask
        return {"vector": hidden.sum(1) / mask.sum(1).clamp(min=1) * self.scale, "words": mask.sum((1, 2))}


class Classifier(nn.Module):
    """Images to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()
        )
        self.head = nn.Linear(32, CLASSES)

    def forward(self, image: torch.Tensor) -> Any:
        return self.head(self.conv(image).mean((2, 3)))


class Waiting(nn.Module):
    """Has the host decide by a result, which no graph can: without NaN the rows of a batch still do not change one another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return -y if y.isnan().any().item() else y


class Version(nn.Module):
    """Its only weight plus zero times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.stack((self.number.expand(len(x)), self.linear(x).sum(1) * 0 + self.number), dim=1)


class Patches(nn.Module):
    """The states of a recurrent network with the batch in the middle, three places for a row, every other step, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 16, num_layers=2, batch_first=True)
        self.patch = nn.Linear(16, 3 * 4)
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))

    def forward(self, steps: torch.Tensor) -> Any:
        sequence, state = self.gru(steps)
        return {
            "state": state,
            "patches": self.patch(state[-1]).reshape(-1, 4),
            "halves": sequence[:, ::2].contiguous(),
            "table": self.table,
        }


class Normalizing(nn.Module):
    """Rows that depend on the others of their batch."""

    def forward(self, x: torch.Tensor) -> Any:
        return x - x.mean(0)


def patches() -> nn.Module:
    return Patches()


def normalizing() -> nn.Module:
    return Normalizing()


def encoder() -> nn.Module:
    return Encoder()


def classifier() -> nn.Module:
    return Classifier()


def waiting() -> nn.Module:
    return Waiting()


def version() -> nn.Module:
    return Version()
