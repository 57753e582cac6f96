"""Messages about the durable memory of a child, whose descriptors the parent keeps."""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
from typing import TYPE_CHECKING

from accel.errors import ClosedError
from accel.remote.messages import Kind
from accel.storage.durable import KeptSlab

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.backend import HeldSlab
    from accel.process.channel import Channel
    from accel.ref import AccelRef
    from accel.storage.durable import DurableBook

__all__ = ["DurableReporter", "DurableReports", "decode_slab", "encode_slab"]

_SLAB = struct.Struct("<QQ")
_BUFFER = struct.Struct("<QQQQ")
_NUMBER = struct.Struct("<Q")
_PER_GENERATION = 1 << 32


def encode_slab(slab: KeptSlab) -> bytes:
    """Return the payload of a MAP_SLAB message; :meth:`Link.ask` puts the question's number before it."""
    return _SLAB.pack(slab.number, slab.nbytes) + b"".join(_BUFFER.pack(*block) for block in slab.blocks)


def decode_slab(data: bytes, fd: int) -> KeptSlab:
    """Return the slab that :func:`encode_slab` was given; its descriptor came with the message."""
    number, nbytes = _SLAB.unpack_from(data)
    return KeptSlab(number, nbytes, fd, tuple(_BUFFER.iter_unpack(data[_SLAB.size :])))


class DurableReporter:
    """The child's :class:`~accel.storage.durable.DurableKeeper`: has the parent keep the memory.

    Each message leaves before the answer to the op that it is about.

    Parameters
    ----------
    channel
        The connection to the parent.

    Attributes
    ----------
    most_slabs : int
        How many slabs the parent keeps; 0 before :meth:`begin_generation`.
    """

    def __init__(self, channel: Channel) -> None:
        self.most_slabs = 0
        self._channel = channel
        self._numbers = itertools.count()

    def begin_generation(self, generation: int, most_slabs: int) -> None:
        """Begin a generation, with a range of slab numbers that no other generation uses."""
        self.most_slabs = most_slabs
        self._numbers = itertools.count(generation * _PER_GENERATION)

    def add_slab(self, slab: HeldSlab) -> int:
        """Send the parent a new slab with its descriptor, and return the slab's number."""
        number = next(self._numbers)
        self._channel.send(Kind.NEW_SLAB, _SLAB.pack(number, slab.nbytes), fds=(slab.fd,))
        return number

    def release_slab(self, number: int) -> None:
        """Have the parent close the descriptor of a slab that holds no buffers any more."""
        with contextlib.suppress(ClosedError):
            self._channel.send(Kind.FREED_SLAB, _NUMBER.pack(number))

    def add_buffer(self, ref: AccelRef, number: int, offset: int, size: int) -> None:
        """Report a new buffer, and where it is, to the parent."""
        self._channel.send(Kind.NEW_BUFFER, _BUFFER.pack(ref.buffer, number, offset, size))

    def remove_buffer(self, buffer: int) -> None:
        """Do nothing: it is the parent that has dropped the buffer."""

    def tear(self, buffers: Iterable[int], why: str) -> None:
        """Report buffers that a failed op has written in part."""
        numbers = list(buffers)
        self._channel.send(Kind.TORN, struct.pack(f"<{len(numbers)}Q", *numbers))


class DurableReports:
    """Enters the messages of a child's :class:`DurableReporter` in the device's book.

    Parameters
    ----------
    book
        The device's.
    """

    def __init__(self, book: DurableBook) -> None:
        self._book = book
        # Durable buffers that the child is asked to make: others it cannot report.
        self._expected: weakref.WeakValueDictionary[int, AccelRef] = weakref.WeakValueDictionary()

    def expect(self, ref: AccelRef) -> None:
        """Note a durable buffer that the child is asked to make, before the op is sent."""
        self._expected[ref.buffer] = ref

    def on_dropped(self, buffer: int) -> None:
        """Remove a buffer whose last ref was dropped: from those expected, and from the book."""
        self._expected.pop(buffer, None)
        if self._book.buffers:
            self._book.remove_buffer(buffer)

    def on_message(self, kind: int, data: bytes, fds: list[int]) -> dict[int, int]:
        """Handle a message about durable memory; return new buffers, and the bytes that each takes.

        The descriptor of a slab that the book keeps is removed from ``fds``; the caller closes
        the others.

        Raises
        ------
        ValueError, struct.error
            If the message cannot be true.
        """
        if kind == Kind.NEW_SLAB:
            number, nbytes = _SLAB.unpack(data)
            if len(fds) != 1:
                raise ValueError(f"slab {number} comes with {len(fds)} descriptors")
            if self._book.adopt_slab(number, nbytes, fds[0]):
                fds.clear()
        elif kind == Kind.NEW_BUFFER:
            buffer, number, offset, size = _BUFFER.unpack(data)
            ref = self._expected.pop(buffer, None)
            if ref is not None:  # else it was dropped meanwhile
                self._book.add_buffer(ref, number, offset, size)
                return {buffer: size}
        else:  # FREED_SLAB; the caller handles TORN
            self._book.release_slab(*_NUMBER.unpack(data))
        return {}
