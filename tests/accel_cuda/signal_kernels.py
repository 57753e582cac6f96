"""Launches of every kernel around random numbers and transforms, of checksums and of the benchmark's own, on memory of exactly the size they need.

cuFFT's own kernels are left out: what it would work on is there, and the kernels before and after it run as they would with it.
"""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from accel import DType, ops
from accel_cuda import CudaBackend
from accel_cuda.families.fft import PART, enqueue
from tests.cuda_support import ref

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["launch_all", "signal_kernels"]

_MANY = 4099
_INTEGERS = (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64)


class _Exact:
    """Device memory for one op at a time, each piece as large as it was asked for: the steps of a transform find no room behind their own.

    Parameters
    ----------
    context
        Where it is taken.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    def alloc(self, nbytes: int) -> int:
        """Return the address of a piece, 0 if it is of no bytes."""
        with self._context.section:
            return int(self._context.driver.call("cuMemAlloc", nbytes)) if nbytes else 0

    def free(self, address: int) -> None:
        """Give a piece back once what was enqueued has ended; 0 is ignored."""
        if address:
            with self._context.section:
                self._context.driver.call("cuCtxSynchronize")
                self._context.driver.call("cuMemFree", address)


class _NoPlans:
    """Stands for the plans of cuFFT."""

    def execute(self, stream: Any, layout: Any, source: int, destination: int, memory: Any, **options: Any) -> None:
        """Do nothing."""


def _draws() -> Iterator[Any]:
    """Yield ops that draw with every kernel: from the beginning of a block of numbers and from within one, few and many."""
    kinds = (
        ops.Uniform,
        ops.Normal,
        ops.Lognormal,
        ops.Exponential,
        ops.TruncatedNormal,
        partial(ops.Gamma, a=0.5),
        partial(ops.Beta, a=0.5, b=2.0),
    )
    floats = [(kind, dtype) for kind in kinds for dtype in (DType.FLOAT32, DType.FLOAT64)]
    for offset, count in ((0, _MANY), (3, _MANY), (1, 1)):
        more: dict[str, Any] = {"seed": 7, "offset": offset}
        for kind, dtype in floats:
            yield kind((count,), dtype, **more)
        for dtype in _INTEGERS:
            yield ops.Integers((count,), 0, 100, dtype, **more)
        yield ops.Integers((count,), -(1 << 40), 1 << 40, DType.INT64, **more)
        yield ops.Integers((count,), 0, 1 << 64, DType.UINT64, **more)
        yield ops.Bernoulli((count,), 0.25, **more)
        yield from (ops.Poisson((count,), lam, **more) for lam in (3.0, 30.0))
        yield from (ops.Binomial((count,), n, 0.75, **more) for n in (10, 100))


def _transforms() -> Iterator[Any]:
    """Yield transforms with every kernel around them: scaled, turned in tiles that are not full, and with ends of spectra that count as real."""
    for real, spectrum in ((DType.FLOAT32, DType.COMPLEX64), (DType.FLOAT64, DType.COMPLEX128)):
        for shape in ((20, 33, 5), (3, 64, 70), (17, 2, 1001)):
            yield ops.Fft(ref(shape, spectrum), axes=(1,), norm="ortho")
            yield ops.Rfft(ref(shape, real), axes=(1,), norm="ortho")
            yield ops.Irfft(ref(shape, spectrum), axes=(1,))
            yield ops.Irfft(ref(shape, spectrum), axes=(0, 1), n=2 * shape[1] - 1)
        yield ops.Rfft(ref((1001,), real), norm="forward")
        yield ops.Hfft(ref((5, 64), spectrum))
        yield ops.Ihfft(ref((5, 63), real))
        types: tuple[Any, ...] = (1, 2, 3, 4)
        for cosine, number, length in itertools.product((ops.Dct, ops.Dst), types, (1000, 1001)):
            yield cosine(ref((3, length, 5), real), number, axis=1, norm="ortho")
        for dtype, filtered in itertools.product((real, spectrum), (ops.Convolve, ops.Correlate)):
            yield filtered(ref((3, 1001), dtype), ref((1, 70), dtype), axes=(1,))
            yield filtered(ref((33, 20, 5), dtype), ref((3, 4, 5), dtype), "same")


def _transform(context: Any, stream: Any, op: Any) -> None:
    plan = op.plan()
    memory: Any = _Exact(context)
    sources, destination = [memory.alloc(ref.nbytes) for ref in plan.reads], memory.alloc(plan.creates[0].nbytes)
    enqueue(stream, memory, _NoPlans(), op, sources, [destination])
    for address in (destination, *sources):
        memory.free(address)


def launch_all(context: Any, stream: Any) -> None:
    """Launch them all.

    Parameters
    ----------
    context, stream
        A context, and a stream of it.
    """
    lane, memory = SimpleNamespace(stream=stream), _Exact(context)
    for op in _draws():
        out = memory.alloc(op.size * op.dtype.itemsize)
        context.kernels("rng")[op.kind](lane, op, op.plan(), [], [out])
        memory.free(out)
    directions = memory.alloc(4 * 33 * 7)
    for dtype in (DType.FLOAT32, DType.FLOAT64):
        op = ops.Sobol(ref((7, 33), DType.UINT32), 999, dtype)
        out = memory.alloc(op.plan().creates[0].nbytes)
        context.kernels("rng")["sobol"](lane, op, op.plan(), [directions], [out])
        memory.free(out)
    memory.free(directions)
    for op in _transforms():
        _transform(context, stream, op)
    for dtype in (DType.FLOAT32, DType.FLOAT64):
        frequencies = ops.Fftfreq(1001, dtype=dtype)
        out = memory.alloc(frequencies.plan().creates[0].nbytes)
        PART.kernels["fftfreq"](lane, frequencies, frequencies.plan(), [], [out])
        memory.free(out)
    total = memory.alloc(8)
    for nbytes, skipped in ((1, 0), (1001, 0), (1001, 3), (1 << 20, 8), ((1 << 20) + 3, 1)):
        source = memory.alloc(nbytes + skipped)
        op = ops.Checksum(ref((nbytes,), DType.UINT8))
        context.kernels("memory")["checksum"](lane, op, op.plan(), [source + skipped], [total])
        memory.free(source)
    memory.free(total)
    stream.launch(context.functions["spin"], 1, 1, 1000)
    stream.synchronize()


def signal_kernels() -> None:
    """Launch them all on the first GPU."""
    context = CudaBackend().open(0)
    stream = context.create_stream()
    launch_all(context, stream)
    stream.close()
    context.close()
