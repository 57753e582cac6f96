"""``accel doctor`` tries the devices of other backends too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from accel.cli import doctor, main

if TYPE_CHECKING:
    import pytest


def test_doctor_tests_other_devices_without_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_usable_beside_the_cpu", lambda: ["cpu:0"])
    assert main(["doctor", "--json"]) == 0
    (found,) = (check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "self-test cpu:0")
    assert found["state"] == "ok"
    assert [step.split()[0] for step in found["detail"].split(", ")] == ["open", "gemm", "check", "close"]
