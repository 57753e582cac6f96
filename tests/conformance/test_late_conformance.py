"""A device whose work ends later, and is looked for, passes the device level of the conformance suite too: hardware is waited for in this way."""

from __future__ import annotations

import pytest

from accel import registry
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness
from tests.late_backend import LateBackend, LateDevice

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")


@pytest.mark.parametrize("check", checks("device"), ids=lambda check: check.name)
@pytest.mark.parametrize(("delay", "every"), [(0.0, 0), (4e-6, 3), (150e-6, 2), (2e-3, 5)])
async def test_late_device_conformance(check: Check, delay: float, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateDevice, "delay", delay)
    monkeypatch.setattr(LateDevice, "every", every)
    await check.run(DeviceHarness(LateBackend()))
