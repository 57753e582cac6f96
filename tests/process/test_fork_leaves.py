"""Line 11: a fork that leaves through ``asyncio.run()`` does not touch its parent's devices."""

from __future__ import annotations

import os
import sys

import pytest

from tests.fork_leaves_support import run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="forks")


@pytest.mark.parametrize(("loop", "way"), [("asyncio", "return"), ("asyncio", "exit"), ("asyncio", "exception"), ("uvloop", "exit")])
def test_the_parent_s_ops_go_on_when_a_fork_leaves_through_asyncio_run(loop: str, way: str) -> None:
    run("fork_leaves", loop, way)


@pytest.mark.parametrize("host", ["inline", "process"])
def test_ops_are_refused_in_a_fork_that_leaves(host: str) -> None:
    run("ops_are_refused", host)


def test_a_fork_of_a_worker_thread_ends_with_its_function() -> None:
    run("worker_thread_forks")
