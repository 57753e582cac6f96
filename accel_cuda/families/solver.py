"""The ``solver`` family on a GPU: cuSOLVER's factorizations, one matrix after the other, and cuBLAS for what goes before and after them.

Kernels of the backend's own do what neither has; ``solver.cu`` says what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_cuda.core.family import CudaPart, FamilyState, Source
from accel_cuda.core.memo import Memo
from accel_cuda.families import solver_factors, solver_spectral
from accel_cuda.families.cublas import CUBLAS, blas_of
from accel_cuda.families.solver_calls import CUSOLVER, SolverCalls
from accel_cuda.families.solver_work import Work

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.stream import CudaStream

__all__ = ["PART", "SolverLibrary"]

_UNKNOWN = 64
"""Commands of an op at most, before its steps were taken once."""

_STEPS = {**solver_factors.STEPS, **solver_spectral.STEPS}
_REFS = ("a", "b", "c", "lu")
_OPTIONS = ("upper", "check", "transpose", "mode", "full_matrices", "rtol", "rcond", "n")
_FAR = 1 << 40
"""Bytes between the operands and results of an op whose steps are taken for nothing."""


class SolverLibrary(FamilyState[SolverCalls]):
    """cuSOLVER in one context, and what its ops work in."""

    def __init__(self, context: CudaContext) -> None:
        super().__init__(context, SolverCalls)
        self.kernels = dict.fromkeys(_STEPS, self._run)
        self._needs: Memo[Hashable, tuple[int, int]] = Memo()

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` may hold its thread: cuSOLVER does so for milliseconds, or until the device has computed."""
        return True

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most; see :class:`accel.backend.CountsCommands`."""
        needs = self._needs.get(_signature(op))
        return _UNKNOWN if needs is None else max(1, needs[1])

    def prepare(self, stream: CudaStream) -> None:
        """Load cuSOLVER, if it is not loaded, and make the stream's handle. May block."""
        calls = self.loaded()
        with self.context.section:
            calls.handle(stream)

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` if its calls have not been measured; see :class:`accel.backend.TakesScratch`."""
        needs = self._needs.get(_signature(op))
        return None if needs is None else needs[0]

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        work, plan = Work(self.loaded()), op.plan()
        made = len(plan.creates) + (plan.status is not None)
        places = [_FAR * i for i in range(1, 1 + len(plan.reads) + made)]
        _STEPS[op.kind](work, op, plan, places[: len(plan.reads)], places[len(plan.reads) :])
        self._needs[_signature(op)] = work.most, work.commands

    def _run(self, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        stream = lane.stream
        with stream.ready().section:
            work = Work(self.loaded(), lane, outputs[-1], self.scratch_nbytes(op))
            if op.kind in solver_spectral.STEPS:
                work.refuse_capture(op.kind)
            _STEPS[op.kind](work, op, plan, inputs, outputs[:-1])


def _signature(op: Any) -> Hashable:
    """Return all that decides which steps an op takes."""
    refs = [getattr(op, name, None) for name in _REFS]
    return op.kind, *[None if ref is None else (ref.shape, ref.dtype) for ref in refs], *[getattr(op, name, None) for name in _OPTIONS]


PART = CudaPart(
    open=SolverLibrary,
    libraries=(CUSOLVER, CUBLAS),
    programs=(Source("solver", lambda code: ("solver.cu", "")),),
    program="solver",
    workspaces=1,
    prepare=blas_of,
)
