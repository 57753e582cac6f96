"""A child process that does not begin its program, because something stops it before: its start ends within a bound, and the loop goes on.

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
from accel.process.child import ChildProcess
from tests.child_support import OURS, children, no_child_left, received
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
    monkeypatch.setattr("accel.process.child._START_TIMEOUT", 2.0)
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


async def test_one_that_does_not_begin_is_given_up_and_ends_if_it_ever_begins(gate: Path) -> None:
    async with ActorSystem() as system:
        began, turns = time.monotonic(), 0
        start, waiting = starting(system), starting(system)
        while not start.done():
            await asyncio.sleep(0.01)
            turns += 1
            assert time.monotonic() - began < 30
        for each in (start, waiting):
            error = await failure(each, accel.BackendUnavailableError)
            assert error.code == "ETIMEDOUT"
            assert "SIGSTOP" in str(error)
        assert turns > 20, "the loop was held up"
        assert len(children()) == 1
        await let_in(gate)
        await until(lambda: not children(), "its end")


async def test_one_that_was_stopped_and_goes_on_in_time_is_as_good_as_any(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.process.child._START_TIMEOUT", 30.0)
    async with ActorSystem() as system:
        start = starting(system)
        await until(children, "a process")
        (pid,) = children()
        await until(lambda: state(pid) == "S", "waiting at the gate")
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: state(pid) == "T", "being stopped")
        assert not start.done()
        os.kill(pid, signal.SIGCONT)
        await let_in(gate)
        child = await asyncio.wait_for(start, 20)
        assert child.pid == pid
        assert await received(child) == b"ready\n"
        await child.aclose(grace=0.0)
