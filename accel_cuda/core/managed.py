"""Managed memory: pages that the driver moves between device and host."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from accel import AccelError, OutOfMemoryError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel
    from accel_cuda.core.context import CudaContext

__all__ = ["MANAGED_KERNELS", "CudaManaged"]


class CudaManaged:
    """A piece of managed memory; see :class:`~accel.backend.SlabMemory`.

    Parameters
    ----------
    context
        The device's context.
    nbytes
        Size.

    Raises
    ------
    UnsupportedError
        If the device cannot use such memory while the host does.
    OutOfMemoryError
        If there is no room.
    """

    __slots__ = ("_context", "_is_closed", "address", "nbytes")

    def __init__(self, context: CudaContext, nbytes: int) -> None:
        self._context = context
        self.nbytes = nbytes
        self._is_closed = False
        driver = context.driver
        context.enter()
        if not context.attribute("CONCURRENT_MANAGED_ACCESS"):
            raise UnsupportedError(
                "this GPU, or its driver, cannot use managed memory beside the host",
                device=context.description.spec,
                remedy="Use device.empty.",
            )
        try:
            self.address = int(context.call("cuMemAllocManaged", nbytes, int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"there is no room for {nbytes} bytes of managed memory",
                requested=nbytes,
                code=error.code,
                library=error.library,
                device=context.description.spec,
            ) from error

    def close(self) -> None:
        """Give the memory back, as soon as no abandoned stream can touch it. May block. Idempotent."""
        self._context.release(self._free)

    def _free(self) -> None:
        # Not after a fault: unlike a mapping, this is an object of the dead context, which the process's end gives back.
        if not self._is_closed and self._context.fault is None:
            self._is_closed = True
            with contextlib.suppress(AccelError), self._context.section:  # the thread may be the loop's
                self._context.driver.ignore("cuMemFree", self.address)


def _location(context: CudaContext, place: str) -> Any:
    driver = context.driver
    location, kinds = driver.CUmemLocation(), driver.CUmemLocationType
    location.type = kinds.CU_MEM_LOCATION_TYPE_HOST if place == "host" else kinds.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0 if place == "host" else context.description.index
    return location


def prefetch(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Enqueue the move of pages."""
    context = lane.stream.ready()
    if op.ref.nbytes:
        with context.section:
            context.call("cuMemPrefetchAsync", inputs[0], op.ref.nbytes, _location(context, op.to), 0, lane.stream.handle)


def advise(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Tell the driver, at once: advice has no place in a stream."""
    context = lane.stream.ready()
    if not op.ref.nbytes:
        return
    subject, _, place = op.advice.rpartition("_")
    kind = {"read": "READ_MOSTLY", "preferred": "PREFERRED_LOCATION", "accessed_by": "ACCESSED_BY"}[subject]
    advice = getattr(context.driver.CUmem_advise, f"CU_MEM_ADVISE_{'UNSET' if op.undo else 'SET'}_{kind}")
    with context.section:
        context.call("cuMemAdvise", inputs[0], op.ref.nbytes, advice, _location(context, place))


MANAGED_KERNELS: Mapping[str, Kernel] = {"prefetch": prefetch, "advise": advise}
"""Op kind -> kernel."""
