"""What is closed in a forked child."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from accel.fork import DeviceFiles, close_after_fork

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
