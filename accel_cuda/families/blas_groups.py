"""Products of different sizes in one call of cuBLAS, and addresses of matrices in device memory, by which such calls find them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from accel import DType
from accel.ops.blas import products_of
from accel_cuda.families.cublas import ADDRESSES, Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.ops.blas import Product
    from accel_cuda.core.stream import CudaStream

__all__ = ["WORD", "commands", "gemm_grouped", "lacks", "write_addresses", "write_addresses_apart"]

_DTYPES = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
WORD = 8
"""Bytes of an address."""

# As in blas.cu: how many addresses are arguments of one launch.
_GIVEN = 448
_BLOCK = 256
_VECTOR = 16
# Three addresses for each product.
_PRODUCTS = ADDRESSES // (3 * WORD)
# Commands of one call, besides those that write addresses.
_LAUNCHES = 4
# How many products the loop's thread enqueues.
_QUICK = 64


class _Given(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("out", ctypes.c_uint64), ("values", ctypes.c_uint64 * _GIVEN))


def gemm_grouped(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply in groups of products of one form each, as one call.

    cuBLAS has no groups of complex matrices. While a graph is captured there are none either: the library may copy from memory of its own on the host, which
    a replay would read again. It cannot see how addresses in device memory are aligned, and takes them to be so that whole vectors can be read.
    """
    products = [each for each in products_of(op, inputs, outputs) if each.m and each.n]
    dtype, together = op.a[0].dtype, []
    for each in products:
        (a, lda, turn_a), (b, ldb, turn_b), (c, ldc) = each.a, each.b, each.out
        if dtype in _DTYPES and each.k and not (a | b | c) % _VECTOR and not lane.stream.is_capturing:
            together.append(each)
            continue
        lane.compute.product(turn_b, turn_a, each.n, each.m, each.k, op.alpha, b, ldb, a, lda, op.beta, c, ldc, dtype, op.allow_tf32)
    for start in range(0, len(together), _PRODUCTS):
        _multiply(lane, op, together[start : start + _PRODUCTS])


def _multiply(lane: Any, op: Any, products: Sequence[Product]) -> None:
    """Enqueue one call. C-order matrices are multiplied as in ``gemm``: cuBLAS's A is our b."""
    groups: dict[Form, list[Product]] = {}
    for each in products:
        (_, lda, turn_a), (_, ldb, turn_b), (_, ldc) = each.a, each.b, each.out
        groups.setdefault(Form(turn_b, turn_a, each.n, each.m, each.k, ldb, lda, ldc), []).append(each)
    ordered = [each for group in groups.values() for each in group]
    stream, blas, count = lane.stream, lane.compute.prepare_blas(), len(ordered)
    stream.ready()
    places = [blas.addresses + i * count * WORD for i in range(3)]
    write_addresses(
        stream, places[0], [each.b[0] for each in ordered] + [each.a[0] for each in ordered] + [each.out[0] for each in ordered]
    )
    counts = {form: len(group) for form, group in groups.items()}
    blas.grouped_gemm(counts, op.alpha, op.beta, *places, op.a[0].dtype, op.allow_tf32)


def write_addresses(stream: CudaStream, out: int, addresses: Sequence[int]) -> None:
    """Enqueue the writing of addresses: they are arguments of kernels, so that nothing is copied from the host."""
    for start in range(0, len(addresses), _GIVEN):
        part = addresses[start : start + _GIVEN]
        given = _Given(count=len(part), out=out + start * WORD)
        given.values[: len(part)] = part
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        stream.launch_with(stream.functions["addresses_given"], (1, 1), (_BLOCK, 1), 0, parameters)


def write_addresses_apart(stream: CudaStream, out: int, first: int, step: int, count: int) -> None:
    """Enqueue the writing of the addresses of matrices that lie ``step`` bytes apart."""
    stream.launch(stream.functions["addresses_apart"], -(-count // _BLOCK), _BLOCK, out, first, step, count)


def lacks(lane: Any, op: Any) -> bool:
    """Return whether a group is enqueued off the loop: it needs a handle, or so many products take their time."""
    return not lane.compute.has_blas or len(op.a) > _QUICK


def commands(op: Any) -> int:
    """Return how many commands a group of products enqueues at most: a product may take two, where each is made on its own."""
    return max(2 * len(op.a), _LAUNCHES * -(-len(op.a) // _PRODUCTS) + -(-3 * len(op.a) // _GIVEN))
