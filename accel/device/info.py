"""What a device says about itself: frozen pictures, cheap to take."""

from __future__ import annotations

from dataclasses import dataclass

from accel.device.lifecycle import DeviceState

__all__ = ["DeviceHealth", "DeviceInfo", "MemoryInfo"]


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
        What libraries hold besides, to work in; not part of ``reserved``, nor under ``limit``.
    """

    used: int
    durable: int
    reserved: int
    limit: int | None
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device at one moment.

    Parameters
    ----------
    name, backend, index
        Which device it is.
    host, pid
        Where its context lives: ``"inline"`` and this process.
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
    """

    name: str
    backend: str
    index: int
    host: str
    pid: int
    state: DeviceState
    generation: int
    restarts: int
    queued: int
    in_flight: int
    memory: MemoryInfo


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Whether a device serves, told from its state and not from queued work.

    Parameters
    ----------
    is_live
        Whether it serves now or will by itself; ``False`` once it is lost or closed.
    is_ready
        Whether it serves now.
    state, generation
        Where it is in its life.
    reason
        What keeps it from serving, or empty.
    """

    is_live: bool
    is_ready: bool
    state: DeviceState
    generation: int
    reason: str
