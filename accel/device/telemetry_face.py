"""The part of a device's face for what can be seen of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.telemetry.hardware import HardwareMonitor, ReadsHardware

if TYPE_CHECKING:
    from accel.engine.core import DeviceCore
    from accel.telemetry.hardware import HardwareInfo

__all__ = ["TelemetryFace", "monitor_of"]


class TelemetryFace:
    """The methods of :class:`~accel.Device` for its telemetry: see there."""

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


def monitor_of(core: DeviceCore) -> HardwareMonitor | None:
    """Return what reads the hardware of a device, once it is asked; ``None`` where its backend cannot."""
    backend, uuid = core.backend, core.description.uuid
    if not isinstance(backend, ReadsHardware):
        return None
    return HardwareMonitor(core.name, lambda: backend.hardware_reader(uuid))
