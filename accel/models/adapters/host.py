"""Arrays of numpy for adapters that compute on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import InvalidArgumentError
from accel.models.examples import expanded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel.libraries.kernel_library import Operand
    from accel.models.examples import Fill
    from accel.ops import Spec

__all__ = ["filled", "store"]


def filled(inputs: Mapping[str, tuple[Spec, Fill]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return an array of each shape and dtype, filled."""
    return {name: expanded(fill, spec.shape, spec.dtype) for name, (spec, fill) in inputs.items()}


def store(result: Any, output: Operand) -> None:
    """Copy what numpy can read into an output in memory of the host.

    Raises
    ------
    InvalidArgumentError
        If shape or dtype differ.
    """
    array = np.asarray(result)
    if array.shape != output.shape or array.dtype != output.dtype.numpy:
        raise InvalidArgumentError(
            f"a result is {array.dtype}{list(array.shape)}, and its output {output.dtype.value}{list(output.shape)}",
            remedy="Return arrays of one dtype, and of shapes that follow from those of the inputs.",
        )
    np.asarray(output)[...] = array
