"""CUDA C++ sources of the backend's own kernels, and what they call element types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel import ComputeBackend, DType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel import BinaryOp, ReduceOp, UnaryOp

__all__ = ["CODES", "instances"]

CODES: dict[DType, str] = {
    DType.FLOAT16: "f16",
    DType.BFLOAT16: "bf16",
    DType.FLOAT32: "f32",
    DType.FLOAT64: "f64",
    DType.INT8: "i8",
    DType.INT16: "i16",
    DType.INT32: "i32",
    DType.INT64: "i64",
    DType.UINT8: "u8",
    DType.UINT16: "u16",
    DType.UINT32: "u32",
    DType.UINT64: "u64",
    DType.COMPLEX64: "c64",
    DType.COMPLEX128: "c128",
}
"""Element type -> its name in the sources, which ends the kernel's name: ``unary_relu_f32``."""


def instances(macro: str, ops: Iterable[UnaryOp | BinaryOp | ReduceOp], capabilities: str, code: str) -> str:
    """Return the lines that make the kernels of ``ops`` for one element type, of those that it is offered for."""
    return "\n".join(
        f"{macro}({op.value}, {op.value.capitalize()}, {code})"
        for op in ops
        if any(CODES[dtype] == code for dtype in ComputeBackend.CAPABILITIES[f"{capabilities}.{op.value}"])
    )
