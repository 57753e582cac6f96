"""The pytest plugin: fixtures, skips of GPU tests, and the layouts that projects have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]


SUITE = """
import accel, numpy as np, pytest

@pytest.mark.asyncio
async def test_device_computes(accel_device, accel_system):
    a = np.random.default_rng().random((4, 4))
    ref = await accel_device.put(a)
    np.testing.assert_allclose(await accel_device.get(await accel_device.blas.gemm(ref, ref)), a @ a)
    assert accel_device.name == "cpu:0" and accel_device in accel_system.devices

@pytest.mark.asyncio
async def test_faults_are_planned(accel_device, fault_plan):
    fault_plan.poison_at(1)
    with pytest.raises(accel.ContextPoisonedError):
        await accel_device.put([1.0])
    assert fault_plan.fired == 1

@pytest.mark.gpu
def test_of_a_gpu():
    raise AssertionError("there is no GPU to run this on")
"""


def run(folder: Path, files: dict[str, str], *words: str) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def has_cuda() -> bool:
    import accel.registry

    try:
        accel.registry.find_device("cuda")
    except accel.BackendUnavailableError:
        return False
    return True


@pytest.mark.skipif(has_cuda(), reason="shows what happens without a GPU")
def test_fixtures_give_a_device_and_gpu_tests_skip_with_the_reason(tmp_path: Path) -> None:
    output = run(tmp_path, {"test_suite.py": SUITE}, "-rs", "-p", "accel.testing.pytest_plugin")
    assert "2 passed, 1 skipped" in output, output
    assert "CUDA" in output, output


def test_a_device_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    output = run(tmp_path, {"test_suite.py": SUITE}, "-p", "accel.testing.pytest_plugin", "--accel-device", "cpu:7")
    assert "2 errors" in output, output
    assert "cpu:7" in output, output


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


def test_addopts_serves_tests_in_any_folder_in_strict_mode(tmp_path: Path) -> None:
    said = run(tmp_path, {"pyproject.toml": BY_ADDOPTS, "service/tests/unit/test_it.py": TESTS}, "-W", "error", "--accel-device", "cpu:0")
    assert "4 passed" in said, said


def test_a_conftest_below_the_root_imports_the_fixtures(tmp_path: Path) -> None:
    said = run(
        tmp_path, {"pyproject.toml": STRICT, "service/tests/conftest.py": IMPORTED, "service/tests/test_it.py": TESTS}, "-W", "error"
    )
    assert "4 passed" in said, said
