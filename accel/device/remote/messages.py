"""What the two halves say to each other."""

from __future__ import annotations

import enum
import marshal
import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from accel.device.options import DeviceOptions
from accel.dtype import DType
from accel.errors import UnsupportedError
from accel.hosts.op_codec import dump_op, load_op
from accel.ops import KernelOp, Plan
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.device.kernel_library import KernelLibrary
    from accel.hosts.op_codec import RefOf

__all__ = ["ArenaSlice", "Config", "Failure", "Kind", "WireGet", "WirePut", "WireReplay", "pack", "pickled_library", "unpack"]


class Kind(enum.IntEnum):
    """Kinds of messages. The parent's have low numbers."""

    CONFIG = 1
    """What to open; the first message. A pickled :class:`Config`."""
    OP = 2
    """One op."""
    BATCH = 3
    """Ops of a batch."""
    FREE = 4
    """Buffers to be freed."""
    BLOCK = 5
    """A block of host memory, with its descriptor."""
    CLOSE = 6
    """Give everything back, and end."""
    RELEASE = 7
    """Let the hangs that were injected end."""

    GRAPH = 9
    """Ops to be captured."""
    REGISTER = 10
    """A library of the user's own: a number, and its name and what makes it, pickled."""
    PING = 8
    """Are you there?"""
    HELD = 11
    """A slab of durable memory, with its descriptor and what lives in it: to be bound before the generation begins."""

    READY = 101
    """The context is there; what it offers."""
    REFUSED = 102
    """There is no context to be had; why. The last message."""
    DONE = 103
    """Numbers of what has ended well."""
    FAILED = 104
    """What has failed, and why."""
    FAULT = 105
    """What ended the context. The last message."""
    MEMORY = 106
    """What is taken from the device."""
    PONG = 107
    """Yes."""
    SLAB = 108
    """A new slab of durable memory, with its descriptor."""
    SLAB_GONE = 109
    """A slab in which nothing lives any more."""
    PLACED = 110
    """Where a durable buffer is."""


def pack(
    number: int, ids: Sequence[Sequence[int]], ops: Sequence[KernelOp], actions: Sequence[bytes | str | None] = (), handle: int = 0
) -> bytes:
    """Return the payload of an OP, BATCH or GRAPH message: for the child alone, which trusts its parent.

    Parameters
    ----------
    number
        Of the submission.
    ids
        For each op the numbers of the buffers that it makes.
    ops
        The ops, as they are sent.
    actions
        For each op what a fault plan does to it.
    handle
        The buffer that stands for a graph.
    """
    return marshal.dumps((number, handle, [list(each) for each in ids], list(actions), [dump_op(op) for op in ops]))


def unpack(data: bytes, ref_of: RefOf) -> tuple[int, int, list[list[int]], list[bytes | str | None], list[KernelOp]]:
    """Return what :func:`pack` was given."""
    number, handle, ids, actions, ops = marshal.loads(data)
    return number, handle, ids, actions, [load_op(each, ref_of) for each in ops]


Failure = struct.Struct("<Qi")
"""Number of the submission, and index of the op of a batch (-1: none), before the error of a FAILED message."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the child shall open.

    Parameters
    ----------
    backend
        ``module:class`` of the backend.
    uuid
        Of the device: it has another index where other devices are visible.
    name
        What the device is called.
    generation
        Of the context.
    options
        Of the device, as far as they are the child's business.
    own
        Libraries that were registered: name -> what makes an instance, pickled.
    """

    backend: str
    uuid: str
    name: str
    generation: int
    options: DeviceOptions
    own: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class ArenaSlice:
    """An array in a block of shared host memory.

    Parameters
    ----------
    block
        Number of the block.
    offset
        Where it starts.
    shape, dtype
        What it is.
    """

    block: int
    offset: int
    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, eq=False, slots=True)
class WirePut(KernelOp):
    """A put on its way: the array is in shared memory."""

    library: ClassVar[str] = "memory"
    kind: ClassVar[str] = "put"

    source: ArenaSlice
    out: AccelRef | None = None
    durable: bool = False

    def plan(self) -> Plan:
        """Never called: it is made into a put again where it runs."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, slots=True)
class WireGet(KernelOp):
    """A get on its way: the array will be in shared memory."""

    library: ClassVar[str] = "memory"
    kind: ClassVar[str] = "get"

    source: AccelRef
    destination: ArenaSlice

    def plan(self) -> Plan:
        """Never called: it is made into a get again where it runs."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, slots=True)
class WireReplay(KernelOp):
    """A replay on its way: the child has the program."""

    library: ClassVar[str] = "graph"
    kind: ClassVar[str] = "replay"

    program: int

    def plan(self) -> Plan:
        """Never called: it is made into a replay again where it runs."""
        raise NotImplementedError


def pickled_library(name: str, make: Callable[[], KernelLibrary]) -> bytes:
    """Return what makes a registered library as bytes.

    Raises
    ------
    UnsupportedError
        If its class, or an argument, cannot be sent to another process.
    """
    try:
        data = pickle.dumps(make)
        why: object = "what is in __main__ is not found in another process" if b"__main__" in data else None
    except Exception as error:  # pickle raises what it likes, and so do the arguments
        data, why = b"", error
    if why is not None:
        raise UnsupportedError(
            f"library {name!r} cannot be sent to the device's process: {why}",
            library=name,
            remedy="Define its class, and what it is made with, at the top of a module that can be imported.",
        )
    return data
