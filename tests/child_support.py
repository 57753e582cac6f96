"""What the tests of child processes share: reading, waiting, counting what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.process.child import ChildProcess
    from accel.process.exit_status import ExitStatus

OURS = "tests.child_programs:"
ROOT = Path(__file__).resolve().parents[1]
_OWN_KINDS = ("/memfd:", "anon_inode:", "socket:", "pipe:")
_OF_LIBRARIES = "anon_inode:[eventfd]"
"""accel opens no such descriptor. PyTorch, ONNX Runtime and CUDA do, at times of their own, and keep it."""


async def until_so(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait for what another process brings about. The pauses leave the processor to it."""
    try:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} never came true") from None


def children() -> set[int]:
    """Return the numbers of all child processes of this process, zombies too."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found.update(map(int, file.read().split()))
        except OSError:  # the thread ended
            continue
    return found


def _children_of(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def forkservers() -> set[int]:
    """Return the forkservers of this process's devices."""
    return {pid for pid in _children_of(os.getpid()) if b"--forkserver" in _arguments(pid)}


def workers() -> set[int]:
    """Return the children of this process's devices, started or forked, that run: not what is between its fork and its own session, or program."""
    servers = forkservers()
    found = _children_of(os.getpid()).union(*map(_children_of, servers))
    running = {pid for pid in found if b"accel.process.worker" in _arguments(pid) and _leads(pid)}
    return running - servers - forkservers()  # one may have begun meanwhile


def _leads(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def descriptors() -> dict[str, str]:
    """Return the open descriptors of the kinds that accel opens, each with what it is of."""
    found: dict[str, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed the directory
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(_OWN_KINDS) and target != _OF_LIBRARIES:
                found[fd] = target
    return found


def held() -> tuple[int, int, set[int]]:
    """Return the number of open descriptors and of threads, and the child processes."""
    return len(descriptors()), threading.active_count(), children()


@pytest.fixture
def no_child_left() -> Iterator[None]:
    before = children()
    yield
    assert children() - before == set()


async def received(child: ChildProcess) -> bytes:
    """Read a line, or what comes until the child's end."""
    data = b""
    while not data.endswith(b"\n"):
        piece = await asyncio.get_running_loop().sock_recv(child.sock, 65536)
        if not piece:
            break
        data += piece
    return data


async def ended(child: ChildProcess, patience: float = 20.0) -> ExitStatus:
    async with asyncio.timeout(patience):
        return await child.wait()
