"""The owner of a device's refs: makes them, checks that they are valid, and resolves tokens."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from accel.errors import InvalidArgumentError, StaleRefError
from accel.fork import close_after_fork
from accel.ref import AccelRef, AccelToken
from accel.storage.durable import DurableBook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from accel.actors import ActorSystem
    from accel.actors.home import Home
    from accel.ops import Plan, Spec
    from accel.storage.disposal import Disposal

__all__ = ["Recording", "Refs"]


class Recording(Protocol):
    """A batch or graph that records ops, whose refs are its own until its block ends."""

    what: ClassVar[str]
    """Its name in errors: "batch" or "graph"."""

    @property
    def is_recording(self) -> bool:
        """Whether its block has not ended."""


class Refs:
    """The owner of a device's refs over all its generations; see :class:`accel.ref.RefOwner`.

    Used on the loop's thread, but for :attr:`dropped`.

    Parameters
    ----------
    name
        Of the device, such as ``"cpu:0"``.
    home
        The loop, thread and process of the device.
    system
        Runs what blocks.
    disposal
        Closes descriptors.
    numbers
        Numbers of new buffers; ``None``: from 1.

    Attributes
    ----------
    identity : str
        Unique to this opened device, in every process.
    live_generation : int
        Generation whose ordinary refs are valid now; 0 while there is none.
    is_closing : bool
        Whether the device is being closed, and no generation follows.
    dropped : deque of int
        Buffers whose last ref was dropped; appended to on any thread.
    next_buffer : callable
        Returns a buffer number that was never used before, in any generation.
    recording : dict
        Buffer -> the batch or graph that makes it and may still be recording.
    durable : DurableBook
        The buffers that outlive a generation.
    device : Device
        The public face, once there is one.
    sharing : Sharing
        Shares the memory of the present generation with other libraries.
    """

    def __init__(self, name: str, home: Home, system: ActorSystem, disposal: Disposal, numbers: Iterator[int] | None = None) -> None:
        self.name = name
        self.identity = f"{name}/{uuid.uuid4().hex}"
        self.live_generation = 0
        self.is_closing = False
        self.dropped: deque[int] = deque()
        self.next_buffer: Callable[[], int] = (itertools.count(1) if numbers is None else numbers).__next__
        self.recording: dict[int, Recording] = {}
        self.durable = DurableBook(self, system, disposal)
        self.device: Any = None
        self.sharing: Any = None
        self._home = home
        # Buffer -> the ref that tokens of it were made from.
        self._tokens: weakref.WeakValueDictionary[int, AccelRef] = weakref.WeakValueDictionary()
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Make all refs invalid in a forked child, whose copy of the loop may go on.

        See :class:`accel.fork.Inherited`.
        """
        self.live_generation = 0

    def check_process(self) -> None:
        """Raise :class:`~accel.ClosedError` in a process forked from the device's."""
        if self._home.is_inherited:
            error = self._home.wrong_place_error()
            error.device = self.name
            raise error

    def make(self, specs: Iterable[Spec], generation: int) -> tuple[AccelRef, ...]:
        """Return refs to new buffers, which have numbers and no memory yet.

        A batch hands them out while it records; the context allocates at the dispatch.
        """
        next_buffer = self.next_buffer
        refs: tuple[AccelRef, ...] = ()
        for shape, dtype, durable in specs:
            refs += (AccelRef(self, next_buffer(), shape, dtype, generation, durable=durable),)
        return refs

    def check(self, ref: AccelRef, recording: Recording | None = None, plan: Plan | None = None) -> None:
        """Raise unless ``ref`` is of this device, valid, and of no other batch that is recording.

        A valid durable ref gets the live generation, if it was made before a rebuild. Of an op's
        operands, the sender calls this only for those that fail its own quick test, which has the
        same conditions: a new condition goes there too.

        Parameters
        ----------
        ref
            The ref.
        recording
            The batch or graph that uses it.
        plan
            Of the op that uses it: a torn buffer may be written by an op that does not read it.

        Raises
        ------
        InvalidArgumentError, StaleRefError
        """
        if ref.owner is not self:
            where = (
                f"another device that was opened as {self.name} too"
                if ref.owner.name == self.name
                else f"{ref.owner.name}, not {self.name}"
            )
            raise InvalidArgumentError(
                f"{ref!r} is on {where}",
                remedy="Each device has memory of its own: copy it over, ref = await device.put(ref).",
                device=self.name,
            )
        if plan is None or not ref.durable or not self.durable.may_rewrite(ref, plan):
            ref.check()
            if ref.durable and self.live_generation:
                ref.generation = self.live_generation  # a view may be older than the rebuild
        if self.recording:
            other = self.recording.get(ref.buffer)
            if other is not None and other is not recording and other.is_recording:
                raise InvalidArgumentError(
                    f"{ref!r} belongs to a {other.what} that has not ended", remedy=f"Use it after the {other.what}'s block."
                )

    def register_token(self, ref: AccelRef) -> None:
        """Remember the ref of a token, so that :meth:`resolve` finds it while the ref lives."""
        self._tokens[ref.buffer] = ref

    def resolve(self, token: AccelToken) -> AccelRef:
        """Return the ref that ``token`` was made from.

        Raises
        ------
        InvalidArgumentError
            If it is no token, of another device, or of a view that runs past its buffer.
        StaleRefError
            If the buffer is gone.
        """
        if not (isinstance(token, AccelToken) and isinstance(token.buffer, int)):
            raise InvalidArgumentError(f"{token!r} is not a token", remedy="Give what ref.token() returned.", device=self.name)
        if token.device != self.identity:
            raise InvalidArgumentError(
                f"{token!r} is not of device {self.identity}", remedy="Resolve it on the device that its ref is on.", device=self.name
            )
        if token.generation != self.live_generation and token.buffer not in self.durable.buffers:
            raise StaleRefError(f"{token!r} is of a generation that is gone", reason="generation", device=self.name)
        ref = self._tokens.get(token.buffer)
        if ref is None:
            raise StaleRefError(f"the ref that {token!r} names was dropped", reason="freed", device=self.name)
        ref.check()
        return token.of(ref)
