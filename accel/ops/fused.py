"""Several functions of elements as one op: intermediate results never reach memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from accel.dtype import FLOATS, REAL_OF, DType
from accel.enums import CAPABILITIES, BinaryOp, UnaryOp, result_dtype
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, op, operand, planned
from accel.ops.fields import set_fields
from accel.ref import AccelRef
from accel.views import broadcast

__all__ = ["CONVERSIONS", "FUNCTIONS", "OPERANDS", "Function", "Fused", "Instruction", "types_of"]

Instruction: TypeAlias = tuple[Any, ...]
"""Name of a function, and the numbers of the values that it is applied to."""

Array = np.ndarray[Any, np.dtype[Any]]

OPERANDS = 16
"""How many operands a program has at most: those of a GPU's launch are limited."""

CONVERSIONS: dict[str, DType] = {dtype.value: dtype for dtype in DType if not dtype.value.startswith(("float8", "float4"))}
"""Name of a dtype, as the name of a function -> what the function converts to."""

_FLOATS = frozenset(FLOATS)
_COMPLEX = frozenset(REAL_OF)
_INTEGERS = frozenset(dtype for dtype in DType if dtype.is_integer)
_BOOL = frozenset({DType.BOOL})


class Function(NamedTuple):
    """A function of elements.

    Attributes
    ----------
    arity
        Of how many values; all are of one dtype, but the condition of ``where``, which is of bool.
    dtypes
        What it takes.
    result
        The dtype of its result: ``"same"``, ``"bool"``, or ``"real"``, the type of a complex number's parts.
    """

    arity: int
    dtypes: frozenset[DType]
    result: str = "same"


def _of_enums() -> dict[str, Function]:
    offered, functions = CAPABILITIES, {}
    for arity, kind, members in ((1, "unary", UnaryOp), (2, "binary", BinaryOp)):
        for member in members:
            dtypes = offered[f"{kind}.{member.value}"]
            result = "bool" if result_dtype(member, DType.FLOAT32) is DType.BOOL else "same"
            functions[member.value] = Function(arity, dtypes | (_COMPLEX if member.value in _ALSO_COMPLEX else frozenset()), result)
    return functions


_ALSO_COMPLEX = frozenset(
    {
        *("exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "log1p", "expm1", "log2", "pow"),
        *("sign", "isnan", "isinf", "isfinite"),
    }
)

FUNCTIONS: dict[str, Function] = {
    **_of_enums(),
    "abs": Function(1, _FLOATS | _INTEGERS | _COMPLEX, "real"),
    **dict.fromkeys(("asinh", "acosh", "atanh", "log10"), Function(1, _FLOATS | _COMPLEX)),
    "trunc": Function(1, _FLOATS),
    "signbit": Function(1, _FLOATS, "bool"),
    "conj": Function(1, _COMPLEX),
    **dict.fromkeys(("real", "imag"), Function(1, _COMPLEX, "real")),
    "invert": Function(1, _INTEGERS | _BOOL),
    **dict.fromkeys(("atan2", "copysign", "hypot", "logaddexp"), Function(2, _FLOATS)),
    "nextafter": Function(2, frozenset({DType.FLOAT32, DType.FLOAT64})),
    "floor_divide": Function(2, _FLOATS | _INTEGERS),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), Function(2, _INTEGERS | _BOOL)),
    **dict.fromkeys(("left_shift", "right_shift"), Function(2, _INTEGERS)),
    "where": Function(3, _FLOATS | _INTEGERS | _COMPLEX | _BOOL),
    "clip": Function(3, _FLOATS | _INTEGERS),
}
"""Name -> function. Names of the enumerations mean what they mean there; the others are numpy's, or the array API standard's."""


@lru_cache(maxsize=1024)
def types_of(program: tuple[Instruction, ...], operands: tuple[DType, ...]) -> tuple[DType, ...]:
    """Return the dtypes of all values of a program: of its operands, and of the result of each instruction.

    Raises
    ------
    InvalidArgumentError
        If an instruction is none, or does not fit what it is applied to.
    UnsupportedError
        If a function is not offered for a dtype.
    """
    types = list(operands)
    for instruction in program:
        name, places = instruction[0], instruction[1:]
        if not all(isinstance(place, int) and 0 <= place < len(types) for place in places):
            raise InvalidArgumentError(f"{instruction} names values that are not there", remedy="Number operands from 0, then results.")
        types.append(_type_of(name, [types[place] for place in places]))
    return tuple(types)


def _type_of(name: str, values: list[DType]) -> DType:
    target, function = CONVERSIONS.get(name), FUNCTIONS.get(name)
    if len(values) != (1 if function is None else function.arity) or (target is None and function is None):
        raise InvalidArgumentError(f"there is no function {name!r} of {len(values)} value(s)", remedy=f"Use one of {', '.join(FUNCTIONS)}.")
    if function is None:
        assert target is not None
        if values[0].is_complex and not target.is_complex and target is not DType.BOOL:
            raise InvalidArgumentError(f"{name} of {values[0].value} would drop the imaginary part", remedy="Use real first.")
        return target
    if name == "where" and values[0] is not DType.BOOL:
        raise InvalidArgumentError(f"where has a condition of {values[0].value}", remedy="Convert it to bool first.")
    rest = values[1:] if name == "where" else values
    dtype = rest[0]
    if any(each is not dtype for each in rest):
        raise InvalidArgumentError(f"{name} of {' and '.join(each.value for each in rest)}", remedy="Convert them to one dtype first.")
    if dtype not in function.dtypes:
        raise UnsupportedError(f"{name} of {dtype.value} is not offered", remedy="Convert to a dtype that is.")
    return DType.BOOL if function.result == "bool" else REAL_OF.get(dtype, dtype) if function.result == "real" else dtype


@op("elementwise")
class Fused(OutOp):
    """Functions of elements, one after the other in one pass over the operands, which are broadcast as in numpy.

    Values are the operands, and then the results of the instructions; the last one's is the result. float16 and bfloat16 are computed in float32 and rounded at
    the end, and where an instruction converts to them.

    Parameters
    ----------
    program
        Instructions: ``(name, *numbers of values)``. Names are those of ``unary`` and ``binary``, of dtypes for conversions, and of others that
        ``accel.ops.fused.FUNCTIONS`` lists: ``(("mul", 0, 1), ("add", 3, 2), ("relu", 4))`` is ``relu(a * b + c)``.
    operands
        Refs, and numbers as numpy's scalars, which have a dtype: ``np.float32(2)``. At most 16.
    out
        Buffer to write; it may be an operand of its shape.
    """

    program: Sequence[Instruction]
    operands: Sequence[AccelRef | np.generic]

    def __post_init__(self) -> None:
        """Convert the sequences."""
        if type(self.program) is not tuple or not self.program or type(self.program[0]) is not tuple:
            instructions = self.program if isinstance(self.program, (tuple, list)) else ()
            if not instructions or not all(isinstance(each, (tuple, list)) and each for each in instructions):
                raise InvalidArgumentError(f"program is {self.program!r}", remedy="Give instructions: (('mul', 0, 1), ('relu', 2)).")
            set_fields(self, program=tuple([tuple(each) for each in instructions]))
        if type(self.operands) is not tuple:
            if not isinstance(self.operands, list):
                raise InvalidArgumentError(f"operands is a {type(self.operands).__name__}", remedy="Give a tuple of refs and numbers.")
            set_fields(self, operands=tuple(self.operands))

    def refs(self) -> list[AccelRef]:
        """Return those operands that are refs."""
        return [each for each in self.operands if isinstance(each, AccelRef)]

    def dtypes(self) -> tuple[DType, ...]:
        """Return the dtypes of the operands."""
        return tuple([each.dtype if isinstance(each, AccelRef) else DType.of(each.dtype) for each in self.operands])

    def types(self) -> tuple[DType, ...]:
        """Return the dtypes of all values."""
        return types_of(tuple(self.program), self.dtypes())

    def takes_strided(self, ref: AccelRef) -> bool:
        return True

    def plan(self) -> Plan:
        if len(self.operands) > OPERANDS:
            raise InvalidArgumentError(f"{len(self.operands)} operands are too many", remedy=f"Fuse functions of at most {OPERANDS}.")
        refs: list[AccelRef] = []
        given: Sequence[Any] = self.operands
        for place, each in enumerate(given):
            if isinstance(each, AccelRef):
                refs.append(each)
            elif not isinstance(each, np.generic):
                operand(f"operands[{place}]", each)
        if not refs:
            raise InvalidArgumentError("no operand is a ref", remedy="Give at least one; numpy computes the others.")
        first = refs[0].shape
        shape = first if all(ref.shape == first for ref in refs) else broadcast(*[ref.shape for ref in refs])
        reads = {f"operands[{place}]": ref for place, ref in enumerate(refs)}
        return planned(self.out, reads, shape, self.types()[-1], in_place=tuple(reads))
