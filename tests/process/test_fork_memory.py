"""Line 3: a forked child holds no memory of its parent's devices."""

from __future__ import annotations

import os
import sys

import pytest

from tests.fork_leaves_support import run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="forks, and looks at /proc")


@pytest.mark.parametrize(("host", "way"), [("inline", "os"), ("process", "os"), ("process", "multiprocessing")])
def test_closing_a_device_frees_its_memory_while_a_forked_child_lives(host: str, way: str) -> None:
    run("closing_frees_memory", host, way)


@pytest.mark.parametrize("host", ["inline", "process"])
def test_arrays_that_the_user_holds_stay_readable_in_a_forked_child(host: str) -> None:
    run("arrays_stay_readable", host)


def test_a_process_that_a_library_forks_in_a_device_s_child_holds_none_of_its_memory() -> None:
    run("grandchild_holds_nothing")
