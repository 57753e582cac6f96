"""The families of ops that there are: those that come with ``accel``, and those of installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from accel.errors import InvalidArgumentError
from accel.ops import arrays, blas, dnn, elementwise, fft, linalg, reduce, rng, scan, solver, sort, sparse, tensor
from accel.ops.family import Family

if TYPE_CHECKING:
    from importlib import metadata

__all__ = ["ENTRY_POINT_GROUP", "FAMILIES", "FamilyName", "installed_families"]

ENTRY_POINT_GROUP = "accel.families"
"""Where a package names its families: ``stats = "my_package.stats:FAMILY"``."""

FAMILIES = (
    blas.FAMILY,
    linalg.FAMILY,
    tensor.FAMILY,
    solver.FAMILY,
    elementwise.FAMILY,
    reduce.FAMILY,
    arrays.FAMILY,
    scan.FAMILY,
    sort.FAMILY,
    dnn.FAMILY,
    fft.FAMILY,
    rng.FAMILY,
    sparse.FAMILY,
)
"""In the order of the documentation."""

FamilyName: TypeAlias = Literal[
    "blas", "linalg", "tensor", "solver", "elementwise", "reduce", "arrays", "scan", "sort", "dnn", "fft", "rng", "sparse"
]
"""Their names, for type checkers."""


def installed_families() -> list[tuple[str, Family | Exception]]:
    """Return all families by their names: those of ``accel``, then those that installed packages name. May block: it imports these.

    In the place of a family that cannot be imported, or is none, is what was raised.
    """
    from importlib import metadata  # its 15 ms are not spent by each child

    points = sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    return [*((family.name, family) for family in FAMILIES), *((point.name, _loaded(point)) for point in points)]


def _loaded(point: metadata.EntryPoint) -> Family | Exception:
    try:
        found = point.load()
    except Exception as error:  # a package's module may raise anything
        return error
    if isinstance(found, Family):
        return found
    return InvalidArgumentError(f"the entry point {point.value} of {point.name} is not a Family", remedy="Name the module's Family.")
