"""Sparse systems solved directly by cuDSS, an optional library: it orders, factors and solves each system anew.

All of it is off the loop: the ordering is the host's work, and the host asks whether the factorization has succeeded. cuDSS takes its memory from the driver's
pool: no call of it takes memory to work in.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import DType, Transpose, UnsupportedError
from accel.sparse_ref import sparse_of
from accel_cuda.core.libraries import VendorLibrary
from accel_cuda.core.library_handle import StreamHandles
from accel_cuda.families.cublas import blas_of
from accel_cuda.families.kernels import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_cuda.core.library_handle import LibraryHandle
    from accel_cuda.core.stream import CudaStream

__all__ = ["CUDSS", "DirectSolver", "solve_scratch"]

CUDSS = VendorLibrary("cudss", "nvidia-cudss-cu13", "nvmath.bindings.cudss", "cuDSSError", extra="sparse-direct")

_DATA = {DType.FLOAT32: "R_32F", DType.FLOAT64: "R_64F", DType.COMPLEX64: "C_32F", DType.COMPLEX128: "C_64F"}
_INDICES = {DType.INT32: "R_32I", DType.INT64: "R_64I"}
_GEAM = {DType.FLOAT32: "sgeam_64", DType.FLOAT64: "dgeam_64", DType.COMPLEX64: "cgeam_64", DType.COMPLEX128: "zgeam_64"}
_GENERAL, _FULL, _FROM_ZERO, _BY_COLUMNS = 0, 0, 0, 0
_MATCHED = 6  # cudssMatchingAlg_t: the library chooses how it brings large elements to the diagonal

_REFINED = 2
"""Steps by which a solution is improved: pivots are not the largest that there are."""


def solve_scratch(op: Any) -> int:
    """Return how many bytes an op works in: several right-hand sides, and solutions, lie by columns meanwhile."""
    return 2 * aligned(op.b.nbytes) if _columns(op) > 1 else 0


class DirectSolver(StreamHandles):
    """cuDSS in one context, with a handle for each stream. Any thread may call it.

    Raises
    ------
    BackendUnavailableError
        If cuDSS is not installed.
    """

    def __init__(self) -> None:
        super().__init__(CUDSS)

    def run(self, lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Solve a system; the context is current. Blocks."""
        stream, a, (out, info, scratch) = lane.stream, sparse_of("a", op.a), outputs
        if stream.is_capturing:
            raise UnsupportedError(
                "cuDSS cannot be part of a graph: the host orders the matrix, and asks whether it is singular",
                op=op.kind,
                remedy="Send it outside of the graph, and give the graph its result.",
            )
        (n, _), count, bad = a.shape, _columns(op), 0
        if n and count:
            b, x = inputs[3], out
            if count > 1:
                b, x = scratch, scratch + aligned(op.b.nbytes)
                _turn(lane, op.b.dtype, n, count, inputs[3], b)
            bad = self._solved(stream, op, (*inputs[:3], b, x)) if a.nnz else n
            if bad:
                stream.fill(out, b"\xff", op.b.nbytes)  # NaN
            elif count > 1:
                _turn(lane, op.b.dtype, count, n, x, out)
        stream.fill(info, bad.to_bytes(4, "little"), 1)

    def _set_up(self, handle: LibraryHandle, stream: CudaStream) -> None:
        context = stream.context
        # Without it the library allocates by cudaMalloc, which waits for the whole device.
        handle.call("set_async_workspace_allocator", int(context.call("cuDeviceGetDefaultMemPool", context.device)))

    def _solved(self, stream: CudaStream, op: Any, addresses: tuple[int, ...]) -> int:
        """Solve, and return how many pivots were 0: none, if it was solved.

        The library looks for pivots close to the diagonal only, so large elements are brought there first. Where a pivot is 0 all the same, or the library
        cannot match rows and columns (some matrices have no way to), it tries again without: a matrix is singular if both find a pivot of 0.
        """
        handle, a = self.handle(stream), sparse_of("a", op.a)
        cudss, types = handle.module, handle.module.DataType
        data, indices, indptr, b, x = addresses
        kind, index = int(types[_DATA[a.dtype]]), int(types[_INDICES[a.indices.dtype]])
        n, count = a.shape[0], _columns(op)
        with contextlib.ExitStack() as owned:
            try:
                forms = index, index, kind, _GENERAL, _FULL, _FROM_ZERO
                matrix = int(cudss.matrix_create_csr(n, n, a.nnz, indptr, 0, indices, data, *forms))
                owned.callback(cudss.matrix_destroy, matrix)
                sides: list[int] = []
                for address in (x, b):
                    sides.append(int(cudss.matrix_create_dn(n, count, n, address, kind, _BY_COLUMNS)))
                    owned.callback(cudss.matrix_destroy, sides[-1])
                attempt = functools.partial(self._attempt, handle, a.dtype, a.indices.dtype, (matrix, *sides))
                try:
                    bad = attempt(is_matched=True)
                except handle.error:  # of the device, it comes again
                    bad = 1
                return bad and attempt(is_matched=False)
            except handle.error as error:
                raise handle.failure(error, op.kind) from error

    def _attempt(
        self, handle: LibraryHandle, dtype: DType, index: DType, matrices: tuple[int, ...], *, is_matched: bool
    ) -> int:  # fmt: skip
        """Order, factor and solve; return how many pivots were 0."""
        cudss = handle.module
        with contextlib.ExitStack() as owned:
            config = int(cudss.config_create())
            owned.callback(cudss.config_destroy, config)
            data = int(cudss.data_create(handle.value))
            owned.callback(cudss.data_destroy, handle.value, data)
            # Pivots that are smaller are replaced by this, and counted: those that are 0.
            self._set(config, "PIVOT_EPSILON", float(np.finfo(dtype.numpy).tiny))
            self._set(config, "IR_N_STEPS", _REFINED)
            if is_matched:
                self._set(config, "MATCHING_ALG", _MATCHED)
            phases = cudss.Phase
            for phase in (phases.ANALYSIS, phases.FACTORIZATION):
                cudss.execute(handle.value, int(phase), config, data, *matrices)
            bad = self._got(handle, data, "NPIVOTS", index.itemsize) or self._got(handle, data, "INFO", 4)
            if not bad:
                cudss.execute(handle.value, int(phases.SOLVE), config, data, *matrices)
            return abs(bad)

    def _set(self, config: int, name: str, value: float) -> None:
        parameter = int(self._bindings.ConfigParam[name])
        held = np.array([value], self._bindings.get_config_param_dtype(parameter))
        self._bindings.config_set(config, parameter, held.ctypes.data, held.nbytes)

    def _got(self, handle: LibraryHandle, data: int, name: str, nbytes: int) -> int:
        """Return a number that the factorization has left; waits for it."""
        held, written = np.zeros(8 // nbytes, f"i{nbytes}"), np.zeros(1, np.uint64)
        self._bindings.data_get(handle.value, data, int(self._bindings.DataParam[name]), held.ctypes.data, nbytes, written.ctypes.data)
        return int(held[0])


def _columns(op: Any) -> int:
    """Return how many right-hand sides there are."""
    return 1 if op.b.ndim == 1 else int(op.b.shape[1])


def _turn(lane: Any, dtype: DType, rows: int, columns: int, source: int, destination: int) -> None:
    """Enqueue the transpose of a C-order matrix."""
    blas = blas_of(lane.stream)
    trans = blas.operation(dtype)[Transpose.TRANSPOSE]
    one, zero = blas.factors(dtype, 1.0, 0.0)
    # The second matrix, which is multiplied by 0, is not read.
    blas.call(_GEAM[dtype], trans, trans, rows, columns, one, source, columns, zero, source, columns, destination, rows)
