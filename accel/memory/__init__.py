"""Memory without devices: slabs, an allocator of buffers in them, uses, and pinned host memory.

Nothing here knows asyncio, streams or a vendor. The device layer subclasses :class:`Timeline`,
gives the allocator a backend's slab source, and turns the dependencies that :class:`Usage` reports
into waits between streams.
"""

from __future__ import annotations

from accel.memory.allocator import Allocator, Block, SlabRequest
from accel.memory.arena import ArenaStatistics, HostArena, HostBlock, HostRegistrar, HostRegistration
from accel.memory.external_block import ExternalBlock, ExternalWork, SharedUsage
from accel.memory.machine import memory_left, memory_size
from accel.memory.slab import MemfdSlab, memfd_identity
from accel.memory.usage import Dependency, Timeline, Usage

__all__ = [
    "Allocator",
    "ArenaStatistics",
    "Block",
    "Dependency",
    "ExternalBlock",
    "ExternalWork",
    "HostArena",
    "HostBlock",
    "HostRegistrar",
    "HostRegistration",
    "MemfdSlab",
    "SharedUsage",
    "SlabRequest",
    "Timeline",
    "Usage",
    "memfd_identity",
    "memory_left",
    "memory_size",
]
