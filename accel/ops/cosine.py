"""Discrete cosine and sine transforms along one axis, with scipy's meaning."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import ClassVar, Literal, get_args

from accel.dtype import WIDE_FLOATS
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, op, operand, planned
from accel.ops.fields import integer, set_fields, to_axis
from accel.ops.pieces import axis_of, lines_of
from accel.ref import AccelRef
from accel.values import check_choice

__all__ = ["Dct", "Dst", "Idct", "Idst"]

Norm = Literal["backward", "ortho", "forward"]
Kind = Literal[1, 2, 3, 4]
_INVERSE: dict[int, Kind] = {1: 1, 2: 3, 3: 2, 4: 4}


@op("fft")
class CosineTransform(OutOp):
    """What cosine and sine transforms share.

    Parameters
    ----------
    x
        What is transformed, of any shape: float32 or float64.
    type
        1 to 4: which of the four transforms. The cosine transform of type 1 needs two elements at least.
    axis
        Along which axis; the others are a batch.
    norm
        ``"backward"``: the inverse is divided by 2 * n, or 2 * (n - 1) and 2 * (n + 1) for the cosine and the sine transform of type 1. ``"forward"``: the
        other one is. ``"ortho"``: both are by its root, and ends are scaled so that the transform is orthogonal.
    out
        Buffer to write; it may be ``x``.
    """

    is_sine: ClassVar[bool]
    is_forward: ClassVar[bool] = True

    x: AccelRef
    type: Kind = 2
    _: KW_ONLY
    axis: int = -1
    norm: Norm = "backward"

    def __post_init__(self) -> None:
        remedy = "Give 1, 2, 3 or 4."
        found = integer("type", self.type, remedy)
        if found not in _INVERSE:
            raise InvalidArgumentError(f"type is {found}", remedy=remedy)
        set_fields(self, type=found, axis=to_axis("axis", self.axis))

    def lines(self) -> tuple[int, int, int]:
        """Return the number of elements before, along and behind the axis."""
        return lines_of(self.x.shape, self.axis)

    def computed(self) -> Kind:
        """Return the type of the sums that are computed: an inverse has those of another type."""
        return self.type if self.is_forward else _INVERSE[self.type]

    def scale(self) -> float:
        """Return what the sums are multiplied by."""
        length = self.lines()[1]
        count = 2 * (length if self.type != 1 else length + 1 if self.is_sine else length - 1)
        if self.norm == "ortho":
            return 1 / math.sqrt(count)
        return 1 / count if (self.norm == "forward") is self.is_forward else 1.0

    def plan(self) -> Plan:
        x = operand("x", self.x)
        if x.dtype not in WIDE_FLOATS:
            raise UnsupportedError(f"there is no {self.kind} of {x.dtype.value}", remedy="Use float32 or float64.")
        check_choice("norm", self.norm, *get_args(Norm))
        length = x.shape[axis_of(self.axis, x.ndim)]
        least = 2 if self.type == 1 and not self.is_sine else 1
        if length < least:
            raise InvalidArgumentError(f"{self.kind} of type {self.type} along {length} elements", remedy=f"Give {least} or more.")
        return planned(self.out, {"x": x}, x.shape, x.dtype, in_place=("x",))


@op()
class Dct(CosineTransform):
    """scipy's ``dct(x, type, axis=axis, norm=norm)`` of float32 or float64. ``out`` may be ``x``. See :class:`CosineTransform` for the parameters."""

    is_sine: ClassVar[bool] = False


@op()
class Idct(CosineTransform):
    """scipy's ``idct(x, type, axis=axis, norm=norm)``, the inverse of ``dct``. ``out`` may be ``x``. See :class:`CosineTransform` for the parameters."""

    is_sine: ClassVar[bool] = False
    is_forward: ClassVar[bool] = False


@op()
class Dst(CosineTransform):
    """scipy's ``dst(x, type, axis=axis, norm=norm)`` of float32 or float64. ``out`` may be ``x``. See :class:`CosineTransform` for the parameters."""

    is_sine: ClassVar[bool] = True


@op()
class Idst(CosineTransform):
    """scipy's ``idst(x, type, axis=axis, norm=norm)``, the inverse of ``dst``. ``out`` may be ``x``. See :class:`CosineTransform` for the parameters."""

    is_sine: ClassVar[bool] = True
    is_forward: ClassVar[bool] = False
