"""What ONNX Runtime says of a model's inputs, as specs. It is not imported here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from accel.dtype import DType
from accel.errors import UnsupportedError
from accel.models.tensor_spec import BATCH, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["dtype_of", "input_specs"]

_DTYPES: Final = {
    "tensor(bool)": DType.BOOL,
    "tensor(float16)": DType.FLOAT16,
    "tensor(float)": DType.FLOAT32,
    "tensor(double)": DType.FLOAT64,
    **{f"tensor({sign}int{bits})": DType.of(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""What numpy and ONNX Runtime exchange."""


def input_specs(inputs: Sequence[tuple[str, str, Sequence[int | str | None]]]) -> dict[str, TensorSpec]:
    """Return the specs of inputs, of which a file says name, type and shape.

    A first dimension that has no length, and one name in all inputs, is the batch. Others keep their names; characters that no name of Python has become
    underscores, and a dimension without a name is called after its input and its place.

    Raises
    ------
    UnsupportedError
        An input is of a type that numpy does not know.
    """
    shapes = {name: [_dimension(name, place, dim) for place, dim in enumerate(shape)] for name, _, shape in inputs}
    first = next((shape[0] for shape in shapes.values() if shape), 0)
    if isinstance(first, str) and all(shape[:1] == [first] and first not in shape[1:] for shape in shapes.values()):
        shapes = {name: [BATCH, *shape[1:]] for name, shape in shapes.items()}
    return {name: TensorSpec(shapes[name], dtype_of(name, kind)) for name, kind, _ in inputs}


def dtype_of(name: str, kind: str) -> DType:
    """Return the dtype of an input or output.

    Raises
    ------
    UnsupportedError
        numpy does not know it.
    """
    if kind not in _DTYPES:
        raise UnsupportedError(
            f"{name!r} of the ONNX model is a {kind}",
            library="onnxruntime",
            remedy=f"Cast it in the file; inputs and outputs are one of {', '.join(_DTYPES)}.",
        )
    return _DTYPES[kind]


def _dimension(name: str, place: int, dim: int | str | None) -> int | str:
    if isinstance(dim, int) and dim >= 0:
        return dim
    found = re.sub(r"\W", "_", dim if isinstance(dim, str) and dim else f"{name}_{place}")
    return f"dim_{found}" if not found.isidentifier() or (found == BATCH and place) else found
