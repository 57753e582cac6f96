"""The families of ops that come with ``accel``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from accel.ops import blas, dnn, elementwise, fft, reduce, rng

__all__ = ["FAMILIES", "FamilyName"]

FAMILIES = (blas.FAMILY, elementwise.FAMILY, reduce.FAMILY, dnn.FAMILY, fft.FAMILY, rng.FAMILY)
"""In the order of the documentation."""

FamilyName: TypeAlias = Literal["blas", "elementwise", "reduce", "dnn", "fft", "rng"]
"""Their names, for type checkers."""
