"""The sources of fused kernels: one kernel for each program of functions and dtypes of its operands."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from accel.ops.fused import CONVERSIONS, types_of
from accel_cuda.families import kernels
from accel_cuda.families.kernels import CODES

if TYPE_CHECKING:
    from accel import DType
    from accel.ops.fused import Instruction

__all__ = ["name_of", "source_of", "structure_of"]

_FILES = ("common.cuh", "elementwise.cu", "strided.cu", "fused.cu")
_STRUCTURES = {"where": "Pick"}
_OF_COMPLEX = {"abs": "ComplexAbs", "sign": "ComplexSign", "isinf": "ComplexIsinf"}


@lru_cache(maxsize=1024)
def name_of(program: tuple[Instruction, ...], operands: tuple[DType, ...]) -> str:
    """Return the name of a program's kernel: another one for other instructions, and for other dtypes of the operands."""
    return f"fused_{hashlib.sha256(_body(program, operands).encode()).hexdigest()[:24]}"


def source_of(program: tuple[Instruction, ...], operands: tuple[DType, ...]) -> str:
    """Return the whole source of a program's kernel."""
    result, folder = types_of(program, operands)[-1], resources.files(kernels)
    codes = ", ".join(CODES[dtype] for dtype in (result, *operands))
    places = ", ".join(map(str, range(len(operands))))
    kernel = f"KERNEL({name_of(program, operands)}) {{ strided<Program, {codes}>(w, Places<{places}>()); }}"
    files = ((folder / file).read_text() for file in _FILES)
    return "\n".join((f"#define OPERANDS {len(operands)}", *files, _body(program, operands), kernel, ""))


def _body(program: tuple[Instruction, ...], operands: tuple[DType, ...]) -> str:
    """Return the function of one element of each operand."""
    types = types_of(program, operands)
    parameters = ", ".join(f"typename Wide<{CODES[dtype]}>::type v{place}" for place, dtype in enumerate(operands))
    lines = [
        f"    const auto v{place} = {_expression(name, [f'v{each}' for each in values], [types[each] for each in values])};"
        for place, (name, *values) in enumerate(program, len(operands))
    ]
    return "\n".join(
        ("struct Program {", f"  static DEVICE auto of({parameters}) {{", *lines, f"    return v{len(types) - 1};", "  }", "};")
    )


def _expression(name: str, values: list[str], types: list[DType]) -> str:
    if (target := CONVERSIONS.get(name)) is not None:
        return f"widen(narrow<{CODES[target]}>({values[0]}))"
    return f"{structure_of(name, types[0])}::of({', '.join(values)})"


def structure_of(name: str, dtype: DType) -> str:
    """Return what a function of elements of ``dtype`` is called in the sources."""
    structure = _STRUCTURES.get(name) or "".join(map(str.capitalize, name.split("_")))
    return _OF_COMPLEX.get(name, structure) if dtype.is_complex else structure
