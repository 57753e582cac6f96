"""What ops compute: the enumerations of their functions, and the dtypes that each takes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Literal, TypeAlias

from accel.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CAPABILITIES",
    "EXTREMES",
    "BinaryName",
    "BinaryOp",
    "Causal",
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

CAPABILITIES: Mapping[str, frozenset[DType]] = {
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
"""Call -> the dtypes that a backend offers it for, unless it says otherwise."""
