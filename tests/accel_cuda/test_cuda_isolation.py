"""The search for an item whose kernel reads out of range, on a GPU; in processes of their own, since the fault ends CUDA where it happens."""

from __future__ import annotations

import pytest

from tests.accel_cuda.cuda_programs import run_program

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("host", ["process", "auto"])
def test_the_item_that_reads_out_of_range_is_found(host: str) -> None:
    run_program(host, module="tests.accel_cuda.poison_programs")
