"""Norms for training, gradients of norms and of softmax, and dropout, on the CPU, and their samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, mean, total, wider
from accel.cpu.families.words import key_of, philox_blocks
from accel.cpu.kernels import kernel, touches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.family import Sample

__all__ = ["KERNELS", "samples"]


def _row_grads(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute the gradients of a norm of the rows of [outer, groups, length] arrays, of which a group has one weight for each of its channels."""
    (grad, x, *weights), (out, *sums) = operands, results
    if not x.size:
        for target in sums:
            target[...] = 0
        return
    groups, (outer, channels, each) = op.rows().groups, op.middle()
    grad, x, out = (array.reshape(outer, groups, channels // groups * each) for array in (grad, x, out))
    wide, row = wider(x.dtype), x[0].size
    totals = np.zeros((2, channels))
    is_centred = op.kind != "rms_norm_grad"
    for block in blocks(outer, 4 * row * wide.itemsize):
        part, change = x[block].astype(wide), grad[block].astype(wide)
        if is_centred:
            part -= part.mean(axis=2, keepdims=True)
        factor = 1 / np.sqrt((part * part).mean(axis=2, keepdims=True) + wide.type(op.eps))
        part *= factor
        by_channel = len(part), channels, -1
        totals += total((change * part).reshape(by_channel), (0, 2)), total(change.reshape(by_channel), (0, 2))
        for weight in weights:
            scaled = change.reshape(by_channel)
            scaled *= weight.reshape(channels, 1).astype(wide)
        along = (change * part).mean(axis=2, keepdims=True)
        if is_centred:
            change -= change.mean(axis=2, keepdims=True)
        out[block] = (change - part * along) * factor
    for target, made in zip(sums, totals, strict=False):
        target[...] = made.reshape(target.shape)


def _softmax_grad(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute the gradient of a softmax of a [before, length, behind] array along its middle axis, or of the logarithm of it."""
    grad, y, out = (array.reshape(op.middle()) for array in (*operands, *results))
    before, length, behind = y.shape
    wide = wider(y.dtype)
    for outer in blocks(before, 4 * length * behind * wide.itemsize):
        for inner in blocks(behind, 4 * (outer.stop - outer.start) * length * wide.itemsize):
            change, made = grad[outer, :, inner].astype(wide), y[outer, :, inner].astype(wide)
            if op.kind == "log_softmax_grad":
                out[outer, :, inner] = change - np.exp(made) * total(change, (1,), keepdims=True)
            else:
                out[outer, :, inner] = (change - total(change * made, (1,), keepdims=True)) * made


def _normalized(op: Any, x: Array) -> tuple[Array, Array, Array, Array]:
    """Return an array whose channels are at axis 1, normalized; its means and variances, and what it was multiplied by."""
    wide = wider(x.dtype)
    part = x.reshape(op.middle()).astype(wide)
    middle = mean(part, (0, 2), keepdims=True)
    part -= middle
    variance = mean(part * part, (0, 2), keepdims=True)
    factor = 1 / np.sqrt(variance + wide.type(op.eps))
    part *= factor
    return part, middle, variance, factor


def _batch_norm_train(op: Any, operands: list[Array], results: list[Array]) -> None:
    (x, *given), (out, *statistics) = operands, results
    made, *found, _ = _normalized(op, x)
    parameters = iter([each.reshape(-1, 1).astype(made.dtype) for each in given])
    if op.weight is not None:
        made *= next(parameters)
    if op.bias is not None:
        made += next(parameters)
    out[...] = made.reshape(out.shape)
    for target, statistic in zip(statistics, found, strict=True):
        target[...] = statistic.ravel()


def _batch_norm_grad(op: Any, operands: list[Array], results: list[Array]) -> None:
    (grad, x, *weights), (out, of_weight, of_bias) = operands, results
    part, _, _, factor = _normalized(op, x)
    change = grad.reshape(part.shape).astype(part.dtype)
    of_weight[...], of_bias[...] = total(change * part, (0, 2)), total(change, (0, 2))
    along = mean(change * part, (0, 2), keepdims=True)
    made = (change - mean(change, (0, 2), keepdims=True) - part * along) * factor
    for weight in weights:
        made *= weight.reshape(-1, 1).astype(part.dtype)
    out[...] = made.reshape(out.shape)


def _dropout(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, out = (array.reshape(-1) for array in (*operands, *results))
    first, wide = op.offset // 4, wider(x.dtype)
    skip, done = op.offset - 4 * first, 0
    for words in philox_blocks(op.key(), first, -(-(op.offset + x.size) // 4) - first):
        stays = (words.reshape(-1)[skip:] >> np.uint32(8))[: x.size - done] >= op.least()
        place = slice(done, done + len(stays))
        out[place] = np.where(stays, x[place].astype(wide) * wide.type(op.scale()), 0)
        done, skip = place.stop, 0


_TOUCHES = touches(24)

KERNELS: Mapping[str, Kernel] = {
    **dict.fromkeys(("layer_norm_grad", "rms_norm_grad", "group_norm_grad", "instance_norm_grad"), kernel(_row_grads, _TOUCHES)),
    "batch_norm_train": kernel(_batch_norm_train, _TOUCHES),
    "batch_norm_grad": kernel(_batch_norm_grad, _TOUCHES),
    **dict.fromkeys(("softmax_grad", "log_softmax_grad"), kernel(_softmax_grad, _TOUCHES)),
    "dropout": kernel(_dropout, touches(30)),
}


_NAMES = ("grad", "x", "weight")


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of every op here."""
    for dtype in sampling.ALL_FLOATS:
        rows: tuple[tuple[tuple[int, ...], Any, bool], ...] = (
            *(((6, 64), 64, True), ((3, 5), 5, False), ((2, 3, 4), (3, 4), True), ((70, 1100), (1100,), True)),
            *(((1, 1), 1, True), ((0, 4), 4, True), ((1, 2049), 2049, False), ((300, 33), 33, True)),
        )
        for shape, trailing, has_weight in rows:
            yield from _row_samples(rng, dtype, shape, trailing, has_weight)
        images: tuple[tuple[tuple[int, ...], int, bool], ...] = (
            *(((2, 6, 5, 3), 3, True), ((3, 8, 16), 2, False), ((4, 6), 2, True), ((70, 4, 4), 2, True), ((2, 16, 9, 8), 4, True)),
            *(((1, 64, 33), 1, True), ((2, 2, 2100), 1, True), ((2, 1, 1), 1, False), ((0, 4, 3), 2, True), ((2, 3, 0), 3, False)),
        )
        for shape, groups, has_weight in images:
            yield from _group_samples(rng, dtype, shape, groups, has_weight)
        channels: tuple[tuple[tuple[int, ...], int, tuple[str, ...]], ...] = (
            *(((4, 3, 5, 7), 1, ("weight", "bias")), ((40, 8), -1, ("weight",)), ((3, 5, 64), 1, ())),
            *(
                ((2, 9, 9, 40), -1, ("weight", "bias")),
                ((2, 1), 1, ("bias",)),
                ((1, 70, 600), 1, ("weight",)),
                ((4, 35, 6), 1, ("weight", "bias")),
            ),
        )
        for shape, axis, names in channels:
            yield from _channel_samples(rng, dtype, shape, axis, names)
        yield from _softmax_samples(rng, dtype)
        for size, p, seed, offset in (
            ((3, 7), 0.5, 1, 0),
            ((1000,), 0.1, 2**64 - 1, 3),
            ((2, 3, 64), 0.9, 7, 2**40),
            ((5,), 0.0, 0, 1),
            ((9,), 1.0, 3, 0),
        ):
            yield _dropout_sample(rng, dtype, size, p, seed, offset)


def _row_samples(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], trailing: Any, has_weight: bool) -> Iterator[Sample]:
    size = (trailing,) if isinstance(trailing, int) else trailing
    x, grad = np.asarray(3 * sampling.random(rng, shape, dtype) + 1, dtype.numpy), sampling.random(rng, shape, dtype)
    weight = sampling.random(rng, size, dtype)
    length = math.prod(size)
    rows, changes = (sampling.wide(each).reshape(-1, length) for each in (x, grad))
    factors = sampling.wide(weight).reshape(-1) if has_weight else np.ones(length)
    # Where all cancels, nothing is left but the rounding of terms of up to 10.
    terms = 10.0 if x.size < 8 else 0.0
    for kind in ("layer_norm_grad", "rms_norm_grad"):
        is_centred = kind == "layer_norm_grad"
        scaled, of_x = _slopes(rows, changes * factors, is_centred)
        sums = (changes * scaled).sum(axis=0), changes.sum(axis=0)
        expected = (of_x.reshape(shape), *(each.reshape(size) for each in sums[: 1 + is_centred]))
        name, options = f"{dtype.value}{list(shape)} {trailing} {'weight' * has_weight}", {"normalized_shape": trailing, "eps": 0.01}
        count, error = 2 + has_weight, sampling.sums(dtype, 64)
        yield sampling.sample(kind, name, (grad, x, weight)[:count], expected, error, terms, names=_NAMES[:count], **options)


def _group_samples(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], groups: int, has_weight: bool) -> Iterator[Sample]:
    x, grad = np.asarray(3 * sampling.random(rng, shape, dtype) + 1, dtype.numpy), sampling.random(rng, shape, dtype)
    weight, channels = sampling.random(rng, shape[1], dtype), shape[1]
    change = sampling.wide(grad).reshape(shape[0], channels, math.prod(shape[2:]))
    ends = change * (sampling.wide(weight)[:, np.newaxis] if has_weight else 1)
    calls: list[tuple[str, dict[str, Any], int]] = [("group_norm_grad", {"num_groups": groups}, groups)]
    for kind, options, count in calls + [("instance_norm_grad", {}, channels)] * (len(shape) > 2):
        rows = shape[0] * count, math.prod(shape[1:]) // count
        scaled, of_x = _slopes(sampling.wide(x).reshape(rows), ends.reshape(rows), True)
        expected = of_x.reshape(shape), (change * scaled.reshape(change.shape)).sum(axis=(0, 2)), change.sum(axis=(0, 2))
        name, given = f"{dtype.value}{list(shape)} {options} {'weight' * has_weight}", 2 + has_weight
        # What is left of short rows is the rounding of terms of up to 10, too.
        error, terms = sampling.sums(dtype, 64), 10.0 if rows[1] < 8 else 0.0
        yield sampling.sample(kind, name, (grad, x, weight)[:given], expected, error, terms, names=_NAMES[:given], eps=0.01, **options)


def _slopes(rows: Array, ends: Array, is_centred: bool) -> tuple[Array, Array]:
    """Return rows normalized with eps=0.01, and their gradients, of which those of the normalized rows are ``ends``."""
    if not rows.size:
        return rows, rows
    off = rows - rows.mean(axis=1, keepdims=True) if is_centred else rows
    root = np.sqrt((off * off).mean(axis=1, keepdims=True) + 0.01)
    slopes = ends - ends.mean(axis=1, keepdims=True) if is_centred else ends
    return off / root, slopes / root - off * (off * ends).sum(axis=1, keepdims=True) / (rows.shape[1] * root**3)


def _softmax_samples(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    calls: tuple[tuple[str, tuple[int, ...], int], ...] = (
        *(("softmax_grad", (3, 5), -1), ("softmax_grad", (4, 64), 1), ("softmax_grad", (2, 9000), -1), ("softmax_grad", (1,), 0)),
        *(("softmax_grad", (3, 5, 16), 1), ("softmax_grad", (130, 3), 0), ("softmax_grad", (2, 40, 33), -2), ("softmax_grad", (3, 0), 1)),
        *(("log_softmax_grad", (3, 65), -1), ("log_softmax_grad", (2, 9, 3), 1), ("log_softmax_grad", (0, 3), 1)),
        *(("log_softmax_grad", (70, 64), -1), ("log_softmax_grad", (2, 300, 16), 1), ("log_softmax_grad", (2, 2, 700, 2), 2)),
    )
    for kind, shape, axis in calls:
        is_log, powers = kind == "log_softmax_grad", np.exp(3 * rng.standard_normal(shape))
        shares, grad = powers / powers.sum(axis=axis, keepdims=True), sampling.random(rng, shape, dtype)
        y = np.asarray(np.log(shares) if is_log else shares, dtype.numpy)
        if y.size > 2:
            y.flat[1] = -np.inf if is_log else 0  # what was -infinity
        made, change = sampling.wide(y), sampling.wide(grad)
        if is_log:
            expected = change - np.exp(made) * change.sum(axis=axis, keepdims=True)
        else:
            expected = made * change - made * (made * change).sum(axis=axis, keepdims=True)
        # One share alone is 1, and has no gradient but the rounding of its terms.
        terms = 4.0 if shape[axis] == 1 else 0.0
        what, error = f"{dtype.value}{list(shape)} axis={axis}", sampling.sums(dtype, 64)
        yield sampling.sample(kind, what, (grad, y), expected, error, terms, axis=axis)


def _channel_samples(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], axis: int, names: tuple[str, ...]) -> Iterator[Sample]:
    count, others = shape[axis], tuple([place for place in range(len(shape)) if place != axis % len(shape)])
    x, grad = np.asarray(2 * sampling.random(rng, shape, dtype) + 1, dtype.numpy), sampling.random(rng, shape, dtype)
    given = {name: sampling.random(rng, count, dtype) for name in names}
    fit = [count if place == axis % len(shape) else 1 for place in range(len(shape))]
    wide, change = sampling.wide(x), sampling.wide(grad)
    mean = wide.mean(axis=others, keepdims=True)
    variance = ((wide - mean) ** 2).mean(axis=others, keepdims=True)
    scaled = (wide - mean) / np.sqrt(variance + 0.01)
    weight, bias = (
        sampling.wide(given[name]).reshape(fit) if name in given else neutral for name, neutral in (("weight", 1.0), ("bias", 0.0))
    )
    options: dict[str, Any] = {"axis": axis, "eps": 0.01}
    name, error = f"{dtype.value}{list(shape)} axis={axis} {' '.join(names)}", sampling.sums(dtype, 64)
    expected: tuple[Array, ...] = scaled * weight + bias, mean.reshape(-1), variance.reshape(-1)
    yield sampling.sample("batch_norm_train", name, (x, *given.values()), expected, error, names=names, **options)
    each, ends = wide.size // count, change * weight
    slopes = (ends - ends.mean(axis=others, keepdims=True) - scaled * (ends * scaled).sum(axis=others, keepdims=True) / each) / np.sqrt(
        variance + 0.01
    )
    operands = {"grad": grad, "x": x, **{name: value for name, value in given.items() if name == "weight"}}
    expected = slopes, (change * scaled).sum(axis=others), change.sum(axis=others)
    terms = 10.0 if x.size < 8 else 0.0
    yield sampling.sample("batch_norm_grad", name, tuple(operands.values()), expected, error, terms, names=tuple(operands), **options)


def _dropout_sample(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], p: float, seed: int, offset: int) -> Sample:
    x = sampling.random(rng, shape, dtype)
    first = offset // 4
    words = np.concatenate(list(philox_blocks(key_of(seed, "uniform 4"), first, x.size // 4 + 2))).reshape(-1)[offset - 4 * first :][
        : x.size
    ]
    # The numbers that rng.uniform draws.
    stays = ((words >> np.uint32(8)) * 2.0**-24 >= p).reshape(shape)
    expected = np.where(stays, sampling.wide(x) / (1 - p if p < 1 else 1), 0)
    what, error = f"{dtype.value}{list(shape)} {p} {seed} {offset}", sampling.sums(dtype)
    return sampling.sample("dropout", what, (x,), expected, error, p=p, seed=seed, offset=offset)
