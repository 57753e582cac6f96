"""What the backend needs and leaves of the threads that call it: contexts, capture modes, and several GPUs in one process."""

from __future__ import annotations

import importlib.util

import pytest

from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import run_program
from tests.accel_cuda.hazard_programs import run_program as run_hazard

pytestmark = pytest.mark.gpu

STRATEGIES = ["adaptive", "polled", "sync", "host_fn"]
MODULE = "tests.accel_cuda.thread_programs"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.parametrize("completion", STRATEGIES)
def test_the_current_context_stays_as_it_was(completion: str) -> None:
    run_program("leaves_the_current_context", completion, module=MODULE)


@needs_torch
def test_switches_between_awaits_are_followed() -> None:
    run_program("follows_switches_between_awaits", "adaptive", module=MODULE)


@needs_torch
@pytest.mark.parametrize("completion", STRATEGIES)
def test_captures_of_the_user_are_left_alone(completion: str) -> None:
    run_program("leaves_captures_alone", completion, module=MODULE)


@needs_torch
@pytest.mark.parametrize("completion", ["adaptive", "host_fn"])
def test_two_gpus_serve_in_one_loop_beside_torch(completion: str) -> None:
    if len(CudaBackend().devices()) < 2:
        pytest.skip("there is one GPU here")
    run_program("serves_two_gpus", completion, module=MODULE)


@pytest.mark.timeout(150)
def test_nothing_hangs_beside_python_callbacks_of_other_libraries() -> None:
    run_hazard("works_beside_python_callbacks", seconds=140)


def test_no_python_thread_waits_for_the_launch_queue() -> None:
    run_hazard("fills_the_queue")


def test_a_copy_for_which_no_thread_starts_fails_and_may_be_tried_again() -> None:
    run_hazard("has_no_thread_for_a_copy")


def test_products_of_new_shapes_do_not_hold_the_loop() -> None:
    run_hazard("multiplies_new_shapes")
