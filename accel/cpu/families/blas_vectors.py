"""Ops of BLAS on vectors that are no calls of the compute interface, in numpy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.views import Array, operand
from accel.cpu.views import array as view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["KERNELS"]

_INT64 = np.dtype(np.int64)


def _sizes(x: Array) -> Array:
    """Return the sizes that BLAS gives elements: complex ones the sum of those of their parts."""
    sizes: Array = np.abs(x.real) + np.abs(x.imag) if x.dtype.kind == "c" else np.abs(x)
    return sizes


@np.errstate(all="ignore")
def _store(function: Callable[..., Any], out: Array, *operands: Array) -> None:
    out[...] = function(*operands)


def _asum(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = operand(inputs[0], op.x)
    out = view(outputs[0], (), x.real.dtype)
    lane.stream.submit(partial(_store, lambda x: _sizes(x).sum(), out, x), costs.elements(2 * x.size, x.dtype))


def _extreme(find: Any, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, out = operand(inputs[0], op.x), view(outputs[0], (), _INT64)
    lane.stream.submit(partial(_store, lambda x: find(_sizes(x)), out, x), costs.elements(2 * x.size, x.dtype))


def _dotc(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if not op.x.dtype.is_complex:
        lane.compute.dot(op.x.size, inputs[0], 1, inputs[1], 1, outputs[0], dtype=op.x.dtype)
        return
    x, y = operand(inputs[0], op.x), operand(inputs[1], op.y)
    out = view(outputs[0], (), x.dtype)
    lane.stream.submit(partial(_store, np.vdot, out, x, y), costs.elements(2 * x.size, x.dtype))


def _rot(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, y = operand(outputs[0], op.x), operand(outputs[1], op.y)
    lane.stream.submit(partial(_rotate, x, y, op.c, op.s), costs.elements(6 * x.size, x.dtype))


@np.errstate(all="ignore")
def _rotate(x: Array, y: Array, c: float, s: complex) -> None:
    kind = x.dtype.type
    turned = kind(c) * y - kind(s.conjugate()) * x
    x[...] = kind(c) * x + kind(s) * y
    y[...] = turned


def _swap(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, y = operand(outputs[0], op.x), operand(outputs[1], op.y)
    lane.stream.submit(partial(_exchange, x, y), costs.elements(4 * x.size, x.dtype))


def _exchange(x: Array, y: Array) -> None:
    kept = x.copy()
    x[...] = y
    y[...] = kept


KERNELS: Mapping[str, Kernel] = {
    "asum": _asum,
    "dotc": _dotc,
    "iamax": partial(_extreme, np.argmax),
    "iamin": partial(_extreme, np.argmin),
    "rot": _rot,
    "swap": _swap,
}
