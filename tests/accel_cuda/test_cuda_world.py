"""Two GPUs as the ranks of a communicator, and of a world."""

from __future__ import annotations

import pytest

from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import run_program

pytestmark = pytest.mark.gpu

_PROGRAMS = "tests.accel_cuda.nccl_programs"


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    found = len(CudaBackend().devices())
    if found < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {found}")


def test_each_collective_of_a_communicator_is_numpys() -> None:
    run_program("conformance", module=_PROGRAMS)


def test_a_rank_that_waits_for_others_leaves() -> None:
    run_program("leaves_a_join", module=_PROGRAMS)


@pytest.mark.timeout(120)
def test_thirty_losses_of_a_rank_leave_nothing_behind() -> None:
    run_program("losses", "30", module=_PROGRAMS, timeout=115)
