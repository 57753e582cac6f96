"""The pytest plugin, used as a stranger's test suite would use it: in a pytest process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def run_pytest(folder: Path, *arguments: str) -> str:
    (folder / "test_suite.py").write_text(SUITE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rs",
        "-p",
        "accel.testing.pytest_plugin",
        "-p",
        "no:cacheprovider",
        *arguments,
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=60, check=False)
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
    output = run_pytest(tmp_path)
    assert "2 passed, 1 skipped" in output, output
    assert "CUDA" in output, output


def test_a_device_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "--accel-device", "cpu:7")
    assert "2 errors" in output, output
    assert "cpu:7" in output, output
