"""The CPU backend passes the compute level of the conformance suite."""

from __future__ import annotations

import pytest

from accel.cpu.backend import CpuBackend
from accel.testing.conformance import Check, Harness, checks


@pytest.mark.parametrize("check", checks("compute"), ids=lambda check: check.name)
async def test_compute_conformance(check: Check) -> None:
    await check.run(Harness(CpuBackend()))
