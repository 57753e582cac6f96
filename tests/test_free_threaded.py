"""Line 8: a Python without the GIL is refused in words."""

from __future__ import annotations

import sys

import pytest

import accel


def test_a_python_without_the_gil_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(accel.UnsupportedError, match="without the GIL") as caught:
        accel.System()
    assert "PYTHON_GIL=1" in caught.value.remedy
