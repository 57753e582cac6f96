"""cuBLAS: one handle per stream, with a workspace of its own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from typing import TYPE_CHECKING, Any

from accel import DType, Transpose
from accel_cuda.bystanders import in_the_way
from accel_cuda.driver import Handle
from accel_cuda.graph import executable
from accel_cuda.libraries import load_library, load_module
from accel_cuda.repeats import Repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel_cuda.stream import CudaStream

__all__ = ["Blas"]

logger = logging.getLogger("accel.cuda")

_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_DEFAULT_ALGORITHM = -1
_OPERATION = {Transpose.NONE: 0, Transpose.TRANSPOSE: 1, Transpose.CONJUGATE: 2}
_REAL_OPERATION = {Transpose.NONE: 0, Transpose.TRANSPOSE: 1, Transpose.CONJUGATE: 1}
_F32, _F64, _TF32 = 68, 70, 77
# Element type of the arrays, type that is computed in, operations. Plain 32-bit computing: without TF32.
_TYPES: dict[DType, tuple[int, int, dict[Transpose, int]]] = {
    DType.FLOAT16: (2, _F32, _REAL_OPERATION),
    DType.BFLOAT16: (14, _F32, _REAL_OPERATION),
    DType.FLOAT32: (0, _F32, _REAL_OPERATION),
    DType.FLOAT64: (1, _F64, _REAL_OPERATION),
    DType.COMPLEX64: (4, _F32, _OPERATION),
    DType.COMPLEX128: (5, _F64, _OPERATION),
}
_FACTOR = 16
_ARGUMENTS_OF_ONE = 15
_RELAXED = 2
_PAUSES = (0.0, 50e-6, 100e-6, 200e-6)
"""Seconds before each look whether a capture would disturb anybody."""

_P, _I, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_ONE = (_P, _I, _I, _N, _N, _N, _P, _P, _I, _N, _P, _I, _N, _P, _P, _I, _N, _I, _I)
_MANY = (_P, _I, _I, _N, _N, _N, _P, _P, _I, _N, _N, _P, _I, _N, _N, _P, _P, _I, _N, _N, _N, _I, _I)


def _held(path: str) -> tuple[Callable[..., int], Callable[..., int]]:
    """Return the library's functions for several products and for one, as calls that keep the GIL: for captures alone, in which nothing runs."""
    library = ctypes.PyDLL(path)
    one, many = library.cublasGemmEx_64, library.cublasGemmStridedBatchedEx_64
    one.argtypes, many.argtypes = _ONE, _MANY
    return many, one


def _is_quiet() -> bool:
    """Wait a little, if need be, until a capture would disturb nobody; ``False`` if that takes longer. The lock was given up right before it returns."""
    where: str | None = None
    for pause in _PAUSES:
        time.sleep(pause)
        where = in_the_way()
        if where is None:
            return True
    logger.debug("no graphs of products were made now: another thread is in %s", where)
    return False


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the collector from running destructors, which may give the lock up, or call the driver."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Blas:
    """A cuBLAS handle bound to a stream.

    Parameters
    ----------
    stream
        Where the work goes; its context is current.
    workspace, nbytes
        Device memory that products may use. It is the stream's own, so that products of several streams do not share any.
    wish
        Called when there are calls whose graphs ought to be made; see :class:`~accel_cuda.repeats.Repeats`.

    Attributes
    ----------
    repeats : Repeats
        Products that come again and again.
    is_home : bool
        Whether calls go to ``stream``.
    """

    def __init__(self, stream: CudaStream, workspace: int, nbytes: int, wish: Callable[[], None]) -> None:
        self._held = _held(load_library("cublas", "nvidia-cublas"))
        self._cublas = load_module("nvmath.bindings.cublas", "nvmath-python")
        self._stream = stream
        self._error: Any = self._cublas.cuBLASError
        # As ctypes has them, numbers beyond a float's range become infinite.
        self._doubles = (ctypes.c_double * 4)()
        self._floats = (ctypes.c_float * 8).from_buffer(self._doubles)
        self._alpha = ctypes.addressof(self._doubles)
        self._beta = self._alpha + _FACTOR
        self._written: tuple[DType, complex, complex] | None = None
        self._workspace = workspace, nbytes
        self.is_home = True
        try:
            self.handle = int(self._cublas.create())
            self._set_stream(stream)
            self._cublas.set_math_mode(self.handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
            self._cublas.set_pointer_mode(self.handle, 0)
        except self._error as error:
            raise self._stream.failure(int(error.status), "create", "cublas") from error
        self.repeats = Repeats(stream, wish)
        stream.at_close(self.close)

    def gemm(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int, beta: complex, c: int,
        ldc: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue one product; the arguments are checked."""
        call = ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, dtype, allow_tf32
        if not self.repeats.launch(call):
            self._enqueue(call)

    def batched_gemm(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, stride_a: int, b: int, ldb: int,
        stride_b: int, beta: complex, c: int, ldc: int, stride_c: int, count: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue ``count`` products in one call; the arguments are checked."""
        call = ta, tb, m, n, k, alpha, a, lda, stride_a, b, ldb, stride_b, beta, c, ldc, stride_c, count, dtype, allow_tf32
        if not self.repeats.launch(call):
            self._enqueue(call)

    def prepare_repeats(self) -> None:
        """Make graphs of the calls that have come often. May block; nobody else makes calls meanwhile; in the section."""
        wished = self.repeats.take_wished()
        if not wished:
            return
        # In a stream of its own: other streams that wait for this one record events in it at any time.
        side = self._stream.context.create_stream(priority=self._stream.priority)
        try:
            self.is_home = False
            self._set_stream(side)
            try:
                is_quiet = True
                for call in wished:
                    is_quiet = is_quiet and _is_quiet()
                    if not (is_quiet and self._capture(call, side)):
                        self.repeats.put_off(call)
            finally:
                self._set_stream(self._stream)
                self.is_home = True
        finally:
            side.close()

    def _capture(self, call: tuple[Any, ...], side: CudaStream) -> bool:
        """Make a graph of a call, if it can be captured without disturbing anybody; ``False`` if it is to be tried again later.

        While anything is captured the driver lets nobody wait for the whole device, or mark all that it does: not this project, and not torch. So no other
        thread may be on its way there. The interpreter's lock was given up right before: whoever wants it then waits for a switch interval, 5 ms. And it is
        kept throughout, for microseconds (docs/hardware.md): the library runs nothing, and what it loads for this call it has loaded by now.
        """
        context, hot = side.context, side.context.driver.hot
        function, arguments = self._held[len(call) == _ARGUMENTS_OF_ONE], self._arguments(call)
        graph, stream, refused = Handle(), side.pointer, 0
        target = ctypes.byref(graph)
        with _without_collections():
            if in_the_way() is not None:
                return False
            status = hot.begin_capture(stream, _RELAXED)
            if not status:
                refused = function(*arguments)
                status = hot.end_capture(stream, target)
        if not (status or refused):
            self.repeats.add(call, executable(side, graph.value))
            return True
        if graph.value:
            context.driver.ignore("cuGraphDestroy", graph.value)
        error = context.failure(status, "cuStreamEndCapture") if status else self._stream.failure(refused, "gemm", "cublas")
        if error.is_fault:
            raise error
        if status:  # somebody who was not seen has broken it off, which the library has felt too
            return False
        self.repeats.refuse(call)
        return True

    def _set_stream(self, stream: CudaStream) -> None:
        """Direct calls to a stream, with our workspace in any: setting the stream sets the library's own again."""
        try:
            self._cublas.set_stream(self.handle, stream.handle)
            self._cublas.set_workspace(self.handle, *self._workspace)
        except self._error as error:
            raise self._stream.failure(int(error.status), "set_stream", "cublas") from error

    def _enqueue(self, call: tuple[Any, ...]) -> None:
        """Make a call of either kind: they have different numbers of arguments."""
        arguments, is_one = self._arguments(call), len(call) == _ARGUMENTS_OF_ONE
        function = self._cublas.gemm_ex_64 if is_one else self._cublas.gemm_strided_batched_ex_64
        try:
            with self._stream.context.section:
                function(*arguments)
        except self._error as error:
            raise self._stream.failure(int(error.status), "gemm" if is_one else "batched_gemm", "cublas") from error

    def _arguments(self, call: tuple[Any, ...]) -> tuple[int, ...]:
        """Return what the library's function is called with; its factors are written where it reads them, during the call."""
        dtype, allow_tf32 = call[-2:]
        element, compute, operation = _TYPES[dtype]
        compute = _TF32 if allow_tf32 else compute
        if len(call) == _ARGUMENTS_OF_ONE:
            ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc = call[:-2]
            where: tuple[int, ...] = a, element, lda, b, element, ldb, self._beta, c, element, ldc
        else:
            ta, tb, m, n, k, alpha, a, lda, stride_a, b, ldb, stride_b, beta, c, ldc, stride_c, count = call[:-2]
            where = a, element, lda, stride_a, b, element, ldb, stride_b, self._beta, c, element, ldc, stride_c, count
        if self._written != (dtype, alpha, beta):
            self._write(dtype, alpha, beta)
        return self.handle, operation[ta], operation[tb], m, n, k, self._alpha, *where, compute, _DEFAULT_ALGORITHM

    def close(self) -> None:
        """Give the handle back. May block; the context is current and healthy."""
        self.repeats.close()
        with contextlib.suppress(self._error):  # what else the stream has is given back all the same
            self._cublas.destroy(self.handle)

    def _write(self, dtype: DType, alpha: complex, beta: complex) -> None:
        """Write the scaling factors where the library reads them, during the call."""
        values = self._floats if _TYPES[dtype][1] == _F32 else self._doubles
        half = len(values) // 2
        values[0], values[1], values[half], values[half + 1] = alpha.real, alpha.imag, beta.real, beta.imag
        self._written = dtype, alpha, beta
