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


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from convolution.samples(rng)
    yield from convolution_grad.samples(rng)
    yield from attention.samples(rng)
    yield from attention_grad.samples(rng)
    yield from normalization.samples(rng)
    yield from pooling.samples(rng)
    yield from loss.samples(rng)
    yield from training.samples(rng)


PART = BackendPart(
    {
        **convolution.KERNELS,
        **attention.KERNELS,
        **normalization.KERNELS,
        **pooling.KERNELS,
        **attention_grad.KERNELS,
        **convolution_grad.KERNELS,
        **loss.KERNELS,
        **training.KERNELS,
    },
    samples=_samples,
)
