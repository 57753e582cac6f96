"""Sparse systems: matrices to a device and back, and iterative solvers made of its ops."""

from __future__ import annotations

from accel.solvers.sparse import DeviceSparse

__all__ = ["DeviceSparse"]
