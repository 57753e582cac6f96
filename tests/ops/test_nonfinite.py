"""NaN and infinity: every op has numpy's result for them, or numpy's error; nothing hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import nonfinite_support as table

if TYPE_CHECKING:
    import numpy as np

    import accel

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("kind", [*table.SOLVERS, *table.FAMILIES])
async def test_results_are_numpy_s(device: accel.Device, kind: str, rng: np.random.Generator) -> None:
    found = [each for case in table.cases(kind, rng) if (each := await table.wrong(device, case))]
    assert not found, f"{len(found)} are wrong:\n" + "\n".join(found[:20])
    assert device.generation == 1
