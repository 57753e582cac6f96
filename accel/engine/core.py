"""What everything that belongs to one opened device shares: identity, options, state and counters."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
import weakref
from asyncio import _get_running_loop  # it knows of threads and forks, and does not raise
from collections import deque
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.engine.lifecycle import DeviceState, Lifecycle
from accel.errors import AccelError, ClosedError, DeviceLostError, FaultScope, InvalidArgumentError, StaleRefError
from accel.fork import close_after_fork
from accel.process.disposal import Disposal
from accel.ref import AccelToken
from accel.storage.durable import DurableBook
from accel.storage.memory_back import MemoryBack
from accel.storage.pinned import PinnedMemory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from accel.actors import ActorSystem
    from accel.backend import AccelBackend, DeviceDescription
    from accel.device.device import Device
    from accel.device.info import DeviceInfo
    from accel.device.options import DeviceOptions
    from accel.device.recording import Recorder
    from accel.dtype import DType
    from accel.engine.kernel_library import KernelLibrary
    from accel.ops import Plan
    from accel.ref import AccelRef
    from accel.storage.durable import DurableKeeper

__all__ = ["DeviceCore"]


logger = get_logger()


class DeviceCore:
    """The shared part of a device; the owner of its refs.

    Attributes
    ----------
    name : str
        Such as ``"cpu:0"``.
    identity : str
        Unique to this opened device, in every process.
    live_generation : int
        Generation whose ordinary refs are valid now; 0 while there is none.
    dropped : deque of int
        Buffers whose last ref went away.
    pending : int
        Callers that wait for a submission of theirs.
    retired : int
        Ops that are over.
    in_hand : int
        Submissions that have left the queue and wait for a context, or for room on the device.
    rebuild_seconds, faulted_at : float
        How long the last rebuild took (or a first guess), and when the last fault surfaced.
    survives : callable
        Whether a new context can follow a fault; the host knows. Where that is not known, it returns ``True``.
    restarts_left : callable
        How many rebuilds the budget has left.
    reopening : Future or None
        While a lost device is brought up again; ends with the error that all who wait for it are told, or ``None``.
    bring_up_again : callable
        Begins with that, or raises what keeps it from it; the device's actor knows how.
    next_buffer : callable
        Returns a buffer number that was never used before, in any generation.
    own : dict
        Name -> what makes an instance, of the libraries that were registered.
    disposal : Disposal
        Closes descriptors that a child has sent.
    durable : DurableBook
        The buffers that outlive every generation but the last.
    keeper : DurableKeeper
        Whom contexts tell of durable memory: the book, but in a child.
    is_watchful : bool
        Whether some durable buffers are torn, or have checksums: then each op is looked at.
    pinned : PinnedMemory
        Host memory for arrays that move fast; it outlives every generation.
    children : Children
        Its child processes besides the one that holds the context; ``None`` in a child.
    memory_back : MemoryBack
        How contexts and slabs are asked for.
    on_change : callable
        Called when a generation has begun, or the device is lost.
    recording : dict
        Buffer -> batch, for refs of batches that have not ended.
    open_quarantine : callable
        Opens a device like this one in a child of its own; the system knows how.
    """

    def __init__(
        self, system: ActorSystem, backend: AccelBackend, description: DeviceDescription, options: DeviceOptions, shared: dict[Any, Any]
    ) -> None:
        self.system = system
        self.backend = backend
        self.description = description
        self.options = options
        self.shared = shared
        self.name = description.spec
        self.identity = f"{description.spec}/{uuid.uuid4().hex}"
        self.loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.lifecycle = Lifecycle(self.name, self.loop)
        self.live_generation = 0
        self.dropped: deque[int] = deque()
        self.recording: dict[int, Recorder] = {}
        self.own: dict[str, Callable[[], KernelLibrary]] = {}
        self.capabilities: Mapping[str, frozenset[DType]] = {}
        self.rebuild_seconds = 0.5
        self.restarts = self.in_hand = self.pending = self.retired = 0
        self.faulted_at = 0.0
        self.pinned = PinnedMemory(self.name, self.loop, system, options.pinned_limit)
        self.is_closing = self.is_watchful = self._had_process_fault = False
        self.disposal = Disposal(self.loop)
        self.durable = DurableBook(self)
        self.keeper: DurableKeeper = self.durable
        self._idle: asyncio.Future[None] | None = None
        self.device: Any = None
        self.sharing: Any = None
        self.children: Any = None
        self.memory_back = MemoryBack()
        self.on_change: Callable[[], object] = lambda: None
        self._tokens: weakref.WeakValueDictionary[int, AccelRef] = weakref.WeakValueDictionary()
        self.survives: Callable[[AccelError], bool] = lambda _: True
        self.restarts_left: Callable[[], int] = lambda: 1
        self.next_buffer: Callable[[], int] = itertools.count(1).__next__
        self.open_quarantine: Callable[[], Awaitable[Device]]
        self.reopening: asyncio.Future[AccelError | None] | None = None
        self.bring_up_again: Callable[[], None] = self.cannot_reopen
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Refuse ops in a forked child, where the loop may run again; see :class:`accel.fork.Inherited`."""
        self.live_generation = 0

    # -- guards

    def guard(self) -> None:
        """Raise unless this is the loop, thread and process that own the device, and it is open.

        Raises
        ------
        ClosedError, DeviceLostError
        """
        if _get_running_loop() is self.loop and self.live_generation and not self.is_closing:
            return
        self.check_home()
        if self.lifecycle.is_final:
            raise self.lifecycle.final_error()
        if self.is_closing:
            raise ClosedError(f"device {self.name} is closing", device=self.name)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that owns the device."""
        return os.getpid() != self.pid

    @property
    def is_home(self) -> bool:
        """Whether this is the loop, thread and process that own the device."""
        return _get_running_loop() is self.loop

    def check_home(self) -> None:
        """Raise unless this is the loop, thread and process that own the device, whatever its state.

        Raises
        ------
        ClosedError
        """
        self.check_process()
        if _get_running_loop() is not self.loop:
            raise ClosedError(
                f"device {self.name} belongs to another event loop",
                device=self.name,
                remedy="Call it from its own loop; from other threads use system.portal.",
            )

    def check_process(self) -> None:
        """Raise unless this is the process that owns the device, in whatever thread.

        Raises
        ------
        ClosedError
        """
        if self.is_inherited:
            raise ClosedError(
                f"device {self.name} belongs to process {self.pid}; it does not survive a fork",
                device=self.name,
                remedy="Open a device in the child.",
            )

    def check_ref(self, ref: AccelRef, batch: Recorder | None = None, plan: Plan | None = None) -> None:
        """Raise unless ``ref`` is of this device, alive, and not of another batch that is still being recorded; ``plan`` is of the op that it is for.

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
                remedy="Each device has memory of its own: copy it over, ref = await device.put(await other.get(ref)).",
                device=self.name,
            )
        if plan is None or not ref.durable or not self.durable.may_write(ref, plan):
            ref.check()
            if ref.durable and self.live_generation:
                ref.generation = self.live_generation  # a view that was made before the last rebuild
        if self.recording:
            recorder = self.recording.get(ref.buffer)
            if recorder is not None and recorder is not batch:
                raise InvalidArgumentError(
                    f"{ref!r} belongs to a {recorder.what} that has not ended", remedy=f"Use it after the {recorder.what}'s block."
                )

    @property
    def is_poisoned(self) -> bool:
        """Whether a fault of scope PROCESS or DEVICE has surfaced: where its context was in this process, no other one can be made here."""
        return self._had_process_fault or getattr(self.backend, "fault", None) is not None

    # -- tokens

    def register_token(self, ref: AccelRef) -> None:
        """See :class:`accel.ref.RefOwner`."""
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

    # -- state

    def became_ready(self, began: float, **pairs: object) -> None:
        """Enter the next generation, whose context has been in the making since ``began``, and say so: as loudly as the fault before it was told."""
        log = logger.info
        if self.lifecycle.generation:
            self.restarts += 1
            self.rebuild_seconds = time.perf_counter() - self.faulted_at
            log = logger.warning
        self.lifecycle.ready()
        self.live_generation = generation = self.lifecycle.generation
        self.durable.entered(generation)
        self.on_change()
        seconds = round(time.perf_counter() - began, 4)
        log("context_ready", device=self.name, generation=generation, seconds=seconds, restarts=self.restarts, **pairs)

    def lost_context(self, error: AccelError, *, is_survived: bool = False) -> None:
        """Make ordinary refs stale at once; the supervisor decides what comes next.

        A fault that nothing will follow loses the device here and now, so that nobody is told to try again. With ``is_survived`` the supervisor has
        decided already.
        """
        self.live_generation = 0
        self._had_process_fault |= error.scope >= FaultScope.PROCESS
        self.faulted_at = time.perf_counter()
        if self.lifecycle.is_final:
            return
        if is_survived or (self.survives(error) and self.restarts_left() > 0):
            self.lifecycle.rebuilding(error)
        else:
            self.lost(error)

    def lost(self, error: BaseException | None) -> None:
        """Give the device up. Durable memory is kept, as it is now, until the device is reopened or closed."""
        self.live_generation = 0
        if not self.lifecycle.is_final:
            logger.error("device_lost", device=self.name, generation=self.lifecycle.generation, error=error)
            self.lifecycle.lost(error if isinstance(error, AccelError) else None)
            self.pinned.ended()
            self.on_change()

    def reopen(self) -> asyncio.Future[AccelError | None]:
        """Begin to bring a lost device up again, or join who has begun already.

        Raises
        ------
        ClosedError, DeviceLostError, InvalidArgumentError, UnsupportedError
            It is closed; its actor has ended; it is not lost; or its process cannot have a context any more.
        """
        self.check_home()
        lifecycle = self.lifecycle
        if self.is_closing or lifecycle.state is DeviceState.CLOSED:
            raise ClosedError(f"device {self.name} is closed", device=self.name, generation=lifecycle.generation)
        if self.reopening is None:
            if lifecycle.state is not DeviceState.LOST:
                raise InvalidArgumentError(
                    f"device {self.name} is {lifecycle.state.value}: only one that is lost is reopened",
                    device=self.name,
                    remedy="Look at device.state first. A device that is rebuilding becomes ready, or lost, by itself.",
                )
            self.bring_up_again()
            self.reopening = self.loop.create_future()
            logger.warning("device_reopening", device=self.name, generation=lifecycle.generation)
            lifecycle.rebuilding(lifecycle.cause)
        return self.reopening

    def reopened(self, error: BaseException | None) -> None:
        """End what :meth:`reopen` has begun, if it has: the device is ready, or lost again because of ``error``."""
        attempt, self.reopening = self.reopening, None
        if attempt is not None:
            if error is not None:
                self.lost(error)
            attempt.set_result(None if error is None else self.lifecycle.final_error())

    def cannot_reopen(self) -> None:
        """Raise: what would bring up another context is gone."""
        raise DeviceLostError(
            f"device {self.name} is lost, and its queue has ended", device=self.name, remedy="Close it, and open another one."
        )

    def closed(self) -> None:
        """End the device's life, whatever is left of it."""
        self.is_closing = True
        self.live_generation = 0
        self.lifecycle.closed()
        self.durable.close()
        self.pinned.ended()

    async def drained(self, context: Callable[[], Any]) -> None:
        """Wait, while closing, until nobody waits for anything and nothing is on the device; ``context()`` is the context of the day.

        What was on a context that has faulted is over: it does not retire any more.
        """
        while not self.lifecycle.is_final and (self.pending or ((day := context()) is not None and day.fault is None and day.in_flight)):
            self._idle = self.loop.create_future()
            await self._idle

    def over(self) -> None:
        """Note that a caller waits no more."""
        self.pending -= 1
        if self.is_closing:
            self.settled()

    def settled(self) -> None:
        """Tell :meth:`drained` that something has ended."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def log_left_behind(self, info: DeviceInfo) -> None:
        """Say what had not ended when closing would wait no longer."""
        logger.warning(
            "device_closed_with_work_left", device=self.name, queued=info.queued, in_flight=info.in_flight, generation=info.generation
        )

    @property
    def is_ready(self) -> bool:
        """Whether ops run now."""
        return self.lifecycle.state is DeviceState.READY
