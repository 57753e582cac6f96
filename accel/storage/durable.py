"""Durable buffers, which outlive a device's contexts, and the descriptors of their memory.

The present context adds each durable buffer to the book, and the slab that it is cut from, before
the op that makes it ends. The book holds a descriptor of each such slab, so that neither a
fault nor the death of a child takes the memory away, and the next context maps it again before its
generation begins.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import os
import resource
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

from accel._log import get_logger
from accel.errors import ClosedError, DriverError, InvalidArgumentError, StaleRefError, UnsupportedError
from accel.fork import close_after_fork
from accel.memory import memfd_identity
from accel.memory.space import ALIGNMENT
from accel.shortage import raise_shortage

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Iterable

    from accel.actors import ActorSystem
    from accel.backend import HeldSlab
    from accel.errors import AccelError
    from accel.ops import Plan
    from accel.ref import AccelRef
    from accel.storage.disposal import Disposal

__all__ = ["DurableBook", "DurableBuffer", "DurableKeeper", "KeptSlab"]

logger = get_logger()

_MOST_SLABS = 1 << 14
"""Slabs that are kept at most, where the process may have many descriptors."""

_UNMAP_TIMEOUT = 30.0
"""Seconds that abandoned work may go on before the device is given up."""

_REWRITE_REMEDY = "Write all of it anew: await device.put(array, out=ref), or any op with out=ref that does not read it; or drop it."
_DROP_REMEDY = "Drop it, and make another one: its memory is gone with its contents."


class KeptSlab(NamedTuple):
    """A slab of the book that a context is to map, and durable buffers in it.

    Attributes
    ----------
    number, nbytes
        Its number in the book, and its size in bytes.
    fd
        The book's own descriptor of it; -1 if the agent of another machine has the descriptor.
    blocks
        For each buffer its number, its offset in the slab, the bytes of its elements, and the bytes
        reserved.
    """

    number: int
    nbytes: int
    fd: int
    blocks: tuple[tuple[int, int, int, int], ...]


class DurableKeeper(Protocol):
    """Keeps the durable memory of a context, as the context tells it: a :class:`DurableBook`.

    In a child it is a :class:`~accel.remote.durable.DurableReporter`, which tells the parent's book.

    Attributes
    ----------
    most_slabs : int
        How many slabs there may be at once. Each takes a descriptor, in the parent too.
    """

    most_slabs: int

    def add_slab(self, slab: HeldSlab) -> int:
        """Keep a descriptor of a new slab, and return the slab's number."""

    def release_slab(self, number: int) -> None:
        """Close the descriptor of a slab, in which there is no buffer any more."""

    def add_buffer(self, ref: AccelRef, number: int, offset: int, size: int) -> None:
        """Add a buffer: where it is, and how many bytes are reserved for it."""

    def remove_buffer(self, buffer: int) -> None:
        """Forget a buffer."""

    def tear(self, buffers: Iterable[int], why: str) -> None:
        """Mark buffers as torn that a failed op has written in part; the context goes on."""


class DurableBuffer:
    """One durable buffer: where it is, and whether its contents are whole.

    Attributes
    ----------
    ref : weakref to AccelRef
        Its ref.
    slab : int or None
        The slab that it is in; ``None`` if the slab was lost, as no context could map it.
    offset, nbytes, size : int
        Its offset there, the bytes of its elements, and the bytes reserved for it.
    torn : str
        Why its contents are not whole; empty if they are.
    tears : int
        What :attr:`DurableBook.tears` was when it was torn. A write that was sent before that does
        not make it whole: see :meth:`DurableBook.on_rewritten`.
    """

    __slots__ = ("nbytes", "offset", "ref", "size", "slab", "tears", "torn")

    def __init__(self, ref: AccelRef, slab: int, offset: int, size: int) -> None:
        self.ref = weakref.ref(ref)
        self.slab: int | None = slab
        self.offset = offset
        self.nbytes = ref.nbytes
        self.size = size
        self.torn = ""
        self.tears = 0


class Seal:
    """The mark of a buffer that no op may write any more.

    Attributes
    ----------
    checksum : int or None
        Of the buffer's contents, once it is made.
    """

    checksum: int | None = None


class _Slab:
    """A slab whose descriptor the book holds.

    Attributes
    ----------
    identity : tuple of int or None
        Device and inode number of the memfd, for a slab that a child has sent: by these a second
        slab of the same memory is found. ``None`` for other slabs.
    unmapped : Event or None
        Set once this process has unmapped the slab; ``None`` if it has not mapped it.
    places : list of (int, int, int)
        Offset, size and number of each buffer in it, in order.
    """

    __slots__ = ("fd", "identity", "nbytes", "places", "unmapped")

    def __init__(self, fd: int, nbytes: int, unmapped: threading.Event | None, identity: tuple[int, int] | None = None) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.unmapped = unmapped
        self.identity = identity
        self.places: list[tuple[int, int, int]] = []

    def add(self, offset: int, size: int, buffer: int) -> bool:
        """Add a buffer, unless it is not aligned, not within the slab, or overlaps another one.

        Return whether it was added: what a child reports may be wrong.
        """
        if offset < 0 or offset + size > self.nbytes or size < ALIGNMENT or offset % ALIGNMENT or size % ALIGNMENT:
            return False
        at = bisect.bisect_left(self.places, (offset,))
        # The buffer before must have ended by then, and the one after must not have begun.
        if (at and sum(self.places[at - 1][:2]) > offset) or (at < len(self.places) and self.places[at][0] < offset + size):
            return False
        self.places.insert(at, (offset, size, buffer))
        return True

    def remove(self, offset: int) -> None:
        """Remove the buffer at ``offset``, which is there."""
        del self.places[bisect.bisect_left(self.places, (offset,))]


class _Refs(Protocol):
    """The members of the device's refs that are used here; see :class:`accel.storage.refs.Refs`."""

    name: str
    live_generation: int
    dropped: deque[int]


class DurableBook:
    """The durable buffers of one device, over all its generations. Used on the loop's thread only.

    Parameters
    ----------
    refs
        The device's refs.
    system
        Runs what blocks.
    disposal
        Closes descriptors.

    Attributes
    ----------
    is_offered : bool
        Whether the device's memory can outlive its contexts; known once there was one.
    any_torn : bool
        Whether some buffers are torn: only then the operands of each op are checked for it.
    tears : int
        How often any buffer was torn so far. A submission notes it when it is sent.
    used, reserved : int
        Bytes reserved for durable buffers, and bytes of the slabs that they are in.
    buffers : dict of int to DurableBuffer
        By the buffers' numbers.
    sealed : dict of int to Seal
        By the buffers' numbers, of those that no op may write any more: they have a checksum, or
        are to have one.
    most_slabs : int
        See :class:`DurableKeeper`.
    """

    def __init__(self, refs: _Refs, system: ActorSystem, disposal: Disposal) -> None:
        self._refs = refs
        self._system = system
        self._disposal = disposal
        self.any_torn = False
        self.tears = 0
        self.is_offered = False
        self.used = self.reserved = 0
        self.buffers: dict[int, DurableBuffer] = {}
        self.sealed: dict[int, Seal] = {}
        self.most_slabs = _default_most_slabs()
        self._torn: set[int] = set()  # numbers of the torn buffers
        self._slabs: dict[int, _Slab] = {}  # by number
        self._numbers = itertools.count(1)
        self._is_closed = False
        close_after_fork(self)

    def check_offered(self) -> None:
        """Raise unless the device has durable buffers.

        Raises
        ------
        UnsupportedError
        """
        if not self.is_offered:
            raise UnsupportedError(
                f"the memory of {self._refs.name} cannot outlive its context, so there are no durable buffers",
                device=self._refs.name,
                remedy="Leave durable out, and put the data on the device again after a rebuild (device.resident does).",
            )

    # -- calls of the present context; see DurableKeeper

    def add_slab(self, slab: HeldSlab) -> int:
        """Keep a duplicate of the slab's descriptor; return the slab's new number.

        Raises
        ------
        ClosedError
            If the device is closed.
        OutOfMemoryError, DriverError
            If the descriptor cannot be duplicated; nothing is added then.
        """
        if self._is_closed:
            raise ClosedError(f"device {self._refs.name} is closed", device=self._refs.name)
        try:
            fd = os.dup(slab.fd)
        except OSError as error:
            raise_shortage(error, "the descriptor of a durable slab cannot be duplicated")
            code = errno.errorcode.get(error.errno or 0, error.errno)
            raise DriverError(f"the descriptor of a durable slab cannot be duplicated: {error}", code=code, library="os") from error
        number = next(self._numbers)
        self._slabs[number] = _Slab(fd, slab.nbytes, slab.closed)
        self.reserved += slab.nbytes
        return number

    def adopt_slab(self, number: int, nbytes: int, fd: int) -> bool:
        """Add a slab that a child made, and own its descriptor from now on.

        A descriptor of -1 stands for one that the agent of another machine has. If the book is
        closed, return ``False``: the caller closes the descriptor, as it does if
        this raises.

        Raises
        ------
        ValueError
            If the number is taken, there are too many slabs, or the descriptor is of other memory
            than the child says.
        """
        if self._is_closed:
            return False
        if number in self._slabs or len(self._slabs) >= self.most_slabs:
            raise ValueError(f"slab {number} is there already, or one too many")
        identity = None if fd < 0 else memfd_identity(fd, nbytes)
        if identity is not None and any(slab.identity == identity for slab in self._slabs.values()):
            raise ValueError(f"slab {number} is the memory of another one")
        self._slabs[number] = _Slab(fd, nbytes, None, identity)
        self.reserved += nbytes
        return True

    def release_slab(self, number: int) -> None:
        """Remove a slab, and close its descriptor. Once the book is closed, do nothing.

        Raises
        ------
        ValueError
            If there is no such slab, or a buffer is in it.
        """
        if self._is_closed:
            return
        slab = self._slabs.get(number)
        if slab is None or slab.places:
            raise ValueError(f"slab {number} is not there, or in use")
        self._remove_slab(number)

    def on_slab_lost(self, number: int, error: AccelError) -> None:
        """Remove a slab that a new context could not map; its buffers stay, torn for good."""
        slab = self._remove_slab(number)
        logger.error("durable_slab_lost", device=self._refs.name, nbytes=slab.nbytes, buffers=len(slab.places), error=error)
        for _, size, buffer in slab.places:
            entry = self.buffers[buffer]
            entry.slab = None
            self.used -= size
            self._tear(entry, f"the context that followed could not have its memory ({error.message})")

    def _remove_slab(self, number: int) -> _Slab:
        """Remove a slab, and close its descriptor off the loop."""
        slab = self._slabs.pop(number)
        self.reserved -= slab.nbytes
        self._disposal.close_fds((slab.fd,))
        return slab

    def on_slab_mapped(self, number: int, unmapped: threading.Event) -> None:
        """Note that a context of this process has mapped a slab; its end sets ``unmapped``."""
        self._slabs[number].unmapped = unmapped

    def add_buffer(self, ref: AccelRef, number: int, offset: int, size: int) -> None:
        """Add a buffer to a slab of the book. Once the book is closed, do nothing.

        Raises
        ------
        ValueError
            If no such buffer can be there.
        """
        if self._is_closed:
            return
        slab = self._slabs.get(number)
        if slab is None or ref.buffer in self.buffers or ref.nbytes > size or not slab.add(offset, size, ref.buffer):
            raise ValueError(f"buffer {ref.buffer} cannot be at {offset} of slab {number}")
        self.buffers[ref.buffer] = DurableBuffer(ref, number, offset, size)
        self.used += size

    def remove_buffer(self, buffer: int) -> None:
        """Remove a buffer that was freed, and not its slab; do nothing for one that is not durable."""
        entry = self.buffers.pop(buffer, None)
        if entry is None:
            return
        if entry.slab is not None:
            self.used -= entry.size
            self._slabs[entry.slab].remove(entry.offset)
        self.sealed.pop(buffer, None)
        self._clear_torn(buffer)

    # -- torn buffers, whose contents are not whole

    def is_intact(self, ref: AccelRef) -> bool:
        """Return whether a buffer is durable and whole: a new generation will have it, too."""
        entry = self.buffers.get(ref.buffer)
        return entry is not None and not entry.torn

    def torn_error(self, ref: AccelRef) -> StaleRefError | None:
        """Return the error for a torn buffer; ``None`` for one that is not torn."""
        entry = self.buffers.get(ref.buffer)
        if entry is None or not entry.torn:
            return None
        return StaleRefError(
            f"{ref!r} is torn: {entry.torn}",
            reason="torn",
            device=self._refs.name,
            generation=self._refs.live_generation or None,
            remedy=_DROP_REMEDY if entry.slab is None else _REWRITE_REMEDY,
        )

    def may_rewrite(self, ref: AccelRef, plan: Plan) -> bool:
        """Return whether a buffer is torn and an op may have it all the same, as it only writes it.

        ``plan`` is the plan of the op, which has the buffer as an operand. :meth:`.Refs.check` asks
        this, and skips the ref's own check then. A write of a view is allowed too, and leaves the
        buffer torn: see :meth:`on_rewritten`. An op that updates, as it keeps or computes with old
        contents, is not allowed. ``False`` for a buffer that is not torn, whose memory is lost, or
        whose ref was freed.
        """
        if ref.buffer not in self._torn or self.buffers[ref.buffer].slab is None:
            return False
        return not ref.is_freed and not plan.updates and all(read.buffer != ref.buffer for read in plan.reads)

    def on_fault(self, unfinished: Iterable[int]) -> None:
        """Mark the durable ones of ``unfinished`` as torn: their writes had not ended at the fault."""
        torn = [entry for buffer in unfinished if (entry := self.buffers.get(buffer)) is not None]
        for entry in torn:
            self._tear(entry, "the context faulted before an op that wrote it was seen to have ended")
        if torn:
            logger.warning("durable_buffers_torn", device=self._refs.name, generation=self._refs.live_generation, buffers=len(torn))

    def tear(self, buffers: Iterable[int], why: str) -> None:
        """Mark buffers as torn that a failed op has written in part: reads fail from now on.

        Buffers that are not durable are left out.
        """
        for buffer in buffers:
            entry = self.buffers.get(buffer)
            if entry is not None:
                self._tear(entry, why)

    def is_torn(self, ref: AccelRef) -> bool:
        """Return whether a buffer is torn; unlike :meth:`torn_error`, without the reason."""
        return ref.buffer in self._torn

    def _tear(self, entry: DurableBuffer, why: str) -> None:
        """Mark a buffer as torn, and remove its seal; do nothing for one whose ref was dropped."""
        ref = entry.ref()
        if ref is not None:
            entry.torn = why
            entry.tears = self.tears = self.tears + 1
            self.sealed.pop(ref.buffer, None)
            self._torn.add(ref.buffer)
            self.any_torn = True

    def on_rewritten(self, writes: Iterable[tuple[int, int, int]], tears: int) -> None:
        """Mark torn buffers as whole again that a submission has written all of, without error.

        ``writes`` has the op's index, the buffer, and the number of bytes of each write; ``tears``
        is :attr:`tears` as it was when the submission was sent. Buffers that were torn after that
        stay torn. The refs of the others become valid in the live generation.
        """
        for _, buffer, nbytes in writes:
            entry = self.buffers.get(buffer) if buffer in self._torn else None
            if entry is not None and nbytes == entry.nbytes and entry.tears <= tears:
                entry.torn = ""
                self._clear_torn(buffer)
                ref = entry.ref()
                if ref is not None:
                    ref.generation = self._refs.live_generation or ref.generation

    def _clear_torn(self, buffer: int) -> None:
        """Remove a buffer from the torn ones, if it is one."""
        self._torn.discard(buffer)
        self.any_torn = bool(self._torn)

    # -- sealed buffers, which have a checksum

    def seal(self, ref: AccelRef) -> Seal:
        """Refuse ops that write a buffer from now on, and return its seal, for the checksum.

        A buffer that was freed or is torn is not sealed: the seal that is returned is not kept. One
        that is sealed already has the same seal.
        """
        seal = self.sealed.get(ref.buffer)
        if seal is None:
            seal = Seal()
            if ref.buffer in self.buffers and ref.buffer not in self._torn:
                self.sealed[ref.buffer] = seal
        return seal

    def unseal(self, ref: AccelRef, seal: Seal) -> None:
        """Allow writes of a buffer again, because its checksum could not be computed.

        Do nothing if another seal has replaced this one, or this one has got a checksum meanwhile.
        """
        if self.sealed.get(ref.buffer) is seal and seal.checksum is None:
            del self.sealed[ref.buffer]

    def check_writes(self, plan: Plan) -> None:
        """Raise if an op writes a sealed buffer.

        Raises
        ------
        InvalidArgumentError
        """
        for ref in plan.writes:
            if ref.buffer in self.sealed:
                raise InvalidArgumentError(
                    f"{ref!r} is sealed: it has a checksum, and is written no more",
                    device=self._refs.name,
                    remedy="Write another buffer; or make this one without a checksum.",
                )

    def on_mismatch(self, ref: AccelRef) -> None:
        """Mark a sealed buffer as torn, because its contents do not have its checksum.

        The buffer must be in the book.
        """
        logger.error(
            "durable_checksum_differs",
            device=self._refs.name,
            generation=self._refs.live_generation or None,
            buffer=ref.buffer,
            nbytes=ref.nbytes,
        )
        self._tear(self.buffers[ref.buffer], "its checksum differs: something wrote to it since it was sealed")

    # -- from generation to generation

    async def slabs_to_bind(self) -> list[KeptSlab]:
        """Return the slabs that a new context must map before its generation begins.

        Before that, remove the buffers of dropped refs, and wait until the context before has
        unmapped the slabs: it can write there no more.

        Raises
        ------
        DriverError
            If abandoned work in this process still uses the memory after 30 s.
        """
        self.apply_frees()
        for slab in list(self._slabs.values()):
            if slab.unmapped is not None and not slab.unmapped.is_set():
                if not await self._system.run_blocking(slab.unmapped.wait, _UNMAP_TIMEOUT):
                    raise DriverError(
                        f"work that was abandoned still uses durable memory of {self._refs.name} after {_UNMAP_TIMEOUT:g} s",
                        device=self._refs.name,
                        remedy="Open the device with host='process', where abandoned work ends with its process.",
                    )
                slab.unmapped = None
        return [KeptSlab(number, slab.nbytes, slab.fd, self._blocks_of(slab)) for number, slab in self._slabs.items()]

    def slabs_of(self, buffers: Iterable[int]) -> list[KeptSlab]:
        """Return the slabs that hold durable ones of ``buffers``, each with those: for a spare child.

        Buffers that are not durable, or whose memory is lost, are left out.
        """
        blocks_by_slab: dict[int, list[tuple[int, int, int, int]]] = {}
        for buffer in buffers:
            entry = self.buffers.get(buffer)
            if entry is not None and entry.slab is not None:
                blocks_by_slab.setdefault(entry.slab, []).append((buffer, entry.offset, entry.nbytes, entry.size))
        return [
            KeptSlab(number, self._slabs[number].nbytes, self._slabs[number].fd, tuple(sorted(blocks)))
            for number, blocks in blocks_by_slab.items()
        ]

    def apply_frees(self) -> None:
        """Remove the buffers of dropped refs, and empty slabs, while there is no context to do so.

        ``refs.dropped`` stays as it is: the next context takes from it, and ignores numbers of
        buffers that it does not have.
        """
        for buffer in list(self._refs.dropped):
            self.remove_buffer(buffer)
        for number in [number for number, slab in self._slabs.items() if not slab.places]:
            self.release_slab(number)

    def _blocks_of(self, slab: _Slab) -> tuple[tuple[int, int, int, int], ...]:
        """Return the buffers in a slab, as :attr:`KeptSlab.blocks` has them."""
        return tuple([(buffer, offset, self.buffers[buffer].nbytes, size) for offset, size, buffer in slab.places])

    def on_generation(self, generation: int) -> None:
        """Give the refs of buffers that are whole the number of the generation that begins.

        They are valid without it, see :attr:`AccelRef.is_stale`; with it the sender checks an
        operand by one comparison. Torn ones keep the old number. Views get it in
        :meth:`Refs.check`.
        """
        for entry in self.buffers.values():
            ref = entry.ref()
            if ref is not None and not entry.torn:
                ref.generation = generation

    def close_inherited(self) -> None:
        """Close the descriptors in a fork; see :class:`accel.fork.Inherited`."""
        self.close()

    def close(self) -> None:
        """Forget all buffers, and close all descriptors: the device is closed. Idempotent.

        A context that has not ended yet may still call the book: new slabs are refused, all other
        calls do nothing.
        """
        self._is_closed = True
        self.buffers.clear()
        self.sealed.clear()
        self._torn.clear()
        self.any_torn = False
        self.used = self.reserved = 0
        slabs, self._slabs = self._slabs, {}
        self._disposal.close_fds([slab.fd for slab in slabs.values()])


def _default_most_slabs() -> int:
    """Return how many slabs the book keeps at most.

    They take half of the descriptors that this process may have; the rest is the service's.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MOST_SLABS, soft // 2) if soft > 0 else _MOST_SLABS
