"""The library ``"bench"``: ops that compute nothing, so that what is measured is the way of an op and not its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel import AccelRef
from accel.ops import KernelOp, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel.backend import Kernel
    from accel_cuda.core.driver import Handle

__all__ = ["BENCH", "EmptyKernel", "SpinKernel", "bench_kernels"]

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

    def run_empty(lane: Any, op: EmptyKernel, inputs: Any, outputs: Any) -> None:
        lane.stream.ready()
        lane.stream.launch(empty, 1, 1)

    def run_spin(lane: Any, op: SpinKernel, inputs: Any, outputs: Any) -> None:
        lane.stream.ready()
        lane.stream.launch(spin, 1, 1, op.nanoseconds)

    return {EmptyKernel.kind: run_empty, SpinKernel.kind: run_spin}
