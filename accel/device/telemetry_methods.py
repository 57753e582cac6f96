"""The methods of :class:`~accel.Device` for the telemetry of its hardware."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from accel.errors import InvalidArgumentError
from accel.telemetry.hardware import HardwareMonitor, ReadsHardware
from accel.telemetry.timeline import Timeline, trace_of
from accel.values import check_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.engine.core import DeviceCore
    from accel.telemetry.hardware import HardwareInfo

__all__ = ["TelemetryMethods", "monitor_of"]


class TelemetryMethods:
    """The methods of :class:`~accel.Device` for its hardware's telemetry; a base class of it."""

    _core: DeviceCore
    _hardware: HardwareMonitor | None

    def hardware(self) -> HardwareInfo | None:
        """Return what the hardware told of itself last: load, memory, power, temperature, errors.

        ``None`` where it tells nothing, as on the CPU backend, and before its first answer: the
        first call begins to ask, once a second, on a thread of its own. Never waits; other threads
        of the process may ask too.

        Raises
        ------
        ClosedError
            In a process forked from this one.
        """
        self._core.refs.check_process()
        return None if self._hardware is None else self._hardware.latest()

    @property
    def pending(self) -> int:
        """Calls that are awaited now: ops, batches and replays, and those that wait for a rebuild."""
        return self._core.workload.pending

    @contextlib.asynccontextmanager
    async def profile(self, path: str | os.PathLike[str], *, limit: int = 100_000) -> AsyncIterator[None]:
        """Write a timeline of the device's work in the block: ``async with device.profile("trace.json")``.

        Perfetto (https://ui.perfetto.dev) and Chrome's ``chrome://tracing`` show it. Each op and
        each batch of ops has a span in the device's ``queue``, one from its ``launch`` until the
        device began with it, and one on the ``device``; batches of services, and faults, are there
        too. The file is written when the block ends, also by an error.

        Parameters
        ----------
        path
            Of the file, which is replaced.
        limit
            How many ops, batches and faults are kept: the newest. The file says how many were
            dropped.

        Raises
        ------
        InvalidArgumentError
            ``path`` is no path, or cannot be written; ``limit`` is no count.
        ClosedError
            This is not the device's loop.

        Notes
        -----
        The device time of all work is measured meanwhile, which costs some 10 us an op on CUDA. For
        work whose time was not measured, the span on the device begins when it was sent. Devices of
        one name are in one timeline.
        """
        core = self._core
        core.check_home()
        check_count("limit", limit)
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidArgumentError(f"path is {path!r}", remedy="Give the name of a file.")
        timeline, file = Timeline(core.name, limit), Path(path)
        try:  # now, so that the work is not run for a file that cannot be written
            await core.system.run_blocking(file.write_text, "")
        except OSError as error:
            raise InvalidArgumentError(
                f"{file} cannot be written: {error.strerror}", remedy="Give a file in a folder that is there."
            ) from error
        core.probes.add(timeline)
        try:
            yield
        finally:
            core.probes.remove(timeline)
            await core.system.run_blocking(lambda: file.write_text(json.dumps(trace_of([timeline]))))


def monitor_of(core: DeviceCore) -> HardwareMonitor | None:
    """Return a monitor of a device's hardware; ``None`` if its backend cannot read that.

    It starts its thread when it is first asked, and is closed with the device.
    """
    backend, uuid = core.backend, core.description.uuid
    if not isinstance(backend, ReadsHardware):
        return None
    return HardwareMonitor(core.name, lambda: backend.hardware_reader(uuid))
