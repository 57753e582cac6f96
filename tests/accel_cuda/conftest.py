"""Tests marked ``gpu`` are skipped where there is no CUDA device to be found, and only there."""

from __future__ import annotations

import asyncio

import pytest

import accel
from accel.testing.pytest_plugin import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems", "used_before", "used_driver"]


@pytest.fixture(scope="session")
def used_driver() -> None:
    """Compute one product: what CUDA keeps open for the whole process, such as cuBLAS's descriptors, is open from here on."""

    async def compute() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline", libraries=("blas",))
            await device.blas.gemm(*[await device.zeros((8, 8)) for _ in range(2)])

    asyncio.run(compute())


@pytest.fixture(autouse=True)
def used_before(request: pytest.FixtureRequest) -> None:
    """Let a test that needs the GPU begin after :func:`used_driver`."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("used_driver")
