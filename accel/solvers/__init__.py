"""Sparse systems: matrices on their way to a device and back, and iterative solvers made of device ops."""

from __future__ import annotations

from accel.solvers.sparse import DeviceSparse

__all__ = ["DeviceSparse"]
