"""Durable memory of a context in a child, of which the parent keeps descriptors."""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
from typing import TYPE_CHECKING

from accel.errors import ClosedError
from accel.remote.messages import Kind
from accel.storage.durable import Kept

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.backend import HeldSlab
    from accel.process.channel import Channel
    from accel.ref import AccelRef
    from accel.storage.durable import DurableBook

__all__ = ["Announcer", "DurableShare", "kept_in", "kept_message"]

_SLAB = struct.Struct("<QQ")
_PLACE = struct.Struct("<QQQQ")
_HEAD = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_PER_GENERATION = 1 << 32


def kept_message(slab: Kept) -> bytes:
    """Return the payload of a HELD message, without the number of its answer."""
    return _HEAD.pack(slab.number, slab.nbytes) + b"".join(_PLACE.pack(*block) for block in slab.blocks)


def kept_in(data: bytes, fd: int) -> Kept:
    """Return what :func:`kept_message` was given."""
    number, nbytes = _HEAD.unpack_from(data)
    return Kept(number, nbytes, fd, tuple(_PLACE.iter_unpack(data[_HEAD.size :])))


class Announcer:
    """Reports durable memory of the child to the parent, before the op that needed it is answered.

    Parameters
    ----------
    channel
        The connection to the parent.

    Attributes
    ----------
    most_slabs : int
        How many slabs the parent keeps; 0 before :meth:`begin`.
    """

    def __init__(self, channel: Channel) -> None:
        self.most_slabs = 0
        self._channel = channel
        self._numbers = itertools.count()

    def begin(self, generation: int, most_slabs: int) -> None:
        """Begin a generation, with its range of numbers of slabs."""
        self.most_slabs = most_slabs
        self._numbers = itertools.count(generation * _PER_GENERATION)

    def add_slab(self, slab: HeldSlab) -> int:
        """See :class:`accel.storage.durable.DurableKeeper`."""
        number = next(self._numbers)
        self._channel.send(Kind.SLAB, _SLAB.pack(number, slab.nbytes), fds=(slab.fd,))
        return number

    def release_slab(self, number: int) -> None:
        """See :class:`accel.storage.durable.DurableKeeper`."""
        with contextlib.suppress(ClosedError):
            self._channel.send(Kind.SLAB_GONE, _NUMBER.pack(number))

    def add_buffer(self, ref: AccelRef, number: int, offset: int, size: int) -> None:
        """See :class:`accel.storage.durable.DurableKeeper`."""
        self._channel.send(Kind.PLACED, _PLACE.pack(ref.buffer, number, offset, size))

    def remove_buffer(self, buffer: int) -> None:
        """Do nothing: the parent has removed it."""

    def tear(self, buffers: Iterable[int], why: str) -> None:
        """See :class:`accel.storage.durable.DurableKeeper`."""
        numbers = list(buffers)
        self._channel.send(Kind.TORN, struct.pack(f"<{len(numbers)}Q", *numbers))


class DurableShare:
    """The parent's half, for one child: the durable buffers that it was asked to make.

    Parameters
    ----------
    book
        The device's.
    """

    def __init__(self, book: DurableBook) -> None:
        self._book = book
        self._awaited: weakref.WeakValueDictionary[int, AccelRef] = weakref.WeakValueDictionary()

    def expect(self, ref: AccelRef) -> None:
        """Note a durable buffer that the child is asked to make."""
        self._awaited[ref.buffer] = ref

    def dropped(self, buffer: int) -> None:
        """Note that the last ref of a buffer was dropped."""
        self._awaited.pop(buffer, None)
        if self._book.buffers:
            self._book.remove_buffer(buffer)

    def take(self, kind: int, data: bytes, fds: list[int]) -> dict[int, int]:
        """Handle a message about durable memory; return the bytes reserved for new buffers.

        Raises
        ------
        ValueError, struct.error
            If the message cannot be true.
        """
        if kind == Kind.SLAB:
            number, nbytes = _SLAB.unpack(data)
            if len(fds) != 1:
                raise ValueError(f"slab {number} comes with {len(fds)} descriptors")
            if self._book.adopt_slab(number, nbytes, fds[0]):
                fds.clear()
        elif kind == Kind.PLACED:
            buffer, number, offset, size = _PLACE.unpack(data)
            ref = self._awaited.pop(buffer, None)
            if ref is not None:  # else it was dropped meanwhile
                self._book.add_buffer(ref, number, offset, size)
                return {buffer: size}
        else:
            self._book.release_slab(*_NUMBER.unpack(data))
        return {}
