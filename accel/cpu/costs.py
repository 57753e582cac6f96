"""How long a call takes: what a CPU stream decides with whether to run it at once or beside the loop.

The estimates are seconds on one core, from simple models with rates that a slow core of today reaches. They need not be good: being wrong by a
factor of two moves a call of some tens of microseconds to the other side of the stream's limit, which costs about as much as it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.enums import UnaryOp

if TYPE_CHECKING:
    import numpy as np

__all__ = ["attention", "convolution", "copying", "elements", "matmul", "unary"]

# Seconds: of any call before it computes, of a small product among others of one call, of touching a byte, of evaluating a function.
_CALL = 3e-6
_PRODUCT = 0.1e-6
_BYTE = 0.1e-9
_FUNCTION = 1e-9
# Seconds to convert one element to the type that is computed in, and for one multiply-add of a matrix product.
_CONVERT: dict[np.dtype[Any], float] = {
    DType.FLOAT16.numpy: 1.2e-9,
    DType.BFLOAT16.numpy: 0.4e-9,
    DType.FLOAT8_E4M3FN.numpy: 8e-9,
    DType.FLOAT8_E5M2.numpy: 8e-9,
}
_MULTIPLY_ADD: dict[np.dtype[Any], float] = {
    DType.FLOAT16.numpy: 0.03e-9,
    DType.BFLOAT16.numpy: 0.03e-9,
    DType.FLOAT8_E4M3FN.numpy: 0.03e-9,
    DType.FLOAT8_E5M2.numpy: 0.03e-9,
    DType.INT8.numpy: 0.06e-9,
    DType.FLOAT32.numpy: 0.03e-9,
    DType.FLOAT64.numpy: 0.06e-9,
    DType.COMPLEX64.numpy: 0.1e-9,
    DType.COMPLEX128.numpy: 0.2e-9,
    **{dtype.numpy: 1e-9 for dtype in DType if dtype.is_integer and dtype is not DType.INT8},
}
_PRODUCTS = {dtype: (seconds, _CONVERT.get(dtype, 0.0)) for dtype, seconds in _MULTIPLY_ADD.items()}
_FUNCTIONS = {
    **dict.fromkeys((UnaryOp.RELU, UnaryOp.ABS, UnaryOp.NEG, UnaryOp.SIGN, UnaryOp.FLOOR, UnaryOp.CEIL, UnaryOp.ROUND), 0.0),
    **dict.fromkeys((UnaryOp.RECIPROCAL, UnaryOp.ISNAN, UnaryOp.ISINF, UnaryOp.ISFINITE, UnaryOp.LOGICAL_NOT), 0.0),
    **dict.fromkeys((UnaryOp.SIGMOID, UnaryOp.SILU, UnaryOp.SOFTPLUS, UnaryOp.ELU), 3e-9),
    **dict.fromkeys((UnaryOp.ERF, UnaryOp.GELU, UnaryOp.GELU_TANH), 20e-9),
}


def matmul(m: int, n: int, k: int, dtype: np.dtype[Any], count: int = 1) -> float:
    """Return the cost of ``count`` (m x k) @ (k x n) products."""
    multiply_add, convert = _PRODUCTS[dtype]
    return _CALL + count * (_PRODUCT + m * n * k * multiply_add + (m * k + k * n + m * n) * convert)


def elements(n: int, dtype: np.dtype[Any]) -> float:
    """Return the cost of touching n elements and computing little with each."""
    return _CALL + n * (_BYTE * dtype.itemsize + _CONVERT.get(dtype, 0.0))


def unary(op: UnaryOp, n: int, dtype: np.dtype[Any]) -> float:
    """Return the cost of a function of n elements."""
    seconds = elements(2 * n, dtype)
    return seconds + n * _FUNCTIONS.get(op, _FUNCTION)


def convolution(pixels: int, filters: int, window: int, dtype: np.dtype[Any]) -> float:
    """Return the cost of a convolution: ``pixels`` of all outputs, each a sum over a ``window`` for each of the ``filters``."""
    return 4 * _CALL + matmul(pixels, filters, window, dtype) + pixels * window * _FUNCTION


def attention(pairs: int, head_dim: int, dtype: np.dtype[Any]) -> float:
    """Return the cost of attention over ``pairs`` of a query and a key: two products and an exponential."""
    return 8 * _CALL + pairs * (2 * head_dim * _MULTIPLY_ADD[dtype] + 2 * _FUNCTION)


def copying(nbytes: int) -> float:
    """Return the cost of a copy."""
    return _CALL / 2 + nbytes * _BYTE
