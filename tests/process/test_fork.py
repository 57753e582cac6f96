"""Forks: what is closed in the child, what a fork waits for in its parent, and that one that leaves does not touch the parent's devices."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from accel.cpu.context import CpuContext
from accel.cpu.stream import CpuEvent, CpuStream
from accel.fork import PAUSE, DeviceFiles, close_after_fork
from tests.child_support import links_of
from tests.fork_leaves_support import run

ROOT = Path(__file__).resolve().parents[2]


def test_files_of_a_driver_are_closed_in_a_fork_and_others_stay(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("nvidia0", "nvidia-uvm", "other")]
    opened = []
    for path in paths:
        path.write_bytes(b"")
        opened.append(os.open(path, os.O_RDONLY))
    files = DeviceFiles((str(tmp_path / "nvidia"),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later, about forks of processes with threads
        pid = os.fork()
    if not pid:
        left = set(links_of().values())
        os._exit(0 if [str(path) in left for path in paths] == [False, False, True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in opened:
        os.close(fd)  # they are this process's as before
    del files


class Slab:
    """Has a descriptor of a driver's file, as memory of a GPU does."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        self.is_closed = False
        close_after_fork(self)

    def close_inherited(self) -> None:
        os.close(self.fd)
        self.is_closed = True


def test_slabs_close_their_own_descriptors_before_the_driver_s_files_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "nvidiactl"
    path.write_bytes(b"")
    slabs = [Slab(path) for _ in range(8)]
    files = DeviceFiles((str(path),))
    slabs += [Slab(path) for _ in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        os._exit(0 if all(slab.is_closed for slab in slabs) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for slab in slabs:
        os.close(slab.fd)
    del files


def forked() -> None:
    """Fork a child that ends at once, and wait for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_fork_waits_for_what_streams_compute_and_nothing_begins_meanwhile() -> None:
    """The handlers of a BLAS end its threads before a fork: what they are computing would never end."""
    context = CpuContext("cpu:0")
    first, second = CpuStream(context, "first"), CpuStream(context, "second")
    seen: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(20)
        seen.append("ended")

    first.submit(work)
    waits = CpuEvent(context)
    first.record(waits)
    second.wait(waits)  # which waits for another stream computes nothing
    second.submit(lambda: seen.append("after"))
    assert begun.wait(20)
    threading.Timer(0.05, may_end.set).start()
    forked()
    seen.insert(1, "forked")
    assert seen[:2] == ["ended", "forked"]
    first.synchronize()
    second.synchronize()
    assert "after" in seen
    for stream in (first, second):
        stream.submit(lambda: seen.append("again"))
        stream.close()
    assert seen.count("again") == 2


def test_fork_waits_for_no_work_without_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("accel.fork.PAUSE", 0.05)
    context = CpuContext("cpu:0")
    stream = CpuStream(context, "stream")
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(20)

    stream.submit(work)
    assert begun.wait(20)
    with caplog.at_level("WARNING", "accel"):
        forked()
    assert "fork_beside_running_work" in caplog.text
    may_end.set()
    stream.close()


def test_fork_by_work_of_a_stream_does_not_wait_for_itself() -> None:
    context = CpuContext("cpu:0")
    stream = CpuStream(context, "stream")
    began = time.monotonic()
    stream.submit(forked)
    stream.synchronize()
    assert time.monotonic() - began < PAUSE
    stream.close()


BESIDE_PRODUCTS = """
import asyncio, os, sys, warnings
import numpy as np, accel

async def main():
    warnings.simplefilter("ignore")
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", libraries=["blas"])
        x = await device.put(np.ones((160, 160), "f4"))
        done = 0
        async def load():
            nonlocal done
            while True:
                await device.blas.gemm(x, x)
                done += 1
        tasks = [asyncio.ensure_future(load()) for _ in range(2)]
        for _ in range(8):
            before = done
            while done < before + 2:  # all of them, some of them at this moment
                await asyncio.sleep(0)
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
        for task in tasks:
            task.cancel()
        print("went on", float((await device.get(await device.blas.gemm(x, x)))[0, 0]))

asyncio.run(main())
"""


def test_products_go_on_after_forks_beside_them() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", BESIDE_PRODUCTS], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "went on 160.0\n", done


@pytest.mark.parametrize(("loop", "way"), [("asyncio", "return"), ("asyncio", "exception"), ("uvloop", "exit")])
def test_the_parent_s_ops_go_on_when_a_fork_leaves_through_asyncio_run(loop: str, way: str) -> None:
    run("fork_leaves", loop, way)


@pytest.mark.parametrize("host", ["inline", "process"])
def test_ops_are_refused_in_a_fork_that_leaves(host: str) -> None:
    run("ops_are_refused", host)


def test_a_fork_of_a_worker_thread_ends_with_its_function() -> None:
    run("worker_thread_forks")


@pytest.mark.parametrize(("host", "way"), [("inline", "os"), ("process", "os"), ("process", "multiprocessing")])
def test_closing_a_device_frees_its_memory_while_a_forked_child_lives(host: str, way: str) -> None:
    run("closing_frees_memory", host, way)


@pytest.mark.parametrize("host", ["inline", "process"])
def test_arrays_that_the_user_holds_stay_readable_in_a_forked_child(host: str) -> None:
    run("arrays_stay_readable", host)


def test_a_process_that_a_library_forks_in_a_device_s_child_holds_none_of_its_memory() -> None:
    run("grandchild_holds_nothing")
