"""Tests marked ``gpu`` are skipped where there is no CUDA device to be found, and only there."""

from __future__ import annotations

import pytest

from accel.testing.pytest_plugin import pytest_collection_modifyitems
from accel_cuda import CudaBackend

__all__ = ["pytest_collection_modifyitems", "used_before", "used_driver"]


@pytest.fixture(scope="session")
def used_driver() -> None:
    """Use the GPU once: what the driver keeps open for the whole process is open from here on."""
    device = CudaBackend().open(0)
    device.create_compute(device.create_stream(), "blas")
    device.close()


@pytest.fixture(autouse=True)
def used_before(request: pytest.FixtureRequest) -> None:
    """Let a test that needs the GPU begin after :func:`used_driver`."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("used_driver")
