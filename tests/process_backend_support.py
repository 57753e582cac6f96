"""A backend on the processor with what a GPU's has besides: a compiler, a shared fate, memory that comes back late."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import accel
from accel._log import get_logger
from accel.cpu.backend import CpuBackend, CpuDevice
from accel.ops import CompiledKernel, KernelLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel.backend import Kernel
    from accel.cpu.backend import CpuSlab
    from accel.ops import Launch

LAYOUT = KernelLayout((8, 8, 8), 256, (256, 64, 4), (1000, 10, 10), 1024)
SLOW = "slow to compile"
BROKEN = "does not compile"

_OUT_OF_MEMORY = "ACCEL_TEST_OUT_OF_MEMORY"
TAKEN = "ACCEL_TEST_TAKEN"


class RichDevice(CpuDevice):
    """Compiles one kernel, ``copy(out, x, n)``, and is told of faults."""

    on_fault: Callable[[accel.AccelError], object]

    def __init__(self, description: accel.DeviceDescription) -> None:
        super().__init__(description)
        self.on_fault = lambda error: None
        RichBackend.opened.append(self)
        # So many slabs are not to be had in this process at first; the service never sets it for itself.
        self.lacking = int(os.environ.get(_OUT_OF_MEMORY, "0")) if os.getpid() != RichBackend.service else 0

    def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Compile nothing."""
        get_logger().warning("compiling", name=kernel.name, percent="100%")
        if BROKEN in kernel.source:
            raise accel.CompileError("the program does not compile", log="line 3: what is this?")
        if SLOW in kernel.source:
            threading.Event().wait(1.0)
        return LAYOUT

    def kernels(self, library: str) -> Mapping[str, Kernel]:
        """Return native kernels."""
        return {"launch": _launch} if library == "compiler" else super().kernels(library)

    def create_slab(self, nbytes: int) -> CpuSlab:
        """Take a slab, if that is to be had yet."""
        if self.lacking > 0:
            self.lacking -= 1
            raise accel.OutOfMemoryError("not yet", requested=nbytes)
        return super().create_slab(nbytes)


class RichBackend(CpuBackend):
    """The processor."""

    shares_fate = True
    fault: ClassVar[accel.AccelError | None] = None
    opened: ClassVar[list[RichDevice]] = []
    preloaded: ClassVar[list[tuple[str, ...]]] = []
    shareable = True
    service = 0

    def open(self, index: int) -> RichDevice:
        """Create a context, if nobody has the device for himself."""
        if TAKEN in os.environ and os.getpid() != RichBackend.service:
            raise accel.BackendUnavailableError(
                f"cpu:{index} is one process's at a time, and another has it", code=46, retryable=True, remedy="Have the mode set back."
            )
        return RichDevice(self.devices()[index])

    def preload(self, libraries: Sequence[str]) -> None:
        """Take note."""
        get_logger().warning("preloading", libraries=",".join(libraries))

    def check_shareable(self, index: int) -> None:
        """Refuse, if that is tested."""
        if not self.shareable:
            raise accel.UnsupportedError(f"cpu:{index} is one process's at a time", remedy="Use standby='imports'.")


def _launch(lane: Any, op: Launch, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    lane.stream.copy(outputs[0], inputs[1], 4 * op.args[2])


class TwinBackend(RichBackend):
    """Two devices that share fate."""

    def devices(self) -> Sequence[accel.DeviceDescription]:
        """List the processor twice."""
        (first,) = super().devices()
        return first, dataclasses.replace(first, index=1, uuid=f"{first.uuid}-1")
