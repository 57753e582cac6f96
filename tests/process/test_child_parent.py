"""A child process never outlives its parent, whatever ends that, and its program refuses to run for nobody."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.child_support import OURS, ROOT, no_child_left

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["no_child_left"]

pytestmark = pytest.mark.usefixtures("nothing_left", "no_child_left")


def parent_of(target: str, loop: str) -> tuple[subprocess.Popen[str], int]:
    """Start a program that starts a child, and return it with a descriptor of the grandchild."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.child_programs", target, loop],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert program.stdout is not None
    return program, os.pidfd_open(int(program.stdout.readline()))


def put_away(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def seconds_until_end(pidfd: int, most: float) -> float:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    before = time.monotonic()
    assert poll.poll(most * 1e3), f"still there after {most} s"
    return time.monotonic() - before


@pytest.mark.parametrize(
    ("target", "loop"), [("ignores_socket", "asyncio"), ("ignores_socket", "uvloop"), ("spins_in_c", "asyncio"), ("sleeps_in_c", "uvloop")]
)
def test_a_child_dies_with_a_parent_that_is_killed(target: str, loop: str) -> None:
    program, pidfd = parent_of(target, loop)
    with program:
        try:
            program.kill()
            seconds_until_end(pidfd, 1.0)
        finally:
            put_away(pidfd)


def test_a_child_without_its_parent_does_not_start() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "accel.process.worker", str(theirs.fileno()), str(2**30), f"{OURS}echo"]
        done = subprocess.run(command, cwd=ROOT, pass_fds=(theirs.fileno(),), capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (66, b"", b"")


@pytest.mark.parametrize("arguments", [[], ["77", str(os.getpid()), "z:z"]])
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "accel.process.worker", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 64
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_the_service_writes_nothing_of_its_own(tmp_path: Path) -> None:
    source = (
        "import asyncio\nfrom accel.actors import ActorSystem\nfrom accel.process.child import ChildProcess\n"
        "async def main():\n"
        "    asyncio.get_running_loop().slow_callback_duration = 60.0\n"  # what a busy machine makes slow is not ours
        "    async with ActorSystem() as system:\n"
        "        child = await ChildProcess.start(system, 'tests.child_programs:writes_much')\n"
        "        await child.wait(); await child.aclose()\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", source], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
