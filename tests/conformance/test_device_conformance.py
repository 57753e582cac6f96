"""The CPU backend passes the device level of the conformance suite, however it is waited for and however its streams are shared."""

from __future__ import annotations

from typing import Any

import pytest

from accel.cpu.backend import CpuBackend
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness

pytestmark = pytest.mark.usefixtures("nothing_left")

CHECKS = checks("device")
# What waiting and streams have a part in; that memory is kept and computed with right is the same for all.
MOVING = [
    check for check in CHECKS if not check.name.startswith(("device.put", "device.large", "device.wrong", "device.refs", "device.memory"))
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_device_conformance(check: Check) -> None:
    await check.run(DeviceHarness(CpuBackend()))


@pytest.mark.parametrize("check", MOVING, ids=lambda check: check.name)
@pytest.mark.parametrize(
    "options",
    [{"completion": "polled"}, {"completion": "sync"}, {"completion": "host_fn"}, {"streams": 1}, {"streams": 2}],
    ids=lambda options: next(iter(options.values())),
)
async def test_device_conformance_with_other_options(check: Check, options: dict[str, Any]) -> None:
    await check.run(DeviceHarness(CpuBackend(), options=options))


async def test_debug_changes_no_result() -> None:
    for check in CHECKS:
        if check.name in ("device.libraries_compute", "device.batch_computes", "device.fault_is_survived"):
            await check.run(DeviceHarness(CpuBackend(), options={"debug": True}))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_device_conformance_on_a_process_host(check: Check) -> None:
    await check.run(DeviceHarness(CpuBackend(), options={"host": "process"}))
