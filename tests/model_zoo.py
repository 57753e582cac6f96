"""Modules of torch as users build them, each with something that a state dict does not say; and models that are none of torch's."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

WIDTH = 8


class Output(OrderedDict[str, Any]):
    """A mapping with attributes, as models of transformers return it."""


@dataclass
class Scores:
    """A result with a field that is not always there."""

    scores: Any
    attention: Any = None


class Tables(NamedTuple):
    """A tuple with names."""

    cos: torch.Tensor
    sin: torch.Tensor


def mlp() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(WIDTH, 16), act=nn.ReLU(), last=nn.Linear(16, 4)))


class Normalized(nn.Module):
    """Has buffers that a forward changes in train mode."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return {"y": self.norm(self.linear(x)), "calls": self.calls.clone()}


class Rotary(nn.Module):
    """Has a table that is not persistent."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (100.0 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)), persistent=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        angles = torch.outer(torch.arange(x.shape[0]).float(), self.inv_freq).repeat(1, 2)
        return self.proj(x * angles.cos() + x.flip(-1) * angles.sin()).T


class Attributes(nn.Module):
    """Has tensors that are no parameters and no buffers, some random, one in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.random = torch.randn(WIDTH)
        self.tables = [torch.randn(WIDTH), {"a": torch.rand(WIDTH)}, self.random]
        self.named = Tables(torch.randn(WIDTH), self.random)
        self.same = self.linear.weight
        self.loose = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval()]
        self.plain = [nn.Parameter(torch.randn(WIDTH))]

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x) * self.random + self.tables[0] * self.tables[1]["a"] + self.tables[2]  # type: ignore[index]
        return self.loose[1](self.loose[0](y)) * self.named.cos + self.named.sin + x @ self.same + self.plain[0]


class Tied(nn.Module):
    """Has one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH)
        self.head = nn.Linear(WIDTH, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.embedding(x)
        return Output(logits=self.head(hidden), hidden=hidden.transpose(1, 2))


class Halves(nn.Module):
    """Has parameters of narrow floats, and empty and 0-d ones."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"):
            values = torch.randn(WIDTH, WIDTH).to(getattr(torch, name))
            setattr(self, f"in_{name}", nn.Parameter(values, requires_grad=not name.startswith("float8")))
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH) < 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"):
            x = x @ getattr(self, f"in_{name}").float()
        return torch.cat([x * self.scale * self.mask, self.empty])


class Recurrent(nn.Module):
    """Keeps its parameters in a list besides."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(x)[0]


class Derived(nn.Module):
    """Computes a table from a parameter, with which it must be built."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norms = self.first.weight.detach().norm(dim=0)

    def forward(self, x: torch.Tensor) -> Any:
        return Scores(self.linear(self.first(x / self.norms)))


class Measuring(Derived):
    """Looks at the values of a parameter while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = self.first.weight.abs().max().item()

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(self.first(x / self.norms)) * self.factor


class Dropping(nn.Module):
    """Computes numbers from tensors while it is built, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0.1, 0.5, 3)]
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(rate)) for rate in self.rates])

    def forward(self, x: torch.Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return tuple(found)


class WritesInput(nn.Module):
    """Changes what it was given."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.relu_()


class WritesParameter(nn.Module):
    """Changes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        self.scale.mul_(0.5)
        return x * self.scale


class WritesUnseen(nn.Module):
    """Changes its parameter past torch's count of changes: by ``.data``, by numpy, or, for large inputs, not before it serves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x)
        return x * self.scale

    def write(self, x: torch.Tensor) -> None:
        self.scale.data.mul_(2)


class WritesByNumpy(WritesUnseen):
    def write(self, x: torch.Tensor) -> None:
        self.scale.detach().numpy()[:] *= 2


class WritesLater(WritesUnseen):
    def write(self, x: torch.Tensor) -> None:
        if (x > 100).any():
            super().write(x)


class SparseResult(nn.Module):
    """Returns what has no strides."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.to_sparse()


ZOO: dict[str, Any] = {
    each.__name__: each for each in (mlp, Normalized, Rotary, Attributes, Tied, Halves, Recurrent, Derived, Measuring, Dropping)
}


def some_input(name: str, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return inputs of a module of the zoo."""
    if name == "Tied":
        return {"x": torch.from_numpy(rng.integers(0, 30, (3, 6)))}
    x = torch.from_numpy(rng.standard_normal((6, WIDTH)).astype(np.float32))
    return {"input" if name == "mlp" else "x": x}


def leaves(result: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a result, by name."""
    if isinstance(result, torch.Tensor):
        return {"": result}
    if isinstance(result, tuple):
        return {str(index): each for index, each in enumerate(result)}
    if isinstance(result, Scores):
        result = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: each for name, each in result.items() if each is not None}


# -- what is no builder


class Doubling:
    """A model of numpy: what a user writes who has another framework."""

    def __init__(self, factor: float | None = 2.0) -> None:
        if factor is None:
            raise ArithmeticError("no factor")
        self.factor = factor

    def open(self, weights: Any, description: Any, stream: Any) -> None:
        self.bias = np.asarray(weights["bias"])

    def run(self, inputs: Any) -> Any:
        return np.asarray(inputs["x"]) * self.factor + self.bias


def gru() -> nn.Module:
    return nn.GRU(WIDTH, 5, num_layers=2, batch_first=True)


def raising() -> nn.Module:
    raise ArithmeticError("no such model")


def nothing() -> None:
    """Forget to return the module."""


async def awaitable() -> nn.Module:
    return mlp()


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def with_argument(width: int) -> nn.Module:
    return nn.Linear(width, width)


partly = functools.partial(with_argument, WIDTH)
number = 3
