"""Tests marked ``gpu`` are skipped where there is no CUDA device to be found, and only there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.memory import HostArena
from accel.testing.pytest_plugin import pytest_collection_modifyitems
from accel_cuda.core.stream import CudaStream
from tests.accel_cuda.compute_support import opened
from tests.cuda_support import Context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

__all__ = ["context", "device", "pytest_collection_modifyitems", "streams", "used_before", "used_driver"]


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


@pytest.fixture
async def device(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    """The first CUDA device, with the ``LIBRARIES`` of the module where it names them."""
    libraries = getattr(request.module, "LIBRARIES", None)
    async with opened(**{} if libraries is None else {"libraries": libraries}) as device:
        yield device


@pytest.fixture
def context() -> Iterator[Any]:
    """A context whose driver is a stand-in."""
    arena = HostArena(1 << 20, block_bytes=1 << 20)
    yield Context(arena)
    arena.close()


@pytest.fixture
def streams(context: Any) -> list[CudaStream]:
    """Two streams of it."""
    made = []
    for handle in (77, 78):
        context.driver.answers["cuStreamCreate"] = handle
        made.append(CudaStream(context, {}))
    return made
