"""What the CUDA backend has of one family of ops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from accel.backend import Kernel
from accel_cuda.core.context import CudaContext
from accel_cuda.core.libraries import VendorLibrary

if TYPE_CHECKING:
    from accel_cuda.core.stream import CudaStream

__all__ = ["Commands", "CudaPart", "FamilyState", "LaneCheck", "Signature", "Source"]

LaneCheck: TypeAlias = Callable[[Any, Any], bool]
"""``check(lane, op)``: whether enqueuing the op may block."""

Signature: TypeAlias = Callable[[Any, Any], Hashable]
"""``signature(lane, op)``: all that decides which functions a library loads for the op."""

Commands: TypeAlias = int | Callable[[Any], int]
"""How many commands an op enqueues at most, or what counts them for one op."""


class FamilyState(Protocol):
    """What a family has in one context: plans, and what it knows of the memory that its ops work in.

    Attributes
    ----------
    kernels : mapping
        Op kind -> kernel.
    """

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """Op kind -> kernel."""

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing an op may block this time. Quick."""

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most. Quick."""

    def prepare(self, stream: CudaStream) -> None:
        """Make what the ops need in the context, and in one stream of it. May block."""

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` before :meth:`measure`. Quick."""

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""

    def close(self) -> None:
        """Give back what the family has. May block; the streams have ended, and the context is healthy."""


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """CUDA C++ of the backend's own kernels: one program, or one for each dtype. A program is compiled when it is first needed.

    Parameters
    ----------
    name
        The program's name; with programs for dtypes, what their names begin with: ``"unary"`` for ``"unary_f32"``.
    text
        ``text(code)`` returns files of ``families/kernels``, and then the lines that instantiate the kernels for the dtype of that code.
    capabilities
        Beginning of names in :data:`accel.enums.CAPABILITIES`: each of their dtypes has a program. Empty if there is one program.
    functions
        First words of kernels' names, if the kernels are not called as the program is.
    on_demand
        Whether ``open_device(libraries=)`` leaves the programs to their first use: many kernels, of which a service needs few.
    """

    name: str
    text: Callable[[str], tuple[str, ...]]
    capabilities: str = ""
    functions: tuple[str, ...] = ()
    on_demand: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class CudaPart:
    """What the CUDA backend has of one family; ``accel_cuda.families.parts`` lists them.

    Parameters
    ----------
    kernels
        Kind of an op -> kernel, where an op does not take the generic one.
    open
        Makes what the family has in one context. Its kernels stand beside ``kernels``, and its ops work in memory that the layers above lend them.
    libraries
        Libraries of NVIDIA's that the kernels call. They are preloaded; the doctor lists their wheels.
    programs
        Sources of the family's own kernels; ``open_device(libraries=)`` loads their programs, but those that are loaded on demand.
    program
        Kind of an op -> the program that an op's kernel is in. An op whose program is not loaded is enqueued off the loop.
    lacks
        Kind of an op -> whether its lane lacks something that the kernel would have to make. Such an op is enqueued off the loop.
    signatures
        Kind of an op -> the signature by which a library loads functions. The first op of a signature is enqueued off the loop.
    commands
        Kind of an op -> commands that it enqueues at most; 1 for all others.
    workspaces
        How many workspaces the ops use in a stream.
    prepare
        Given a compute interface, makes what the ops need in its stream besides workspaces. May block.
    """

    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    open: Callable[[CudaContext], FamilyState] | None = None
    libraries: tuple[VendorLibrary, ...] = ()
    programs: tuple[Source, ...] = ()
    program: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    lacks: Mapping[str, LaneCheck] = field(default_factory=dict)
    signatures: Mapping[str, Signature] = field(default_factory=dict)
    commands: Mapping[str, Commands] = field(default_factory=dict)
    workspaces: int = 0
    prepare: Callable[[Any], object] | None = None
