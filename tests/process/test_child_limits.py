"""Starting and ending child processes leaves nothing, also when it fails or is cancelled."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import statistics
import subprocess
import sys
import threading
import time

import pytest

import accel
from accel.actors import ActorSystem
from accel.process.child import ChildProcess
from tests.child_support import OURS, ended, held, no_child_left

__all__ = ["no_child_left"]

pytestmark = pytest.mark.usefixtures("nothing_left", "no_child_left")


async def test_fifty_starts_and_ends_leave_nothing() -> None:
    milliseconds = []
    async with ActorSystem() as system:
        await (await ChildProcess.start(system, f"{OURS}returns")).aclose(grace=20.0)
        before = held()
        for number in range(50):
            begun = time.perf_counter()
            child = await ChildProcess.start(system, f"{OURS}{'returns' if number % 2 else 'ignores_socket'}")
            if number % 2:
                await ended(child)
                milliseconds.append((time.perf_counter() - begun) * 1e3)
            await child.aclose(grace=0.0)
        assert held() == before
    print(f"an empty target, start to end: median {statistics.median(milliseconds):.0f} ms")


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    async with ActorSystem() as system:
        await (await ChildProcess.start(system, f"{OURS}returns")).aclose(grace=20.0)
        before = held()
        for turns in range(12):
            start = asyncio.create_task(ChildProcess.start(system, f"{OURS}ignores_socket"))
            for _ in range(turns % 4):
                await asyncio.sleep(0.001 * (turns // 4))
            start.cancel()
            try:
                child = await start
            except asyncio.CancelledError:
                continue
            await child.aclose(grace=0.0)
        assert held() == before


def limit_for(free: int) -> int:
    """Return the limit of open files that leaves ``free`` descriptors to be opened."""
    taken = {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    numbers = (number for number in itertools.count() if number not in taken)
    return [next(numbers) for _ in range(free + 1)][-1]


async def test_running_out_of_descriptors_is_told_and_leaves_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    errors: list[accel.BackendUnavailableError] = []
    async with ActorSystem() as system:
        await (await ChildProcess.start(system, f"{OURS}returns")).aclose(grace=20.0)
        before = held()
        for free in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(free), hard))
            try:
                child = await ChildProcess.start(system, f"{OURS}returns")
            except accel.BackendUnavailableError as error:
                errors.append(error)
            else:
                await child.aclose(grace=20.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert held() == before, f"{free} descriptors free"
    assert 3 <= len(errors) < 12
    assert {error.code for error in errors} == {"EMFILE"}
    assert all("ulimit -n" in str(error) for error in errors)


async def test_running_out_of_processes_or_threads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit itself does not bind a privileged user, so the refusals are made up.
    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with ActorSystem() as system:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(accel.BackendUnavailableError, match="ulimit -u"):
                await ChildProcess.start(system, f"{OURS}returns")
        await (await ChildProcess.start(system, f"{OURS}returns")).aclose(grace=20.0)
        before = held()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            with pytest.raises(accel.BackendUnavailableError, match="ulimit -u") as caught:
                await ChildProcess.start(system, f"{OURS}returns")
        assert caught.value.code == "EAGAIN"
        assert held() == before
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "")
            with pytest.raises(accel.BackendUnavailableError, match=r"sys\.executable"):
                await ChildProcess.start(system, f"{OURS}returns")
        child = await ChildProcess.start(system, f"{OURS}returns")
        assert (await child.aclose(grace=20.0)).code == 0
