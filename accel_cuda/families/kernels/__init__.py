"""CUDA C++ sources of the backend's own kernels, and what they call element types."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from accel import DType
from accel.enums import CAPABILITIES, result_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel import BinaryOp, ReduceOp, UnaryOp

__all__ = ["CODES", "aligned", "bits", "clear", "instances", "launch_each", "program_for"]

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
    DType.BOOL: "b8",
}
"""Element type -> its name in the sources, which ends the kernel's name: ``unary_relu_f32``."""


_DOUBLE = struct.Struct("d")
_THREADS = 256


def bits(value: float) -> int:
    """Return the bits of a float64, as an argument of a kernel."""
    return int.from_bytes(_DOUBLE.pack(value), "little")


def aligned(nbytes: int) -> int:
    """Return how many bytes a part of the memory that an op works in takes, so that the next one begins at a multiple of 256."""
    return -(-nbytes // 256) * 256


def program_for(name: str, operand: str = "x") -> Callable[[Any], str]:
    """Return what tells of an op which of the programs ``name`` has its kernel: the one for the element type of an operand."""
    programs = {dtype: f"{name}_{code}" for dtype, code in CODES.items()}

    def program(op: Any) -> str:
        return programs.get(getattr(op, operand).dtype, "")

    return program


def launch_each(stream: Any, name: str, count: int, *arguments: int) -> None:
    """Enqueue one of the backend's own kernels, each of whose threads takes one of ``count`` elements; nothing for none.

    Raises
    ------
    AccelError
        If nothing can be enqueued.
    """
    if count:
        stream.ready()
        stream.launch(stream.functions[name], -(-count // _THREADS), _THREADS, *arguments)


def clear(stream: Any, *parts: tuple[int, int]) -> None:
    """Enqueue zeros for parts of memory, each of which is an address and how many bytes there are; nothing for none.

    Raises
    ------
    AccelError
        If nothing can be enqueued.
    """
    for address, nbytes in parts:
        if nbytes:
            stream.fill(address, b"\0", nbytes)


def instances(macro: str, ops: Iterable[UnaryOp | BinaryOp | ReduceOp], capabilities: str, code: str) -> str:
    """Return the lines that make the kernels of ``ops`` for one element type, of those that it is offered for."""
    dtype = next(dtype for dtype, name in CODES.items() if name == code)
    return "\n".join(
        f"{macro}({op.value}, {''.join(map(str.capitalize, op.value.split('_')))}, {code}, {CODES[result_dtype(op, dtype)]})"
        for op in ops
        if dtype in CAPABILITIES[f"{capabilities}.{op.value}"]
    )
