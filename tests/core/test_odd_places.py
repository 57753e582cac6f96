"""Devices where the system allows less: no memfd, a working folder that may not be entered, few processes."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.process.spawning import python_path
from tests.child_support import no_child_left

if TYPE_CHECKING:
    import numpy as np

__all__ = ["no_child_left"]

pytestmark = pytest.mark.usefixtures("no_child_left")

PATH = os.pathsep.join((str(Path(__file__).resolve().parents[2]), *python_path()))
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EACCES])
async def test_device_without_memfd_is_inline(code: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """A seccomp profile may refuse the call."""

    def refused(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "memfd_create", refused)
    values = rng.standard_normal(5)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        assert (await device.get(await device.put(values))).tolist() == values.tolist()
        with pytest.raises(accel.UnsupportedError, match="durable"):
            await device.put(values, durable=True)
        with pytest.raises(accel.UnsupportedError, match="memfd_create"):
            await system.open_device("cpu", host="process")


IN_A_CLOSED_FOLDER = """
import asyncio, os, sys
import accel

async def main():
    os.chdir(sys.argv[1])
    os.chmod(sys.argv[1], 0)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        first = device.info().pid
        os.kill(first, 9)
        async for generation in device.generations():  # the next child is a fork of the forkserver
            if generation == 2:
                break
        print((await device.get(await device.zeros(2))).tolist(), os.readlink(f"/proc/{device.info().pid}/cwd"))

asyncio.run(main())
"""


def _as_any_user() -> None:
    """Take from root what lets it enter any folder; another user has none of it."""
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def test_children_are_forked_in_a_working_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", IN_A_CLOSED_FOLDER, str(folder)],
            env=os.environ | {"PYTHONPATH": PATH},
            preexec_fn=_as_any_user,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        folder.chmod(0o700)
    assert done.stdout == f"[0.0, 0.0] {folder}\n", done


def test_path_of_children_in_a_working_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    assert python_path() == [str(folder), "/somewhere"]
    folder.rmdir()
    assert python_path() == ["/somewhere"]


WITH_FEW_PROCESSES = """
import asyncio
import accel

async def main():
    async with accel.System(close_timeout=5) as system:
        try:
            device = await asyncio.wait_for(system.open_device("cpu", host="process"), 40)
            print((await device.get(await device.zeros(1))).tolist())
        except accel.AccelError as error:
            print(error.code, "ulimit -u" in str(error), str(error).count("ulimit -u"))

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() == 0, reason="the limit of processes does not hold for root")
@pytest.mark.parametrize("limit", [1, 20])
def test_few_processes_are_enough_or_the_error_says_so(limit: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITH_FEW_PROCESSES],
        env=os.environ | {"PYTHONPATH": PATH, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout in ("[0.0]\n", "EAGAIN True 1\n"), done
