"""The state of a device as frozen snapshots."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.engine.lifecycle import DeviceState
from accel.storage.pinned import PinnedInfo
from accel.telemetry import fault_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel.actors.mailbox import MailboxStatistics
    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.telemetry.hardware import HardwareInfo

__all__ = ["DeviceHealth", "DeviceInfo", "MemoryInfo", "PinnedInfo", "SpareInfo", "health_of", "info_as_json", "snapshot"]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory of one opened device, in bytes.

    Parameters
    ----------
    used
        Bytes of live buffers.
    durable
        The part of ``used`` that stays valid over a rebuild.
    reserved
        Bytes of the slabs taken from the device.
    limit
        The ``memory_limit`` for ``reserved``; ``None`` without one.
    workspace
        Workspaces of the libraries, one per stream: a part of ``reserved``, but not of ``used``.
    peak
        The most bytes that were ``reserved`` at once in this generation.
    """

    used: int
    durable: int
    reserved: int
    limit: int | None
    workspace: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class SpareInfo:
    """The spare child of ``standby=``.

    Parameters
    ----------
    pid
        Its process id.
    host_nbytes
        Bytes of host memory that it has alone, without files and memory that it shares with other
        processes, such as durable memory of the CPU; 0 if it has just ended. What it shares with
        the forkserver until one of the two writes there is counted.
    """

    pid: int
    host_nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device at one moment.

    Parameters
    ----------
    name, backend, index
        The device.
    host
        Where the context lives now: ``"inline"`` is this process, ``"process"`` a child.
    pid
        Process id of the child; ``None`` with ``"inline"`` and while no child runs.
    state, generation
        The device's state and the number of its context.
    restarts
        Number of rebuilds since the device was opened.
    queued
        Submissions in the queue, and those that wait for room in it.
    in_flight
        Ops that were sent to the device and have not ended.
    memory
        Device memory.
    pinned
        Host memory under ``pinned_limit``.
    standby
        State of the spare child, or of the readiest: ``"none"``, ``"starting"``, ``"ready"`` or
        ``"failed"``. After ``"failed"`` the next generation starts another one.
    spare
        That child; ``None`` while there is none, and on another machine.
    device_seconds
        Device time that was measured: see :class:`accel.DeviceTime`.
    node
        The address of the machine that it is on; ``None``: this one.
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
    spare: SpareInfo | None = None
    device_seconds: float = 0.0
    node: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Whether a device serves. It is read from the device's state; nothing is sent.

    Parameters
    ----------
    is_live
        Whether the device serves now, or will without intervention; ``False`` in the states LOST
        and CLOSED.
    is_ready
        Whether the device serves now; ``False`` also if durable memory of a library that is opened
        with it is torn, such as a model's weights.
    state, generation
        The device's state and the number of its context.
    reason
        Why the device does not serve, with the Xid errors that the driver of its hardware has told
        of; empty while it does.
    is_stalled
        Whether an op does not end, or a child does not answer, although the state is READY.
    error
        Class and code of the fault behind the state, such as ``"DriverError 700"``, without its
        message; empty where there is none.
    """

    is_live: bool
    is_ready: bool
    state: DeviceState
    generation: int
    reason: str
    is_stalled: bool = False
    error: str = ""


def snapshot(core: DeviceCore, host: Host, queue: MailboxStatistics) -> DeviceInfo:
    """Return a snapshot of the device; ``queue`` is the state of its actor's mailbox.

    Without a context only durable memory is used, and nothing is in flight. After a fault nothing is
    in flight either, although the context still counts the ops that the fault has ended. ``queued``
    also counts submissions in hand, which wait for READY or for room on the device.
    """
    context = host.context
    used, reserved, workspace = (core.durable.used, core.durable.reserved, 0) if context is None else context.memory()
    return DeviceInfo(
        name=core.name,
        backend=core.description.backend,
        index=core.description.index,
        host=host.kind,
        pid=host.pid,
        state=core.lifecycle.state,
        generation=core.lifecycle.generation,
        restarts=core.restarts,
        queued=queue.depth + queue.waiting_putters + core.workload.in_hand,
        in_flight=0 if context is None or context.fault is not None else context.in_flight,
        memory=MemoryInfo(used, core.durable.used, reserved, core.options.memory_limit, workspace, 0 if context is None else context.peak),
        pinned=core.pinned.info(),
        standby=host.children.standby,
        spare=_spare_info(host.children.spare_pid),
        device_seconds=core.workload.device_seconds,
        node=host.children.node_address,
    )


def health_of(core: DeviceCore, context: Any, xid_errors: Mapping[int, int]) -> DeviceHealth:
    """Return whether the device serves.

    Parameters
    ----------
    core, context
        Of the device; ``None`` without a context.
    xid_errors
        Number -> count of the errors that the driver of its hardware has told of.
    """
    lifecycle, is_closing = core.lifecycle, core.is_closing
    state = lifecycle.state  # read once: it may change meanwhile where another thread asks
    is_live = state not in (DeviceState.LOST, DeviceState.CLOSED)
    is_ready = state is DeviceState.READY and not is_closing
    stall = context.stall_reason() if is_ready and context is not None else ""
    torn = _torn_library(core) if is_ready and core.durable.any_torn else ""
    cause = None if is_ready else lifecycle.cause
    why = "closing" if is_closing and is_live else state.value
    not_ready = f"{why}: {cause}" if cause else why
    reason = (stall or torn) if is_ready else not_ready
    if reason and xid_errors:
        reason += f" (the driver has told of Xid {', '.join(map(str, xid_errors))})"
    return DeviceHealth(
        is_live=is_live,
        is_ready=is_ready and not (stall or torn),
        state=state,
        generation=lifecycle.generation,
        reason=reason,
        is_stalled=bool(stall),
        error=("StaleRefError torn" if torn else "") if cause is None else f"{type(cause).__name__} {fault_code(cause)}".rstrip(),
    )


def _torn_library(core: DeviceCore) -> str:
    """Return that a library which is opened with the device has torn memory; ``""`` if none has."""
    for registration in list(core.registrations.values()):  # another thread may ask
        if registration.is_eager and not registration.unregistrations and any(map(core.durable.is_torn, registration.refs)):
            return f"library {registration.name!r} cannot be opened: durable memory of it is torn; if a model has it, swap to new weights"
    return ""


def info_as_json(info: DeviceInfo, health: DeviceHealth, hardware: HardwareInfo | None) -> dict[str, Any]:
    """Return a JSON-serialisable dict of a device's info, readiness and hardware.

    Its keys are those of ``"devices"`` in :meth:`accel.System.snapshot`. The reason and the error
    of ``health`` are left out: a snapshot shows no texts of errors.
    """
    hardware_fields = None
    if hardware is not None:
        # JSON keys are strings, and the codes of the errors are ints.
        xid_errors = {str(code): count for code, count in hardware.xid_errors.items()}
        hardware_fields = {**asdict(hardware), "xid_errors": xid_errors, "stale": hardware.is_stale}
    return {**asdict(info), "state": info.state.value, "ready": health.is_ready, "stalled": health.is_stalled, "hardware": hardware_fields}


def _spare_info(pid: int | None) -> SpareInfo | None:
    """Return the pid of a spare child and its memory, as the kernel reports it now.

    ``None`` if there is no spare; the memory is 0 if the process has ended.
    """
    if pid is None:
        return None
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]  # in pages
    except OSError:  # the process has ended
        return SpareInfo(pid, 0)
    return SpareInfo(pid, (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE"))
