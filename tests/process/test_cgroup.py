"""In a control group with little memory the service gets an OutOfMemoryError where it would be killed, and the default limits follow the group."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
LIMIT = 400 * MIB

FILLED = """
import asyncio, sys
group, host = sys.argv[1:]
open(group + "/cgroup.procs", "w").write("0")  # before anything is imported: memory counts where it is taken

import numpy as np
import accel

async def main():
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        assert device.info().pinned.limit == 100 << 20, device.info().pinned
        held, array = [], np.ones(16 << 20, np.uint8)
        for _ in range(2):
            try:
                for _ in range(40):
                    held.append(await device.put(array))
            except accel.OutOfMemoryError as error:
                assert error.retryable, error
            assert 4 <= len(held) < 25, len(held)
            kept = held[0]
            held = [kept]
            assert (await device.get(kept))[-1] == 1
        try:
            await device.zeros(1 << 30, "uint8")
        except accel.OutOfMemoryError:
            print("bounded", device.generation, device.state.name)

asyncio.run(main())
"""

SHOWN = """
import asyncio, builtins, io, sys

TREES = {
    "v1": {
        "/proc/self/cgroup": "7:memory,hugetlb:/docker/me\\n3:cpu:/\\n0::/\\n",
        "/proc/self/mountinfo": "32 31 0:29 /docker/me /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory,hugetlb\\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "419430400\\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "104857600\\n",
        "/sys/fs/cgroup/memory/memory.stat": "total_inactive_file 52428800\\ntotal_active_file 0\\n",
    },
    "v2": {
        "/proc/self/cgroup": "0::/service/worker\\n",
        "/proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\\n",
        "/sys/fs/cgroup/service/worker/memory.max": "max\\n",
        "/sys/fs/cgroup/service/worker/memory.current": "1000\\n",
        "/sys/fs/cgroup/service/memory.max": "419430400\\n",
        "/sys/fs/cgroup/service/memory.current": "104857600\\n",
        "/sys/fs/cgroup/service/memory.stat": "anon 1\\ninactive_file 52428800\\nactive_file 0\\n",
    },
}
tree, real = TREES[sys.argv[1]], io.open

def shown(file, *args, **kwargs):
    name = str(file)
    if name in tree:
        return io.StringIO(tree[name])
    if name.startswith("/sys/fs/cgroup"):
        raise FileNotFoundError(2, "not in the tree", name)
    return real(file, *args, **kwargs)

import numpy as np
import accel
builtins.open = io.open = shown

async def main():
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        assert device.info().pinned.limit == 100 << 20, device.info().pinned
        await device.put(np.ones(4))
        try:
            await device.zeros(320 << 20, "uint8")  # less than the machine has, and more than the group has left
        except accel.OutOfMemoryError:
            print("bounded", device.generation, device.state.name)
        tree.clear()  # the group is given more
        await device.zeros(320 << 20, "uint8")

asyncio.run(main())
"""


def _directory() -> Path | None:
    """Return where this process may make a control group of its own with a limit of memory."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        own["v2" if number == "0" and not controllers else controllers] = path
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory" + own.get("memory", "/none")), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup" + own.get("v2", "/none")), "memory.max"),
    ):
        made = parent / f"accel-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            made.mkdir()
            if (made / limit).exists():
                (made / limit).write_text(str(LIMIT), encoding="utf-8")
                return made
            made.rmdir()
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    made = _directory()
    if made is None:
        pytest.skip("no control group can be made here; the test with shown files runs all the same")
    yield made
    deadline = time.monotonic() + 10
    while True:
        try:
            made.rmdir()
        except OSError:  # what has ended in it is not gone yet
            assert time.monotonic() < deadline, "the control group stays"
            time.sleep(0.01)
        else:
            return


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("host", ["inline", "process"])
def test_a_service_in_a_small_group_is_told_and_lives(group: Path, host: str) -> None:
    assert _run(FILLED, str(group), host) == "bounded 1 READY\n"


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_limits_follow_the_group_that_is_shown(version: str) -> None:
    assert _run(SHOWN, version) == "bounded 1 READY\n"
