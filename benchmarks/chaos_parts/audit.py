"""What a run must not leave behind: processes, threads, tasks, descriptors, shared memory, device memory, and errors that went nowhere."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from accel import AccelRef
from benchmarks.chaos_parts.processes import children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Left", "Witness", "device_memory", "growth", "living_refs", "own_memory"]

_PATIENCE = 10.0
_OURS = ("/memfd:", "anon_inode:", "socket:", "pipe:", "/dev/shm")
_BAD_EVENTS = ("actor_hook_failed", "actor_decision_failed")


def _descriptors() -> dict[str, str]:
    found: dict[str, str] = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(_OURS):
                found[number] = target
    return found


def _mapped() -> Counter[str]:
    """Return how often which shared memory is mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return Counter(line.split(maxsplit=5)[-1] for line in lines if "/memfd:" in line or "/dev/shm" in line)


def _shared() -> set[str]:
    with contextlib.suppress(OSError):
        return set(os.listdir("/dev/shm"))
    return set()


def device_memory(uuid: str) -> int | None:
    """Return how many MiB of a GPU's memory are in use, by any process; ``None`` where that is not known."""
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return sum(int(line) for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def own_memory() -> int:
    """Return how many MiB of this process's own memory are resident: not those that it shares with its children."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10


def growth(samples: Sequence[int]) -> int:
    """Return by how much the median of the last quarter is above that of the second; 0 for less than eight samples."""
    quarter = len(samples) // 4
    return round(median(samples[-quarter:]) - median(samples[quarter : 2 * quarter])) if quarter > 1 else 0


def living_refs(device: str) -> list[str]:
    """Return the refs to buffers of a device that are held, each with what holds it."""
    found: list[str] = []
    for each in gc.get_objects():
        if type(each) is AccelRef and not each.is_freed and each.owner.name == device:
            holders = [type(holder).__name__ for holder in gc.get_referrers(each) if holder is not found]
            found.append(f"{each!r} held by {holders}")
    return found


@dataclass
class Left:
    """What there is at one moment, and what is left of what came later."""

    pids: set[int] = field(default_factory=children)
    threads: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    descriptors: dict[str, str] = field(default_factory=_descriptors)
    mapped: Counter[str] = field(default_factory=_mapped)
    shared: set[str] = field(default_factory=_shared)

    def behind(self, patience: float = _PATIENCE) -> list[str]:
        """Return what has been added since and is not gone within ``patience`` seconds. Blocks for as long."""
        deadline = time.monotonic() + patience
        while True:
            gc.collect()
            found = self._added()
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _added(self) -> list[str]:
        descriptors = {number: target for number, target in _descriptors().items() if self.descriptors.get(number) != target}
        return [
            *(f"process {pid} is left" for pid in sorted(children() - self.pids)),
            *(f"thread {thread.name} is left" for thread in threading.enumerate() if thread not in self.threads),
            *(f"descriptor {number} ({target}) is left" for number, target in descriptors.items()),
            *(f"{name} is mapped {count} times more" for name, count in (_mapped() - self.mapped).items()),
            *(f"/dev/shm/{name} is left" for name in sorted(_shared() - self.shared)),
        ]


class Witness(logging.Handler):
    """Sees what goes nowhere: warnings, errors in destructors and threads, and what accel logs. A context manager around a run.

    Parameters
    ----------
    violation
        Told what must not be.

    Attributes
    ----------
    events : Counter
        How often accel logged what.
    recent : deque of str
        The last lines.
    """

    def __init__(self, violation: Callable[[str], None]) -> None:
        super().__init__()
        self.events: Counter[str] = Counter()
        self.recent: deque[str] = deque(maxlen=2000)
        self._violation = violation
        self._began = time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        text = record.getMessage()
        event = text.partition(" ")[0]
        self.events[event] += 1
        self.recent.append(f"{time.perf_counter() - self._began:8.3f} {record.levelname.lower()} {text}")
        if event in _BAD_EVENTS:
            self._violation(f"accel logged {text}")

    def _unraisable(self, unraisable: Any) -> None:
        self._violation(f"no caller was told of {unraisable.exc_value!r}, in {unraisable.object!r}")

    def _in_thread(self, failed: threading.ExceptHookArgs) -> None:
        self._violation(f"thread {failed.thread and failed.thread.name} ended with {failed.exc_value!r}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for as long as the block runs."""
        logger = logging.getLogger("accel")
        level, propagate = logger.level, logger.propagate
        hooks = sys.unraisablehook, threading.excepthook
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        sys.unraisablehook, threading.excepthook = self._unraisable, self._in_thread
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield
                gc.collect()
        finally:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate
            sys.unraisablehook, threading.excepthook = hooks
