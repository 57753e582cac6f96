"""Losses on the CPU, and their samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, wider
from accel.cpu.kernels import kernel, touches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.family import Sample

__all__ = ["KERNELS", "samples"]


def _losses(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute the loss of each row; given the gradients of the losses, those of the logits."""
    *grads, logits, labels = operands
    classes = logits.shape[-1]
    logits, labels = logits.reshape(-1, classes), labels.ravel()
    out = results[0].reshape(-1, classes) if grads else results[0].reshape(-1)
    wide = wider(logits.dtype)
    for some in blocks(len(logits), 2 * classes * wide.itemsize):
        part, label = logits[some].astype(wide), labels[some]
        part -= part.max(axis=1, keepdims=True)
        powers = np.exp(part)
        total = powers.sum(axis=1, keepdims=True)
        is_class = (label >= 0) & (label < classes)
        place = np.arange(len(label)), np.where(is_class, label, 0)
        if not grads:
            made = np.log(total[:, 0]) - part[place]
        else:
            made = powers / total
            made[place] -= 1
            made *= grads[0].reshape(-1, 1)[some].astype(wide)
        made[~is_class] = np.nan
        made[label == op.ignore_index] = 0
        out[some] = made


KERNELS: Mapping[str, Kernel] = dict.fromkeys(("cross_entropy", "cross_entropy_grad"), kernel(_losses, touches(12)))


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of every op here."""
    for dtype in sampling.ALL_FLOATS:
        for number, shape in enumerate(((5, 10), (1, 1), (2, 3, 33), (7, 1000), (3, 20_003), (300, 64), (4,), (0, 3))):
            kind = np.int32 if number % 2 else np.int64
            labels = rng.integers(0, shape[-1], shape[:-1]).astype(kind)
            options = {"ignore_index": 2} if number % 3 == 2 else {}
            if labels.size > 3:
                labels.flat[1:4] = -100, -1, shape[-1]
            yield from _samples(rng, dtype, shape, labels, options)


def _samples(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], labels: Array, options: dict[str, Any]) -> Iterator[Sample]:
    logits = np.asarray(4 * sampling.random(rng, shape, dtype), dtype.numpy)
    if logits.size > 200:
        logits.flat[5], logits.flat[shape[-1] + 7] = -np.inf, np.inf
    grad = sampling.random(rng, shape[:-1], dtype)
    losses, grads = _expected(sampling.wide(grad), sampling.wide(logits), labels, options.get("ignore_index", -100))
    # The sum of exponentials and the logit of the label may cancel.
    largest = float(np.max(np.abs(logits), initial=0.0, where=np.isfinite(logits)))
    name, error = f"{dtype.value}{list(shape)} {labels.dtype} {options}", sampling.sums(dtype, 16)
    yield sampling.sample("cross_entropy", name, (logits, labels), losses, error, largest, **options)
    terms = 1.0  # a probability less 1
    yield sampling.sample("cross_entropy_grad", name, (grad, logits, labels), grads, error, terms, **options)


@np.errstate(all="ignore")
def _expected(grad: Array, logits: Array, labels: Array, ignored: int) -> tuple[Array, Array]:
    """Return the losses, and the gradients of the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True)
    is_one = labels[..., None] == np.arange(logits.shape[-1])
    is_class, is_ignored = is_one.any(-1), labels == ignored
    losses = np.asarray(np.where(is_class, np.where(is_one, np.log(total) - shifted, 0).sum(-1), np.nan))
    grads = np.where(is_class[..., None], (np.exp(shifted) / total - is_one) * grad[..., None], np.nan)
    losses[is_ignored], grads[is_ignored] = 0, 0
    return losses, grads
