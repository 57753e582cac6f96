"""What observers of a system are told, and the device time that work is charged."""

from __future__ import annotations

from accel.telemetry.probe import DeviceTime, DeviceWork, Probe, Probes, ServedBatch, ServedRequest, Service, fault_code

__all__ = ["DeviceTime", "DeviceWork", "Probe", "Probes", "ServedBatch", "ServedRequest", "Service", "fault_code"]
