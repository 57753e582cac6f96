"""Two GPUs as the ranks of a communicator, and of a world."""

from __future__ import annotations

import pytest

from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import run_program

pytestmark = pytest.mark.gpu

_PROGRAMS = "tests.accel_cuda.nccl_programs"


@pytest.fixture
def two_gpus() -> None:
    found = len(CudaBackend().devices())
    if found < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {found}")


@pytest.fixture(autouse=True)
def bindings() -> None:
    pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")


def test_each_collective_of_one_rank_is_numpys() -> None:
    run_program("conformance", "1", module=_PROGRAMS)


def test_each_collective_of_two_ranks_is_numpys(two_gpus: None) -> None:
    run_program("conformance", "2", module=_PROGRAMS)


def test_a_rank_that_waits_for_others_leaves() -> None:
    run_program("leaves_a_join", module=_PROGRAMS)


def test_a_communicator_waits_for_the_graphs_that_captured_it() -> None:
    run_program("outlived_by_a_graph", module=_PROGRAMS)


@pytest.mark.timeout(120)
def test_thirty_losses_of_a_rank_leave_nothing_behind(two_gpus: None) -> None:
    run_program("losses", "30", module=_PROGRAMS, timeout=115)
