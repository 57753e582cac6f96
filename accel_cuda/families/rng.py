"""The ``rng`` family on a GPU: one launch of a kernel of the backend's own for each op; :mod:`accel.ops.rng` says what the numbers are.

A counter-based generator needs no state, so an op is a pure function with nothing to set up; cuRAND's generators have one on the device, which each new
seed or offset would make anew.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import DType
from accel_cuda.core.family import CudaPart, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.backend import Kernel

__all__ = ["PART"]

_BLOCK, _EACH = 256, 4
_DOUBLE = struct.Struct("d")
_CODES = {DType.FLOAT32: "f32", DType.FLOAT64: "f64"}
_ALL = 1 << 64

Parameters = tuple[str, tuple[int, int, int]]
"""Name of a kernel without its prefix, and its parameters, 8 bytes each."""


def _bits(*values: float) -> tuple[int, int, int]:
    low, middle, high = (int.from_bytes(_DOUBLE.pack(value), "little") for value in (*values, 0.0, 0.0)[:3])
    return low, middle, high


@lru_cache(256)
def _range(dtype: DType, low: float, high: float) -> Parameters:
    kind = dtype.numpy.type
    start, end = kind(low), kind(high)
    return f"uniform_{_CODES[dtype]}", _bits(low, float(end - start), float(np.nextafter(end, start)))


@lru_cache(256)
def _bell(kind: str, dtype: DType, mean: float, deviation: float) -> Parameters:
    return f"{kind}_{_CODES[dtype]}", _bits(mean, deviation)


def _uniform(op: Any) -> Parameters:
    return _range(op.dtype, op.low, op.high)


def _normal(op: Any) -> Parameters:
    return _bell(op.kind, op.dtype, op.mean, op.std)


def _lognormal(op: Any) -> Parameters:
    return _bell(op.kind, op.dtype, op.mean, op.sigma)


def _integers(op: Any) -> Parameters:
    span = op.span()
    is_pair = op.per_block() == 2
    end = _ALL if is_pair else 1 << 32
    return f"{'pairs' if is_pair else 'words'}_{op.dtype.itemsize}", (op.low % _ALL, span % _ALL, end % span)


def _kernel(parameters: Callable[[Any], Parameters]) -> Kernel:
    def kernel(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if not op.size:
            return
        name, values = parameters(op)
        stream = lane.stream
        stream.ready()
        function = stream.functions[f"philox_{name}"]
        size, per_block = op.size, op.per_block()
        first, end = op.offset // per_block, -(-(op.offset + size) // per_block)
        stream.launch(function, -(-(end - first) // (_BLOCK * _EACH)), _BLOCK, outputs[0], size, op.seed, op.offset, *values)

    return kernel


def _program(op: Any) -> str:
    return "rng"


_KERNELS: dict[str, Kernel] = {
    "uniform": _kernel(_uniform),
    "normal": _kernel(_normal),
    "lognormal": _kernel(_lognormal),
    "integers": _kernel(_integers),
}

PART = CudaPart(
    kernels=_KERNELS,
    programs=(Source("rng", lambda code: ("philox.cuh", "rng.cu", ""), functions=("philox",)),),
    program=dict.fromkeys(_KERNELS, _program),
)
