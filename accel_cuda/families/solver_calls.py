"""cuSOLVER's calls of one context: a handle for each stream, and how much memory each call works in. Matrices are column-major here."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import DType, UnsupportedError
from accel.dtype import COMPLEX_OF, REAL_OF
from accel_cuda.core.event import CudaEvent
from accel_cuda.core.libraries import VendorLibrary, load_module
from accel_cuda.core.library_handle import StreamHandles
from accel_cuda.core.memo import Memo
from accel_cuda.errors import error_of
from accel_cuda.families.cublas import LETTERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["CUSOLVER", "Call", "SolverCalls"]

CUSOLVER = VendorLibrary("cusolver", "nvidia-cusolver", "nvmath.bindings.cusolverDn", "nvmath.bindings.cusolver.cuSOLVERError")

_DATA = {DType.FLOAT32: "CUDA_R_32F", DType.FLOAT64: "CUDA_R_64F", DType.COMPLEX64: "CUDA_C_32F", DType.COMPLEX128: "CUDA_C_64F"}
_ANY_ADDRESS = 256
"""Stands for operands where the library is asked how much memory a call works in: it reads none of them."""

_FILL = {False: 1, True: 0}  # cublasFillMode_t, by whether it is the lower triangle
_WITHOUT, _WITH = 0, 1  # cusolverEigMode_t
_FIRST_TYPE = 1  # cusolverEigType_t: a @ v = b @ v * w
_JOBS = {"all": ord("A"), "some": ord("S"), "none": ord("N")}
_OPERANDS = {"potrf": 1, "getrf": 2, "geqrf": 2, "orgqr": 2, "syevd": 2, "sygvd": 3, "gesvd": 4, "geev": 3}
_TYPED = {"orgqr": ("orgqr", "ungqr"), "sygvd": ("sygvd", "hegvd")}  # of real and of complex matrices


class Call(NamedTuple):
    """A call, by all that decides how much memory it works in.

    Attributes
    ----------
    name
        ``"potrf"``, ``"getrf"``, ``"geqrf"``, ``"orgqr"``, ``"syevd"``, ``"sygvd"``, ``"gesvd"`` or ``"geev"``.
    dtype
        The matrix's.
    m, n
        Its rows and columns.
    k
        Of orgqr: how many reflectors there are.
    lower
        Which triangle is read.
    vectors
        What is computed besides values: ``"all"``, ``"some"`` or ``"none"``.
    """

    name: str
    dtype: DType
    m: int
    n: int
    k: int = 0
    lower: bool = True
    vectors: str = "all"


class SolverCalls(StreamHandles):
    """What the streams of one context share. Any thread may call it.

    Parameters
    ----------
    context
        The context.

    Attributes
    ----------
    sizes : Memo
        Call -> bytes that it works in on the device, and on the host, of those that were measured.
    """

    def __init__(self, context: CudaContext) -> None:
        super().__init__(CUSOLVER)
        data: Any = load_module("nvmath", "nvmath-python").CudaDataType
        self._types = {dtype: int(data[name]) for dtype, name in _DATA.items()}
        self._context = context
        self._measuring = threading.Lock()  # one thread at a time uses the handle that belongs to no stream
        self._keeping = threading.Lock()  # of what is kept for calls that are not at their end
        self._used: deque[tuple[CudaEvent, bytearray]] = deque()
        self.sizes: Memo[Call, tuple[int, int]] = Memo()
        try:
            with context.section:
                self._handle = int(self._bindings.create())
                self._params = int(self._bindings.create_params())
        except self._error as error:
            raise self._failure(error, "create") from error

    def measure(self, call: Call) -> tuple[int, int]:
        """Return how many bytes a call works in on the device, and on the host. May block."""
        found = self.sizes.get(call)
        if found is None:
            try:
                with self._measuring, self._context.section:
                    found = self._measured(call)
            except self._error as error:
                raise self._failure(error, f"buffer_size of {call.name}") from error
            self.sizes[call] = found
        return found

    def run(self, stream: CudaStream, call: Call, addresses: Sequence[int], scratch: int, info: int) -> None:
        """Enqueue a call; the context is current. May block.

        Parameters
        ----------
        stream, call
            Where it goes, and what it is.
        addresses
            The matrix, whose leading dimension is its number of rows, and what else the call takes and makes, in its order.
        scratch
            Memory to work in, as much as was measured.
        info
            Where the library writes an int32.
        """
        nbytes, on_host = self.measure(call)
        if on_host and stream.is_capturing:
            raise UnsupportedError(
                f"{call.name} cannot become a part of a graph: cuSOLVER computes a part of it on the host",
                library=CUSOLVER.name,
                remedy="Await the op outside the graph.",
            )
        room = bytearray(on_host)
        host = _address(room)
        arguments = self._arguments(call, addresses)
        if call.name in _TYPED:
            self._run(stream, self._typed(call), *arguments, scratch, nbytes // call.dtype.itemsize, info)
        else:
            self._run(stream, f"x{call.name}", self._params, *arguments, scratch, nbytes, host, on_host, info)
        if on_host:
            self._keep(stream, room)

    def solve(self, stream: CudaStream, trans: int, dtype: DType, n: int, k: int, lu: int, piv: int, b: int, info: int) -> None:
        """Enqueue the solution in place of n equations for k right-hand sides, of what getrf has factored; ``trans`` is a number of cuBLAS's."""
        kind = self._types[dtype]
        self._run(stream, "xgetrs", self._params, trans, n, k, kind, lu, n, piv, kind, b, n, info)

    def close(self) -> None:
        """Destroy what the streams share. May block; they have ended, and the context is healthy."""
        for event, _ in self._used:
            event.close()
        self._used.clear()
        with self._context.section, contextlib.suppress(self._error):  # what else there is is given back all the same
            self._bindings.destroy_params(self._params)
            self._bindings.destroy(self._handle)

    def _run(self, stream: CudaStream, name: str, *arguments: int) -> None:
        """Call with the stream's handle. To make one may wait for the device, which a capture forbids: that is lent the one that measures."""
        if not stream.is_capturing:
            self.handle(stream).call(name, *arguments)
            return
        with self._measuring:
            try:
                self._bindings.set_stream(self._handle, stream.handle)
                try:
                    getattr(self._bindings, name)(self._handle, *arguments)
                finally:
                    self._bindings.set_stream(self._handle, 0)
            except self._error as error:
                raise stream.failure(int(error.status), name, CUSOLVER.name) from error

    def _measured(self, call: Call) -> tuple[int, int]:
        arguments = self._arguments(call, (_ANY_ADDRESS,) * _OPERANDS[call.name])
        if call.name in _TYPED:
            return int(getattr(self._bindings, f"{self._typed(call)}_buffer_size")(self._handle, *arguments)) * call.dtype.itemsize, 0
        if call.name == "getrf":  # the one call that is measured without one of its operands, the pivots
            arguments = *arguments[:5], arguments[6]
        device, host = getattr(self._bindings, f"x{call.name}_buffer_size")(self._handle, self._params, *arguments)
        return int(device), int(host)

    @staticmethod
    def _typed(call: Call) -> str:
        return LETTERS[call.dtype] + _TYPED[call.name][call.dtype.is_complex]

    def _arguments(self, call: Call, addresses: Sequence[int]) -> tuple[int, ...]:
        """Return the arguments of a call between the handle and the memory."""
        m, n, dtype = call.m, call.n, call.dtype
        kind, real = self._types[dtype], self._types[REAL_OF.get(dtype, dtype)]
        a, *others = addresses
        fill, vectors = _FILL[call.lower], _WITHOUT if call.vectors == "none" else _WITH
        match call.name:
            case "potrf":
                return fill, n, kind, a, n, kind
            case "getrf":
                return m, n, kind, a, m, others[0], kind
            case "geqrf":
                return m, n, kind, a, m, kind, others[0], kind
            case "orgqr":
                return m, n, call.k, a, m, others[0]
            case "syevd":
                return vectors, fill, n, kind, a, n, real, others[0], kind
            case "sygvd":
                return _FIRST_TYPE, vectors, fill, n, a, n, others[0], n, others[1]
            case "gesvd":
                s, u, vt = others
                job = _JOBS[call.vectors]
                return job, job, m, n, kind, a, m, real, s, kind, u, m, kind, vt, n, kind
            case _:
                values = self._types[COMPLEX_OF.get(dtype, dtype)]
                return _WITHOUT, vectors, n, kind, a, n, values, others[0], kind, 0, n, kind, others[1], n, kind

    def _keep(self, stream: CudaStream, room: bytearray) -> None:
        """Keep host memory until the stream has passed the call that works in it."""
        context, event = stream.context, CudaEvent(stream.context)
        context.check(context.driver.hot.event_record(event.handle, stream.pointer), "cuEventRecord")
        event.mark(stream.transfers, 0)  # it says nothing of the stream's transfers
        with self._keeping:
            while self._used and self._used[0][0].query():
                self._used.popleft()[0].close()
            self._used.append((event, room))

    def _failure(self, error: Any, call: str) -> Exception:
        return error_of(int(error.status), call, library=CUSOLVER.name, device=self._context.description.spec)


def _address(room: bytearray) -> int:
    """Return where host memory lies, 0 if it is of no bytes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(room)) if room else 0
