"""A child process that does not begin its program, because something stops it before: nobody but its starter waits, and that not for ever.

Here it opens a FIFO between its making and its program, and so waits there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

import accel
from accel.actors import ActorSystem
from accel.process import spawn_timeout as births
from accel.process.child import ChildProcess
from tests.child_support import OURS, children, ended, no_child_left, received
from tests.device_support import failure, until

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["no_child_left"]

pytestmark = [
    pytest.mark.usefixtures("nothing_left", "no_child_left"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),  # what waits has to be called in between
]


def _wait_at(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return what new processes wait for."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=partial(_wait_at, str(path))))
    monkeypatch.setattr(births, "_CHECKS", 8)
    return path


async def let_in(gate: Path) -> None:
    """Let the process go on that waits, or will."""

    def is_in() -> bool:
        try:
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody waits yet
            return False
        return True

    await until(is_in, "somebody at the gate")


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0]


def starting(system: ActorSystem) -> asyncio.Task[ChildProcess]:
    return asyncio.create_task(ChildProcess.start(system, f"{OURS}ignores_socket"))


async def test_one_that_does_not_begin_is_killed_and_the_loop_goes_on(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ActorSystem() as system:
        began, turns = time.monotonic(), 0
        start = starting(system)
        while not start.done():
            await asyncio.sleep(0.01)
            turns += 1
            assert time.monotonic() - began < 30
        error = await failure(start, accel.BackendUnavailableError)
        assert error.code == "ETIMEDOUT"
        assert "SIGSTOP" in str(error)
        assert turns > 20, "the loop was held up"
        monkeypatch.undo()
        child = await ChildProcess.start(system, f"{OURS}returns")
        assert (await ended(child)).code == 0
        await child.aclose()


async def test_one_that_was_stopped_and_goes_on_in_time_is_as_good_as_any(gate: Path) -> None:
    async with ActorSystem() as system:
        start = starting(system)
        await until(children, "a process")
        (pid,) = children()
        await until(lambda: state(pid) == "S", "waiting at the gate")
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: state(pid) == "T", "being stopped")
        others = await system.run_blocking(sum, range(100_000))
        assert others
        assert not start.done()
        os.kill(pid, signal.SIGCONT)
        await let_in(gate)
        child = await asyncio.wait_for(start, 20)
        assert child.pid == pid
        assert await received(child) == b"ready\n"
        await child.aclose(grace=0.0)


async def test_a_start_that_is_cancelled_ends_too(gate: Path) -> None:
    async with ActorSystem() as system:
        start = starting(system)
        await until(children, "a process")
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(start, 20)
        assert not children()


async def test_one_that_cannot_be_killed_is_left_and_ends_if_it_ever_begins(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(births, "_CHECKS", 2)
    monkeypatch.setattr(births, "_CHECKS_QUEUED", 3)
    monkeypatch.setattr(births, "_kill", lambda *_: None)
    async with ActorSystem() as system:
        start = starting(system)
        await until(children, "a process")
        waiting = starting(system)
        for each in (start, waiting):
            error = await failure(each, accel.BackendUnavailableError)
            assert error.code == "ETIMEDOUT"
        assert len(children()) == 1
        await let_in(gate)
        await until(lambda: not children(), "its end")


def test_time_in_which_nobody_looks_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(births, "_kill", lambda thread, before: killed.append(thread))
    birth = births.SpawnTimeout()
    assert all(birth.check() for _ in range(239))
    assert not birth.check(), "it has never had its turn"
    birth = births.SpawnTimeout()
    with birth:
        assert all(birth.check() for _ in range(19))
        assert not killed
        assert birth.check()
        assert len(killed) == 1
        assert all(birth.check() for _ in range(19))
        assert not birth.check()
    assert len(killed) == 1
