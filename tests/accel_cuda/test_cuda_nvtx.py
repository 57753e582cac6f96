"""Ranges for NVIDIA's tools: by a stand-in here, and under Nsight Systems on a GPU that has it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from accel.telemetry.probe import DeviceWork
from accel_cuda.core import nvtx

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Domain:
    """Takes down which ranges began and ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began: list[str] = []
        self.ended: list[int] = []
        self.made = 0

    def get_event_attributes(self, *, message: str) -> str:
        self.made += 1
        return message

    def start_range(self, attributes: str) -> int:
        self.began.append(attributes)
        return len(self.began)

    def end_range(self, number: int) -> None:
        self.ended.append(number)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: Any = ModuleType("nvtx")
    made.Domain, made.get_domain = Domain, Domain
    monkeypatch.setitem(sys.modules, "nvtx", made)
    nvtx.nvtx_probe.cache_clear()
    yield made
    nvtx.nvtx_probe.cache_clear()


def work(name: str) -> DeviceWork:
    return DeviceWork(name, (("blas", name),), None, is_timed=False)


def test_ranges_overlap_and_end_by_their_own_number(module: Any) -> None:
    probe = nvtx.nvtx_probe()
    assert probe is not None
    assert probe is nvtx.nvtx_probe(), "one in a process"
    first, second, third = work("gemm"), work("axpy"), work("gemm")
    for each in (first, second, third):
        probe.op_sent(each)
    for each in (second, first, third, third):
        probe.op_ended(each)
    domain = probe._domain
    assert (domain.name, domain.began, domain.ended) == ("accel", ["gemm", "axpy", "gemm"], [2, 1, 3])
    assert domain.made == 2, "attributes are made once for a name"


def test_without_a_tool_there_is_no_probe(module: Any) -> None:
    module.get_domain = lambda name: object()  # nvtx's dummy
    assert nvtx.nvtx_probe() is None


def test_without_nvtx_there_is_no_probe(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert nvtx.nvtx_probe() is None


PROGRAM = """
import asyncio
import numpy as np
import accel

async def main():
    async with accel.System() as system:
        device = await system.open_device("cuda", host="HOST")
        a = await device.put(np.ones((64, 64), np.float32))
        for _ in range(3):
            await device.blas.gemm(a, a)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("host", ["inline", "process"])
@pytest.mark.timeout(300)
def test_nsight_systems_sees_the_ranges(host: str, tmp_path: Path) -> None:
    nsys = shutil.which("nsys")
    if nsys is None:
        pytest.skip("Nsight Systems is not installed")
    pytest.importorskip("nvtx")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("HOST", host))
    report = tmp_path / "report"
    options = ["--trace=nvtx", "--trace-fork-before-exec=true", "--output", str(report), "--export=json"]
    ended = subprocess.run(
        [nsys, "profile", *options, sys.executable, str(program)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = report.with_suffix(".json").read_text()
    assert "NvtxEvent" in told
    assert '"gemm"' in told
    assert '"accel"' in told


@pytest.mark.gpu
@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_profile_of_a_gpu_has_the_time_of_its_kernels(host: Any, tmp_path: Path, rng: Any) -> None:
    import numpy as np

    import accel

    path = tmp_path / "trace.json"
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host, libraries=("blas",))
        a = await device.put(rng.standard_normal((2048, 2048), np.float32))
        await device.blas.gemm(a, a)
        async with device.profile(path):
            for _ in range(5):
                await device.blas.gemm(a, a)
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("cat") == "device"]
    gemms = [each for each in events if each["name"] == "gemm"]
    assert len(gemms) == 5
    for each in gemms:
        assert each["args"]["device_seconds"] == pytest.approx(each["dur"] * 1e-6, rel=0.01)
        assert 20 < each["dur"] < 50_000, "microseconds of a product of 2048 x 2048"
