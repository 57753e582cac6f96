"""The measurement of hostile clients in short: what must hold whatever the machine, with wide limits of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.hostile_clients import scenarios

if TYPE_CHECKING:
    import numpy as np

PATIENCE = 10.0
"""Beside other tests; the limits themselves are measured by the benchmark."""


@pytest.mark.parametrize("name", ["killed", "each", "flood"])
async def test_innocent_clients_are_answered_and_the_device_is_kept(name: str, rng: np.random.Generator) -> None:
    line = await scenarios(0.7, PATIENCE)[name].run("cpu", 1, 0.3, int(rng.integers(1 << 32)))
    assert line.violated == [], line
    assert line.failed == 0
    assert line.answered > 0
