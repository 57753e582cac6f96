"""What the tests of child processes share: reading, waiting, counting what is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
    return children_of(os.getpid())


def links_of(pid: int | str = "self") -> dict[int, str]:
    """Return what each open descriptor of a process is of, less what it closes meanwhile."""
    found: dict[int, str] = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(fd)] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def children_of(pid: int) -> set[int]:
    """Return the numbers of all child processes of a process, zombies too."""
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
    return {pid for pid in children_of(os.getpid()) if b"--forkserver" in _arguments(pid)}


def workers() -> set[int]:
    """Return the children of this process's devices, started or forked, that run: not what is between its fork and its own session, or program."""
    servers = forkservers()
    found = children_of(os.getpid()).union(*map(children_of, servers))
    running = {pid for pid in found if b"accel.process.worker" in _arguments(pid) and _leads(pid)}
    return running - servers - forkservers()  # one may have begun meanwhile


def _leads(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def descriptors() -> dict[int, str]:
    """Return the open descriptors of the kinds that accel opens, each with what it is of."""
    return {fd: link for fd, link in links_of().items() if link.startswith(_OWN_KINDS) and link != _OF_LIBRARIES}


def held() -> tuple[int, int, set[int]]:
    """Return the number of open descriptors and of threads, and the child processes."""
    return len(descriptors()), threading.active_count(), children()


def limit_for(free: int) -> int:
    """Return the limit of open files that leaves ``free`` descriptors to be opened."""
    taken = {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    numbers = (number for number in itertools.count() if number not in taken)
    return [next(numbers) for _ in range(free + 1)][-1]


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
