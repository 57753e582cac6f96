"""Host memory that the device reads and writes: our own mapping, registered with the driver.

Memory that the driver itself hands out is unmapped when the context is reset, and reading an array over it then ends the process. A mapping of our
own stays readable whatever becomes of the context.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_cuda.driver import Driver

__all__ = ["PinnedBlock"]


class PinnedBlock:
    """Page-locked host memory.

    Parameters
    ----------
    driver
        The driver; a context is current on this thread.
    nbytes
        Size; rounded up to whole pages.

    Attributes
    ----------
    address : int
        Where it starts, for the host and for the device.
    nbytes : int
        Its size after rounding.
    """

    __slots__ = ("_driver", "_map", "address", "nbytes")

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map: mmap.mmap | None = mmap.mmap(-1, self.nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # PORTABLE: for every context of the process.
        driver.call("cuMemHostRegister", self.address, self.nbytes, 1)

    def close(self) -> None:
        """Give the memory back; nothing on the device uses it any more. May block. Idempotent."""
        mapping, self._map = self._map, None
        if mapping is not None:
            if self._driver.fault is None:
                self._driver.ignore("cuMemHostUnregister", self.address)
            mapping.close()
