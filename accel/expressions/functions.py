"""What all functions of a namespace stand on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, Shape

if TYPE_CHECKING:
    from accel.dtype import DType

__all__ = ["Functions"]


class Functions:
    """The part of a namespace that makes arrays.

    Parameters
    ----------
    device
        What computes them.

    Attributes
    ----------
    array_type
        The class of its arrays.
    """

    array_type: type[Array] = Array

    def __init__(self, device: Any) -> None:
        self.device = device

    def make(self, shape: Shape, dtype: DType, step: Any, inputs: tuple[Any, ...] = (), arguments: tuple[Any, ...] = ()) -> Array:
        """Return an array that is not computed yet; see :class:`~accel.expressions.array.Step`."""
        return self.array_type(self, shape, dtype, step, inputs, arguments)

    def check_device(self, device: Any) -> None:
        """Raise unless ``device`` is that of the namespace, or ``None``."""
        if device is not None and device is not self.device:
            raise InvalidArgumentError(f"{device!r} is another device", remedy="Use that device's own xp.")
