"""The families of ops in one context: their kernels, what tells which of their ops may block, and what they make in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_cuda.families.parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from accel import DType
    from accel.backend import Kernel
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.family import Commands, CudaPart, FamilyState, LaneCheck, Program, Signature
    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.programs import Programs

__all__ = ["STAGES", "ContextFamilies"]

# The lanes of these libraries stage copies; in other lanes, the pinned memory for it is made at its first use.
STAGES = frozenset({"memory", "batch", "capture"})


class ContextFamilies:
    """The families in one context.

    Parameters
    ----------
    context, programs
        The context, and the backend's own kernels in it.
    parts
        Name of a family -> the CUDA backend's part.

    Attributes
    ----------
    states : dict
        Name of a family -> what it has in this context, of those that have something.
    """

    def __init__(self, context: CudaContext, programs: Programs, parts: Mapping[str, CudaPart] = PARTS) -> None:
        self._programs = programs
        self._parts = parts
        self.states: dict[str, FamilyState[Any]] = {name: part.open(context) for name, part in parts.items() if part.open is not None}

    def kernels(self) -> dict[str, Mapping[str, Kernel]]:
        """Return the kernels of each family: name -> op kind -> kernel."""
        found = {name: part.kernels for name, part in self._parts.items()}
        for name, state in self.states.items():
            found[name] = {**found[name], **state.kernels}
        return found

    def capabilities(self) -> dict[str, frozenset[DType]]:
        """Return what the families offer besides what every device does."""
        return {name: dtypes for state in self.states.values() for name, dtypes in state.capabilities.items()}

    def signatures(self) -> dict[tuple[str, str], Signature]:
        """Return the signatures of all ops that have one: library and op kind -> signature."""
        return {(name, kind): signature for name, part in self._parts.items() for kind, signature in part.signatures.items()}

    def commands(self) -> dict[tuple[str, str], Commands]:
        """Return how many commands ops enqueue: library and op kind -> commands; 1 for all others."""
        found = {(name, kind): commands for name, part in self._parts.items() for kind, commands in part.commands.items()}
        for name, state in self.states.items():
            found |= {(name, kind): state.commands for kind in state.kernels}
        return found

    def scratch(self) -> dict[tuple[str, str], Callable[[Any], int | None]]:
        """Return what says how many bytes ops work in: library and op kind -> that; see :class:`accel.backend.TakesScratch`."""
        return {(name, kind): state.scratch_nbytes for name, state in self.states.items() for kind in state.kernels}

    def checks(self) -> dict[tuple[str, str], LaneCheck]:
        """Return whether ops may block because their program or something in their lane is not there: library and op kind -> check."""
        found: dict[tuple[str, str], LaneCheck] = {}
        for name, part in self._parts.items():
            state = self.states.get(name)
            own = {} if state is None else state.kernels
            lacks = {**part.lacks, **({} if state is None else dict.fromkeys(own, state.may_block))}
            program = dict.fromkeys((*part.kernels, *own), part.program) if isinstance(part.program, str) else part.program
            found |= {(name, kind): self._check(program.get(kind), lacks.get(kind)) for kind in {**program, **lacks}}
        return found

    def _check(self, program: Program | None, lacks: LaneCheck | None) -> LaneCheck:
        missing = self._programs.missing
        if program is None:
            assert lacks is not None
            return lacks
        if isinstance(program, str):
            return lambda lane, op: program in missing or (lacks is not None and lacks(lane, op))
        if lacks is None:
            return lambda lane, op: program(op) in missing
        return lambda lane, op: program(op) in missing or lacks(lane, op)

    def prepare(self, library: str, stream: CudaStream) -> None:
        """Load the programs of a family, and make what its ops need in a stream, as far as it is not there. May block."""
        if (part := self._parts.get(library)) is not None:
            self._programs.prepare(part.programs)
        if library in STAGES:
            stream.transfers.prepare()
        for prepare in dict.fromkeys(part.prepare for part in self._parts_of(library)):
            if prepare is not None:
                prepare(stream)
        if (state := self.states.get(library)) is not None:
            state.prepare(stream)

    def workspaces_of(self, library: str) -> int:
        """Return how many workspaces the ops of a library use in a stream."""
        return max((part.workspaces for part in self._parts_of(library)), default=0)

    def _parts_of(self, library: str) -> Iterable[CudaPart]:
        """Return the parts whose ops the lane of a library runs: all for captures, none for libraries that are no families."""
        if library == "capture":
            return self._parts.values()
        return (self._parts[library],) if library in self._parts else ()

    def measure_scratch(self, op: Any) -> None:
        """See that it is known how many bytes an op works in. May block."""
        self.states[op.library].measure(op)

    def close(self) -> None:
        """Give back what the families have. May block; the streams have ended, and the context is healthy."""
        for state in self.states.values():
            state.close()
