"""The CPU as a device of its own kind: its work runs on its own threads, its marks end some time after their work, and some enqueuing may block.

It says that it does not share the processor, so that it is polled as hardware is.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from accel.cpu.backend import CpuBackend, CpuDevice
from accel.cpu.stream import CpuEvent, CpuStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.backend import DeviceDescription

__all__ = ["LateBackend", "LateDevice"]


class LateEvent(CpuEvent):
    """A mark that is seen ``LateDevice.delay`` seconds after it was recorded, at the earliest; marks of one stream stay in order."""

    __slots__ = ("due",)

    due: float

    def query(self) -> bool:
        return self.stream is None or (super().query() and time.perf_counter() >= self.due)

    def synchronize(self) -> None:
        super().synchronize()
        while not self.query():
            time.sleep(LateDevice.delay)


class LateStream(CpuStream):
    """A stream whose work always runs on a thread of its own, and whose marks are never passed at once."""

    __slots__ = ()

    def submit(self, work: Callable[[], object], cost: float = 1.0, keep: object = None, *, is_op: bool = True) -> None:
        super().submit(work, 1.0, keep, is_op=is_op)

    def record(self, event: CpuEvent) -> bool:
        super().record(event)
        assert isinstance(event, LateEvent), "the device makes no others"
        event.due = time.perf_counter() + LateDevice.delay
        return False


class LateDevice(CpuDevice):
    """A context; its memory is this process's."""

    shares_processor = False
    delay: ClassVar[float] = 0.0
    """Seconds that a mark is late."""
    every: ClassVar[int] = 0
    """Every so many ops, one may block; 0 for none."""

    def __init__(self, description: DeviceDescription) -> None:
        super().__init__(description)
        self._asked: Iterator[int] = itertools.count(1)

    def create_stream(self, *, library: str = "") -> LateStream:
        stream: Any = super().create_stream()
        stream.__class__ = LateStream
        made: LateStream = stream
        return made

    def create_event(self) -> LateEvent:
        return LateEvent(super().create_event().context)

    def may_block(self, lane: Any, op: Any) -> bool:
        assert op.kind, "asked for an op"
        return bool(self.every) and next(self._asked) % self.every == 0


class LateBackend(CpuBackend):
    """What ``open_device("late")`` opens, where :data:`accel.registry` was told of it."""

    name = "late"
    preference = -1

    def devices(self) -> Sequence[DeviceDescription]:
        return tuple(replace(device, backend=self.name) for device in super().devices())

    def open(self, index: int) -> LateDevice:
        return LateDevice(self.devices()[index])
