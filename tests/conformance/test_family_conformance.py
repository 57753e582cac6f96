"""Every op of every family gives what numpy gives: on the CPU, inline and in a child, and where results are waited for as those of hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from accel import registry
from accel.cpu.backend import CpuBackend
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness
from tests.late_backend import LateBackend

if TYPE_CHECKING:
    from accel.backend import AccelBackend

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("check", checks("families"), ids=lambda check: check.name)
@pytest.mark.parametrize("kind", ["inline", "process", "late"])
async def test_family_conformance(check: Check, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    backend: AccelBackend = LateBackend() if kind == "late" else CpuBackend()
    options: dict[str, Any] = {"host": "process"} if kind == "process" else {}
    await check.run(DeviceHarness(backend, options=options))
