"""What ONNX Runtime says of a model's inputs, as specs. It is not imported here."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from accel.dtype import DType
from accel.errors import UnsupportedError
from accel.models.tensor_spec import BATCH, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["dtype_of", "input_specs"]

_DTYPES: Final = {
    "tensor(bool)": DType.BOOL,
    "tensor(float16)": DType.FLOAT16,
    "tensor(float)": DType.FLOAT32,
    "tensor(double)": DType.FLOAT64,
    **{f"tensor({sign}int{bits})": DType.of(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""What numpy and ONNX Runtime exchange."""

_BATCHES: Final = re.compile(r"batch([\W_]*size)?", re.IGNORECASE)
_SHORT: Final = re.compile(r"[NB]", re.IGNORECASE)
"""What exporters and authors call the batch."""


def input_specs(inputs: Sequence[tuple[str, str, Sequence[int | str | None]]]) -> dict[str, TensorSpec]:
    """Return the specs of inputs, of which a file says name, type and shape.

    The batch is the dimension that the file calls so (``batch``, ``batch_size``), wherever it is; beside it, in other inputs, a first dimension that is
    called ``N`` or ``B``, or nothing. If nothing is called so, it is what is called ``N`` or ``B`` in all inputs; or else a first dimension that has no
    length, and one name in all inputs. Others keep their names, made names of Python. A dimension without a name is called after its input and its place.

    Raises
    ------
    UnsupportedError
        An input is of a type that numpy does not know.
    """
    shapes = {name: [None if dim == "" or (isinstance(dim, int) and dim < 0) else dim for dim in shape] for name, _, shape in inputs}
    batch, names = _batch_axes(shapes), _Names()
    return {
        name: TensorSpec(
            [
                BATCH if place == batch.get(name) else dim if isinstance(dim, int) else names.of(dim or (name, place))
                for place, dim in enumerate(shapes[name])
            ],
            dtype_of(name, kind),
        )
        for name, kind, _ in inputs
    }


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


def _batch_axes(shapes: Mapping[str, Sequence[int | str | None]]) -> dict[str, int]:
    """Return which dimension of each input is the batch; an input that has none is left out."""
    found = {name: axis for name, shape in shapes.items() if (axis := _axis_of(shape, _BATCHES)) is not None}
    if found:
        inner = {dim for shape in shapes.values() for dim in shape[1:] if dim is not None}
        firsts = {name: shape[0] for name, shape in shapes.items() if shape and shape[0] not in inner}
        more = [name for name, first in firsts.items() if first is None or _axis_of([first], _SHORT) == 0]
        return dict.fromkeys(more, 0) | found
    short = {name: axis for name, shape in shapes.items() if (axis := _axis_of(shape, _SHORT)) is not None}
    if short.keys() == shapes.keys() and len({shapes[name][axis] for name, axis in short.items()}) == 1:
        return short if all(shape.count(shape[short[name]]) == 1 for name, shape in shapes.items()) else {}
    first = next((shape[0] for shape in shapes.values() if shape), 0)
    is_one = all(shape[:1] == [first] and first not in shape[1:] for shape in shapes.values()) if first else len(shapes) == 1
    return dict.fromkeys(shapes, 0) if is_one and not isinstance(first, int) else {}


def _axis_of(shape: Sequence[int | str | None], names: re.Pattern[str]) -> int | None:
    return next((axis for axis, dim in enumerate(shape) if isinstance(dim, str) and names.fullmatch(dim)), None)


class _Names:
    """A name of Python for each dimension: what the file calls it, or an input and a place. No two have the same."""

    def __init__(self) -> None:
        self._names: dict[str | tuple[str, int], str] = {}
        self._taken = {BATCH}
        self._counts: Counter[str] = Counter()

    def of(self, dim: str | tuple[str, int]) -> str:
        if dim not in self._names:
            text = re.sub(r"\W", "_", dim if isinstance(dim, str) else f"{dim[0]}_{dim[1]}")
            text = found = text if text.isidentifier() and text != BATCH else f"dim_{text}"
            while found in self._taken:
                self._counts[text] += 1
                found = f"{text}_{self._counts[text] + 1}"
            self._taken.add(found)
            self._names[dim] = found
        return self._names[dim]
