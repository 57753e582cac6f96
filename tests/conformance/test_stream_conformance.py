from __future__ import annotations

import pytest

from accel.cpu.backend import CpuBackend
from accel.testing import conformance


@pytest.mark.parametrize("check", conformance.checks("streams"), ids=lambda check: check.name)
async def test_cpu_streams(check: conformance.Check) -> None:
    await check.run(conformance.Harness(CpuBackend()))
