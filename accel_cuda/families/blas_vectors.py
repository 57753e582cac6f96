"""Ops of cuBLAS on vectors.

Results are written into device memory by the library, so that nothing waits for them on the host.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from accel import DType
from accel_cuda.families.cublas import LETTERS, blas_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["KERNELS"]

_BLOCK, _MOST_BLOCKS = 256, 4096
_SUMS = {DType.FLOAT32: "sasum_64", DType.FLOAT64: "dasum_64", DType.COMPLEX64: "scasum_64", DType.COMPLEX128: "dzasum_64"}


def _axpy(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    lane.stream.ready()
    if op.x.size and op.alpha:
        blas_of(lane.stream).axpy(op.x.size, op.alpha, inputs[0], outputs[0], op.x.dtype)


def _scal(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    lane.stream.ready()
    if op.x.size:
        blas_of(lane.stream).scal(op.x.size, op.alpha, outputs[0], op.x.dtype)


def _dot(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Sum products; of no elements, write 0."""
    stream, x = lane.stream, op.x
    stream.ready()
    if x.size:
        blas_of(lane.stream).dot(x.size, inputs[0], inputs[1], outputs[0], x.dtype)
    else:
        stream.fill(outputs[0], bytes(x.dtype.itemsize), 1)


def _nrm2(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Compute a norm; of no elements, write 0."""
    stream, x = lane.stream, op.x
    stream.ready()
    if x.size:
        blas_of(lane.stream).nrm2(x.size, inputs[0], outputs[0], x.dtype)
    else:
        stream.fill(outputs[0], bytes(x.dtype.itemsize), 1)


def _asum(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Sum sizes; of no elements, write 0."""
    stream, x = lane.stream, op.x
    stream.ready()
    if x.size:
        blas_of(lane.stream).call_on_device(_SUMS[x.dtype], x.size, inputs[0], 1, outputs[0])
    else:
        stream.fill(outputs[0], bytes(x.dtype.itemsize // (2 if x.dtype.is_complex else 1)), 1)


def _extreme(kind: str, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Find an index, which cuBLAS counts from 1, and without NaN; kernels of the backend's own put both right."""
    stream, x = lane.stream, op.x
    stream.ready()
    blas_of(lane.stream).call_on_device(f"i{LETTERS[x.dtype]}{kind}_64", x.size, inputs[0], 1, outputs[0])
    parts = 2 if x.dtype.is_complex else 1
    blocks = min(-(-x.size * parts // _BLOCK), _MOST_BLOCKS)
    stream.launch(stream.functions[f"index_of_nan_f{8 * x.dtype.itemsize // parts}"], blocks, _BLOCK, outputs[0], inputs[0], x.size, parts)
    stream.launch(stream.functions["index_from_zero"], 1, 1, outputs[0], x.size)


def _dotc(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Sum products with conjugates; of real elements as ``dot`` does."""
    stream, x = lane.stream, op.x
    if not x.dtype.is_complex:
        _dot(lane, op, plan, inputs, outputs)
        return
    stream.ready()
    if x.size:
        blas_of(lane.stream).call_on_device(f"{LETTERS[x.dtype]}dotc_64", x.size, inputs[0], 1, inputs[1], 1, outputs[0])
    else:
        stream.fill(outputs[0], bytes(x.dtype.itemsize), 1)


def _rot(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = op.x
    lane.stream.ready()
    if x.size:
        blas = blas_of(lane.stream)
        blas.call(f"{LETTERS[x.dtype]}rot_64", x.size, outputs[0], 1, outputs[1], 1, *blas.factors(x.dtype, op.c, op.s))


def _swap(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = op.x
    lane.stream.ready()
    if x.size:
        blas_of(lane.stream).call(f"{LETTERS[x.dtype]}swap_64", x.size, outputs[0], 1, outputs[1], 1)


KERNELS: Mapping[str, Kernel] = {
    "axpy": _axpy,
    "scal": _scal,
    "dot": _dot,
    "nrm2": _nrm2,
    "asum": _asum,
    "dotc": _dotc,
    "iamax": partial(_extreme, "amax"),
    "iamin": partial(_extreme, "amin"),
    "rot": _rot,
    "swap": _swap,
}
