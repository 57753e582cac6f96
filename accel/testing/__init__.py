"""Tools for testing services and backends; none of them needs pytest."""

from __future__ import annotations

from accel.testing.faults import FaultPlan

__all__ = ["FaultPlan"]
