"""A user's library that is registered with a device, as it is open in one context."""

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
    from accel.libraries.kernel_library import KernelLibrary, Ranks
    from accel.ops import KernelOp, Plan, Spec
    from accel.ref import AccelRef

__all__ = ["RegisteredLibrary"]

logger = get_logger()


class RegisteredLibrary:
    """A registered library in one context: the instance, and its methods as kernels.

    The constructor sets the ``description`` of the instance, and its ``members``.

    Parameters
    ----------
    name
        The name that it is registered under.
    instance
        The instance of the user's class.
    description
        Describes the device.
    members
        The ranks of worlds that the context is.

    Attributes
    ----------
    part : BackendPart
        The kernels, in the form in which a family has them.
    is_unregistered : bool
        Whether the library was unregistered: it takes no more ops.
    """

    def __init__(self, name: str, instance: KernelLibrary, description: DeviceDescription, members: Ranks) -> None:
        self.name = name
        self.instance = instance
        instance.description = self._description = description
        instance.members = members
        self.is_unregistered = False
        # Its lane and that of a batch may call it from two threads; it need not be thread-safe.
        self._lock = threading.Lock()
        kernels = {op.kind: self._adapt(getattr(instance, name)) for op, name in kernels_of(type(instance)).items()}
        self.part = BackendPart(kernels, may_block=instance.blocking, launches=instance.launches)

    def _adapt(self, method: Callable[..., object]) -> Kernel:
        """Return the kernel that calls a method of the instance with operands for addresses."""
        backend, index, lock = self._description.backend, self._description.index, self._lock

        def call(lane: StreamClock, op: KernelOp, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
            """Call the method; see :data:`accel.backend.Kernel`."""
            stream = lane.stream
            reads = [
                Operand(address, ref.shape, ref.dtype, False, backend, index, stream)
                for address, ref in zip(inputs, plan.reads, strict=True)
            ]
            # What `outputs` are for; a user's library has no scratch memory.
            written: tuple[AccelRef | Spec, ...] = (*plan.writes, *plan.creates, *([] if plan.status is None else [plan.status.spec]))
            writes = [
                Operand(address, spec.shape, spec.dtype, True, backend, index, stream)
                for address, spec in zip(outputs, written, strict=True)
            ]
            with lock:
                method(op, stream, reads, writes)

        return call

    def close(self) -> None:
        """Close the instance.

        An exception is logged only, so that the rest of the context is released too.
        """
        try:
            self.instance.close()
        except Exception as error:
            logger.warning("library_not_closed", library=self.name, error=error)
