"""What the tests of the CPU's streams share."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.cpu.backend import CpuDevice
    from accel.cpu.stream import CpuEvent, CpuStream

LARGE = 1.0
SMALL = 0.0
PATIENCE = 30.0


class Gate:
    """Work that says when it has begun and goes on when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.opened.wait(PATIENCE)


class Thing:
    """Something that can be watched going away."""


def marked(device: CpuDevice, stream: CpuStream) -> CpuEvent:
    event = device.create_event()
    stream.record(event)
    return event


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"


def ends(name: str) -> bool:
    return not any(thread.name == name for thread in threading.enumerate())
