"""The families of ops that there are: those that come with ``accel``, and those of installed packages."""

from __future__ import annotations

from importlib import metadata
from typing import Literal, TypeAlias

from accel.errors import InvalidArgumentError
from accel.ops import blas, dnn, elementwise, fft, reduce, rng
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
    InvalidArgumentError
        If an entry point names something else.
    Exception
        What importing a package's family raises.
    """
    points = sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    return (*FAMILIES, *map(_loaded, points))


def _loaded(point: metadata.EntryPoint) -> Family:
    found = point.load()
    if not isinstance(found, Family):
        raise InvalidArgumentError(f"the entry point {point.value} of {point.name} is not a Family", remedy="Name the module's Family.")
    return found
