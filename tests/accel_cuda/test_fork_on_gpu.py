"""Lines 3 and 11 on a GPU: a forked child holds no device memory, and leaves without touching the device."""

from __future__ import annotations

import pytest

from tests.fork_leaves_support import run

pytestmark = pytest.mark.gpu


def test_closing_a_device_frees_its_memory_while_a_forked_child_lives() -> None:
    run("gpu_closing_frees_memory")


def test_a_process_that_a_library_forks_in_a_device_s_child_holds_none_of_its_memory() -> None:
    run("gpu_grandchild_holds_nothing")


def test_the_device_goes_on_when_a_fork_leaves_through_asyncio_run() -> None:
    run("gpu_fork_leaves")
