"""Tests marked ``gpu`` are skipped where there is no CUDA device to be found, and only there."""

from __future__ import annotations

from accel.testing.pytest_plugin import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
