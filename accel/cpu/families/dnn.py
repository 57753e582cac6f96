"""The ``dnn`` family on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.cpu.families import attention, attention_grad, convolution, convolution_grad, loss, normalization, pooling, training
from accel.family import BackendPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from accel.family import Sample

__all__ = ["PART"]


_MODULES = (convolution, convolution_grad, attention, attention_grad, normalization, pooling, loss, training)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for module in _MODULES:
        yield from module.samples(rng)


PART = BackendPart({kind: kernel for module in _MODULES for kind, kernel in module.KERNELS.items()}, samples=_samples)
