"""The compute interface of a backend: fifteen calls on raw pointers, asynchronous in one stream.

Implementing :class:`ComputeBackend` (and the small protocols of :mod:`accel.backend`) is all that a new vendor needs to get actors, refs, supervision,
batches and hosts. The method list follows oxicuda's ``ComputeBackend`` trait; the semantics, which that trait leaves open, are fixed here and checked by the
conformance suite in :mod:`accel.testing`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from accel.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "EXTREMES",
    "BinaryName",
    "BinaryOp",
    "Causal",
    "ComputeBackend",
    "ReduceName",
    "ReduceOp",
    "Transpose",
    "TransposeName",
    "UnaryName",
    "UnaryOp",
    "result_dtype",
]

# The values of the enumerations below: a type checker finds the one that is misspelt.
TransposeName: TypeAlias = Literal["n", "t", "c"]
ReduceName: TypeAlias = Literal["sum", "mean", "max", "min", "prod", "var", "std", "any", "all", "argmax", "argmin", "logsumexp"]
UnaryName: TypeAlias = Literal[
    "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "gelu", "gelu_tanh", "silu", "softplus", "leaky_relu", "elu",
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "log1p", "expm1", "log2", "exp2", "erf", "rsqrt", "reciprocal",
    "sign", "floor", "ceil", "round", "isnan", "isinf", "isfinite", "logical_not",
]  # fmt: skip
BinaryName: TypeAlias = Literal[
    "add", "sub", "mul", "div", "max", "min", "pow", "remainder",
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
]  # fmt: skip


class Transpose(enum.Enum):
    """What is done to a matrix before it is multiplied."""

    __hash__ = object.__hash__  # by identity, as members are compared: they are keys on the way of every op

    NONE = "n"
    TRANSPOSE = "t"
    CONJUGATE = "c"
    """Transpose and conjugate; the same as TRANSPOSE for real elements."""


class ReduceOp(enum.Enum):
    """Reductions."""

    __hash__ = object.__hash__  # by identity, as members are compared: they are keys on the way of every op

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    VAR = "var"
    STD = "std"
    ANY = "any"
    ALL = "all"
    ARGMAX = "argmax"
    """Index of the first largest element, of the first NaN if there is one."""
    ARGMIN = "argmin"
    LOGSUMEXP = "logsumexp"
    """``log(sum(exp(x)))``, with no exponential that overflows."""


class UnaryOp(enum.Enum):
    """Functions of one element."""

    __hash__ = object.__hash__  # by identity, as members are compared: they are keys on the way of every op

    RELU = "relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    EXP = "exp"
    LOG = "log"
    SQRT = "sqrt"
    ABS = "abs"
    NEG = "neg"
    GELU = "gelu"
    """``x`` times the normal distribution function of ``x``."""
    GELU_TANH = "gelu_tanh"
    """GELU with the distribution function approximated by tanh."""
    SILU = "silu"
    """``x * sigmoid(x)``."""
    SOFTPLUS = "softplus"
    """``log(1 + exp(x))``."""
    LEAKY_RELU = "leaky_relu"
    """``x`` where it is positive, else ``0.01 * x``."""
    ELU = "elu"
    """``x`` where it is positive, else ``exp(x) - 1``."""
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    ASIN = "asin"
    ACOS = "acos"
    ATAN = "atan"
    SINH = "sinh"
    COSH = "cosh"
    LOG1P = "log1p"
    EXPM1 = "expm1"
    LOG2 = "log2"
    EXP2 = "exp2"
    ERF = "erf"
    """The error function."""
    RSQRT = "rsqrt"
    """``1 / sqrt(x)``."""
    RECIPROCAL = "reciprocal"
    SIGN = "sign"
    FLOOR = "floor"
    CEIL = "ceil"
    ROUND = "round"
    """To the nearest integer; halves to the even one."""
    ISNAN = "isnan"
    ISINF = "isinf"
    ISFINITE = "isfinite"
    LOGICAL_NOT = "logical_not"


class BinaryOp(enum.Enum):
    """Functions of two elements."""

    __hash__ = object.__hash__  # by identity, as members are compared: they are keys on the way of every op

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    MAX = "max"
    MIN = "min"
    POW = "pow"
    """``a ** b``. An integer to a negative power is what is left of the quotient: 0, but for 1 and -1."""
    REMAINDER = "remainder"
    """With the sign of ``b``; of integers 0 where ``b`` is 0."""
    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    LESS = "less"
    LESS_EQUAL = "less_equal"
    GREATER = "greater"
    GREATER_EQUAL = "greater_equal"
    LOGICAL_AND = "logical_and"
    LOGICAL_OR = "logical_or"
    LOGICAL_XOR = "logical_xor"


_TESTS = frozenset({UnaryOp.ISNAN, UnaryOp.ISINF, UnaryOp.ISFINITE, UnaryOp.LOGICAL_NOT})
_COMPARISONS = frozenset({BinaryOp.EQUAL, BinaryOp.NOT_EQUAL, BinaryOp.LESS, BinaryOp.LESS_EQUAL, BinaryOp.GREATER, BinaryOp.GREATER_EQUAL})
_LOGIC = frozenset({BinaryOp.LOGICAL_AND, BinaryOp.LOGICAL_OR, BinaryOp.LOGICAL_XOR})
_RESULTS: dict[UnaryOp | BinaryOp | ReduceOp, DType] = {
    **dict.fromkeys(_TESTS | _COMPARISONS | _LOGIC | {ReduceOp.ANY, ReduceOp.ALL}, DType.BOOL),
    **dict.fromkeys((ReduceOp.ARGMAX, ReduceOp.ARGMIN), DType.INT64),
}
EXTREMES = frozenset({ReduceOp.MAX, ReduceOp.MIN, ReduceOp.ARGMAX, ReduceOp.ARGMIN})
"""Reductions that have no value over no elements."""


def result_dtype(op: UnaryOp | BinaryOp | ReduceOp, dtype: DType) -> DType:
    """Return the type of the results of ``op`` on elements of ``dtype``: BOOL of tests, comparisons and logic, INT64 of indices, else ``dtype``."""
    return _RESULTS.get(op, dtype)


Causal: TypeAlias = bool | Literal["bottom_right"]
"""``False``: every query sees every key. ``True``: query i sees keys j <= i. ``"bottom_right"``: query i sees keys j <= i + seq_kv - seq_q."""

_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
_COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})
_SIGNED = frozenset({DType.INT8, DType.INT16, DType.INT32, DType.INT64})
_INTEGERS = _SIGNED | {DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64}
_BOOL = frozenset({DType.BOOL})
_SIGNS = frozenset({UnaryOp.RELU, UnaryOp.ABS, UnaryOp.SIGN})


class ComputeBackend(ABC):
    """Compute calls that go into one stream.

    Every computing method **enqueues and returns**; only :meth:`synchronize` blocks. Pointers are addresses of device memory; ranges that are
    written do not overlap ranges that are read, except where a method says so. A method raises before it has enqueued anything, or not at all;
    what fails later surfaces in the stream's events.

    ``dtype`` is the type of all elements of a call. Sums of float16 and bfloat16 are accumulated in float32 at least, and rounded once.
    NaN and infinity behave as in numpy: they propagate, also through ``max``, ``min`` and ``relu``.

    Raises
    ------
    UnsupportedError
        From any computing method whose (call, dtype) pair is not in :meth:`capabilities`.
    InvalidArgumentError
        If a size or stride is negative, a leading dimension too small, a pointer null where something is read or written, a scaling factor complex
        for real elements, or host memory not C-contiguous (for ``copy_dtoh``: or read-only).
    NotInitializedError
        If :meth:`init` was not called.
    """

    CAPABILITIES: ClassVar[Mapping[str, frozenset[DType]]] = {
        "gemm": _FLOATS | _COMPLEX,
        "batched_gemm": _FLOATS | _COMPLEX,
        "conv2d_forward": _FLOATS,
        "attention": _FLOATS,
        **{f"reduce.{op}": _FLOATS | _INTEGERS for op in ("max", "min", "argmax", "argmin", "prod")},
        **{f"reduce.{op}": _FLOATS for op in ("var", "std", "logsumexp")},
        **{f"reduce.{op}": _FLOATS | _INTEGERS | _BOOL for op in ("any", "all")},
        "reduce.sum": _FLOATS | _INTEGERS | _COMPLEX,
        "reduce.mean": _FLOATS | _COMPLEX,
        **{f"unary.{op.value}": _FLOATS for op in UnaryOp},
        **{f"unary.{op.value}": _FLOATS | _SIGNED for op in _SIGNS},
        "unary.neg": _FLOATS | _SIGNED | _COMPLEX,
        "unary.logical_not": _BOOL,
        **{f"binary.{op}": _FLOATS | _INTEGERS | _COMPLEX for op in ("add", "sub", "mul")},
        "binary.div": _FLOATS | _COMPLEX,
        **{f"binary.{op}": _FLOATS | _INTEGERS for op in ("max", "min", "pow", "remainder")},
        **{f"binary.{op.value}": _FLOATS | _INTEGERS | _BOOL for op in _COMPARISONS},
        **{f"binary.{op}": _FLOATS | _INTEGERS | _COMPLEX | _BOOL for op in ("equal", "not_equal")},
        **{f"binary.{op.value}": _BOOL for op in _LOGIC},
        "where": _FLOATS | _INTEGERS | _COMPLEX | _BOOL,
        "clip": _FLOATS | _INTEGERS,
        **dict.fromkeys(("normalize", "pool"), _FLOATS),
        "scatter_add": _FLOATS | {DType.INT32, DType.INT64, DType.UINT32, DType.UINT64},
        "cast": _FLOATS | _INTEGERS | _COMPLEX | _BOOL,
    }
    """What a backend offers by default: call -> dtypes."""

    def capabilities(self) -> Mapping[str, frozenset[DType]]:
        """Return the dtypes of every call; ops outside it are rejected before any work. A backend may narrow or widen the default."""
        return self.CAPABILITIES

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name, such as ``"cpu"``."""

    @abstractmethod
    def init(self) -> None:
        """Make the instance ready. Called again it does nothing. May block."""

    @property
    @abstractmethod
    def is_initialized(self) -> bool:
        """Whether :meth:`init` has been called and :meth:`synchronize` can be."""

    @abstractmethod
    def gemm(
        self,
        transpose_a: Transpose,
        transpose_b: Transpose,
        m: int,
        n: int,
        k: int,
        alpha: complex,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        beta: complex,
        c: int,
        ldc: int,
        *,
        dtype: DType = DType.FLOAT64,
    ) -> None:
        """Enqueue ``C = alpha * op(A) @ op(B) + beta * C`` on **column-major** matrices, as BLAS defines it.

        Parameters
        ----------
        transpose_a, transpose_b
            ``op`` of A and of B.
        m, n, k
            ``op(A)`` is m x k, ``op(B)`` is k x n, C is m x n. Any may be 0; with ``k == 0`` C is scaled by ``beta``.
        alpha, beta
            Scaling factors. With ``beta == 0`` C is not read (NaN in it does not spread); with ``alpha == 0`` A and B are not read.
        a, b, c
            Addresses of the first elements.
        lda, ldb, ldc
            Elements between the starts of two columns; at least the number of rows of the matrix as it is stored (and at least 1).
        dtype
            Element type.
        """

    @abstractmethod
    def batched_gemm(
        self,
        transpose_a: Transpose,
        transpose_b: Transpose,
        m: int,
        n: int,
        k: int,
        alpha: complex,
        a: int,
        lda: int,
        stride_a: int,
        b: int,
        ldb: int,
        stride_b: int,
        beta: complex,
        c: int,
        ldc: int,
        stride_c: int,
        batch_count: int,
        *,
        dtype: DType = DType.FLOAT32,
    ) -> None:
        """Enqueue ``batch_count`` independent :meth:`gemm` calls whose matrices lie ``stride_*`` **elements** apart.

        A stride of 0 for A or B uses the same matrix for the whole batch; for C it is refused, since results would overwrite each other.
        """

    @abstractmethod
    def conv2d_forward(
        self,
        input: int,
        input_shape: Sequence[int],
        filter: int,
        filter_shape: Sequence[int],
        output: int,
        output_shape: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        *,
        dtype: DType = DType.FLOAT32,
    ) -> None:
        """Enqueue a 2-d cross-correlation (what neural networks call convolution), all arrays C-contiguous.

        Parameters
        ----------
        input, input_shape
            ``[N, C, H, W]``.
        filter, filter_shape
            ``[K, C, R, S]``; not flipped.
        output, output_shape
            ``[N, K, P, Q]`` with ``P = (H + 2 * padding[0] - R) // stride[0] + 1``, Q likewise.
        stride, padding
            ``[vertical, horizontal]``; padding is with zeros, on both sides.
        dtype
            Element type.
        """

    @abstractmethod
    def attention(
        self,
        q: int,
        k: int,
        v: int,
        o: int,
        batch: int,
        heads: int,
        seq_q: int,
        seq_kv: int,
        head_dim: int,
        scale: float,
        causal: Causal,
        *,
        dtype: DType = DType.FLOAT32,
    ) -> None:
        """Enqueue ``O = softmax(scale * Q K^T) V``, the softmax over keys computed stably.

        Parameters
        ----------
        q, o
            C-contiguous ``[batch, heads, seq_q, head_dim]``.
        k, v
            C-contiguous ``[batch, heads, seq_kv, head_dim]``.
        scale
            Multiplies the scores; usually ``head_dim ** -0.5``.
        causal
            Which keys a query sees; see :data:`Causal`. A query that sees none gives zeros.
        dtype
            Element type.
        """

    @abstractmethod
    def reduce(self, op: ReduceOp, input: int, output: int, shape: Sequence[int], axis: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue a reduction of a C-contiguous array along ``axis`` (0 <= axis < ndim); the output has the input's shape without it.

        :func:`result_dtype` has the type of its elements. Integer sums and products wrap around. VAR and STD divide by the number of elements. Over an empty
        axis SUM is 0, PROD 1, ANY false, ALL true, LOGSUMEXP -infinity, MEAN, VAR and STD NaN; others raise :class:`~accel.InvalidArgumentError`.
        """

    @abstractmethod
    def unary(self, op: UnaryOp, input: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue ``output[i] = op(input[i])`` for n elements; ``output`` may be ``input`` if its elements are of the same type.

        :func:`result_dtype` has the type of its elements.
        """

    @abstractmethod
    def binary(self, op: BinaryOp, a: int, b: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue ``output[i] = op(a[i], b[i])`` for n elements; ``output`` may be ``a`` or ``b`` if its elements are of the same type.

        :func:`result_dtype` has the type of its elements.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread until everything enqueued has ended, releasing the GIL; raises the context's fault."""

    @abstractmethod
    def alloc(self, nbytes: int) -> int:
        """Allocate device memory, aligned to at least 256 bytes, and return its address. May block.

        For callers that use this interface alone; devices cut their buffers from slabs instead.
        """

    @abstractmethod
    def free(self, pointer: int) -> None:
        """Give memory from :meth:`alloc` back once the work enqueued so far has ended. 0 is allowed and ignored.

        Raises
        ------
        InvalidArgumentError
            If the pointer is not from :meth:`alloc`, or was freed before.
        """

    @abstractmethod
    def copy_htod(self, destination: int, source: memoryview) -> None:
        """Enqueue a copy of host memory (C-contiguous bytes) to the device. The source is kept alive, and may be read until the copy has ended."""

    @abstractmethod
    def copy_dtoh(self, destination: memoryview, source: int) -> None:
        """Enqueue a copy of device memory into writable host memory (C-contiguous bytes), which is kept alive until the copy has ended."""
