"""Products of sparse matrices, conversions between their formats, and triangular systems. Names and meaning are those of ``scipy.sparse``."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

from accel.enums import Transpose
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, OutOp, Plan, Spec, op, operand, planned, same_dtype
from accel.ops.blas_operands import FACTORS, TRANSPOSES, TransposeField, applied, check_factors, to_transpose, transpose_of, wide_dtype
from accel.ops.family import Family
from accel.ops.namespace import M, OpNamespace, method, sized_method
from accel.ops.sparse_conversions import Diagonal, Fromdense, Tocoo, Tocsc, Tocsr, Todense
from accel.ops.sparse_operands import STRUCTURE, no_product, parts
from accel.ops.sparse_products import Add, Spgemm, SpgemmSize
from accel.ops.sparse_systems import Spsolve, SpsolveTriangular
from accel.ref import AccelRef
from accel.sparse_ref import SparseField, SparseRef, parts_of, sparse_of

__all__ = ["Sddmm", "SparseOps", "Spmm", "Spmv"]


_NONE = Transpose.NONE


@op("sparse", convert={"a": parts_of, "transpose_a": to_transpose, **FACTORS})
class Spmv(OutOp):
    """``alpha * op(a) @ x + beta * out`` of a sparse matrix and a vector.

    Parameters
    ----------
    a
        (m, n) after ``op``, of any format. float16 and bfloat16 are summed in float32.
    x
        (n,), of the dtype of ``a``.
    out
        Buffer to write, (m,); none of the operands.
    alpha, beta
        Factors. With a ``beta`` that is not 0, ``out`` has to be given.
    transpose_a
        What ``op`` does.
    """

    a: SparseField
    x: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE

    def plan(self) -> Plan:
        a, x = sparse_of("a", self.a), operand("x", self.x, ndim=1)
        dtype = same_dtype(a=a.data, x=x)
        m, n = applied(a.shape, transpose_of(self.transpose_a))
        if x.shape != (n,):
            raise no_product((m, n), x.shape)
        check_factors(self, dtype)
        return planned(self.out, {**parts(a), "x": x}, (m,), dtype, updates=bool(self.beta), status=STRUCTURE)


@op("sparse", convert={"a": parts_of, **TRANSPOSES, **FACTORS})
class Spmm(OutOp):
    """``alpha * op(a) @ op(b) + beta * out`` of a sparse and a dense matrix.

    Parameters
    ----------
    a
        (m, k) after ``op``, of any format. float16 and bfloat16 are summed in float32.
    b
        (k, n) after ``op``, of the dtype of ``a``.
    out
        Buffer to write, (m, n); none of the operands.
    alpha, beta
        As for ``spmv``.
    transpose_a, transpose_b
        What ``op`` does.
    """

    a: SparseField
    b: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE
    transpose_b: TransposeField = _NONE

    def plan(self) -> Plan:
        a, b = sparse_of("a", self.a), operand("b", self.b, ndim=2)
        dtype = same_dtype(a=a.data, b=b)
        (m, k), (k_b, n) = applied(a.shape, transpose_of(self.transpose_a)), applied(b.shape, transpose_of(self.transpose_b))
        if k != k_b:
            raise no_product((m, k), (k_b, n))
        check_factors(self, dtype)
        return planned(self.out, {**parts(a), "b": b}, (m, n), dtype, updates=bool(self.beta), status=STRUCTURE)


@op("sparse", convert={"pattern": parts_of, **TRANSPOSES, **FACTORS})
class Sddmm(FamilyOp[SparseRef]):
    """``alpha * (op(a) @ op(b))`` where ``pattern`` has elements, plus ``beta`` times these: a product of dense matrices of which few elements are wanted.

    The result shares ``indices`` and ``indptr`` with the pattern.

    Parameters
    ----------
    a, b
        (m, k) and (k, n), dense, after ``op``: float32, float64, complex64 or complex128.
    pattern
        csr, (m, n), of the same dtype.
    alpha, beta
        Factors.
    transpose_a, transpose_b
        What ``op`` does.
    """

    a: AccelRef
    b: AccelRef
    pattern: SparseField
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE
    transpose_b: TransposeField = _NONE

    def plan(self) -> Plan:
        a, b, pattern = operand("a", self.a, ndim=2), operand("b", self.b, ndim=2), sparse_of("pattern", self.pattern)
        dtype = wide_dtype(self, a=a, b=b, pattern=pattern.data)
        if pattern.format != "csr":
            raise InvalidArgumentError(f"pattern is {pattern.format}", remedy="Convert it first: await device.sparse.tocsr(pattern).")
        (m, k), (k_b, n) = applied(a.shape, transpose_of(self.transpose_a)), applied(b.shape, transpose_of(self.transpose_b))
        if k != k_b or pattern.shape != (m, n):
            raise InvalidArgumentError(
                f"op(a) is {m} x {k}, op(b) is {k_b} x {n} and pattern {pattern.shape}", remedy="Give the pattern of their product."
            )
        check_factors(self, dtype, scales_out=False)
        return Plan((a, b, *pattern.refs), (), (Spec((pattern.nnz,), dtype),), status=STRUCTURE)

    def result(self, refs: tuple[AccelRef, ...]) -> SparseRef:
        pattern = sparse_of("pattern", self.pattern)
        return SparseRef("csr", refs[0], pattern.indices, pattern.indptr, pattern.shape)


class SparseOps(OpNamespace[M]):
    """Sparse matrices, each a :class:`~accel.SparseRef`. Nothing is converted silently: operands have one dtype."""

    __slots__ = ()

    library: ClassVar = "sparse"
    aliases: ClassVar = {
        "csrmv": ".spmv(a, x)",
        "csrmm": ".spmm(a, b)",
        "to_dense": ".todense(a)",
        "toarray": ".todense(a)",
        "from_dense": ".fromdense(x)",
        "matmul": ".spgemm(a, b) of sparse matrices, .spmm(a, b) of a sparse and a dense one",
        "csrgeam": ".add(a, b)",
        "csr2csc": ".tocsc(a)",
        "spsolve": ".solve(a, b)",
        "spsv": ".spsolve_triangular(a, b)",
        "spsm": ".spsolve_triangular(a, b)",
    }

    spmv = method(Spmv)
    spmm = method(Spmm)
    tocsr = method(Tocsr)
    tocsc = method(Tocsc)
    tocoo = method(Tocoo)
    todense = method(Todense)
    diagonal = method(Diagonal)
    fromdense = sized_method(Fromdense)
    add = sized_method(Add)
    spgemm = sized_method(Spgemm)
    spgemm_size = method(SpgemmSize)
    sddmm = method(Sddmm)
    spsolve_triangular = method(SpsolveTriangular)
    solve = method(Spsolve)


FAMILY = Family(SparseOps)
