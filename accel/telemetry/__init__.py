"""What observers of a system are told, and the device time that work is charged."""

from __future__ import annotations

from accel.telemetry.device_time import DeviceTime
from accel.telemetry.probe import DeviceWork, Probe, Probes, ServedBatch, ServedRequest, Service, fault_code

__all__ = ["DeviceTime", "DeviceWork", "Probe", "Probes", "ServedBatch", "ServedRequest", "Service", "fault_code"]
