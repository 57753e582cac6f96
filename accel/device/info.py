"""What a device says about itself: frozen pictures, cheap to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.engine.lifecycle import DeviceState

if TYPE_CHECKING:
    from accel.actors.mailbox import MailboxStatistics
    from accel.engine.core import DeviceCore
    from accel.engine.host import Host

__all__ = ["DeviceHealth", "DeviceInfo", "MemoryInfo", "PinnedInfo", "snapshot"]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory of one opened device, in bytes.

    Parameters
    ----------
    used
        Held by live buffers.
    durable
        The part of ``used`` that outlives a rebuild.
    reserved
        Taken from the device.
    limit
        The most that may be reserved; ``None`` where nothing was set.
    workspace
        Held by streams for their libraries to work in: a part of ``reserved``, and under ``limit``, but not of ``used``.
    """

    used: int
    durable: int
    reserved: int
    limit: int | None
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class PinnedInfo:
    """Host memory of :meth:`accel.Device.pinned`, in bytes.

    Parameters
    ----------
    used
        Held by arrays.
    reserved
        Page-locked.
    limit
        The most that may be reserved.
    waiting
        How many calls wait for room.
    """

    used: int
    reserved: int
    limit: int
    waiting: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device at one moment.

    Parameters
    ----------
    name, backend, index
        Which device it is.
    host
        Where its context lives: ``"inline"`` is this process, ``"process"`` a child.
    pid
        Of that child; ``None`` while there is none, and with ``"inline"``.
    state, generation
        Where it is in its life.
    restarts
        How often its context was rebuilt.
    queued
        Submissions that wait, those that wait for room in the queue included.
    in_flight
        Ops that were sent to the device and are not over.
    memory
        Its memory.
    pinned
        The host memory of its pinned arrays.
    standby
        What there is of a spare child: ``"none"``, ``"starting"``, ``"ready"``, or ``"failed"``, where too many have died by themselves; another is
        tried with the next generation.
    """

    name: str
    backend: str
    index: int
    host: str
    pid: int | None
    state: DeviceState
    generation: int
    restarts: int
    queued: int
    in_flight: int
    memory: MemoryInfo
    pinned: PinnedInfo
    standby: str = "none"


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Whether a device serves, told from its state and not from queued work.

    Parameters
    ----------
    is_live
        Whether it serves now or will by itself; ``False`` while it is lost, and once it is closed.
    is_ready
        Whether it serves now.
    state, generation
        Where it is in its life.
    reason
        What keeps it from serving, or empty.
    is_stalled
        Whether that is an op that does not end, or a child that does not answer, although the state is READY.
    """

    is_live: bool
    is_ready: bool
    state: DeviceState
    generation: int
    reason: str
    is_stalled: bool = False


def snapshot(core: DeviceCore, host: Host, queue: MailboxStatistics) -> DeviceInfo:
    """Return a device's picture; ``queue`` is the state of its actor's mailbox."""
    context = host.context
    used = reserved = workspace = 0
    if context is not None:
        used, reserved, workspace = context.memory()
    else:
        used, reserved = core.durable.used, core.durable.reserved
    return DeviceInfo(
        name=core.name,
        backend=core.description.backend,
        index=core.description.index,
        host=host.kind,
        pid=host.pid,
        state=core.lifecycle.state,
        generation=core.lifecycle.generation,
        restarts=core.restarts,
        queued=queue.depth + queue.waiting_putters + core.in_hand,
        in_flight=0 if context is None or context.fault is not None else context.in_flight,
        memory=MemoryInfo(used, core.durable.used, reserved, core.options.memory_limit, workspace),
        pinned=core.pinned.info(),
        standby=core.children.standby,
    )
