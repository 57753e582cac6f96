"""Softmax and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, total, wider
from accel.cpu.kernels import kernel, touches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.family import Sample

__all__ = ["KERNELS", "samples"]


def _softmax(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute the softmax of a [before, length, behind] array along its middle axis, or the logarithm of it."""
    before, length, behind = shape = op.middle()
    x, out = operands[0].reshape(shape), results[0].reshape(shape)
    wide = wider(x.dtype)
    for outer in blocks(before, 2 * length * behind * wide.itemsize):
        for inner in blocks(behind, 2 * (outer.stop - outer.start) * length * wide.itemsize):
            part = x[outer, :, inner].astype(wide)
            part -= part.max(axis=1, keepdims=True)
            powers = np.exp(part)
            sums = total(powers, (1,), keepdims=True)
            out[outer, :, inner] = part - np.log(sums) if op.kind == "log_softmax" else powers / sums


def _parameters(op: Any, given: list[Array], shape: tuple[int, ...]) -> list[Array | None]:
    """Return the parameters of a norm in a shape, and ``None`` for those that are not given."""
    following = iter(given)
    return [None if each.ref is None else next(following).reshape(shape) for each in op.parameters()]


def _norm(op: Any, operands: list[Array], results: list[Array]) -> None:
    rows = op.rows()
    x, out = (each.reshape(rows.rows, rows.length) for each in (operands[0], results[0]))
    parameters, wide = _parameters(op, operands[1:], (rows.groups, rows.length // rows.each, 1)), wider(x.dtype)
    for block in blocks(rows.rows, 2 * rows.length * wide.itemsize):
        part = x[block].astype(wide)
        if op.kind != "rms_norm":
            part -= part.mean(axis=1, keepdims=True)
        part /= np.sqrt((part * part).mean(axis=1, keepdims=True) + wide.type(op.eps))
        scaled = part.reshape(len(part), -1, rows.each)
        groups = np.arange(block.start, block.stop) % rows.groups
        for parameter, apply in zip(parameters, (np.multiply, np.add), strict=False):
            if parameter is not None:
                apply(scaled, parameter[groups].astype(wide, copy=False), out=scaled)
        out[block] = part


def _batch_norm(op: Any, operands: list[Array], results: list[Array]) -> None:
    shape = op.middle()
    x, out = (each.reshape(shape) for each in (operands[0], results[0]))
    wide, parameters = wider(x.dtype), _parameters(op, operands[1:], (shape[1], 1))
    mean, variance, weight, bias = [None if each is None else each.astype(wide) for each in parameters]
    scale = 1 / np.sqrt(variance + wide.type(op.eps)) * (1 if weight is None else weight)
    for block in blocks(len(x), 2 * x[0].size * wide.itemsize):
        part = (x[block].astype(wide) - mean) * scale
        out[block] = part if bias is None else part + bias


# An exponential is among what touches an element.
_TOUCHES = touches(12)

KERNELS: Mapping[str, Kernel] = {
    **dict.fromkeys(("softmax", "log_softmax"), kernel(_softmax, _TOUCHES)),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "instance_norm"), kernel(_norm, _TOUCHES)),
    "batch_norm": kernel(_batch_norm, _TOUCHES),
}


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of every op here."""
    for dtype in sampling.ALL_FLOATS:
        yield from _softmaxes(rng, dtype)
        yield from _norms(rng, dtype)


def _softmaxes(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    calls: tuple[tuple[str, tuple[int, ...], int], ...] = (
        *(("softmax", (3, 5), -1), ("softmax", (4, 64), 1), ("softmax", (2, 1000), -1), ("softmax", (1,), 0), ("softmax", (3, 0), 1)),
        *(("softmax", (3, 5, 16), 1), ("softmax", (130, 3), 0), ("softmax", (2, 40, 33), -2)),
        *(("log_softmax", (3, 65), -1), ("log_softmax", (2, 9, 3), 1), ("log_softmax", (0, 3), 1)),
        *(("log_softmax", (3, 64), -1), ("log_softmax", (2, 9, 16), 1)),
    )
    for kind, shape, axis in calls:
        x = np.asarray(4 * sampling.random(rng, shape, dtype), dtype.numpy)
        if x.size > 1:
            x.flat[1] = -np.inf
        wide = sampling.wide(x)
        shifted = wide - wide.max(axis=axis, keepdims=True, initial=-np.inf)
        total = np.exp(shifted).sum(axis=axis, keepdims=True)
        expected = np.exp(shifted) / total if kind == "softmax" else shifted - np.log(total)
        yield sampling.sample(kind, f"{dtype.value}{list(shape)} axis={axis}", (x,), expected, sampling.sums(dtype, 8), axis=axis)
    # Where infinity is the largest, or there is nothing but -infinity, no weight is a number.
    for value in (np.nan, np.inf, -np.inf):
        x, expected = np.full((2, 7), value, dtype.numpy), np.full((2, 7), np.nan)
        x[0, 3] = 1
        if value == -np.inf:
            expected[0] = np.arange(7) == 3
        yield sampling.sample("softmax", f"{dtype.value} {value}", (x,), expected)


_BOTH = ("weight", "bias")


def _norms(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    layers: tuple[tuple[tuple[int, ...], Any, tuple[str, ...]], ...] = (
        *(((6, 64), 64, _BOTH), ((3, 5), 5, ("bias",)), ((2, 3, 4), (3, 4), ("weight",)), ((2, 1100), (1100,), _BOTH)),
        *(((1, 1), 1, ()), ((0, 4), 4, _BOTH)),
    )
    for shape, trailing, names in layers:
        size = (trailing,) if isinstance(trailing, int) else trailing
        axes = tuple(range(-len(size), 0))
        options = {"normalized_shape": trailing}
        yield _norm_sample(rng, "layer_norm", dtype, shape, axes, options, names, size, size)
        yield _norm_sample(rng, "rms_norm", dtype, shape, axes, options, tuple(name for name in names if name == "weight"), size, size)
    for shape, groups, names in (((2, 6, 5, 3), 3, _BOTH), ((3, 8, 16), 2, _BOTH), ((4, 6), 2, ("bias",)), ((2, 4, 7, 3), 4, ("weight",))):
        channels, fit = (shape[1],), (shape[1], *(1,) * (len(shape) - 2))
        yield _norm_sample(rng, "group_norm", dtype, shape, groups, {"num_groups": groups}, names, channels, fit)
        if len(shape) > 2:
            yield _norm_sample(rng, "instance_norm", dtype, shape, shape[1], {}, names, channels, fit)
    for shape, axis, names in (
        ((2, 3, 5), 1, _BOTH),
        ((4, 8), -1, ("weight",)),
        ((2, 5, 16), 1, ()),
        ((3, 2, 6), -1, ("bias",)),
        ((0, 3), 1, _BOTH),
    ):
        yield _batch_sample(rng, dtype, shape, axis, names)


def _norm_sample(
    rng: np.random.Generator, kind: str, dtype: DType, shape: tuple[int, ...], groups: Any, options: Any, names: tuple[str, ...], size: Any, fit: Any
) -> Sample:  # fmt: skip
    """Return a sample of a norm over the last axes, or over groups of channels, whose parameters of one size fit the result reshaped."""
    x = np.asarray(3 * sampling.random(rng, shape, dtype) + 1, dtype.numpy)
    given = {name: sampling.random(rng, size, dtype) for name in names}
    wide = sampling.wide(x)
    rows = wide if isinstance(groups, tuple) else wide.reshape(shape[0], groups, -1)
    axes = groups if isinstance(groups, tuple) else (2,)
    if kind != "rms_norm":
        rows = rows - rows.mean(axis=axes, keepdims=True)
    made = (rows / np.sqrt((rows * rows).mean(axis=axes, keepdims=True) + 0.01)).reshape(shape)
    made = _with_parameters(made, given, fit)
    what, operands = f"{dtype.value}{list(shape)} {options} {' '.join(names)}", (x, *given.values())
    return sampling.sample(kind, what, operands, made, sampling.sums(dtype, 16), names=names, eps=0.01, **options)


def _batch_sample(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], axis: int, names: tuple[str, ...]) -> Sample:
    count = shape[axis]
    x, mean = sampling.random(rng, shape, dtype), sampling.random(rng, count, dtype)
    var = np.asarray(rng.uniform(0.5, 2, count), dtype.numpy)
    given = {name: sampling.random(rng, count, dtype) for name in names}
    fit = [count if place == axis % len(shape) else 1 for place in range(len(shape))]
    wide, off, spread = sampling.wide(x), sampling.wide(mean).reshape(fit), sampling.wide(var).reshape(fit)
    made = _with_parameters((wide - off) / np.sqrt(spread + 0.01), given, fit)
    what, operands = f"{dtype.value}{list(shape)} axis={axis} {' '.join(names)}", (x, mean, var, *given.values())
    return sampling.sample("batch_norm", what, operands, made, sampling.sums(dtype, 16), names=names, axis=axis, eps=0.01)


def _with_parameters(made: Array, given: dict[str, Array], fit: Any) -> Array:
    if "weight" in given:
        made = made * sampling.wide(given["weight"]).reshape(fit)
    return made + sampling.wide(given["bias"]).reshape(fit) if "bias" in given else made
