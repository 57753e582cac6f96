"""Ops of BLAS on vectors, in numpy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import vectors
from accel.cpu.views import Array, array, operand, result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel.backend import Kernel
    from accel.ref import AccelRef

__all__ = ["KERNELS"]


def _sizes(x: Array) -> Array:
    """Return the sizes that BLAS gives elements: complex ones the sum of those of their parts."""
    sizes: Array = np.abs(x.real) + np.abs(x.imag) if x.dtype.kind == "c" else np.abs(x)
    return sizes


@np.errstate(all="ignore")
def _store(function: Callable[..., Any], out: Array, *operands: Array) -> None:
    out[...] = function(*operands)


def _flat(pointer: int, ref: AccelRef) -> Array:
    return array(pointer, (ref.size,), ref.dtype.numpy)


def _axpy(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, y = _flat(inputs[0], op.x), _flat(outputs[0], op.y)
    lane.stream.submit(partial(vectors.axpy, op.alpha, x, y), costs.elements(3 * x.size, x.dtype))


def _scal(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = _flat(outputs[0], op.x)
    lane.stream.submit(partial(vectors.scal, op.alpha, x), costs.elements(2 * x.size, x.dtype))


def _dot(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, y = _flat(inputs[0], op.x), _flat(inputs[1], op.y)
    lane.stream.submit(partial(vectors.dot, x, y, result(outputs[0], plan)), costs.elements(2 * x.size, x.dtype))


def _nrm2(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = _flat(inputs[0], op.x)
    lane.stream.submit(partial(vectors.nrm2, x, result(outputs[0], plan)), costs.elements(2 * x.size, x.dtype))


def _asum(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, out = operand(inputs[0], op.x), result(outputs[0], plan)
    lane.stream.submit(partial(_store, lambda x: _sizes(x).sum(), out, x), costs.elements(2 * x.size, x.dtype))


def _extreme(find: Any, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, out = operand(inputs[0], op.x), result(outputs[0], plan)
    lane.stream.submit(partial(_store, lambda x: find(_sizes(x)), out, x), costs.elements(2 * x.size, x.dtype))


def _dotc(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if not op.x.dtype.is_complex:
        _dot(lane, op, plan, inputs, outputs)
        return
    x, y, out = operand(inputs[0], op.x), operand(inputs[1], op.y), result(outputs[0], plan)
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
    "axpy": _axpy,
    "scal": _scal,
    "dot": _dot,
    "nrm2": _nrm2,
    "asum": _asum,
    "dotc": _dotc,
    "iamax": partial(_extreme, np.argmax),
    "iamin": partial(_extreme, np.argmin),
    "rot": _rot,
    "swap": _swap,
}
