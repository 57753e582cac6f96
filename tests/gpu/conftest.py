"""Tests marked ``gpu`` are skipped where there is no CUDA device to be found, and only there."""

from __future__ import annotations

import pytest

from accel.backend import load_backend
from accel.testing.pytest_plugin import pytest_collection_modifyitems

__all__ = ["driver_loaded", "pytest_collection_modifyitems"]


@pytest.fixture(scope="session")
def driver_loaded() -> None:
    """Use the driver once: what it keeps open for the whole process is open from here on, and is nothing that a test left behind."""
    device = load_backend("cuda").open(0)
    stream = device.create_stream()
    device.create_compute(stream).synchronize()
    stream.close()
    device.close()
