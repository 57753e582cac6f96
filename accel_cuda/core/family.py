"""What the CUDA backend has of one family of ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from accel.backend import Kernel
from accel_cuda.core.context import CudaContext
from accel_cuda.core.libraries import VendorLibrary
from accel_cuda.core.stream import CudaStream

if TYPE_CHECKING:
    from accel import DType

__all__ = ["Commands", "CudaPart", "FamilyState", "LaneCheck", "Program", "Signature", "Source", "derived"]

LaneCheck: TypeAlias = Callable[[Any, Any], bool]
"""``check(lane, op)``: whether enqueuing the op may block."""

Signature: TypeAlias = Callable[[Any, Any], Hashable]
"""``signature(lane, op)``: all that decides which functions a library loads for the op."""

Program: TypeAlias = str | Callable[[Any], str]
"""The program that a kernel is in, or what tells it of an op."""

Commands: TypeAlias = int | Callable[[Any], int]
"""How many commands an op enqueues at most, or what counts them for one op."""


T = TypeVar("T")


def derived(op: Any, work_out: Callable[[Any], T]) -> T:
    """Return what ``work_out(op)`` does: once for each op, which is asked about several times on its way."""
    found: tuple[object, T] | None = getattr(op, "derived", None)
    if found is None or found[0] is not work_out:
        found = work_out, work_out(op)
        object.__setattr__(op, "derived", found)
    return found[1]


class Library(Protocol):
    """A library in one context: its plans, algorithms or handles."""

    def close(self) -> None:
        """Give back what there is. May block; the streams have ended, and the context is healthy."""


L = TypeVar("L", bound=Library)


class FamilyState(Generic[L]):
    """What a family has in one context: a library, and what it knows of the memory that its ops work in.

    A subclass sets ``kernels``, and overrides what is not as it is here: each op may block until the library is loaded, and works in no memory.

    Parameters
    ----------
    context
        The context.
    load
        Loads the library. May block.

    Attributes
    ----------
    kernels : mapping
        Op kind -> kernel.
    context : CudaContext
        The context.
    library : object or None
        The library, once it is loaded.
    """

    kernels: Mapping[str, Kernel]
    commands: Commands = 1
    """How many commands an op enqueues at most, or what counts them for one op."""
    capabilities: Mapping[str, frozenset[DType]] = MappingProxyType({})
    """What it offers besides :data:`accel.enums.CAPABILITIES`: ops that other ops compute elsewhere."""

    def __init__(self, context: CudaContext, load: Callable[[CudaContext], L]) -> None:
        self.context = context
        self.library: L | None = None
        self._load = load
        self._lock = threading.Lock()

    def loaded(self) -> L:
        """Return the library, which is loaded if it is not yet: that may block.

        Raises
        ------
        BackendUnavailableError
            If it is not installed.
        """
        if (library := self.library) is None:
            with self._lock:
                library = self.library = self.library or self._load(self.context)
        return library

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing an op may block this time. Quick."""
        return self.library is None

    def prepare(self, stream: CudaStream) -> None:
        """Make what the ops need in the context, and in one stream of it. May block."""
        self.loaded()

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in, or ``None`` before :meth:`measure`. Quick."""
        return 0

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""

    def close(self) -> None:
        """Give back what the family has. May block; the streams have ended, and the context is healthy."""
        if self.library is not None:
            self.library.close()


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
        The program that the kernels are in; or kind of an op -> its program, or what tells it of an op. An op whose program is not loaded is enqueued off the
        loop.
    lacks
        Kind of an op -> whether its lane lacks something that the kernel would have to make. Such an op is enqueued off the loop.
    signatures
        Kind of an op -> the signature by which a library loads functions. The first op of a signature is enqueued off the loop.
    commands
        Kind of an op -> commands that it enqueues at most; 1 for all others.
    workspaces
        How many workspaces the ops use in a stream.
    prepare
        Makes what the ops need in a stream besides workspaces. May block.
    """

    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    open: Callable[[CudaContext], FamilyState[Any]] | None = None
    libraries: tuple[VendorLibrary, ...] = ()
    programs: tuple[Source, ...] = ()
    program: str | Mapping[str, Program] = field(default_factory=dict)
    lacks: Mapping[str, LaneCheck] = field(default_factory=dict)
    signatures: Mapping[str, Signature] = field(default_factory=dict)
    commands: Mapping[str, Commands] = field(default_factory=dict)
    workspaces: int = 0
    prepare: Callable[[CudaStream], object] | None = None
