"""An opt-in pytest plugin: ``pytest -p accel.testing.pytest_plugin``, or ``pytest_plugins = ["accel.testing.pytest_plugin"]`` in a conftest.

It adds the option ``--accel-device`` (default ``cpu``), the fixtures ``accel_system``, ``accel_device`` and ``fault_plan``, and the marker ``gpu``, whose
tests are skipped only where there is no CUDA device to be found. The fixtures are asynchronous; pytest-asyncio runs them, or anyio's plugin.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from accel.device import Device, System
from accel.errors import BackendUnavailableError
from accel.registry import find_device
from accel.testing.faults import FaultPlan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

__all__ = ["accel_device", "accel_system", "fault_plan", "pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]


def _async_fixture() -> Callable[..., Any]:
    """Return what marks an asynchronous fixture: pytest-asyncio in its strict mode wants its own."""
    if importlib.util.find_spec("pytest_asyncio") is not None:
        import pytest_asyncio

        return pytest_asyncio.fixture
    return pytest.fixture


async_fixture = _async_fixture()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--accel-device``."""
    parser.getgroup("accel").addoption(
        "--accel-device", default="cpu", help="device that the accel_device fixture opens: cpu, cuda:1, auto, a UUID (default: cpu)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skips where there is none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where no CUDA device can be found; an installation that is broken in another way fails them instead."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    try:
        find_device("cuda")
    except BackendUnavailableError as error:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {error.message}"))


@pytest.fixture
def fault_plan() -> Iterator[FaultPlan]:
    """Give an empty plan, which ``accel_device`` uses too; its hangs are released at the end of the test."""
    plan = FaultPlan()
    yield plan
    plan.release()


@async_fixture
async def accel_system() -> AsyncIterator[System]:
    """Give an open system that is closed after the test."""
    async with System(name="test") as system:
        yield system


@async_fixture
async def accel_device(accel_system: System, fault_plan: FaultPlan, request: pytest.FixtureRequest) -> Device:
    """Give the device that ``--accel-device`` names, opened with ``fault_plan``."""
    spec: str = request.config.getoption("--accel-device")
    return await accel_system.open_device(spec, faults=fault_plan)
