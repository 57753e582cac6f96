"""Linear algebra ops. Matrices are C-order, as numpy users mean them; kernels translate to the column-major convention of BLAS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from accel.compute import Transpose
from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import KernelOp, Plan, Shape, Spec, factor, not_aliased, operand, plan_of, result_in, same_dtype
from accel.ref import AccelRef, overlap

__all__ = ["Axpy", "Dot", "Gemm", "GemmBatched", "Gemv", "Nrm2", "Scal"]

_NONE = Transpose.NONE


def _applied(shape: Shape, transpose: Transpose) -> Shape:
    """Return the shape of ``op(A)``."""
    rows, columns = shape[-2:]
    return (rows, columns) if transpose is _NONE else (columns, rows)


def _product(a: Shape, b: Shape, transpose_a: Transpose, transpose_b: Transpose) -> Shape:
    m, k = _applied(a, transpose_a)
    k_b, n = _applied(b, transpose_b)
    if k != k_b:
        raise _no_product(a, b, k, k_b)
    return m, n


def _no_product(a: Shape, b: Shape, k: int, k_b: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"op(a) has {k} columns and op(b) has {k_b} rows (shapes {a} and {b})",
        remedy="Give matrices that can be multiplied, with transpose_a= or transpose_b= where they lie the other way round.",
    )


def _set_factors(op: Any, dtype: DType, *names: str) -> None:
    """Turn scaling factors into plain floats or complexes, which every kernel can take."""
    for name in names:
        # The op is frozen for its users; this changes how a number is written, and not which it is.
        object.__setattr__(op, name, factor(name, getattr(op, name), dtype))


def _tf32(allowed: bool, dtype: DType) -> None:
    """Refuse to let anything but float32 be rounded to TF32."""
    if allowed and dtype is not DType.FLOAT32:
        raise InvalidArgumentError(
            f"allow_tf32 is given for {dtype.value} matrices", remedy="Leave it out: only float32 is ever computed in TF32."
        )


def _no_out() -> InvalidArgumentError:
    return InvalidArgumentError("beta scales out, which is not given", remedy="Pass out=, or leave beta at 0.")


@dataclass(frozen=True, eq=False, slots=True)
class Gemm(KernelOp):
    """``alpha * op(a) @ op(b) + beta * out``.

    Parameters
    ----------
    a, b
        Matrices of one dtype, ``op(a)`` of shape (m, k) and ``op(b)`` of shape (k, n).
    out
        (m, n); needed where ``beta`` is not 0. It is neither ``a`` nor ``b``.
    alpha, beta
        Scaling factors. With ``beta == 0`` the old contents of ``out`` are not read.
    transpose_a, transpose_b
        What ``op`` does.
    allow_tf32
        Permits a device to round the factors of float32 matrices to TF32 (10 bits of mantissa), where that is faster; sums stay float32. A device
        without TF32 computes in full float32, which honours it. Rejected with any other dtype.
    """

    library: ClassVar[str] = "blas"
    kind: ClassVar[str] = "gemm"

    a: AccelRef
    b: AccelRef
    out: AccelRef | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: Transpose = _NONE
    transpose_b: Transpose = _NONE
    allow_tf32: bool = False

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a, b, out = self.a, self.b, self.out
        if type(a) is not AccelRef or type(b) is not AccelRef or len(a.shape) != 2 or len(b.shape) != 2:  # nearly always they are
            operand("a", a, ndim=2)
            operand("b", b, ndim=2)
        dtype = a.dtype
        if b.dtype is not dtype:
            same_dtype(a=a, b=b)
        m, k = a.shape if self.transpose_a is _NONE else a.shape[::-1]
        k_b, n = b.shape if self.transpose_b is _NONE else b.shape[::-1]
        if k != k_b:
            raise _no_product(a.shape, b.shape, k, k_b)
        if type(self.alpha) is not float or type(self.beta) is not float:
            _set_factors(self, dtype, "alpha", "beta")
        if self.allow_tf32:
            _tf32(self.allow_tf32, dtype)
        if out is None:
            if self.beta:
                raise _no_out()
            return plan_of(((a, b), (), (Spec((m, n), dtype),), "gemm", dtype, False))
        if type(out) is not AccelRef or out.shape != (m, n) or out.dtype is not dtype:
            result_in(out, (m, n), dtype)
        if out.buffer == a.buffer or out.buffer == b.buffer:
            not_aliased(out, a=a, b=b)
        return plan_of(((a, b), (out,), (), "gemm", dtype, self.beta != 0))


@dataclass(frozen=True, eq=False, slots=True)
class GemmBatched(KernelOp):
    """``alpha * op(a[i]) @ op(b[i]) + beta * out[i]`` for every i, as one call.

    Parameters
    ----------
    a, b
        Of shape (batch, rows, columns); one of them may be a single matrix of two dimensions, used for the whole batch.
    out, alpha, beta, transpose_a, transpose_b, allow_tf32
        As in :class:`Gemm`; ``out`` is (batch, m, n).
    """

    library: ClassVar[str] = "blas"
    kind: ClassVar[str] = "gemm_batched"

    a: AccelRef
    b: AccelRef
    out: AccelRef | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: Transpose = _NONE
    transpose_b: Transpose = _NONE
    allow_tf32: bool = False

    @property
    def batch_count(self) -> int:
        """Number of products."""
        return self.a.shape[0] if len(self.a.shape) == 3 else self.b.shape[0]

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a, b = operand("a", self.a), operand("b", self.b)
        dtype = same_dtype(a=a, b=b)
        dimensions = (len(a.shape), len(b.shape))
        if dimensions not in {(3, 3), (2, 3), (3, 2)}:
            raise InvalidArgumentError(
                f"a has shape {a.shape} and b {b.shape}", remedy="Give (batch, rows, columns); one of them may be (rows, columns)."
            )
        if dimensions == (3, 3) and a.shape[0] != b.shape[0]:
            raise InvalidArgumentError(f"a has {a.shape[0]} matrices and b has {b.shape[0]}", remedy="Give both as many.")
        _set_factors(self, dtype, "alpha", "beta")
        _tf32(self.allow_tf32, dtype)
        if self.beta and self.out is None:
            raise _no_out()
        not_aliased(self.out, a=a, b=b)
        shape = (self.batch_count, *_product(a.shape, b.shape, self.transpose_a, self.transpose_b))
        writes, creates = result_in(self.out, shape, dtype)
        return Plan((a, b), writes, creates, "batched_gemm", dtype, bool(self.beta))


@dataclass(frozen=True, eq=False, slots=True)
class Gemv(KernelOp):
    """``alpha * op(a) @ x + beta * out``, with ``op(a)`` of shape (m, n), x of shape (n,) and out of shape (m,)."""

    library: ClassVar[str] = "blas"
    kind: ClassVar[str] = "gemv"

    a: AccelRef
    x: AccelRef
    out: AccelRef | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: Transpose = _NONE

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a, x = operand("a", self.a, ndim=2), operand("x", self.x, ndim=1)
        dtype = same_dtype(a=a, x=x)
        m, n = _applied(a.shape, self.transpose_a)
        if n != x.shape[0]:
            raise InvalidArgumentError(f"op(a) has {n} columns and x has {x.shape[0]} elements", remedy="Give as many elements as columns.")
        _set_factors(self, dtype, "alpha", "beta")
        if self.beta and self.out is None:
            raise _no_out()
        not_aliased(self.out, a=a, x=x)
        writes, creates = result_in(self.out, (m,), dtype)
        return Plan((a, x), writes, creates, "gemm", dtype, bool(self.beta))


def _vectors(x: AccelRef, y: AccelRef) -> None:
    if x.shape != y.shape:
        raise InvalidArgumentError(f"x has shape {x.shape} and y has {y.shape}", remedy="Give both the same shape.")


@dataclass(frozen=True, eq=False, slots=True)
class Axpy(KernelOp):
    """``y += alpha * x``, in place; any one shape. The result is ``y``."""

    library: ClassVar[str] = "blas"
    kind: ClassVar[str] = "axpy"

    x: AccelRef
    y: AccelRef
    alpha: complex = 1.0

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, y = operand("x", self.x), operand("y", self.y)
        dtype = same_dtype(x=x, y=y)
        _vectors(x, y)
        _set_factors(self, dtype, "alpha")
        if overlap(x, y):
            what = "are the same buffer" if x is y else "overlap: they are views of one buffer"
            raise InvalidArgumentError(f"x and y {what}", remedy="Use blas.scal(x, 1 + alpha), or parts that do not overlap.")
        return Plan((x,), (y,), (), "gemm", dtype, updates=True)


@dataclass(frozen=True, eq=False, slots=True)
class Dot(KernelOp):
    """The sum of ``x * y`` (nothing is conjugated) as a 0-d buffer; any one shape."""

    library: ClassVar[str] = "blas"
    kind: ClassVar[str] = "dot"

    x: AccelRef
    y: AccelRef
    out: AccelRef | None = None

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x, y = operand("x", self.x), operand("y", self.y)
        dtype = same_dtype(x=x, y=y)
        _vectors(x, y)
        not_aliased(self.out, x=x, y=y)
        writes, creates = result_in(self.out, (), dtype)
        return Plan((x, y), writes, creates, "gemm", dtype)


@dataclass(frozen=True, eq=False, slots=True)
class Nrm2(KernelOp):
    """The Euclidean norm of real ``x`` as a 0-d buffer; any shape."""

    library: ClassVar[str] = "blas"
    kind: ClassVar[str] = "nrm2"

    x: AccelRef
    out: AccelRef | None = None

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x = operand("x", self.x)
        if x.dtype.is_complex:
            raise UnsupportedError(
                f"nrm2 is for real buffers, and x is {x.dtype.value}",
                remedy="Put the array as real numbers: array.view('float32') of complex64, or 'float64' of complex128, has the same norm.",
            )
        not_aliased(self.out, x=x)
        writes, creates = result_in(self.out, (), x.dtype)
        return Plan((x,), writes, creates, "unary.sqrt", x.dtype)


@dataclass(frozen=True, eq=False, slots=True)
class Scal(KernelOp):
    """``x *= alpha``, in place; any shape. The result is ``x``."""

    library: ClassVar[str] = "blas"
    kind: ClassVar[str] = "scal"

    x: AccelRef
    alpha: complex

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x = operand("x", self.x)
        _set_factors(self, x.dtype, "alpha")
        return Plan((), (x,), (), "gemm", x.dtype, updates=True)
