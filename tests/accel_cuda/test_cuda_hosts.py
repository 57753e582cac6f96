"""CUDA in a child process, and devices that move there when a fault has taken CUDA from this process."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness
from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import run_program
from tests.accel_cuda.hazard_programs import run_program as run_hazard
from tests.device_support import child_pid
from tests.fork_leaves_support import run as run_fork

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", checks("device"), ids=lambda check: check.name)
async def test_device_conformance_on_a_process_host(check: Check) -> None:
    await check.run(DeviceHarness(CudaBackend(), options={"host": "process"}))


async def test_a_killed_child_is_replaced() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process")
        x = await device.put(np.ones(4))
        os.kill(child_pid(device), signal.SIGKILL)
        with pytest.raises(accel.AccelError):
            for _ in range(1000):
                await asyncio.wait_for(device.get(x), 10)
        x = await asyncio.wait_for(device.put(np.arange(4.0)), 30)
        np.testing.assert_array_equal(await device.get(x), np.arange(4.0))
        assert device.generation == 2


async def test_a_fault_in_the_child_costs_this_process_nothing() -> None:
    async with accel.System() as system:
        # What the plan's fault is reported as: one without an error says that it was injected.
        error = accel.DriverError("an illegal address, as the fault plan asks", code=700, scope=accel.FaultScope.PROCESS)
        inline = await system.open_device("cuda", host="inline")
        device = await system.open_device("cuda", host="process", faults=FaultPlan().poison_at(2, error))
        here = await inline.put(np.ones(4))
        x = await device.put(np.ones(4))
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await asyncio.wait_for(device.elementwise.unary("neg", x), 30)
        assert (caught.value.code, caught.value.scope, caught.value.retryable) == (700, accel.FaultScope.PROCESS, True)
        x = await asyncio.wait_for(device.put(np.ones(4)), 30)
        np.testing.assert_array_equal(await device.get(x), np.ones(4))
        np.testing.assert_array_equal(await inline.get(here), np.ones(4))


def test_an_inline_device_moves_to_a_child() -> None:
    run_program("moves_to_a_child")


@pytest.mark.parametrize("completion", ["adaptive", "polled", "sync", "host_fn"])
def test_a_fault_ends_every_wait_and_loses_the_device(completion: str) -> None:
    run_program("loses_the_device", completion)


def test_a_fault_ends_batches_and_generations() -> None:
    run_program("ends_batches_and_generations")


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_page_locked_memory_of_other_libraries_outlives_a_fail_over(library: str) -> None:
    run_hazard(f"puts_pinned_memory_of_{library}")


def test_slabs_and_workspaces_come_back_and_the_log_says_what_stays() -> None:
    run_hazard("gives_slabs_back")


def test_a_device_of_a_poisoned_process_is_reopened_in_a_child() -> None:
    run_hazard("reopens_in_a_child")


def test_closing_a_device_frees_its_memory_while_a_forked_child_lives() -> None:
    run_fork("gpu_closing_frees_memory")


def test_a_process_that_a_library_forks_in_a_device_s_child_holds_none_of_its_memory() -> None:
    run_fork("gpu_grandchild_holds_nothing")


def test_the_device_goes_on_when_a_fork_leaves_through_asyncio_run() -> None:
    run_fork("gpu_fork_leaves")
