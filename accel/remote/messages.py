"""The messages between a device and the context in its child."""

from __future__ import annotations

import enum
import json
import marshal
import pickle
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from accel.engine.kernels import NO_COMPILER
from accel.engine.options import DeviceOptions
from accel.errors import UnsupportedError
from accel.ops import CompilesKernels, KernelLayout
from accel.process.protocol import ProtocolError

if TYPE_CHECKING:
    from accel.backend import AccelDevice
    from accel.dtype import DType
    from accel.engine.registration import Registration

__all__ = [
    "ArenaSlice",
    "Attach",
    "Begin",
    "Config",
    "Failure",
    "Kind",
    "Lent",
    "Timed",
    "WireOp",
    "layout_of",
    "pack",
    "packed_layout",
    "pickled_library",
    "unpack",
]


class Kind(enum.IntEnum):
    """Kinds of messages. The parent's have low numbers."""

    CONFIG = 1
    """The first message: the device and its options, a pickled :class:`Config`."""
    BATCH = 3
    """Ops of one submission: those of a batch, or one that is awaited by itself."""
    FREE = 4
    """Buffers to be freed."""
    BLOCK = 5
    """A block of host memory, with its descriptor."""
    CLOSE = 6
    """Release everything, and end."""
    END_HANGS = 7
    """End the hangs that a fault plan has injected."""
    GRAPH = 9
    """Ops to be captured."""
    REGISTER = 10
    """A registered library to be opened: a number, and the registration, pickled."""
    UNREGISTER = 13
    """A registered library to be closed after the ops before: a number, and its name."""
    PING = 8
    """Answer by PONG."""
    BEGIN = 20
    """Begin a generation, with a pickled :class:`Begin`."""
    COMPILE = 21
    """A kernel to be compiled: a number, by which the answer names it, and the kernel, pickled."""
    DEFINE = 22
    """An object that ops refer to by a number from now on: the number, and the object, pickled."""
    WORLD = 23
    """A command to a rank of a world: a number, and as JSON a ``Members`` method with arguments."""
    UNMAP_BLOCK = 12
    """A block of host memory to be unmapped: its number. All ops on it are answered."""
    MAP_SLAB = 11
    """A slab of durable memory to be mapped, with its descriptor and its buffers.

    The child of a generation binds it, too, to its allocator; a spare child only maps it.
    """
    UNMAP_SLABS = 14
    """Slabs that a spare child is to unmap: their numbers."""

    ATTACH = 15
    """Memory to be added as a buffer: a number, the buffer, its size; a new slab without a descriptor."""
    END_LOAN = 16
    """A loan that has ended: the number of the op that lent."""

    READY = 101
    """The generation is ready: what its context offers, as JSON."""
    REFUSED = 102
    """The last message: the error that prevents a context."""
    DONE = 103
    """Requests that have succeeded: their numbers."""
    FAILED = 104
    """A request that has failed: its number, the index of the op, and the error."""
    FAULT = 105
    """The last message: the error that ended the context."""
    MEMORY = 106
    """Bytes that are reserved on the device, and those that libraries hold."""
    PONG = 107
    """The answer to PING."""
    WARM = 120
    """The child has made ready all that it can before its generation begins."""
    BUSY = 121
    """One byte: whether the child opens, loads or compiles something that ops may wait for."""
    LOG = 122
    """An event of the log: JSON."""
    COMPILED = 123
    """A kernel was compiled: a number, and its layout as JSON."""
    WORLD_DONE = 126
    """A rank has executed a WORLD command: the number, and the method's result, as JSON."""
    TIMES = 125
    """Numbers of requests that end with the next message, each with the nanoseconds of its device time."""
    TORN = 124
    """Durable buffers that a failed op has written in part: their numbers."""
    NEW_SLAB = 108
    """A new slab of durable memory, with its descriptor."""
    FREED_SLAB = 109
    """A slab that holds no durable buffers any more: its number."""
    NEW_BUFFER = 110
    """A new durable buffer, and where it is: its slab, offset and size."""
    LENT = 111
    """A lent buffer, with the slab's descriptor; before the answer to its op. See :data:`Lent`."""


def pack(
    number: int,
    result_ids: list[list[int]],
    wire_ops: list[WireOp],
    fault_actions: list[bytes | str | None] | None = None,
    freed: list[int] | None = None,
    handle: int = 0,
    *,
    is_timed: bool = False,
) -> bytes:
    """Return the payload of a BATCH or GRAPH message. The child trusts its parent.

    Parameters
    ----------
    number
        Of the message, by which the answer names it.
    result_ids
        For each op the numbers of the buffers that it makes.
    wire_ops
        The ops, as :class:`~accel.remote.op_codec.OpWriter` writes them.
    fault_actions
        For each op the action of the fault plan, see :func:`.begin_action`; ``None``: no actions.
    freed
        Buffers to be freed before the ops run.
    handle
        The buffer that stands for a graph.
    is_timed
        Whether the answer is to have the device time.
    """
    return marshal.dumps((number, handle, result_ids, fault_actions or [], wire_ops, freed or [], is_timed), _NO_REFERENCES)


def unpack(data: bytes) -> tuple[int, int, list[list[int]], list[bytes | str | None], list[WireOp], list[int], bool]:
    """Return number, handle, result_ids, fault_actions, wire_ops, freed, is_timed; see :func:`pack`."""
    content: tuple[int, int, list[list[int]], list[bytes | str | None], list[WireOp], list[int], bool] = marshal.loads(data)
    return content


_NO_REFERENCES = 2
"""The version of marshal's format without a table of references: it is twice as fast."""


Failure = struct.Struct("<Qi")
"""The head of a FAILED message: the request's number, and the index of the op, or -1."""

Timed = struct.Struct("<QQ")
"""An entry of a TIMES message: the number of the request, and nanoseconds."""


Lent = struct.Struct("<QQQQ")
"""A LENT message: numbers of the request and of the slab, the slab's size, the buffer's offset."""

Attach = struct.Struct("<QQ")
"""An ATTACH message, behind its number: the buffer and the size of the memory."""


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of a child, which it gets before it has a generation.

    Parameters
    ----------
    backend
        ``module:class`` of the backend.
    uuid
        Of the device, whose index may be another one in the child.
    name
        The name of the device.
    options
        Of the device, as far as the child uses them.
    readiness
        Which part to make ready before a generation begins: ``"imports"``, those of
        ``options.libraries`` too, or also the ``"context"``.
    log_level
        The lowest level of events that are sent.
    """

    backend: str
    uuid: str
    name: str
    options: DeviceOptions
    readiness: Literal["imports", "context"] = "imports"
    log_level: int = 30


@dataclass(frozen=True, slots=True)
class Begin:
    """A generation that begins in a child.

    Parameters
    ----------
    generation
        Its number.
    libraries
        Registered libraries: name -> pickled registration.
    most_slabs
        How many slabs of durable memory the parent keeps.
    oom_patience
        Seconds for which requests for memory are repeated while the device has none: that of the
        last generation may come back a little after its process has ended.
    """

    generation: int
    libraries: dict[str, bytes]
    most_slabs: int
    oom_patience: float = 0.0


class ArenaSlice(NamedTuple):
    """Where an array is in the blocks of shared host memory.

    Attributes
    ----------
    block
        Number of the block; 0 for an array without elements, which lies in none.
    offset
        Bytes from the start of the block.
    shape, dtype
        Of the array.
    """

    block: int
    offset: int
    shape: tuple[int, ...]
    dtype: DType


WireOp: TypeAlias = tuple[int, list[Any], list[tuple[int, int]]]
"""An op as ``marshal`` takes it; see :mod:`accel.remote.op_codec`."""


def pickled_library(registration: Registration) -> bytes:
    """Return a registered library as bytes.

    Raises
    ------
    UnsupportedError
        If its class, or an argument, cannot be sent to another process.
    """
    try:
        return pickle.dumps(registration)
    except UnsupportedError as error:
        why, remedy = error.message, error.remedy
    except Exception as error:  # pickle raises anything
        why, remedy = str(error), "Define its class, and what it is made with, at the top of a module that can be imported."
    raise UnsupportedError(
        f"library {registration.name!r} cannot be sent to the device's process: {why}", library=registration.name, remedy=remedy
    )


def packed_layout(device: AccelDevice, name: str, data: bytes) -> bytes:
    """Compile and load a pickled kernel, and return its layout for :func:`layout_of`. May block.

    Raises
    ------
    CompileError, InvalidArgumentError
        See :class:`accel.ops.CompilesKernels`.
    UnsupportedError
        The device has no compiler.
    """
    if not isinstance(device, CompilesKernels):
        raise UnsupportedError(f"{name} has no compiler", remedy=NO_COMPILER)
    return json.dumps(asdict(device.compile(pickle.loads(data)))).encode()


def layout_of(data: bytes) -> KernelLayout:
    """Return the layout that a child has sent, checked.

    Raises
    ------
    ProtocolError
        If it is no layout.
    """
    try:
        fields = json.loads(data)
        block, grid, sizes = _ints(fields["max_block"]), _ints(fields["max_grid"]), _ints(fields["sizes"])
        threads, shared = _ints([fields["max_threads"], fields["max_shared"]])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"a message that should be the layout of a kernel is none: {type(error).__name__}: {error}") from None
    if len(block) != len(grid) or len(block) != 3:
        raise ProtocolError("the layout of a kernel has grids or blocks that are not of three dimensions")
    return KernelLayout(sizes, threads, (block[0], block[1], block[2]), (grid[0], grid[1], grid[2]), shared)


def _ints(values: object) -> tuple[int, ...]:
    """Return a list of integers that are not negative; raise :class:`ProtocolError` for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, int) and value >= 0 for value in values):
        raise ProtocolError(f"the layout of a kernel has {values!r} where integers of 0 or more must be")
    return tuple(values)
