"""The CUDA backend passes the conformance suite, all but what an inline context cannot do: survive a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accel.testing.conformance import Check, Harness, checks
from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import run_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.backend import AccelDevice

# Compilers fill a cold cache of programs first.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

# A fault takes CUDA from the whole process, so that no context can follow it here; test_cuda_faults says what happens instead.
REBUILDING = {
    "device.fault_is_survived",
    "device.everyone_in_flight_is_told",
    "device.load_goes_on_through_faults",
    "device.batch_meets_a_fault",
    "device.generations_are_told",
    "device.durable_data_outlives_faults",
    "device.torn_buffers_say_so",
}
FAULTING = {
    "streams.host_function_never_runs_after_a_fault",
    "streams.poison_reaches_every_wait",
    "streams.nothing_succeeds_after_a_fault",
    "streams.marks_seen_before_a_fault_stay_passed",
    "device.spent_budget_loses_the_device",
}
HEALTHY = [check for check in checks() if check.name not in FAULTING | REBUILDING]


@pytest.fixture(scope="module")
def primary_context() -> Iterator[AccelDevice]:
    """Keep the primary context, which takes tenths of a second to make, between the checks."""
    context = CudaBackend().open(0)
    yield context
    context.close()


@pytest.mark.parametrize("check", HEALTHY, ids=lambda check: check.name)
async def test_conformance(check: Check, primary_context: AccelDevice) -> None:
    await check.run(Harness(CudaBackend()))


@pytest.mark.parametrize("name", sorted(FAULTING))
def test_conformance_with_a_fault(name: str) -> None:
    run_program("check", name)


def test_every_check_is_run_or_named() -> None:
    assert {check.name for check in checks()} == {check.name for check in HEALTHY} | FAULTING | REBUILDING
