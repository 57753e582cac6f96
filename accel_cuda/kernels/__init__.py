"""CUDA C++ sources of the backend's own kernels, and the list of what is made of each."""

from __future__ import annotations

from importlib import resources

from accel import BinaryOp, ComputeBackend, DType, ReduceOp, UnaryOp

__all__ = ["CODES", "PROGRAMS", "source_of"]

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

_MACROS = {"unary": "UNARY", "binary": "BINARY", "reduce": "REDUCE"}


def _functions(family: str, ops: tuple[UnaryOp | BinaryOp | ReduceOp, ...]) -> str:
    return "\n".join(
        f"{_MACROS[family]}({op.value}, {op.value.capitalize()}, {CODES[dtype]})"
        for op in ops
        for dtype in sorted(ComputeBackend.CAPABILITIES[f"{family}.{op.value}"], key=lambda dtype: dtype.value)
    )


def _dnn() -> str:
    return "\n".join(f"DNN({CODES[dtype]})" for dtype in sorted(ComputeBackend.CAPABILITIES["attention"], key=lambda dtype: dtype.value))


PROGRAMS: tuple[str, ...] = ("memory", "unary", "binary", "sum", "max", "min", "dnn", "fft", "rng")
"""What is compiled on its own; small enough that they can be compiled side by side."""


def source_of(program: str) -> str:
    """Return the whole source of one of :data:`PROGRAMS`."""
    file, instances = _parts(program)
    folder = resources.files(__name__)
    return "\n".join(((folder / "common.cuh").read_text(), (folder / file).read_text(), instances, ""))


def _parts(program: str) -> tuple[str, str]:
    if program in ("memory", "fft", "rng"):
        return f"{program}.cu", ""
    if program == "dnn":
        return "dnn.cu", _dnn()
    if program in _MACROS:
        ops = tuple(UnaryOp) if program == "unary" else tuple(BinaryOp)
        return "elementwise.cu", _functions(program, ops)
    # A mean is a sum with a divisor.
    return "reduce.cu", _functions("reduce", (ReduceOp(program),))
