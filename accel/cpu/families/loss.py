"""Losses on the CPU, and their samples."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, wider
from accel.cpu.views import array
from accel.family import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType

__all__ = ["KERNELS", "samples"]

_TOUCHES = 12


def _enqueue(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    shape, dtype = op.logits.shape, op.logits.dtype.numpy
    rows, classes = math.prod(shape[:-1]), shape[-1]
    if not rows:
        return
    is_grad = op.kind == "cross_entropy_grad"
    *grads, logits_at, labels_at = inputs
    logits, labels = array(logits_at, (rows, classes), dtype), array(labels_at, (rows,), op.labels.dtype.numpy)
    out = array(outputs[0], (rows, classes) if is_grad else (rows,), dtype)
    grad = array(grads[0], (rows, 1), dtype) if is_grad else None
    lane.stream.submit(partial(_losses, logits, labels, grad, out, op.ignore_index), costs.elements(_TOUCHES * logits.size, dtype))


@np.errstate(all="ignore")
def _losses(logits: Array, labels: Array, grad: Array | None, out: Array, ignored: int) -> None:
    """Compute the loss of each row; given the gradients of the losses, those of the logits."""
    wide = wider(logits.dtype)
    for some in blocks(len(logits), 2 * logits.shape[1] * wide.itemsize):
        part, label = logits[some].astype(wide), labels[some]
        part -= part.max(axis=1, keepdims=True)
        powers = np.exp(part)
        total = powers.sum(axis=1, keepdims=True)
        is_class = (label >= 0) & (label < part.shape[1])
        place = np.arange(len(label)), np.where(is_class, label, 0)
        if grad is None:
            made = np.log(total[:, 0]) - part[place]
        else:
            made = powers / total
            made[place] -= 1
            made *= grad[some].astype(wide)
        made[~is_class] = np.nan
        made[label == ignored] = 0
        out[some] = made


KERNELS: Mapping[str, Kernel] = {"cross_entropy": _enqueue, "cross_entropy_grad": _enqueue}


def _call(kind: str, options: dict[str, Any], dnn: Any, *refs: Any) -> Any:
    return getattr(dnn, kind)(*refs, **options)


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
    yield Sample(f"cross_entropy {name}", partial(_call, "cross_entropy", options), (logits, labels), losses, error, largest)
    call = partial(_call, "cross_entropy_grad", options)
    yield Sample(f"cross_entropy_grad {name}", call, (grad, logits, labels), grads, error, 1.0)  # a probability less 1


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
