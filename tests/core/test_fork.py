"""What is closed in a forked child."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from accel.fork import DeviceFiles

if TYPE_CHECKING:
    from pathlib import Path


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
        left = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
        os._exit(0 if [str(path) in left for path in paths] == [False, False, True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in opened:
        os.close(fd)  # they are this process's as before
    del files
