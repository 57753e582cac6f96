"""The parent's blocks of host memory in the child: arrays move through them."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from ctypes import addressof, c_char
from typing import TYPE_CHECKING, Any

import numpy as np

from accel._log import get_logger
from accel.errors import AccelError, LibraryError
from accel.memory import HostRegistrar
from accel.shortage import shortage

if TYPE_CHECKING:
    from accel.actors import ActorSystem
    from accel.memory import HostRegistration
    from accel.remote.busy import Busy
    from accel.remote.messages import ArenaSlice

__all__ = ["MappedBlocks"]

logger = get_logger()

_BLOCK = struct.Struct("<QQ")


class MappedBlocks:
    """Maps the blocks that the parent sends, registers them with the device, and unmaps them.

    Parameters
    ----------
    system
        Has the worker threads for calls that may block.
    busy
        Tells the parent's watchdog that a call that may take long is running.
    """

    def __init__(self, system: ActorSystem, busy: Busy) -> None:
        self._system = system
        self._busy = busy
        # number -> mapping, and its registration if the device has one
        self._blocks: dict[int, tuple[mmap.mmap, HostRegistration | None]] = {}
        self._not_mapped: dict[int, tuple[int, int]] = {}  # number -> descriptor, size

    def close_inherited(self) -> None:
        """Unmap all blocks in a fork; called by the :class:`Server` that owns this."""
        blocks, self._blocks = self._blocks, {}
        for mapping, _ in blocks.values():
            with contextlib.suppress(BufferError):
                mapping.close()
        while self._not_mapped:
            os.close(self._not_mapped.popitem()[1][0])

    async def add(self, data: bytes, fd: int, device: object) -> None:
        """Handle a BLOCK message: map the block and register it with the device, so copies are fast.

        ``fd`` is this object's from here on. For a device that registers no memory, the first op
        that needs the block maps it. A failed registration is logged, unless it is a fault.
        """
        number, nbytes = _BLOCK.unpack(data)
        self._not_mapped[number] = fd, nbytes
        if not isinstance(device, HostRegistrar):
            return
        try:
            mapping = self._map(number)
            address = addressof(c_char.from_buffer(mapping))
            with self._busy:
                self._blocks[number] = mapping, await self._system.run_blocking(device.register_host, address, nbytes)
        except AccelError as error:
            if error.is_fault:
                raise
            logger.warning("host_memory_not_registered", nbytes=nbytes, error=error)

    def _map(self, number: int) -> mmap.mmap:
        """Map a block that has come and is not mapped yet, and close its descriptor.

        Raises :class:`OutOfMemoryError` or :class:`LibraryError` if that fails; a later call may
        succeed.
        """
        fd, nbytes = self._not_mapped[number]
        try:
            mapping = mmap.mmap(fd, nbytes)
        except OSError as error:
            text = "host memory of the device's parent cannot be mapped"
            raise shortage(error, text) or LibraryError(f"{text}: {error}", library="os") from error
        del self._not_mapped[number]
        os.close(fd)
        self._blocks[number] = mapping, None
        return mapping

    async def unmap(self, data: bytes) -> None:
        """Handle an UNMAP_BLOCK message: end the registration, then the mapping.

        An array that still refers to the mapping keeps it.
        """
        number = int.from_bytes(data, "little")
        if number in self._not_mapped:
            os.close(self._not_mapped.pop(number)[0])
            return
        mapping, registration = self._blocks.pop(number)
        if registration is not None:
            with self._busy:
                await self._system.run_blocking(registration.close)
        with contextlib.suppress(BufferError):
            mapping.close()

    def array(self, place: ArenaSlice) -> np.ndarray[Any, Any]:
        """Return the array at a place in a block, which is mapped if it is not yet.

        An empty array is in no block.
        """
        if not place.block:
            return np.empty(place.shape, place.dtype.numpy)
        mapping = self._map(place.block) if place.block in self._not_mapped else self._blocks[place.block][0]
        count = math.prod(place.shape) * place.dtype.itemsize
        flat = np.frombuffer(mapping, np.uint8, count, place.offset)
        return flat.view(place.dtype.numpy).reshape(place.shape)
