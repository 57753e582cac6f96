"""A fault of one of two GPUs: who is in a child of its own serves on as if nothing were, who is in this process moves."""

from __future__ import annotations

import pytest

from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import run_program

pytestmark = pytest.mark.gpu

_MODULE = "tests.accel_cuda.two_gpu_programs"


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    found = len(CudaBackend().devices())
    if found < 2:
        pytest.skip(f"it takes two GPUs, and this process may use {found}")


@pytest.mark.parametrize("faulty", ["0", "1"])
@pytest.mark.parametrize("standby", ["none", "context"])
def test_the_other_gpu_sees_nothing_of_a_fault_in_a_child(faulty: str, standby: str) -> None:
    run_program("children_of_two_gpus", faulty, standby, module=_MODULE)


def test_auto_keeps_the_gpus_apart() -> None:
    run_program("auto_on_two_gpus", module=_MODULE)


def test_a_fault_in_this_process_moves_the_devices_of_both_gpus() -> None:
    run_program("inline_devices_of_two_gpus", module=_MODULE)
