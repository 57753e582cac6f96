"""The places of a device's contexts, with their limits: ``host=`` of ``open_device``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from accel.actors.checks import check_seconds
from accel.errors import InvalidArgumentError
from accel.values import check_flag

__all__ = ["HostOption", "InlineHost", "ProcessHost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineHost:
    """Contexts in this process; ``host="inline"`` is one with the defaults.

    Parameters
    ----------
    stall_after
        Seconds. :meth:`Device.health` is not ready while the oldest op in flight takes longer than
        ops of its kind usually do, and this besides. The first op of a kind, loading and compiling
        do not count. ``None``: ops are not looked at.
    """

    stall_after: float | None = 2.0

    def __post_init__(self) -> None:
        _check_times(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHost:
    """Contexts in child processes of their own; ``host="process"`` is one with the defaults.

    Parameters
    ----------
    after_fault
        Whether contexts are made in this process until a fault of scope PROCESS, and in children
        from then on, as with ``host="auto"``.
    stall_after
        See :class:`InlineHost`.
    busy_timeout
        Seconds that a child may take to map durable memory, to open a registered library or to
        compile a kernel; and seconds of loading and compiling that do not count as a hang of one
        op. After that the child is killed, and another one replaces it. A large library loads in
        tens of seconds.
    heartbeat_interval
        Seconds between two heartbeats that a child must answer. :meth:`Device.health` is not ready
        while one is unanswered for longer.
    heartbeat_timeout
        Seconds without an answer after which the child is killed, and another one replaces it; six
        times as many while it loads or compiles. A library call that keeps the GIL delays answers.
    """

    after_fault: bool = False
    stall_after: float | None = 2.0
    busy_timeout: float = 120.0
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0

    def __post_init__(self) -> None:
        check_flag("after_fault", self.after_fault)
        _check_times(self)
        if self.heartbeat_timeout < self.heartbeat_interval:
            raise InvalidArgumentError(
                f"heartbeat_timeout is {self.heartbeat_timeout!r} and heartbeat_interval {self.heartbeat_interval!r}",
                remedy="Allow at least one interval of silence.",
            )


HostOption: TypeAlias = Literal["auto", "inline", "process"] | InlineHost | ProcessHost
"""The values of ``host=``."""


def _check_times(host: InlineHost | ProcessHost) -> None:
    """Raise unless each field that holds a time is seconds above 0."""
    for field in fields(host):
        seconds = getattr(host, field.name)
        if field.name == "after_fault" or (seconds is None and field.name == "stall_after"):
            continue
        check_seconds(field.name, seconds)
        if seconds <= 0:
            raise InvalidArgumentError(f"{field.name} is {seconds!r}", remedy="Give seconds above 0.")
