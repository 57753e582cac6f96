"""Products of two sparse matrices by cuSPARSE, whose calls learn how much memory they work in, and how large the result is, while they run.

All of it is off the loop: the library waits for the device between its steps. How much it works in depends on the elements, so an op brings that memory, and
another op tells how much is needed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import DType, InvalidArgumentError, SparseRef, UnsupportedError
from accel.sparse_ref import sparse_of
from accel_cuda.families.kernels import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.sparse_plans import SparsePlans

__all__ = ["PRODUCTS", "enqueue_spgemm", "enqueue_spgemm_size", "spgemm_scratch"]

PRODUCTS = ("spgemm", "spgemm_size")
"""Kinds of the ops."""

_INDEX, _BASE, _DEFAULT, _NONE = 2, 0, 0, 0  # int32, from 0 on; the algorithm that the library chooses; no transpose


def spgemm_scratch(op: Any) -> int:
    """Return how many bytes an op works in: what it brings for the library, and of the one that counts, an indptr that the library is shown."""
    first, _ = _factors(op)
    if op.kind == "spgemm":
        return int(op.workspace)
    return aligned(4 * (first[1][0] + 1)) + int(op.workspace)


def enqueue_spgemm_size(plans: SparsePlans, stream: CudaStream, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Ask for the memory of a product, and count its products of elements as soon as there is memory for that."""
    (a, shape, _), (b, _, _) = _factors(op)
    _check(stream, op)
    needed, products, offsets = 0, 0, outputs[1]
    if a.nnz and b.nnz:
        work = offsets + aligned(4 * (shape[0] + 1))
        with _call(plans, stream, op, inputs, offsets) as (sparse, call, descriptor):
            needed, products = aligned(int(sparse.sp_gemm_work_estimation(*call, 0))), -1
            if op.workspace >= needed:
                sparse.sp_gemm_work_estimation(*call, work)
                needed += _asked(sparse, call)
                products = int(sparse.sp_gemm_get_num_products(descriptor))
    for place, number in enumerate((needed, products)):
        stream.fill(outputs[0] + 8 * place, number.to_bytes(8, "little", signed=True), 1)


def enqueue_spgemm(plans: SparsePlans, stream: CudaStream, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply; the library says in the middle how many elements there are."""
    data, indices, indptr, count, scratch = outputs
    (a, (rows, _), _), (b, (_, columns), _) = _factors(op)
    _check(stream, op)
    room, itemsize, found, written = op.room(rows * columns), a.dtype.itemsize, 0, 0
    if a.nnz and b.nnz:
        with _call(plans, stream, op, inputs, indptr) as (sparse, call, _):
            first = aligned(int(sparse.sp_gemm_work_estimation(*call, 0)))
            _check_workspace(op, first)
            sparse.sp_gemm_work_estimation(*call, scratch)
            size = np.array([_asked(sparse, call)], np.uint64)
            _check_workspace(op, first + int(size[0]))
            sparse.sp_gemm_compute(*call, size.ctypes.data, scratch + first)
            found = int(sparse.sp_mat_get_size(call[7])[2])
            if 0 < found <= room:
                sparse.csr_set_pointers(call[7], indptr, indices, data)
                sparse.sp_gemm_copy(*call)
                written = found
    if not written:
        stream.fill(indptr, bytes(4), rows + 1)
    for address, width in ((data, itemsize), (indices, 4)):
        if room > written:
            stream.fill(address + written * width, bytes(1), (room - written) * width)
    stream.fill(count, found.to_bytes(8, "little"), 1)


def _factors(op: Any) -> tuple[tuple[SparseRef, tuple[int, int], slice], tuple[SparseRef, tuple[int, int], slice]]:
    """Return the factors as csr, each with its shape and the places of its addresses: of csc, the transposes in reverse order."""
    a, b = sparse_of("a", op.a), sparse_of("b", op.b)
    if a.format == "csr":
        return (a, a.shape, slice(0, 3)), (b, b.shape, slice(3, 6))
    return (b, b.shape[::-1], slice(3, 6)), (a, a.shape[::-1], slice(0, 3))


def _check(stream: CudaStream, op: Any) -> None:
    """Raise what the library cannot do."""
    if stream.is_capturing:
        raise UnsupportedError(
            "cuSPARSE's SpGEMM cannot be part of a graph: the host learns in the middle how many elements there are",
            op=op.kind,
            remedy="Send it outside of the graph, and give the graph its result.",
        )
    if sparse_of("a", op.a).indices.dtype is not DType.INT32:
        raise UnsupportedError("cuSPARSE multiplies sparse matrices with indices of int32 only", op=op.kind, remedy="Give int32 indices.")


def _check_workspace(op: Any, needed: int) -> None:
    if op.workspace < needed:
        raise InvalidArgumentError(
            f"cuSPARSE's SpGEMM works in {needed} bytes or more, and workspace is {op.workspace}",
            op=op.kind,
            remedy="Await device.sparse.spgemm(a, b), which asks for them; or give workspace= what device.sparse.spgemm_size(a, b) says.",
        )


@contextlib.contextmanager
def _call(
    plans: SparsePlans, stream: CudaStream, op: Any, inputs: Sequence[int], offsets: int
) -> Iterator[tuple[Any, tuple[int, ...], int]]:
    """Give the library, the arguments that all steps of a product have, and its descriptor; the context is current."""
    handle = plans.handle(stream)
    sparse, dtype = handle.module, sparse_of("a", op.a).dtype
    kind = plans.type_of(dtype)
    alpha = getattr(op, "alpha", 1.0)
    factors = np.array([alpha if dtype.is_complex else alpha.real, 0], dtype.numpy)
    with contextlib.ExitStack() as owned:
        try:
            matrices: list[int] = []
            shapes = [(matrix, shape, inputs[places]) for matrix, shape, places in _factors(op)]
            for matrix, shape, (data, indices, indptr) in shapes:
                matrices.append(int(sparse.create_csr(*shape, matrix.nnz, indptr, indices, data, _INDEX, _INDEX, _BASE, kind)))
                owned.callback(sparse.destroy_sp_mat, matrices[-1])
            result = shapes[0][1][0], shapes[1][1][1]
            matrices.append(int(sparse.create_csr(*result, 0, offsets, 0, 0, _INDEX, _INDEX, _BASE, kind)))
            owned.callback(sparse.destroy_sp_mat, matrices[-1])
            descriptor = int(sparse.sp_gemm_create_descr())
            owned.callback(sparse.sp_gemm_destroy_descr, descriptor)
            first, second, third = matrices
            at = factors.ctypes.data
            yield sparse, (
                *(handle.value, _NONE, _NONE, at, first, second),
                *(at + factors.itemsize, third, kind, _DEFAULT, descriptor),
            ), descriptor  # fmt: skip
        except handle.error as error:
            raise handle.failure(error, op.kind) from error


def _asked(sparse: Any, call: tuple[int, ...]) -> int:
    """Return how many bytes the computing step works in, besides those of the first."""
    size = np.zeros(1, np.uint64)
    sparse.sp_gemm_compute(*call, size.ctypes.data, 0)
    return int(size[0])
