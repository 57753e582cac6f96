"""Norms for training, gradients of norms and of softmax, and dropout, on the CPU, and their samples."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, mean, total, wider
from accel.cpu.families.words import key_of, philox_blocks
from accel.cpu.views import array
from accel.family import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType

__all__ = ["KERNELS", "samples"]

_TOUCHES = 24


def _submit(lane: Any, op: Any, work: Any) -> None:
    lane.stream.submit(work, costs.elements(_TOUCHES * op.x.size, op.x.dtype.numpy))


def _row_grads(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    dtype, count = op.x.dtype.numpy, math.prod(op.norm().parameters()[0].shape)
    if not count:
        return
    sums = [array(at, (count,), dtype) for at in outputs[1:]]
    if not op.x.size:
        _submit(lane, op, partial(_clear, sums))
        return
    groups, (outer, channels, each) = op.rows().groups, op.middle()
    grad, x, out = (array(at, (outer, groups, channels // groups * each), dtype) for at in (*inputs[:2], outputs[0]))
    weight = None if op.weight is None else array(inputs[2], (channels, 1), dtype)
    _submit(lane, op, partial(_of_rows, grad, x, weight, out, sums, op.kind != "rms_norm_grad", op.eps))


def _clear(sums: list[Array]) -> None:
    for target in sums:
        target[...] = 0


@np.errstate(all="ignore")
def _of_rows(grad: Array, x: Array, weight: Array | None, out: Array, sums: list[Array], is_centred: bool, eps: float) -> None:
    """Compute the gradients of a norm of the rows of [outer, groups, length] arrays, of which a group has one weight for each of its channels."""
    wide, row = wider(x.dtype), x[0].size
    totals = np.zeros((2, len(sums[0])))
    for block in blocks(len(x), 4 * row * wide.itemsize):
        part, change = x[block].astype(wide), grad[block].astype(wide)
        if is_centred:
            part -= part.mean(axis=2, keepdims=True)
        factor = 1 / np.sqrt((part * part).mean(axis=2, keepdims=True) + wide.type(eps))
        part *= factor
        by_channel = len(part), totals.shape[1], -1
        totals += total((change * part).reshape(by_channel), (0, 2)), total(change.reshape(by_channel), (0, 2))
        if weight is not None:
            scaled = change.reshape(by_channel)
            scaled *= weight.astype(wide)
        along = (change * part).mean(axis=2, keepdims=True)
        if is_centred:
            change -= change.mean(axis=2, keepdims=True)
        out[block] = (change - part * along) * factor
    for target, made in zip(sums, totals, strict=False):
        target[...] = made


def _softmax_grad(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.y.size:
        grad, y, out = (array(address, op.middle(), op.y.dtype.numpy) for address in (*inputs, outputs[0]))
        work = partial(_of_softmax, grad, y, out, op.kind == "log_softmax_grad")
        lane.stream.submit(work, costs.elements(_TOUCHES * op.y.size, op.y.dtype.numpy))


@np.errstate(all="ignore")
def _of_softmax(grad: Array, y: Array, out: Array, is_log: bool) -> None:
    """Compute the gradient of a softmax of a [before, length, behind] array along its middle axis, or of the logarithm of it."""
    before, length, behind = y.shape
    wide = wider(y.dtype)
    for outer in blocks(before, 4 * length * behind * wide.itemsize):
        for inner in blocks(behind, 4 * (outer.stop - outer.start) * length * wide.itemsize):
            change, made = grad[outer, :, inner].astype(wide), y[outer, :, inner].astype(wide)
            if is_log:
                out[outer, :, inner] = change - np.exp(made) * total(change, (1,), keepdims=True)
            else:
                out[outer, :, inner] = (change - total(change * made, (1,), keepdims=True)) * made


def _batch_norm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    shape, dtype = op.middle(), op.x.dtype.numpy
    if not op.x.size:
        return
    *grads, at = inputs[: 2 if op.kind == "batch_norm_grad" else 1]
    given = iter(inputs[len(grads) + 1 :])
    names = ("weight",) if grads else ("weight", "bias")
    weight, bias = [*(None if getattr(op, name) is None else array(next(given), (shape[1], 1), dtype) for name in names), None][:2]
    x, out = array(at, shape, dtype), array(outputs[0], shape, dtype)
    sums = [array(address, (shape[1],), dtype) for address in outputs[1:]]
    grad = array(grads[0], shape, dtype) if grads else None
    _submit(lane, op, partial(_channels, x, grad, weight, bias, out, sums, op.eps))


@np.errstate(all="ignore")
def _channels(x: Array, grad: Array | None, weight: Array | None, bias: Array | None, out: Array, sums: list[Array], eps: float) -> None:
    """Normalize an array whose channels are at axis 1, or compute the gradients of that; and write the statistics, or the gradients of weight and bias."""
    wide = wider(x.dtype)
    part = x.astype(wide)
    middle = mean(part, (0, 2), keepdims=True)
    part -= middle
    variance = mean(part * part, (0, 2), keepdims=True)
    factor = 1 / np.sqrt(variance + wide.type(eps))
    part *= factor
    scale = wide.type(1) if weight is None else weight.astype(wide)
    if grad is None:
        made = part * scale
        out[...] = made if bias is None else made + bias.astype(wide)
        results = middle, variance
    else:
        change = grad.astype(wide)
        results = total(change * part, (0, 2)), total(change, (0, 2))
        along = mean(change * part, (0, 2), keepdims=True)
        out[...] = (change - mean(change, (0, 2), keepdims=True) - part * along) * factor * scale
    for target, result in zip(sums, results, strict=True):
        target[...] = result.reshape(-1)


def _dropout(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.x.size:
        x, out = (array(address, (op.x.size,), op.x.dtype.numpy) for address in (inputs[0], outputs[0]))
        lane.stream.submit(partial(_drop, x, out, op), costs.elements(30 * op.x.size, op.x.dtype.numpy))


@np.errstate(all="ignore")
def _drop(x: Array, out: Array, op: Any) -> None:
    first, wide = op.offset // 4, wider(x.dtype)
    skip, done = op.offset - 4 * first, 0
    for words in philox_blocks(op.key(), first, -(-(op.offset + x.size) // 4) - first):
        stays = (words.reshape(-1)[skip:] >> np.uint32(8))[: x.size - done] >= op.least()
        place = slice(done, done + len(stays))
        out[place] = np.where(stays, x[place].astype(wide) * wide.type(op.scale()), 0)
        done, skip = place.stop, 0


KERNELS: Mapping[str, Kernel] = {
    **dict.fromkeys(("layer_norm_grad", "rms_norm_grad", "group_norm_grad", "instance_norm_grad"), _row_grads),
    "batch_norm_train": _batch_norm,
    "batch_norm_grad": _batch_norm,
    **dict.fromkeys(("softmax_grad", "log_softmax_grad"), _softmax_grad),
    "dropout": _dropout,
}


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
        call = partial(_call, kind, {"normalized_shape": trailing, "eps": 0.01}, ("grad", "x", "weight")[: 2 + has_weight])
        sums = (changes * scaled).sum(axis=0), changes.sum(axis=0)
        expected = (of_x.reshape(shape), *(each.reshape(size) for each in sums[: 1 + is_centred]))
        name = f"{kind} {dtype.value}{list(shape)} {trailing} {'weight' * has_weight}"
        yield Sample(name, call, (grad, x, weight)[: 2 + has_weight], expected, sampling.sums(dtype, 64), terms)


def _group_samples(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], groups: int, has_weight: bool) -> Iterator[Sample]:
    x, grad = np.asarray(3 * sampling.random(rng, shape, dtype) + 1, dtype.numpy), sampling.random(rng, shape, dtype)
    weight, channels = sampling.random(rng, shape[1], dtype), shape[1]
    change = sampling.wide(grad).reshape(shape[0], channels, math.prod(shape[2:]))
    ends = change * (sampling.wide(weight)[:, np.newaxis] if has_weight else 1)
    calls: list[tuple[str, dict[str, Any], int]] = [("group_norm_grad", {"num_groups": groups}, groups)]
    for kind, options, count in calls + [("instance_norm_grad", {}, channels)] * (len(shape) > 2):
        rows = shape[0] * count, math.prod(shape[1:]) // count
        scaled, of_x = _slopes(sampling.wide(x).reshape(rows), ends.reshape(rows), True)
        call = partial(_call, kind, {**options, "eps": 0.01}, ("grad", "x", "weight")[: 2 + has_weight])
        expected = of_x.reshape(shape), (change * scaled.reshape(change.shape)).sum(axis=(0, 2)), change.sum(axis=(0, 2))
        name = f"{kind} {dtype.value}{list(shape)} {options} {'weight' * has_weight}"
        # What is left of short rows is the rounding of terms of up to 10, too.
        yield Sample(name, call, (grad, x, weight)[: 2 + has_weight], expected, sampling.sums(dtype, 64), 10.0 if rows[1] < 8 else 0.0)


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
        call = partial(_call, kind, {"axis": axis}, ("grad", "y"))
        # One share alone is 1, and has no gradient but the rounding of its terms.
        terms = 4.0 if shape[axis] == 1 else 0.0
        yield Sample(f"{kind} {dtype.value}{list(shape)} axis={axis}", call, (grad, y), expected, sampling.sums(dtype, 64), terms)


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
    options = {"axis": axis, "eps": 0.01}
    name, error = f"{dtype.value}{list(shape)} axis={axis} {' '.join(names)}", sampling.sums(dtype, 64)
    call = partial(_call, "batch_norm_train", options, ("x", *names))
    expected: tuple[Array, ...] = scaled * weight + bias, mean.reshape(-1), variance.reshape(-1)
    yield Sample(f"batch_norm_train {name}", call, (x, *given.values()), expected, error)
    each, ends = wide.size // count, change * weight
    slopes = (ends - ends.mean(axis=others, keepdims=True) - scaled * (ends * scaled).sum(axis=others, keepdims=True) / each) / np.sqrt(
        variance + 0.01
    )
    operands = {"grad": grad, "x": x, **{name: value for name, value in given.items() if name == "weight"}}
    call = partial(_call, "batch_norm_grad", options, tuple(operands))
    expected = slopes, (change * scaled).sum(axis=others), change.sum(axis=others)
    terms = 10.0 if x.size < 8 else 0.0
    yield Sample(f"batch_norm_grad {name}", call, tuple(operands.values()), expected, error, terms)


def _dropout_sample(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], p: float, seed: int, offset: int) -> Sample:
    x = sampling.random(rng, shape, dtype)
    first = offset // 4
    words = np.concatenate(list(philox_blocks(key_of(seed, "uniform 4"), first, x.size // 4 + 2))).reshape(-1)[offset - 4 * first :][
        : x.size
    ]
    # The numbers that rng.uniform draws.
    stays = ((words >> np.uint32(8)) * 2.0**-24 >= p).reshape(shape)
    expected = np.where(stays, sampling.wide(x) / (1 - p if p < 1 else 1), 0)
    call = partial(_call, "dropout", {"p": p, "seed": seed, "offset": offset}, ("x",))
    return Sample(f"dropout {dtype.value}{list(shape)} {p} {seed} {offset}", call, (x,), expected, sampling.sums(dtype))


def _call(kind: str, options: dict[str, Any], names: tuple[str, ...], dnn: Any, *refs: Any) -> Any:
    return getattr(dnn, kind)(**dict(zip(names, refs, strict=True)), **options)
