"""NaN and infinity on the GPU: the table of ``tests/nonfinite_support.py``, as on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import nonfinite_support as table

if TYPE_CHECKING:
    import numpy as np

    import accel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", [*table.SOLVERS, *table.FAMILIES])
async def test_results_are_numpy_s(device: accel.Device, kind: str, rng: np.random.Generator) -> None:
    # Some of cuDNN's kernels of 16-bit convolutions make 0 of a sum that is -infinity.
    cases = [case for case in table.cases(kind, rng) if not (case.name.startswith("conv2d float16") and case.name.endswith("inf"))]
    found = [each for case in cases if (each := await table.wrong(device, case))]
    assert not found, f"{len(found)} are wrong:\n" + "\n".join(found[:20])
    assert device.generation == 1
