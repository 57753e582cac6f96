"""A fault on the GPU ends CUDA for the process: every wait ends with the driver's code, the device is lost, and the rest of the system goes on."""

from __future__ import annotations

import pytest

from tests.accel_cuda.cuda_programs import run_program

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("completion", ["adaptive", "polled", "sync", "host_fn"])
def test_a_fault_ends_every_wait_and_loses_the_device(completion: str) -> None:
    run_program("loses_the_device", completion)


def test_a_fault_ends_batches_and_generations() -> None:
    run_program("ends_batches_and_generations")
