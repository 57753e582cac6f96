"""Softmax and norms."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, total, wider
from accel.cpu.views import array
from accel.family import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.ops.normalization import NormRows

__all__ = ["KERNELS", "samples"]

# How many times an element is touched, an exponential among them.
_TOUCHES = 12


def _submit(lane: Any, op: Any, work: Any) -> None:
    lane.stream.submit(work, costs.elements(_TOUCHES * op.x.size, op.x.dtype.numpy))


def _softmax(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.x.size:
        x, out = (array(address, op.middle(), op.x.dtype.numpy) for address in (inputs[0], outputs[0]))
        _submit(lane, op, partial(_exponentials, x, out, op.kind == "log_softmax"))


@np.errstate(all="ignore")
def _exponentials(x: Array, out: Array, is_log: bool) -> None:
    """Compute the softmax of a [before, length, behind] array along its middle axis, or the logarithm of it."""
    before, length, behind = x.shape
    wide = wider(x.dtype)
    for outer in blocks(before, 2 * length * behind * wide.itemsize):
        for inner in blocks(behind, 2 * (outer.stop - outer.start) * length * wide.itemsize):
            part = x[outer, :, inner].astype(wide)
            part -= part.max(axis=1, keepdims=True)
            powers = np.exp(part)
            sums = total(powers, (1,), keepdims=True)
            out[outer, :, inner] = part - np.log(sums) if is_log else powers / sums


def _norm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if not op.x.size:
        return
    rows, dtype = op.rows(), op.x.dtype.numpy
    source, *addresses = op.addresses(inputs)
    x, out = (array(address, (rows.rows, rows.length), dtype) for address in (source, outputs[0]))
    shape = rows.groups, rows.length // rows.each, 1
    parameters = [array(address, shape, dtype) if address else None for address in addresses]
    _submit(lane, op, partial(_scale_rows, x, out, parameters, rows, op.kind != "rms_norm", op.eps))


@np.errstate(all="ignore")
def _scale_rows(x: Array, out: Array, parameters: list[Array | None], rows: NormRows, is_centred: bool, eps: float) -> None:
    wide = wider(x.dtype)
    for block in blocks(rows.rows, 2 * rows.length * wide.itemsize):
        part = x[block].astype(wide)
        if is_centred:
            part -= part.mean(axis=1, keepdims=True)
        part /= np.sqrt((part * part).mean(axis=1, keepdims=True) + wide.type(eps))
        scaled = part.reshape(len(part), -1, rows.each)
        groups = np.arange(block.start, block.stop) % rows.groups
        for parameter, apply in zip(parameters, (np.multiply, np.add), strict=False):
            if parameter is not None:
                apply(scaled, parameter[groups].astype(wide, copy=False), out=scaled)
        out[block] = part


def _batch_norm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if not op.x.size:
        return
    shape, dtype = op.middle(), op.x.dtype.numpy
    source, *addresses = op.addresses(inputs)
    x, out = (array(address, shape, dtype) for address in (source, outputs[0]))
    parameters = [array(address, (shape[1], 1), dtype) if address else None for address in addresses]
    _submit(lane, op, partial(_scale_channels, x, out, parameters, op.eps))


@np.errstate(all="ignore")
def _scale_channels(x: Array, out: Array, parameters: list[Array | None], eps: float) -> None:
    wide = wider(x.dtype)
    mean, variance, weight, bias = [None if each is None else each.astype(wide) for each in parameters]
    scale = 1 / np.sqrt(variance + wide.type(eps)) * (1 if weight is None else weight)
    for block in blocks(len(x), 2 * x[0].size * wide.itemsize):
        part = (x[block].astype(wide) - mean) * scale
        out[block] = part if bias is None else part + bias


KERNELS: Mapping[str, Kernel] = {
    "softmax": _softmax,
    "log_softmax": _softmax,
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "instance_norm"), _norm),
    "batch_norm": _batch_norm,
}


def _call(kind: str, options: dict[str, Any], names: tuple[str, ...], dnn: Any, x: Any, *refs: Any) -> Any:
    return getattr(dnn, kind)(x, **options, **dict(zip(names, refs, strict=True)))


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
        call = partial(_call, kind, {"axis": axis}, ())
        yield Sample(f"{kind} {dtype.value}{list(shape)} axis={axis}", call, (x,), expected, sampling.sums(dtype, 8))
    # Where infinity is the largest, or there is nothing but -infinity, no weight is a number.
    for value in (np.nan, np.inf, -np.inf):
        x, expected = np.full((2, 7), value, dtype.numpy), np.full((2, 7), np.nan)
        x[0, 3] = 1
        if value == -np.inf:
            expected[0] = np.arange(7) == 3
        yield Sample(f"softmax {dtype.value} {value}", partial(_call, "softmax", {}, ()), (x,), expected)


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
    name = f"{kind} {dtype.value}{list(shape)} {options} {' '.join(names)}"
    call = partial(_call, kind, {**options, "eps": 0.01}, names)
    return Sample(name, call, (x, *given.values()), made, sampling.sums(dtype, 16))


def _batch_sample(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...], axis: int, names: tuple[str, ...]) -> Sample:
    count = shape[axis]
    x, mean = sampling.random(rng, shape, dtype), sampling.random(rng, count, dtype)
    var = np.asarray(rng.uniform(0.5, 2, count), dtype.numpy)
    given = {name: sampling.random(rng, count, dtype) for name in names}
    fit = [count if place == axis % len(shape) else 1 for place in range(len(shape))]
    wide, off, spread = sampling.wide(x), sampling.wide(mean).reshape(fit), sampling.wide(var).reshape(fit)
    made = _with_parameters((wide - off) / np.sqrt(spread + 0.01), given, fit)
    call = partial(_call, "batch_norm", {"axis": axis, "eps": 0.01}, ("mean", "var", *names))
    name = f"batch_norm {dtype.value}{list(shape)} axis={axis} {' '.join(names)}"
    return Sample(name, call, (x, mean, var, *given.values()), made, sampling.sums(dtype, 16))


def _with_parameters(made: Array, given: dict[str, Array], fit: Any) -> Array:
    if "weight" in given:
        made = made * sampling.wide(given["weight"]).reshape(fit)
    return made + sampling.wide(given["bias"]).reshape(fit) if "bias" in given else made
