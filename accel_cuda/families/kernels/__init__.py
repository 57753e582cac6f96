"""CUDA C++ sources of the backend's own kernels, and the list of what is made of each."""

from __future__ import annotations

from importlib import resources

from accel import BinaryOp, ComputeBackend, DType, ReduceOp, UnaryOp
from accel_cuda.families.kernels.attention import ATTENTION_DIMS, ATTENTION_GROUPS, ATTENTION_TILES

__all__ = ["CODES", "PROGRAMS", "program_of", "source_of"]

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


def _functions(family: str, ops: tuple[UnaryOp | BinaryOp | ReduceOp, ...], code: str) -> str:
    return "\n".join(
        f"{_MACROS[family]}({op.value}, {op.value.capitalize()}, {code})"
        for op in ops
        if any(CODES[dtype] == code for dtype in ComputeBackend.CAPABILITIES[f"{family}.{op.value}"])
    )


def _split(program: str, capabilities: str) -> tuple[str, ...]:
    """Return the names of a program that is compiled for each element type alone: most processes use few."""
    dtypes = {dtype for name, offered in ComputeBackend.CAPABILITIES.items() if name.startswith(capabilities) for dtype in offered}
    return tuple(f"{program}_{code}" for dtype, code in CODES.items() if dtype in dtypes)


def _attention(code: str) -> str:
    lines = [f"ANYWISE({code})", *(f"ROWWISE({code}, {dim})" for dim in ATTENTION_DIMS)]
    for (dtype, dim), tile in ATTENTION_TILES.items():
        if CODES[dtype] == code:
            lines.append(f"TILED({code}, {dim}, {tile.tall}, {tile.keys}, {tile.lines}, {tile.blocks})")
    for (dtype, dim), tile in ATTENTION_GROUPS.items():
        if CODES[dtype] == code:
            lines.append(f"GROUPED({code}, {dim}, {tile.keys}, {tile.lines}, {tile.blocks})")
    return "\n".join(lines)


def _vectors() -> str:
    dtypes = sorted(ComputeBackend.CAPABILITIES["gemm"], key=lambda dtype: dtype.value)
    return "\n".join(f"VECTORS({CODES[dtype]})" + ("" if dtype.is_complex else f" NORM({CODES[dtype]})") for dtype in dtypes)


PROGRAMS: tuple[str, ...] = (
    "memory",
    *_split("unary", "unary."),
    *_split("binary", "binary."),
    *_split("sum", "reduce.sum"),
    *_split("max", "reduce.max"),
    *_split("min", "reduce.min"),
    "vectors",
    "conv2d",
    "fft",
    "rng",
    *_split("attention", "attention"),
)
"""What is compiled and loaded on its own, when it is first needed. A function's name holds its program's, or one that stands for it below."""

_FAMILIES = {"axpy": "vectors", "scal": "vectors", "dot": "vectors", "nrm2": "vectors", "philox": "rng"}


def program_of(function: str) -> str:
    """Return which of :data:`PROGRAMS` has a function: ``unary_f32`` has ``unary_relu_f32``. The first, where no name tells."""
    words = function.split("_")
    pairs = (f"{first}_{second}" for i, first in enumerate(words) for second in words[i + 1 :])
    return next((name for name in (*pairs, *words, *(_FAMILIES.get(word, "") for word in words)) if name in PROGRAMS), PROGRAMS[0])


def source_of(program: str) -> str:
    """Return the whole source of one of :data:`PROGRAMS`."""
    *files, instances = _parts(program)
    folder = resources.files(__name__)
    return "\n".join((*((folder / file).read_text() for file in ("common.cuh", *files)), instances, ""))


def _parts(program: str) -> tuple[str, ...]:
    if program in ("memory", "fft", "rng", "conv2d"):
        return f"{program}.cu", ""
    if program == "vectors":
        return "vectors.cu", _vectors()
    family, _, code = program.partition("_")
    if family == "attention":
        tiled = ("attention_mma.cu", "attention_warpgroup.cu") if code in ("f16", "bf16") else ("attention_fma.cu",)
        return "attention.cuh", "attention_rows.cu", *tiled, _attention(code)
    if family in _MACROS:
        return "elementwise.cu", _functions(family, tuple(UnaryOp) if family == "unary" else tuple(BinaryOp), code)
    # A mean is a sum with a divisor.
    return "tiles.cuh", "reduce.cu", "reduce_spans.cu", _functions("reduce", (ReduceOp(family),), code)
