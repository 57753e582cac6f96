"""A registered library of the user's own in one context."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from accel._log import get_logger
from accel.family import BackendPart
from accel.libraries.kernel_library import Operand, kernels_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.backend import DeviceDescription, Kernel
    from accel.engine.stream_clock import StreamClock
    from accel.libraries.kernel_library import KernelLibrary
    from accel.ops import KernelOp, Plan, Spec
    from accel.ref import AccelRef

__all__ = ["OwnLibrary"]

logger = get_logger()


class OwnLibrary:
    """A registered library in one context: the instance, with its kernels as others are called.

    Parameters
    ----------
    name
        What it is registered as.
    library
        The instance.
    description
        Of the device.

    Attributes
    ----------
    part : BackendPart
        The kernels, as those of a family.
    is_leaving : bool
        Whether the library was unregistered: it takes no more ops.
    """

    def __init__(self, name: str, library: KernelLibrary, description: DeviceDescription) -> None:
        self.name = name
        self.library = library
        library.description = self._description = description
        self.is_leaving = False
        self._lock = threading.Lock()  # its own lane and that of batches may call it from two threads
        kernels = {op.kind: self._adapt(getattr(library, name)) for op, name in kernels_of(type(library)).items()}
        self.part = BackendPart(kernels, may_block=library.blocking, launches=library.launches)

    def _adapt(self, method: Callable[..., object]) -> Kernel:
        backend, index, lock = self._description.backend, self._description.index, self._lock

        def call(lane: StreamClock, op: KernelOp, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            stream = lane.stream
            reads = [Operand(a, ref.shape, ref.dtype, False, backend, index, stream) for a, ref in zip(inputs, plan.reads, strict=True)]
            written: tuple[AccelRef | Spec, ...] = (*plan.writes, *plan.creates, *([] if plan.status is None else [plan.status.spec]))
            writes = [Operand(a, spec.shape, spec.dtype, True, backend, index, stream) for a, spec in zip(outputs, written, strict=True)]
            with lock:
                method(op, stream, reads, writes)

        return call

    def close(self) -> None:
        """Close the instance.

        What it raises is logged: the rest of the context is given back all the same.
        """
        try:
            self.library.close()
        except Exception as error:
            logger.warning("library_not_closed", library=self.name, error=error)
