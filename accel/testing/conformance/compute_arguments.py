"""What a compute interface refuses, and that it does so before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.enums import BinaryOp, ReduceOp, Transpose, UnaryOp
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.testing.conformance.harness import poison

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.compute import ComputeBackend
    from accel.testing.conformance.harness import Harness

__all__ = [
    "check_capabilities_name_every_call",
    "check_invalid_sizes_are_refused",
    "check_unsupported_dtypes_are_refused",
]

_NONE, _TURNED = Transpose.NONE, Transpose.TRANSPOSE
_F32 = DType.FLOAT32
# Room for 64 elements of the largest type.
_ROOM = 1024


def _calls(compute: ComputeBackend, x: int, y: int) -> dict[str, Callable[[DType], None]]:
    """Return one valid call for each entry of the capabilities, which reads from ``x`` and writes to ``y``."""
    image = (1, 1, 2, 2)
    calls: dict[str, Callable[[DType], None]] = {
        "gemm": lambda dtype: compute.gemm(_NONE, _NONE, 2, 2, 2, 1, x, 2, x, 2, 0, y, 2, dtype=dtype),
        "batched_gemm": lambda dtype: compute.batched_gemm(_NONE, _NONE, 2, 2, 2, 1, x, 2, 4, x, 2, 4, 0, y, 2, 4, 2, dtype=dtype),
        "conv2d_forward": lambda dtype: compute.conv2d_forward(x, image, x, (1, 1, 1, 1), y, image, (1, 1), (0, 0), dtype=dtype),
        "attention": lambda dtype: compute.attention(x, x, x, y, 1, 1, 2, 2, 2, 1.0, False, dtype=dtype),
    }

    def reduction(op: ReduceOp) -> Callable[[DType], None]:
        return lambda dtype: compute.reduce(op, x, y, (2, 2), 1, dtype=dtype)

    def unary(op: UnaryOp) -> Callable[[DType], None]:
        return lambda dtype: compute.unary(op, x, y, 4, dtype=dtype)

    def binary(op: BinaryOp) -> Callable[[DType], None]:
        return lambda dtype: compute.binary(op, x, x, y, 4, dtype=dtype)

    calls |= {f"reduce.{op.value}": reduction(op) for op in ReduceOp}
    calls |= {f"unary.{op.value}": unary(op) for op in UnaryOp}
    return calls | {f"binary.{op.value}": binary(op) for op in BinaryOp}


async def check_capabilities_name_every_call(harness: Harness) -> None:
    """Check that each call is in the capabilities with at least one dtype, and accepts all dtypes it has there; functions of elements may be left out."""
    with harness.open_compute() as compute, harness.case(compute, "calls of the capabilities") as case:
        x, y = (case.poisoned(_ROOM, DType.UINT8) for _ in range(2))
        for name, call in _calls(compute, x, y).items():
            offered = compute.capabilities().get(name, frozenset())
            case.require(bool(offered) or name.startswith(("unary.", "binary.", "reduce.")), f"{name} is not offered for any dtype")
            for dtype in offered:
                call(dtype)
        compute.synchronize()


async def check_unsupported_dtypes_are_refused(harness: Harness) -> None:
    """Check that a (call, dtype) pair outside the capabilities raises UnsupportedError, names the call, and writes nothing."""
    with harness.open_compute() as compute, harness.case(compute, "unsupported dtypes") as case:
        x, y = (case.poisoned(_ROOM, DType.UINT8) for _ in range(2))
        for name, call in _calls(compute, x, y).items():
            for dtype in set(DType) - compute.capabilities().get(name, frozenset()):
                try:
                    call(dtype)
                except UnsupportedError as error:
                    case.require(error.op is not None, f"the error of {name} does not name the op")
                    case.require(dtype.value in str(error), f"the error of {name} does not name {dtype.value}: {error}")
                except Exception as error:
                    raise AssertionError(f"{case.what}: {name} of {dtype.value} raised {error!r}") from error
                else:
                    case.require(False, f"{name} took {dtype.value}")
        case.same(case.get(y, _ROOM, DType.UINT8), poison(_ROOM, DType.UINT8), "the output")


def _wrong_products(compute: ComputeBackend, x: int, y: int) -> dict[str, Callable[[], None]]:
    def gemm(m: int, n: int, k: int, lda: int, ldb: int, ldc: int, ta: Transpose = _NONE, tb: Transpose = _NONE) -> Callable[[], None]:
        return lambda: compute.gemm(ta, tb, m, n, k, 1, x, lda, x, ldb, 0, y, ldc, dtype=_F32)

    def batched(m: int, k: int, lda: int, ldc: int, stride: int, count: int) -> Callable[[], None]:
        return lambda: compute.batched_gemm(_NONE, _NONE, m, 2, k, 1, x, lda, 4, x, 2, 4, 0, y, ldc, stride, count, dtype=_F32)

    return {
        "gemm with m < 0": gemm(-1, 2, 2, 2, 2, 2),
        "gemm with n < 0": gemm(2, -1, 2, 2, 2, 2),
        "gemm with k < 0": gemm(2, 2, -1, 2, 2, 2),
        "gemm with lda < m": gemm(3, 2, 2, 2, 2, 3),
        "gemm with lda < k, transposed": gemm(2, 2, 3, 2, 3, 2, ta=_TURNED),
        "gemm with ldb < k": gemm(2, 2, 3, 2, 2, 2),
        "gemm with ldb < n, transposed": gemm(2, 3, 2, 2, 2, 2, tb=_TURNED),
        "gemm with ldc < m": gemm(3, 2, 2, 3, 2, 2),
        "gemm with lda = 0": gemm(0, 2, 2, 0, 2, 1),
        "gemm with ldc = 0": gemm(0, 2, 2, 1, 2, 0),
        "batched_gemm with m < 0": batched(-1, 2, 2, 2, 4, 2),
        "batched_gemm with k < 0": batched(2, -1, 2, 2, 4, 2),
        "batched_gemm with a negative count": batched(2, 2, 2, 2, 4, -1),
        "batched_gemm with lda < m": batched(3, 2, 2, 3, 6, 2),
        "batched_gemm with ldc < m": batched(3, 2, 3, 2, 6, 2),
    }


def _wrong_others(compute: ComputeBackend, x: int, y: int) -> dict[str, Callable[[], None]]:
    def convolution(out: tuple[int, ...], filters: tuple[int, ...] = (1, 1, 2, 2), **options: Any) -> Callable[[], None]:
        stride, padding = options.get("stride", (1, 1)), options.get("padding", (0, 0))
        return lambda: compute.conv2d_forward(x, (1, 1, 3, 3), x, filters, y, out, stride, padding, dtype=_F32)

    def attention(negative: int) -> Callable[[], None]:
        batch, heads, seq_q, seq_kv, dim = (-1 if i == negative else 1 for i in range(5))
        return lambda: compute.attention(x, x, x, y, batch, heads, seq_q, seq_kv, dim, 1.0, False, dtype=_F32)

    return {
        "conv2d with another output": convolution((1, 1, 3, 3)),
        "conv2d with other channels": convolution((1, 1, 2, 2), (1, 2, 2, 2)),
        "conv2d with a filter that is too large": convolution((1, 1, 0, 0), (1, 1, 4, 4)),
        "conv2d with stride 0": convolution((1, 1, 2, 2), stride=(0, 1)),
        "conv2d with negative padding": convolution((1, 1, 0, 2), padding=(-1, 0)),
        **{f"attention with a negative size at {i}": attention(i) for i in range(5)},
        "reduce of a negative length": lambda: compute.reduce(ReduceOp.SUM, x, y, (2, -1), 0),
        "reduce along an axis that is not there": lambda: compute.reduce(ReduceOp.SUM, x, y, (2, 2), 2),
        "reduce of no axes": lambda: compute.reduce(ReduceOp.SUM, x, y, (), 0),
        "unary with n < 0": lambda: compute.unary(UnaryOp.NEG, x, y, -1),
        "binary with n < 0": lambda: compute.binary(BinaryOp.ADD, x, x, y, -1),
        "alloc of a negative size": lambda: compute.free(compute.alloc(-1)),
    }


async def check_invalid_sizes_are_refused(harness: Harness) -> None:
    """Check that negative sizes, small leading dimensions and shapes that do not fit raise InvalidArgumentError, and write nothing."""
    with harness.open_compute() as compute, harness.case(compute, "invalid arguments") as case:
        x, y = (case.poisoned(_ROOM, DType.UINT8) for _ in range(2))
        for name, call in {**_wrong_products(compute, x, y), **_wrong_others(compute, x, y)}.items():
            try:
                call()
            except InvalidArgumentError:
                continue
            case.require(False, f"{name} was not refused")
        case.same(case.get(y, _ROOM, DType.UINT8), poison(_ROOM, DType.UINT8), "the output")
