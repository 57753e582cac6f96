"""Slabs of device memory that can outlive their context: each is held by a descriptor."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from accel import DriverError, OutOfMemoryError
from accel.fork import close_after_fork

if TYPE_CHECKING:
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.driver import Driver

__all__ = ["CudaSlab", "SlabAllocation"]


class SlabAllocation:
    """How slabs of a device are allocated: plain device memory that a descriptor can name.

    Parameters
    ----------
    driver, index
        The device.

    Attributes
    ----------
    properties : CUmemAllocationProp
    granularity : int
        The size of a slab in bytes is a multiple of it.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self.properties = driver.CUmemAllocationProp()
        self.properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        self.properties.location = location
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(driver.call("cuMemGetAllocationGranularity", self.properties, flag))


class CudaSlab:
    """Physical memory of the device, mapped into its address space.

    Parameters
    ----------
    context
        The device's context, for whose abandoned streams closing waits.
    allocation
        How it is allocated.
    nbytes
        Size; rounded up to the device's granularity.
    fd
        Descriptor of another context's slab of that size, whose memory is mapped instead of new one; duplicated.

    Attributes
    ----------
    address : int
        Where it starts; a multiple of the granularity.
    nbytes : int
        Its size after rounding.
    fd : int
        Descriptor of the memory (close-on-exec). A duplicate of it keeps the memory, also beyond this process; -1 once closed.
    closed : threading.Event
        See :class:`accel.backend.HeldSlab`.

    Raises
    ------
    OutOfMemoryError
        If the device has no such piece.
    """

    __slots__ = ("__weakref__", "_allocation", "_context", "_held", "address", "closed", "fd", "nbytes")

    def __init__(self, context: CudaContext, allocation: SlabAllocation, nbytes: int, *, fd: int | None = None) -> None:
        self._context = context
        self.closed = threading.Event()
        self._allocation = allocation
        driver, unit = context.driver, allocation.granularity
        self.nbytes = max(1, -(-nbytes // unit)) * unit
        context.enter()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self._create() if fd is None else self._import(fd, kind)
        try:
            if fd is None:
                self.fd = int(context.call("cuMemExportToShareableHandle", handle, kind, 0))
                os.set_inheritable(self.fd, False)
            else:
                self.fd = os.dup(fd)
            try:
                self.address = self._map(handle)
            except BaseException:
                os.close(self.fd)  # it would keep the memory
                raise
        finally:
            # The mapping and the descriptor keep the memory.
            driver.ignore("cuMemRelease", handle)
        self._held = self.fd  # until it is closed, which may have to wait
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<CudaSlab {self.nbytes} bytes{' closed' if self.fd < 0 else ''}>"

    def _import(self, fd: int, kind: Any) -> Any:
        """Return the handle of memory that another process has made, or says so: of another descriptor the driver answers 999, as it does after a fault."""
        context = self._context
        status, handle = context.driver.answer("cuMemImportFromShareableHandle", fd, kind)
        if status:
            context.call("cuMemGetInfo")  # it raises the fault, if there is one
            raise DriverError(
                f"a descriptor is of no memory of this device: cuMemImportFromShareableHandle answered {status}",
                code=status,
                library="driver",
                device=context.description.spec,
                remedy="Make the buffers anew that were in it.",
            )
        return handle

    def _create(self) -> Any:
        try:
            return self._context.call("cuMemCreate", self.nbytes, self._allocation.properties, 0)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the device has no {self.nbytes} bytes for a slab",
                requested=self.nbytes,
                code=error.code,
                library=error.library,
                device=self._context.description.spec,
            ) from error

    def _map(self, handle: Any) -> int:
        context = self._context
        driver = context.driver
        address = int(context.call("cuMemAddressReserve", self.nbytes, 0, 0, 0))
        try:
            context.call("cuMemMap", address, self.nbytes, 0, handle, 0)
            access = driver.CUmemAccessDesc()
            access.location = self._allocation.properties.location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            context.call("cuMemSetAccess", address, self.nbytes, [access], 1)
        except BaseException:
            driver.ignore("cuMemUnmap", address, self.nbytes)
            driver.ignore("cuMemAddressFree", address, self.nbytes)
            raise
        return address

    def close(self) -> None:
        """Give the memory back, as soon as no abandoned stream can touch it. May block. Idempotent."""
        if self.fd >= 0:
            self.fd = -1
            self._context.release(self._close)

    def close_inherited(self) -> None:
        """Close the descriptor in a forked child, where the memory is not mapped and the driver must not be called."""
        self.fd = -1
        self._close_held()

    def _close(self) -> None:
        # Also after a fault: memory that is mapped is the one thing of a dead context that can still be given back.
        driver = self._context.driver
        driver.ignore("cuMemUnmap", self.address, self.nbytes)
        driver.ignore("cuMemAddressFree", self.address, self.nbytes)
        self._close_held()
        self.closed.set()

    def _close_held(self) -> None:
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
