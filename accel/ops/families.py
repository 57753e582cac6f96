"""The families of ops that there are: those that come with ``accel``, and those of installed packages."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Literal, TypeAlias

from accel.ops import blas, dnn, elementwise, fft, reduce, rng

if TYPE_CHECKING:
    from accel.ops.family import Family

__all__ = ["ENTRY_POINT_GROUP", "FAMILIES", "FamilyName", "installed_families"]

ENTRY_POINT_GROUP = "accel.families"
"""Where a package names its families: ``stats = "my_package.stats:FAMILY"``."""

FAMILIES = (blas.FAMILY, elementwise.FAMILY, reduce.FAMILY, dnn.FAMILY, fft.FAMILY, rng.FAMILY)
"""In the order of the documentation."""

FamilyName: TypeAlias = Literal["blas", "elementwise", "reduce", "dnn", "fft", "rng"]
"""Their names, for type checkers."""


def installed_families() -> tuple[Family, ...]:
    """Return all families: those of ``accel``, then those of installed packages, by name. May block: it imports these.

    Raises
    ------
    Exception
        What importing a package's family raises.
    """
    points = sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    return (*FAMILIES, *(point.load() for point in points))
