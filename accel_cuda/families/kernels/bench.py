"""The library ``"bench"``: ops that compute nothing, so that what is measured is the way of an op and not its arithmetic."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel import AccelRef
from accel.ops import KernelOp, Plan
from accel_cuda.core.driver import LaunchConfig
from accel_cuda.core.libraries import load_module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.backend import Kernel
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.driver import Handle

__all__ = ["BENCH", "EmptyKernel", "SpinKernel", "bench_kernels", "launch_and_wait"]

BENCH = "bench"
"""Name of the library. It is for ``device.run``; devices have no attribute for it."""


@dataclass(frozen=True, eq=False, slots=True)
class EmptyKernel(KernelOp):
    """Launch a kernel that does nothing, as a writer of ``out``: the op is checked, ordered and marked like any other."""

    library: ClassVar[str] = BENCH
    kind: ClassVar[str] = "empty_kernel"

    out: AccelRef

    def plan(self) -> Plan:
        """See :meth:`accel.ops.KernelOp.plan`."""
        return Plan((), (self.out,), ())


@dataclass(frozen=True, eq=False, slots=True)
class SpinKernel(KernelOp):
    """Launch a kernel of one thread that takes ``nanoseconds`` by the device's clock, as a writer of ``out``."""

    library: ClassVar[str] = BENCH
    kind: ClassVar[str] = "spin_kernel"

    out: AccelRef
    nanoseconds: int

    def plan(self) -> Plan:
        """See :meth:`accel.ops.KernelOp.plan`."""
        return Plan((), (self.out,), ())


def bench_kernels(functions: Mapping[str, Handle]) -> Mapping[str, Kernel]:
    """Return how the ops of :data:`BENCH` are enqueued: kind -> kernel."""
    empty, spin = functions["empty"], functions["spin"]

    def run_empty(lane: Any, op: EmptyKernel, plan: Any, inputs: Any, outputs: Any) -> None:
        lane.stream.ready()
        lane.stream.launch(empty, 1, 1)

    def run_spin(lane: Any, op: SpinKernel, plan: Any, inputs: Any, outputs: Any) -> None:
        lane.stream.ready()
        lane.stream.launch(spin, 1, 1, op.nanoseconds)

    return {EmptyKernel.kind: run_empty, SpinKernel.kind: run_spin}


def launch_and_wait(context: CudaContext, function: Handle, stream: int) -> Callable[[], object]:
    """Return the raw twin of :class:`EmptyKernel`: what a careful user writes with the driver alone.

    The launch goes through the same ``ctypes`` call as this project's, which is the fastest there is
    from Python. The context becomes current on this thread, as in a program without this project.
    """
    bindings: Any = load_module("cuda.bindings.driver", "cuda-bindings")
    launch, synchronize, handle = context.driver.hot.launch, bindings.cuStreamSynchronize, bindings.CUstream(stream)
    config = ctypes.pointer(LaunchConfig(1, 1, 1, 1, 1, 1, 0, stream, None, 0))
    context.enter()
    # Looked at once: a twin that fails is fast.
    context.check(launch(config, function, None, None), "cuLaunchKernelEx")

    def run() -> None:
        launch(config, function, None, None)
        synchronize(handle)

    return run
