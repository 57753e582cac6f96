"""Every fault that a CUDA kernel can bring about is survived: on each host, with and without a spare child, beside torch, and with the memory given back."""

from __future__ import annotations

import pytest

from tests.accel_cuda.cuda_programs import run_program
from tests.accel_cuda.fault_programs import FAULTS

pytestmark = pytest.mark.gpu

_FAULTS = "tests.accel_cuda.fault_programs"
_MODULE = "tests.accel_cuda.standby_programs"


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    ("host", "standby", "companion"),
    [("process", "none", ""), ("auto", "none", "torch"), ("auto", "context", "")],
)
def test_a_fault_is_survived(kind: str, host: str, standby: str, companion: str) -> None:
    run_program(kind, host, standby, companion, module=_FAULTS)


def test_every_fault_one_after_the_other_is_survived_beside_torch() -> None:
    run_program("every", "process", "context", "torch", module=_FAULTS)


@pytest.mark.parametrize("host", ["auto", "process"])
def test_a_fault_is_survived_by_a_spare_with_its_imports(host: str) -> None:
    run_program("illegal_address", host, "imports", module=_FAULTS)


@pytest.mark.parametrize("standby", ["none", "context"])
def test_memory_comes_back_before_the_move(standby: str) -> None:
    run_program("gives_its_memory_back", standby, module=_MODULE)


def test_inline_devices_of_a_process_move_together() -> None:
    run_program("inline_devices_move_together", module=_MODULE)


@pytest.mark.parametrize("host", ["process", "auto"])
def test_a_kernel_that_never_ends_is_ended(host: str) -> None:
    run_program("kernels_that_never_end", host, module=_MODULE)


def test_torch_and_cupy_in_the_same_process() -> None:
    run_program("lives_beside_torch_and_cupy", module=_MODULE)
