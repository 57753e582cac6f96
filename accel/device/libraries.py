"""What ``device.blas`` and its siblings are: one method per op, the same for a device (awaitables) and for a batch (refs)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from accel import ops
from accel.compute import BinaryOp, Causal, ReduceOp, Transpose, UnaryOp
from accel.device.compiler import Launches
from accel.device.libraries_signal import Fft, Rng
from accel.device.op_namespace import OpNamespace
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.compute import BinaryName, ReduceName, TransposeName, UnaryName
    from accel.ops import KernelOp
    from accel.ref import AccelRef

__all__ = ["Blas", "Dnn", "Elementwise", "Libraries", "Reduce"]

T_co = TypeVar("T_co", covariant=True)

_NONE = Transpose.NONE
_TRANSPOSE = {False: Transpose.NONE, True: Transpose.TRANSPOSE} | {member: member for member in Transpose} | {m.value: m for m in Transpose}


def _transpose(value: bool | TransposeName | Transpose) -> Transpose:
    try:
        return _TRANSPOSE[value]
    except (KeyError, TypeError):
        raise InvalidArgumentError(f"{value!r} is not a transpose", remedy="Use False, True, or accel.Transpose.CONJUGATE.") from None


def _member(enumeration: Any, table: dict[Any, Any], value: object) -> Any:
    try:
        return table[value]
    except (KeyError, TypeError):
        names = ", ".join(repr(member.value) for member in enumeration)
        raise InvalidArgumentError(f"{value!r} is not a {enumeration.__name__}", remedy=f"Use one of {names}.") from None


_UNARY = {key: member for member in UnaryOp for key in (member, member.value)}
_BINARY = {key: member for member in BinaryOp for key in (member, member.value)}
_REDUCE = {key: member for member in ReduceOp for key in (member, member.value)}


class Blas(OpNamespace[T_co]):
    """Linear algebra. Matrices are C-order: ``gemm(a, b)`` is numpy's ``a @ b``.

    All operands of a call have one dtype: float16, bfloat16, float32, float64, complex64 or complex128. ``out=`` names a buffer to write instead of making
    one; ``timeout=`` (seconds) is when waiting ends with :class:`~accel.DeadlineExceededError`.
    """

    __slots__ = ()

    aliases: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("matmul", "mm"), ".gemm(x, y)"),
        "bmm": ".gemm_batched(x, y)",
        "norm": ".nrm2(x)",
    }

    def gemm(
        self,
        a: AccelRef,
        b: AccelRef,
        *,
        out: AccelRef | None = None,
        alpha: complex = 1.0,
        beta: complex = 0.0,
        transpose_a: bool | TransposeName | Transpose = False,
        transpose_b: bool | TransposeName | Transpose = False,
        allow_tf32: bool = False,
        timeout: float | None = None,
    ) -> T_co:
        """Compute ``alpha * op(a) @ op(b) + beta * out``; see :class:`accel.ops.Gemm`."""
        ta = _NONE if transpose_a is False else _transpose(transpose_a)
        tb = _NONE if transpose_b is False else _transpose(transpose_b)
        op = ops.Gemm(a, b, out, alpha, beta, ta, tb, allow_tf32)
        return self._submit(op, timeout)

    def gemm_batched(
        self,
        a: AccelRef,
        b: AccelRef,
        *,
        out: AccelRef | None = None,
        alpha: complex = 1.0,
        beta: complex = 0.0,
        transpose_a: bool | TransposeName | Transpose = False,
        transpose_b: bool | TransposeName | Transpose = False,
        allow_tf32: bool = False,
        timeout: float | None = None,
    ) -> T_co:
        """Compute :meth:`gemm` for every matrix of a (batch, rows, columns) array; see :class:`accel.ops.GemmBatched`."""
        op = ops.GemmBatched(a, b, out, alpha, beta, _transpose(transpose_a), _transpose(transpose_b), allow_tf32)
        return self._submit(op, timeout)

    def gemv(
        self,
        a: AccelRef,
        x: AccelRef,
        *,
        out: AccelRef | None = None,
        alpha: complex = 1.0,
        beta: complex = 0.0,
        transpose_a: bool | TransposeName | Transpose = False,
        timeout: float | None = None,
    ) -> T_co:
        """Compute ``alpha * op(a) @ x + beta * out``; see :class:`accel.ops.Gemv`."""
        return self._submit(ops.Gemv(a, x, out, alpha, beta, _transpose(transpose_a)), timeout)

    def axpy(self, x: AccelRef, y: AccelRef, *, alpha: complex = 1.0, timeout: float | None = None) -> T_co:
        """Add ``alpha * x`` to ``y`` in place, and give ``y``."""
        return self._submit(ops.Axpy(x, y, alpha), timeout)

    def dot(self, x: AccelRef, y: AccelRef, *, out: AccelRef | None = None, timeout: float | None = None) -> T_co:
        """Sum ``x * y`` into a 0-d buffer; nothing is conjugated."""
        return self._submit(ops.Dot(x, y, out), timeout)

    def nrm2(self, x: AccelRef, *, out: AccelRef | None = None, timeout: float | None = None) -> T_co:
        """Compute the Euclidean norm of real ``x`` into a 0-d buffer."""
        return self._submit(ops.Nrm2(x, out), timeout)

    def scal(self, x: AccelRef, alpha: complex, *, timeout: float | None = None) -> T_co:
        """Multiply ``x`` by ``alpha`` in place, and give ``x``."""
        return self._submit(ops.Scal(x, alpha), timeout)


class Elementwise(OpNamespace[T_co]):
    """Functions of one or two arrays, element by element, in the operands' dtype."""

    __slots__ = ()

    aliases: ClassVar[Mapping[str, str]] = {
        **{op.value: f".unary({op.value!r}, x)" for op in UnaryOp},
        **{op.value: f".binary({op.value!r}, x, y)" for op in BinaryOp},
    }

    def unary(self, op: UnaryName | UnaryOp, x: AccelRef, *, out: AccelRef | None = None, timeout: float | None = None) -> T_co:
        """Compute ``op(x)``: relu, sigmoid, tanh, exp, log, sqrt, abs or neg. ``out`` may be ``x``."""
        return self._submit(ops.Unary(_member(UnaryOp, _UNARY, op), x, out), timeout)

    def binary(
        self, op: BinaryName | BinaryOp, x: AccelRef, y: AccelRef, *, out: AccelRef | None = None, timeout: float | None = None
    ) -> T_co:
        """Compute ``op(x, y)``: add, sub, mul, div, max or min. One shape; ``out`` may be an operand."""
        return self._submit(ops.Binary(_member(BinaryOp, _BINARY, op), x, y, out), timeout)


class Reduce(OpNamespace[T_co]):
    """Reductions; the object itself is called: ``device.reduce("sum", x, axis=1)``."""

    __slots__ = ()

    aliases: ClassVar[Mapping[str, str]] = {op.value: f"({op.value!r}, x, axis=...)" for op in ReduceOp}

    def __call__(
        self,
        op: ReduceName | ReduceOp,
        x: AccelRef,
        *,
        axis: int | None = None,
        keepdims: bool = False,
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Compute ``op`` (sum, mean, max or min) along ``axis``, or over everything; see :class:`accel.ops.Reduce`."""
        return self._submit(ops.Reduce(_member(ReduceOp, _REDUCE, op), x, axis, keepdims, out), timeout)


class Dnn(OpNamespace[T_co]):
    """Neural network ops: float16, bfloat16, float32, float64."""

    __slots__ = ()

    def conv2d(
        self,
        input: AccelRef,
        filter: AccelRef,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Correlate (N, C, H, W) with (K, C, R, S); one number means both directions. See :class:`accel.ops.Conv2d`."""
        # The op makes pairs of single numbers itself, when it is checked.
        return self._submit(ops.Conv2d(input, filter, cast("Any", stride), cast("Any", padding), out), timeout)

    def attention(
        self,
        q: AccelRef,
        k: AccelRef,
        v: AccelRef,
        *,
        scale: float | None = None,
        causal: Causal = False,
        out: AccelRef | None = None,
        timeout: float | None = None,
    ) -> T_co:
        """Compute ``softmax(scale * q @ k^T) @ v`` on (batch, heads, sequence, head_dim); see :class:`accel.ops.Attention`."""
        return self._submit(ops.Attention(q, k, v, scale, causal, out), timeout)


class Libraries(Generic[T_co]):
    """All libraries, bound to one taker of ops."""

    __slots__ = ("blas", "compiler", "dnn", "elementwise", "fft", "reduce", "rng")

    def __init__(self, submit: Callable[[KernelOp, float | None], T_co]) -> None:
        self.blas = Blas(submit)
        self.elementwise = Elementwise(submit)
        self.reduce = Reduce(submit)
        self.dnn = Dnn(submit)
        self.compiler = Launches(submit)
        self.fft = Fft(submit)
        self.rng = Rng(submit)
