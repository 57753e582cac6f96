"""What the two halves say to each other."""

from __future__ import annotations

import enum
import marshal
import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from accel.engine.options import DeviceOptions
from accel.errors import UnsupportedError

if TYPE_CHECKING:
    from accel.dtype import DType
    from accel.engine.registration import Registration

__all__ = [
    "ArenaSlice",
    "Begin",
    "Config",
    "Failure",
    "Kind",
    "WireOp",
    "pack",
    "pickled_library",
    "unpack",
]


class Kind(enum.IntEnum):
    """Kinds of messages. The parent's have low numbers."""

    CONFIG = 1
    """What to open; the first message. A pickled :class:`Config`."""
    BATCH = 3
    """Ops of one submission: those of a batch, or one that is awaited by itself."""
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
    """A library of the user's own, to be opened: a number, and the registration, pickled."""
    UNREGISTER = 13
    """A registered library to be closed after the ops before: a number, and its name."""
    PING = 8
    """Are you there?"""
    BEGIN = 20
    """Begin a generation; the second message but for blocks. A pickled :class:`Begin`, and its descriptors."""
    COMPILE = 21
    """A kernel to be compiled: a number, by which the answer names it, and the kernel, pickled."""
    NAMED = 22
    """An object that ops name by a number: the number, and the object, pickled."""
    BLOCK_GONE = 12
    """A block of host memory that was given back: its number. No op that was not answered uses it."""
    HELD = 11
    """A slab of durable memory, with its descriptor and what lives in it: to be bound before the generation begins. A spare child only maps it."""
    HELD_GONE = 14
    """Numbers of slabs that a spare child has mapped, and no registered library of its needs any more."""

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
    WARM = 120
    """All is made ready that can be before a generation begins."""
    BUSY = 121
    """Whether something is opened, loaded or compiled that ops may wait for: one byte."""
    LOG = 122
    """An event of the log: JSON."""
    COMPILED = 123
    """A kernel was compiled: a number, and its layout as JSON."""
    TORN = 124
    """Numbers of durable buffers that work which failed halfway has written."""
    SLAB = 108
    """A new slab of durable memory, with its descriptor."""
    SLAB_GONE = 109
    """A slab in which nothing lives any more."""
    PLACED = 110
    """Where a durable buffer is."""


def pack(
    number: int,
    ids: list[list[int]],
    ops: list[WireOp],
    actions: list[bytes | str | None] | None = None,
    freed: list[int] | None = None,
    handle: int = 0,
) -> bytes:
    """Return the payload of a BATCH or GRAPH message. The child trusts its parent.

    Parameters
    ----------
    number
        Of the message, by which the answer names it.
    ids
        For each op the numbers of the buffers that it makes.
    ops
        The ops, as :class:`~accel.remote.op_codec.OpWriter` writes them.
    actions
        For each op what a fault plan does to it; ``None`` where it does nothing to any.
    freed
        Buffers to be freed before.
    handle
        The buffer that stands for a graph.
    """
    return marshal.dumps((number, handle, ids, actions or [], ops, freed or []), _NO_REFERENCES)


def unpack(data: bytes) -> tuple[int, int, list[list[int]], list[bytes | str | None], list[WireOp], list[int]]:
    """Return the number, the handle, the ids, the actions, the ops and the freed buffers that :func:`pack` was given."""
    found: tuple[int, int, list[list[int]], list[bytes | str | None], list[WireOp], list[int]] = marshal.loads(data)
    return found


_NO_REFERENCES = 2
"""The version of marshal's format that keeps no table of what it has written: it is twice as fast."""


Failure = struct.Struct("<Qi")
"""Number of the submission, and index of the op of a batch (-1: none), before the error of a FAILED message."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the child is for; known before there is a generation for it.

    Parameters
    ----------
    backend
        ``module:class`` of the backend.
    uuid
        Of the device: it has another index where other devices are visible.
    name
        What the device is called.
    options
        Of the device, as far as they are the child's business.
    ahead
        What to make ready before a generation begins: ``"imports"``, or the ``"context"`` too, with what ``options.libraries`` need.
    log_level
        Events of this level and above are told.
    """

    backend: str
    uuid: str
    name: str
    options: DeviceOptions
    ahead: Literal["imports", "context"] = "imports"
    log_level: int = 30


@dataclass(frozen=True, slots=True)
class Begin:
    """A generation that begins in a child. What it takes over comes with it, as descriptors.

    Parameters
    ----------
    generation
        Its number.
    own
        Libraries that were registered: name -> registration, pickled.
    most_slabs
        How many slabs of durable memory the parent keeps.
    patience
        Seconds for which memory that the device does not have yet is asked for again: what the last generation held may come back a little later than
        its process ends.
    """

    generation: int
    own: dict[str, bytes]
    most_slabs: int
    patience: float = 0.0


class ArenaSlice(NamedTuple):
    """An array in a block of shared host memory.

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
    except Exception as error:  # pickle raises what it likes, and so do the arguments
        why, remedy = str(error), "Define its class, and what it is made with, at the top of a module that can be imported."
    raise UnsupportedError(
        f"library {registration.name!r} cannot be sent to the device's process: {why}", library=registration.name, remedy=remedy
    )
