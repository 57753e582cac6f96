"""The pytest plugin in the layouts that projects have: strict mode, a conftest.py below the root, a device with options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
    import accel
    import pytest

    @pytest.mark.asyncio
    async def test_a_fault(accel_device: accel.Device, fault_plan) -> None:
        fault_plan.poison_at(1)
        with pytest.raises(accel.ContextPoisonedError):
            await accel_device.put([1.0])
        assert accel_device.name == "cpu:0"

    @pytest.mark.asyncio
    @pytest.mark.parametrize("accel_options", [{"memory_limit": 1 << 20}, {"memory_limit": 2 << 20}])
    async def test_options(accel_device: accel.Device, accel_options) -> None:
        assert accel_device.info().memory.limit == accel_options["memory_limit"]

    class TestOwn:
        @pytest.fixture
        def accel_options(self):
            return {"pending_limit": 1, "overload": "reject"}

        @pytest.mark.asyncio
        async def test_options_of_a_class(self, accel_device: accel.Device, accel_system: accel.System) -> None:
            assert accel_device in accel_system.devices
"""

BY_ADDOPTS = """
    [tool.pytest.ini_options]
    asyncio_mode = "strict"
    asyncio_default_fixture_loop_scope = "function"
    addopts = "-p accel.testing.pytest_plugin"
"""

STRICT = """
    [tool.pytest.ini_options]
    asyncio_mode = "strict"
    asyncio_default_fixture_loop_scope = "function"
"""

IMPORTED = "from accel.testing.pytest_plugin import accel_device, accel_options, accel_system, fault_plan\n"


def run(folder: Path, files: dict[str, str], *words: str) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_addopts_serves_tests_in_any_folder_in_strict_mode(tmp_path: Path) -> None:
    said = run(tmp_path, {"pyproject.toml": BY_ADDOPTS, "service/tests/unit/test_it.py": TESTS}, "--accel-device", "cpu:0")
    assert "4 passed" in said, said


def test_a_conftest_below_the_root_imports_the_fixtures(tmp_path: Path) -> None:
    said = run(tmp_path, {"pyproject.toml": STRICT, "service/tests/conftest.py": IMPORTED, "service/tests/test_it.py": TESTS})
    assert "4 passed" in said, said
