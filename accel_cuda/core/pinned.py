"""Host memory that the driver knows: what of it this context has registered, and the end of that.

Memory that the driver itself hands out is unmapped when the context is reset, and reading an array over it then ends the process. A mapping of our
own stays readable whatever becomes of the context.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import threading
from typing import TYPE_CHECKING

from accel import AccelError
from accel.fork import close_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cuda.core.driver import Driver, Section

__all__ = ["PinnedBlock", "PinnedRanges", "Registration"]


class PinnedRanges:
    """Which host memory is page-locked: what was registered here is known, what others did is asked of the driver.

    Parameters
    ----------
    driver
        Asked about memory of others', such as torch's.
    section
        Makes the context current while something is asked.
    """

    __slots__ = ("_driver", "_ends", "_lock", "_section", "_starts")

    def __init__(self, driver: Driver, section: Section) -> None:
        self._driver = driver
        self._section = section
        self._lock = threading.Lock()
        # Replaced, never changed: readers take no lock.
        self._starts: tuple[int, ...] = ()
        self._ends: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock whole pages. May block."""
        with self._section:
            self._driver.call("cuMemHostRegister", address, nbytes, self._driver.CU_MEMHOSTREGISTER_PORTABLE)
        with self._lock:
            self._ends = {**self._ends, address: address + nbytes}
            self._starts = tuple(sorted(self._ends))

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`; after a fault the driver is left alone. May block."""
        with self._lock:
            self._ends = {start: end for start, end in self._ends.items() if start != address}
            self._starts = tuple(sorted(self._ends))
        if self._driver.fault is None:
            with contextlib.suppress(AccelError), self._section:  # a fault that shows here is recorded
                self._driver.ignore("cuMemHostUnregister", address)

    def covers(self, address: int, nbytes: int) -> bool:
        """Return whether all of ``nbytes``, 1 at least, is page-locked. Never blocks.

        Raises
        ------
        AccelError
            The context's fault, where the driver had to be asked.
        """
        starts, ends = self._starts, self._ends
        place = bisect.bisect_right(starts, address)
        if place and address + nbytes <= ends.get(starts[place - 1], 0):
            return True
        with self._section:
            return self._is_foreign(address) and self._is_foreign(address + nbytes - 1)

    def _is_foreign(self, address: int) -> bool:
        driver = self._driver
        # The plural answers "nothing known" for ordinary memory, where the singular fails.
        (kind,) = driver.call("cuPointerGetAttributes", 1, [driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE], address)
        return kind is not None and int(kind) == driver.CUmemorytype.CU_MEMORYTYPE_HOST


class Registration:
    """See :class:`accel.memory.HostRegistration`.

    Parameters
    ----------
    release
        Calls what it is given, once no stream that was abandoned can use the memory.
    end
        Ends the registration.
    """

    __slots__ = ("_end", "_release")

    def __init__(self, release: Callable[[Callable[[], None]], None], end: Callable[[], None]) -> None:
        self._release = release
        self._end: Callable[[], None] | None = end

    def close(self) -> None:
        """End it. May block. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            self._release(end)


class PinnedBlock:
    """A page of page-locked memory for one purpose.

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

    __slots__ = ("__weakref__", "_driver", "_map", "address", "nbytes")

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map: mmap.mmap | None = mmap.mmap(-1, self.nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        driver.call("cuMemHostRegister", self.address, self.nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Unmap it in a forked child, with which an anonymous mapping is shared too."""
        mapping, self._map = self._map, None
        if mapping is not None:
            mapping.close()

    def close(self) -> None:
        """Give the memory back; nothing on the device uses it any more. May block. Idempotent."""
        mapping, self._map = self._map, None
        if mapping is not None:
            if self._driver.fault is None:
                self._driver.ignore("cuMemHostUnregister", self.address)
            mapping.close()
