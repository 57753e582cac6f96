"""Matrix products of a compute interface."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from accel.enums import Transpose
from accel.testing.conformance.harness import poison, sum_rounding, wide

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.compute import ComputeBackend
    from accel.dtype import DType
    from accel.testing.conformance.harness import Array, Case, Harness

__all__ = [
    "check_batched_gemm_of_shared_matrices",
    "check_batched_gemm_sizes",
    "check_batched_gemm_transposes",
    "check_gemm_accumulates_in_float32",
    "check_gemm_of_larger_matrices",
    "check_gemm_of_nothing",
    "check_gemm_of_one_matrix_with_itself",
    "check_gemm_propagates_nan_and_infinity",
    "check_gemm_reads_only_what_counts",
    "check_gemm_scaling",
    "check_gemm_transposes",
]

_NONE = Transpose.NONE
_SMALL = ((1, 1, 1), (3, 5, 7), (8, 8, 8), (1, 19, 6), (17, 1, 33), (64, 48, 80))


@dataclass(frozen=True)
class _Product:
    """One product: its sizes, what is done to the operands, and how much longer columns are than they need be."""

    m: int
    n: int
    k: int
    transpose_a: Transpose = _NONE
    transpose_b: Transpose = _NONE
    alpha: complex = 1.0
    beta: complex = 0.0
    padding: int = 0

    @property
    def stored_a(self) -> tuple[int, int]:
        return (self.m, self.k) if self.transpose_a is _NONE else (self.k, self.m)

    @property
    def stored_b(self) -> tuple[int, int]:
        return (self.k, self.n) if self.transpose_b is _NONE else (self.n, self.k)


def _dtypes(compute: ComputeBackend, call: str) -> Iterable[DType]:
    return sorted(compute.capabilities().get(call, ()), key=lambda dtype: dtype.value)


def _matrix(harness: Harness, shape: tuple[int, int], padding: int, dtype: DType) -> Array:
    """Return ``[columns, leading dimension]``: a column-major matrix whose columns end in poison."""
    rows, columns = shape
    result = poison((columns, max(1, rows + padding)), dtype).copy()
    result[:, :rows] = harness.random((columns, rows), dtype)
    return result


def _applied(matrix: Array, rows: int, transpose: Transpose) -> Array:
    value = wide(matrix[:, :rows]).T
    if transpose is _NONE:
        return value
    return value.T.conj() if transpose is Transpose.CONJUGATE else value.T


def _reference(p: _Product, a: Array, b: Array, c: Array, dtype: DType) -> tuple[Array, Array]:
    """Return the expected C and how far a result may be off, both [m, n]."""
    left, right = _applied(a, p.stored_a[0], p.transpose_a), _applied(b, p.stored_b[0], p.transpose_b)
    expected: Array = np.zeros((p.m, p.n), left.dtype)
    error = np.zeros((p.m, p.n))
    unit = sum_rounding(dtype)
    if p.alpha != 0:
        expected = expected + p.alpha * (left @ right)
        error = error + (4 * p.k + 8) * unit * abs(p.alpha) * (np.abs(left) @ np.abs(right))
    if p.beta != 0:
        old = _applied(c, p.m, _NONE)
        expected = expected + p.beta * old
        error = error + 8 * unit * abs(p.beta) * np.abs(old)
    return expected, error


def _check(case: Case, p: _Product, a: Array, b: Array, c: Array, dtype: DType) -> None:
    """Compute the product on the device and compare everything that C's memory holds afterwards."""
    out = case.put(c)
    sizes = (p.transpose_a, p.transpose_b, p.m, p.n, p.k)
    case.compute.gemm(*sizes, p.alpha, case.put(a), a.shape[1], case.put(b), b.shape[1], p.beta, out, c.shape[1], dtype=dtype)
    got = case.get(out, c.shape, dtype)
    expected, error = _reference(p, a, b, c, dtype)
    case.close_to(got[:, : p.m], expected.T, error.T)
    case.same(got[:, p.m :], c[:, p.m :], "the padding of C")


def _run(harness: Harness, compute: ComputeBackend, p: _Product, dtype: DType) -> None:
    with harness.case(compute, f"gemm {dtype.value} {p}") as case:
        a, b = _matrix(harness, p.stored_a, p.padding, dtype), _matrix(harness, p.stored_b, p.padding, dtype)
        c = _matrix(harness, (p.m, p.n), p.padding, dtype) if p.beta != 0 else poison((p.n, p.m + p.padding), dtype)
        _check(case, p, a, b, c, dtype)


async def check_gemm_transposes(harness: Harness) -> None:
    """Check every dtype, shape and pair of transposes; leading dimensions larger than the columns; C full of NaN before."""
    with harness.open_compute() as compute:
        for dtype, (m, n, k), ta, tb in itertools.product(_dtypes(compute, "gemm"), _SMALL, Transpose, Transpose):
            _run(harness, compute, _Product(m, n, k, ta, tb, padding=int(harness.rng.integers(0, 4))), dtype)


async def check_gemm_of_larger_matrices(harness: Harness) -> None:
    """Check sizes that a library cuts into tiles, none of them a multiple of a tile's."""
    with harness.open_compute() as compute:
        for dtype, (ta, tb) in itertools.product(_dtypes(compute, "gemm"), ((_NONE, _NONE), (Transpose.TRANSPOSE, Transpose.CONJUGATE))):
            _run(harness, compute, _Product(257, 131, 193, ta, tb, padding=3), dtype)
            _run(harness, compute, _Product(131, 259, 517, ta, tb, 0.5, -2.0, padding=1), dtype)


async def check_gemm_scaling(harness: Harness) -> None:
    """Check alpha and beta: one, zero, negative, fractions, and complex ones for complex elements."""
    with harness.open_compute() as compute:
        for dtype in _dtypes(compute, "gemm"):
            factors: list[complex] = [0, 1, -1, 0.375, 2.5]
            if dtype.is_complex:
                factors += [1j, 0.5 - 1.25j]
            for alpha, beta, transpose in itertools.product(factors, factors, (_NONE, Transpose.CONJUGATE)):
                _run(harness, compute, _Product(9, 6, 5, transpose, _NONE, alpha, beta, padding=2), dtype)


async def check_gemm_of_nothing(harness: Harness) -> None:
    """Check sizes of 0: no elements are written, or C is scaled by beta."""
    with harness.open_compute() as compute:
        for dtype, (m, n, k), beta in itertools.product(_dtypes(compute, "gemm"), ((0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)), (0, 1, -2)):
            _run(harness, compute, _Product(m, n, k, beta=beta, padding=1), dtype)


async def check_gemm_reads_only_what_counts(harness: Harness) -> None:
    """Check that with ``beta == 0`` NaN in C does not spread, and with ``alpha == 0`` NaN in A and B does not."""
    with harness.open_compute() as compute:
        for dtype, beta in itertools.product(_dtypes(compute, "gemm"), (0, 1, 0.5)):
            p = _Product(6, 4, 5, alpha=0, beta=beta, padding=1)
            with harness.case(compute, f"gemm {dtype.value} of NaN with {p}") as case:
                c = _matrix(harness, (6, 4), 1, dtype) if beta else poison((4, 7), dtype)
                _check(case, p, poison((5, 7), dtype), poison((4, 6), dtype), c, dtype)


async def check_gemm_propagates_nan_and_infinity(harness: Harness) -> None:
    """Check that a NaN or an infinity in row i of A spoils row i of C alone, by the rules of arithmetic."""
    with harness.open_compute() as compute:
        for dtype in _dtypes(compute, "gemm"):
            for value in (np.nan, np.inf):
                with harness.case(compute, f"gemm {dtype.value} with {value}") as case:
                    a, b, c = (_matrix(harness, (7, 7), 0, dtype) for _ in range(3))
                    b[...] = np.abs(b) + np.ones((), dtype.numpy)
                    a[3, 2] = value
                    out = case.put(c)
                    compute.gemm(_NONE, _NONE, 7, 7, 7, 1.0, case.put(a), 7, case.put(b), 7, 0.0, out, 7, dtype=dtype)
                    got = wide(case.get(out, (7, 7), dtype))
                    case.require(not np.isfinite(got[:, 2]).any(), f"row 2 lost the {value}: {got[:, 2]}")
                    case.require(bool(np.isfinite(np.delete(got, 2, axis=1)).all()), f"the {value} spread to other rows")
                    if not dtype.is_complex:
                        same = np.isnan(got[:, 2]) if np.isnan(value) else got[:, 2] == value
                        case.require(bool(same.all()), f"row 2 is {got[:, 2]}, not {value}")


async def check_gemm_accumulates_in_float32(harness: Harness) -> None:
    """Check a sum of 5000 ones: a 16-bit accumulator would stop at 2048 or 256."""
    with harness.open_compute() as compute:
        for dtype in _dtypes(compute, "gemm"):
            k = 5000
            with harness.case(compute, f"gemm {dtype.value} of ones") as case:
                a, b = np.ones((k, 2), dtype.numpy), np.ones((3, k), dtype.numpy)
                _check(case, _Product(2, 3, k), a, b, poison((3, 2), dtype), dtype)


async def check_gemm_of_one_matrix_with_itself(harness: Harness) -> None:
    """Check that A and B may be the same memory."""
    with harness.open_compute() as compute:
        for dtype, (ta, tb) in itertools.product(_dtypes(compute, "gemm"), itertools.product(Transpose, Transpose)):
            p = _Product(21, 21, 21, ta, tb)
            with harness.case(compute, f"gemm {dtype.value} of A and A {p}") as case:
                a = _matrix(harness, (21, 21), 0, dtype)
                pointer, out = case.put(a), case.poisoned((21, 21), dtype)
                compute.gemm(ta, tb, 21, 21, 21, 1.0, pointer, 21, pointer, 21, 0.0, out, 21, dtype=dtype)
                expected, error = _reference(p, a, a, a, dtype)
                case.close_to(case.get(out, (21, 21), dtype), expected.T, error.T)


def _run_batched(
    harness: Harness, compute: ComputeBackend, p: _Product, count: int, dtype: DType, *, shared: str = "", gap: int = 0
) -> None:
    """Check a batch; ``shared`` names the operands that all products share, ``gap`` elements lie between the others."""
    with harness.case(compute, f"batched_gemm {dtype.value} of {count} {p} shared={shared!r} gap={gap}") as case:
        shapes = {"a": p.stored_a, "b": p.stored_b, "c": (p.m, p.n)}
        stacks: dict[str, Array] = {}
        matrices: dict[str, list[Array]] = {}
        for name, shape in shapes.items():
            blocks = [_matrix(harness, shape, p.padding, dtype) for _ in range(1 if name in shared else count)]
            matrices[name] = blocks * count if name in shared else blocks
            stacks[name] = poison((len(blocks), blocks[0].size + gap if blocks else 0), dtype).copy()
            for row, block in zip(stacks[name], blocks, strict=True):
                row[: block.size] = block.ravel()
        strides = {name: 0 if name in shared else stack.shape[1] for name, stack in stacks.items()}
        leading = {name: max(1, shape[0] + p.padding) for name, shape in shapes.items()}
        out = case.put(stacks["c"])
        first = (p.transpose_a, p.transpose_b, p.m, p.n, p.k, p.alpha, case.put(stacks["a"]), leading["a"], strides["a"])
        second = (case.put(stacks["b"]), leading["b"], strides["b"], p.beta, out, leading["c"], strides["c"], count)
        compute.batched_gemm(*first, *second, dtype=dtype)
        got = case.get(out, stacks["c"].shape, dtype)
        for index, (a, b, c) in enumerate(zip(matrices["a"], matrices["b"], matrices["c"], strict=True)):
            expected, error = _reference(p, a, b, c, dtype)
            block = got[index, : c.size].reshape(c.shape)
            case.close_to(block[:, : p.m], expected.T, error.T)
            case.same(block[:, p.m :], c[:, p.m :], "the padding of C")
        gaps = slice(p.n * leading["c"], None)
        case.same(got[:, gaps], stacks["c"][:, gaps], "what lies between the matrices of C")


async def check_batched_gemm_transposes(harness: Harness) -> None:
    """Check every dtype and pair of transposes, with room between columns and between matrices, scaled or not."""
    with harness.open_compute() as compute:
        for dtype, ta, tb in itertools.product(_dtypes(compute, "batched_gemm"), Transpose, Transpose):
            _run_batched(harness, compute, _Product(5, 3, 7, ta, tb, padding=2), 4, dtype, gap=5)
            _run_batched(harness, compute, _Product(4, 6, 3, ta, tb, 1.5, -0.5, padding=1), 3, dtype)


async def check_batched_gemm_sizes(harness: Harness) -> None:
    """Check batches of none, one and many; matrices of nothing; larger matrices."""
    with harness.open_compute() as compute:
        for dtype in _dtypes(compute, "batched_gemm"):
            _run_batched(harness, compute, _Product(3, 3, 3), 1, dtype)
            _run_batched(harness, compute, _Product(2, 2, 2), 300, dtype)
            _run_batched(harness, compute, _Product(65, 33, 129), 3, dtype, gap=1)
            _run_batched(harness, compute, _Product(3, 2, 0, beta=-1), 2, dtype)
            compute.batched_gemm(_NONE, _NONE, 3, 3, 3, 1, 0, 3, 9, 0, 3, 9, 0, 0, 3, 9, 0, dtype=dtype)


async def check_batched_gemm_of_shared_matrices(harness: Harness) -> None:
    """Check that a stride of 0 uses one matrix for the whole batch."""
    with harness.open_compute() as compute:
        for dtype, shared, transpose in itertools.product(_dtypes(compute, "batched_gemm"), ("a", "b", "ab"), Transpose):
            _run_batched(harness, compute, _Product(6, 5, 4, transpose, transpose, 2, 0, padding=1), 5, dtype, shared=shared)
