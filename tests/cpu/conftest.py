"""Fixtures of the CPU backend's tests: a device of the backend itself, and work that waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accel.cpu.backend import CpuBackend, CpuDevice
from tests.cpu_support import Gate

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = CpuBackend().open(0)
    yield opened
    opened.close(abandon=True)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()
