"""An opt-in pytest plugin: ``pytest -p accel.testing.pytest_plugin``, which ``addopts`` in ``pyproject.toml`` can say for every run.

``pytest_plugins = ["accel.testing.pytest_plugin"]`` in the root ``conftest.py`` does the same; a ``conftest.py`` below may import the fixtures,
without the rest.

It adds the option ``--accel-device`` (default ``cpu``), the fixtures ``accel_system``, ``accel_device``, ``accel_options`` and ``fault_plan``, and the
marker ``gpu``, whose tests are skipped only where there is no CUDA device to be found. ``accel_system`` and ``accel_device`` are asynchronous;
pytest-asyncio runs them, in its strict mode too, or anyio's plugin.
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

__all__ = [
    "accel_device",
    "accel_options",
    "accel_system",
    "fault_plan",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
]

_DEVICE = "cpu"
"""What is opened unless ``--accel-device`` says otherwise; the option is not there where only the fixtures were imported."""


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
        "--accel-device", default=_DEVICE, help="device that the accel_device fixture opens: cpu, cuda:1, auto, a UUID (default: cpu)"
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


@pytest.fixture
def accel_options() -> dict[str, Any]:
    """Give the options of :meth:`accel.System.open_device` that ``accel_device`` is opened with: none. Override or parametrize it."""
    return {}


@async_fixture
async def accel_system() -> AsyncIterator[System]:
    """Give an open system that is closed after the test."""
    async with System(name="test") as system:
        yield system


@async_fixture
async def accel_device(
    accel_system: System, accel_options: dict[str, Any], fault_plan: FaultPlan, request: pytest.FixtureRequest
) -> Device:
    """Give the device that ``--accel-device`` names, opened with ``fault_plan`` and ``accel_options``."""
    spec: str = request.config.getoption("--accel-device", _DEVICE)
    return await accel_system.open_device(spec, **{"faults": fault_plan, **accel_options})
