"""Values that a device keeps by name, such as the weights of a model."""

from __future__ import annotations

from accel.residents.residents import Residents

__all__ = ["Residents"]
