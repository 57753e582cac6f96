"""The ``rng`` family on a GPU: one launch of a kernel of the backend's own for each op; :mod:`accel.ops.rng` says what the numbers are.

A counter-based generator needs no state, so an op is a pure function with nothing to set up. cuRAND's generators have one on the device, which each new
seed or offset makes anew: they are used where an op names one.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_cuda.core.cub import CUB
from accel_cuda.core.family import CudaPart, FamilyState, Source
from accel_cuda.families.choices import Choices
from accel_cuda.families.curand import CURAND, CurandGenerators
from accel_cuda.families.kernels import CODES, bits, launch_each

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel import DType
    from accel.backend import Kernel
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["PART"]

_BLOCK, _EACH = 256, 4
_LONG = ("gamma", "beta", "truncated_normal", "poisson", "binomial", "sobol")
_PICKED, _VENDORS = ("permutation", "choice"), ("uniform", "normal")
_CURAND_COMMANDS = 8  # kernels that make a state, and the numbers, at most
_CONSTANTS = 10  # of what has several, as in rng.cu
_ALL = 1 << 64

Parameters = tuple[str, tuple[int, ...]]
"""Name of a kernel, and its parameters, 8 bytes each."""


def _bits(*values: float, count: int = 3) -> tuple[int, ...]:
    return tuple([bits(value) for value in values]) + (0,) * (count - len(values))


@lru_cache(256)
def _range(dtype: DType, low: float, high: float) -> Parameters:
    kind = dtype.numpy.type
    start, end = kind(low), kind(high)
    return f"philox_uniform_{CODES[dtype]}", _bits(low, float(end - start), float(np.nextafter(end, start)))


@lru_cache(256)
def _bell(kind: str, dtype: DType, mean: float, deviation: float) -> Parameters:
    return f"philox_{kind}_{CODES[dtype]}", _bits(mean, deviation)


def _uniform(op: Any) -> Parameters:
    return _range(op.dtype, op.low, op.high)


def _normal(op: Any) -> Parameters:
    return _bell(op.kind, op.dtype, op.mean, op.std)


def _lognormal(op: Any) -> Parameters:
    return _bell(op.kind, op.dtype, op.mean, op.sigma)


def _exponential(op: Any) -> Parameters:
    return f"philox_exponential_{CODES[op.dtype]}", _bits(op.scale)


def _bernoulli(op: Any) -> Parameters:
    return "philox_bernoulli", (op.limit(), 0, 0)


def _several(op: Any) -> Parameters:
    return f"draws_{op.kind}_{CODES[op.dtype]}", _bits(*op.constants(), count=_CONSTANTS)


def _counts(op: Any) -> Parameters:
    return f"draws_{op.way()}", _bits(*op.constants(), count=_CONSTANTS)


def _integers(op: Any) -> Parameters:
    return _words("philox", op.low, op.span(), op.per_block(), op.dtype.itemsize)


def _words(program: str, low: int, span: int, per_block: int, itemsize: int) -> Parameters:
    is_pair = per_block == 2
    end = _ALL if is_pair else 1 << 32
    return f"{program}_{'pairs' if is_pair else 'words'}_{itemsize}", (low % _ALL, span % _ALL, end % span)


def _kernel(parameters: Callable[[Any], Parameters]) -> Kernel:
    def kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if op.size:
            lane.stream.ready()
            _launch(lane.stream, op, op.size, outputs[0], parameters(op))

    return kernel


def _launch(stream: CudaStream, op: Any, size: int, out: int, parameters: Parameters) -> None:
    name, values = parameters
    per_block = op.per_block()
    first, end = op.offset // per_block, -(-(op.offset + size) // per_block)
    function = stream.functions[name]
    stream.launch(function, -(-(end - first) // (_BLOCK * _EACH)), _BLOCK, out, size, op.key(), op.offset, *values)


def _draw_integers(stream: CudaStream, op: Any, length: int, count: int, out: int) -> None:
    """Enqueue places of elements that are chosen."""
    _launch(stream, op, count, out, _words("draws", 0, length, op.per_block(), 8))


def _sobol(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    width, _ = op.directions.shape
    size = op.n * width
    launch_each(lane.stream, f"sobol_{CODES[op.dtype]}", size, inputs[0], outputs[0], size, width, op.offset)


_KERNELS: dict[str, Kernel] = {
    "uniform": _kernel(_uniform),
    "normal": _kernel(_normal),
    "lognormal": _kernel(_lognormal),
    "exponential": _kernel(_exponential),
    "gamma": _kernel(_several),
    "beta": _kernel(_several),
    "truncated_normal": _kernel(_several),
    "integers": _kernel(_integers),
    "bernoulli": _kernel(_bernoulli),
    "poisson": _kernel(_counts),
    "binomial": _kernel(_counts),
    "sobol": _sobol,
}


class RngLibrary(FamilyState[Choices]):
    """What the family has in one context."""

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, partial(Choices, drawn=_draw_integers))
        self._generators = CurandGenerators()
        self.kernels = {**dict.fromkeys(_PICKED, self.loaded().pick), **dict.fromkeys(_VENDORS, self._draw)}

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether the op needs an algorithm of CUB's that was not run yet, or is cuRAND's. Quick."""
        is_vendors: bool = op.generator != "philox"
        return is_vendors or (op.kind in _PICKED and self.loaded().may_block(op))

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most. Quick."""
        if op.kind in _PICKED:
            return self.loaded().commands(op)
        return 1 if op.generator == "philox" else _CURAND_COMMANDS

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` before :meth:`measure`. Quick."""
        return self.loaded().scratch_nbytes(op) if op.kind in _PICKED else 0

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        if op.kind in _PICKED:
            self.loaded().measure(op)

    def _draw(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        if op.generator == "philox":
            _KERNELS[op.kind](lane, op, plan, inputs, outputs)
        else:
            self._generators.draw(lane.stream, op, outputs[0])


PART = CudaPart(
    kernels=_KERNELS,
    open=RngLibrary,
    libraries=(CUB, CURAND),
    programs=(
        Source("rng", lambda code: ("philox.cuh", "rng.cu", ""), functions=("philox",)),
        Source("draws", lambda code: ("philox.cuh", "draws.cu", "choice.cu", ""), functions=("sobol", "choice")),
    ),
    program={**dict.fromkeys(_KERNELS, "rng"), **dict.fromkeys((*_LONG, *_PICKED), "draws")},
)
