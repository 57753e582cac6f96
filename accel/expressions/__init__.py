"""Expressions of arrays that are awaited: the Python array API standard over one device."""

from __future__ import annotations

from accel.expressions.array import Array, LazyArrayError
from accel.expressions.evaluate import evaluate
from accel.expressions.namespace import Namespace

__all__ = ["Array", "LazyArrayError", "Namespace", "evaluate"]
