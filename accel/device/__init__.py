"""The face of a device: what users open, await, record and read."""

from __future__ import annotations

from accel.device.batch import Batch
from accel.device.compiler import Compiler, DeviceKernel, Launches
from accel.device.device import Device
from accel.device.graph import Graph
from accel.device.info import DeviceHealth, DeviceInfo, MemoryInfo, PinnedInfo, SpareInfo
from accel.device.memory_exchange import SharedMemory
from accel.device.pool import Link, Pool, PoolHealth
from accel.device.system import System, open_device
from accel.device.world import World
from accel.engine.lifecycle import DeviceState
from accel.engine.options import FaultSource, InlineHost, ProcessHost
from accel.functions import kernel_op
from accel.libraries.kernel_library import KernelLibrary, Operand, kernel
from accel.node.client import Node
from accel.solvers import DeviceSparse
from accel.telemetry.hardware import HardwareInfo

__all__ = [
    "Batch",
    "Compiler",
    "Device",
    "DeviceHealth",
    "DeviceInfo",
    "DeviceKernel",
    "DeviceSparse",
    "DeviceState",
    "FaultSource",
    "Graph",
    "HardwareInfo",
    "InlineHost",
    "KernelLibrary",
    "Launches",
    "Link",
    "MemoryInfo",
    "Node",
    "Operand",
    "PinnedInfo",
    "Pool",
    "PoolHealth",
    "ProcessHost",
    "SharedMemory",
    "SpareInfo",
    "System",
    "World",
    "kernel",
    "kernel_op",
    "open_device",
]
