"""The state of one opened device that outlives its contexts."""

from __future__ import annotations

import asyncio
import time
from threading import get_ident
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.actors.home import Home
from accel.engine.lifecycle import DeviceState, Lifecycle
from accel.engine.stall import BusyTime
from accel.errors import AccelError, ClosedError, FaultScope
from accel.storage.disposal import Disposal
from accel.storage.oom_retry import OomRetry
from accel.storage.pinned import PinnedMemory
from accel.storage.refs import Refs
from accel.telemetry.probe import Probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from accel.actors import ActorSystem
    from accel.backend import AccelBackend, DeviceDescription
    from accel.dtype import DType
    from accel.engine.attribution import Attribution
    from accel.engine.options import DeviceOptions
    from accel.engine.registration import Registration
    from accel.family import OpFamily
    from accel.storage.durable import DurableKeeper

__all__ = ["DeviceCore", "Workload"]

logger = get_logger()


class Workload:
    """Counters of one device over all its generations. Used on the loop's thread only.

    Attributes
    ----------
    pending : int
        Callers that await a submission.
    in_hand : int
        Submissions that have left the queue and wait for a context, for room on the device, for
        shared memory, or for an earlier submission; and callers that wait for a context before they
        send.
    device_seconds : float
        Device time that was measured.
    changed : Future or None
        The future that :meth:`wait_changed` awaits; ``None`` while no task waits.
    """

    __slots__ = ("changed", "device_seconds", "in_hand", "pending")

    def __init__(self) -> None:
        self.pending = self.in_hand = 0
        self.device_seconds = 0.0
        self.changed: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the tasks in :meth:`wait_changed`."""
        changed, self.changed = self.changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def wait_changed(self) -> None:
        """Wait until an op or a caller has ended, or the device's state has changed.

        Any number of tasks may wait; cancelling one does not disturb the others.
        """
        if self.changed is None:
            self.changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self.changed)


class DeviceCore:
    """The state of one opened device over all its generations.

    Contexts come and go; the device, its actors and its contexts share this object.

    Parameters
    ----------
    system, backend, description, options, shared
        The system, the backend with its description of the device, the options, and a dictionary
        of what the devices of the system share.
    name
        The device's name, such as ``"cpu:0"``; ``None`` for that of the description.
    numbers
        Numbers of new buffers; ``None``: from 1.
    keeper
        Notified of durable memory by contexts; ``None`` for the device's own book.
    probes
        The system's probes; ``None`` for probes of its own.

    Attributes
    ----------
    is_closing : bool
        Whether the device is being closed, or is closed: nothing more is sent.
    loop : AbstractEventLoop
    home : Home
        The loop, thread and process of the device.
    lifecycle : Lifecycle
        State and generation.
    refs : Refs
        The owner of the device's refs.
    durable : DurableBook
        The buffers that outlive a generation.
    keeper : DurableKeeper
        The book; in a child the messages to the parent.
    pinned : PinnedMemory
        Pinned host memory for ``put`` and ``get``.
    oom_retry : OomRetry
        Tries again where memory of the context before is not free yet.
    disposal : Disposal
        Closes descriptors.
    workload : Workload
        Counts callers that wait, and submissions in hand.
    loans : BusyTime
        Counts the buffers that it lends to other devices: ops that write them wait for the ends of
        the loans.
    worlds : set of int
        Numbers of the open worlds that it is a rank of.
    registrations : dict
        Name -> registration, of the libraries of the user's own.
    registration_listeners : list of callable
        Called when a library was registered or unregistered.
    families : dict
        Name -> family, of the families from outside ``accel`` whose ops were sent.
    capabilities : Mapping
        Capability -> dtypes, of the newest context.
    has_graphs : bool
        Whether the backend makes one command of a graph.
    attributions : set of Attribution
        Work in flight to which the death of a context is attributed.
    restarts : int
        How often the context was rebuilt.
    rebuild_seconds : float
        How long the last rebuild took, or a first guess.
    """

    def __init__(
        self,
        system: ActorSystem,
        backend: AccelBackend,
        description: DeviceDescription,
        options: DeviceOptions,
        shared: dict[Any, Any],
        *,
        name: str | None = None,
        numbers: Iterator[int] | None = None,
        keeper: DurableKeeper | None = None,
        probes: Probes | None = None,
    ) -> None:
        self.system = system
        self.backend = backend
        self.description = description
        self.options = options
        self.shared = shared  # between the devices of the system
        self.name = name or description.spec
        self.is_closing = False
        self.home = Home(f"device {self.name}")
        self.loop = self.home.loop
        self.probes = probes or Probes()
        self.lifecycle = Lifecycle(self.name, self.loop, self.probes)
        self.disposal = Disposal(self.loop)
        self.refs = Refs(self.name, self.home, system, self.disposal, numbers)
        self.durable = self.refs.durable
        self.keeper = keeper or self.durable
        self.pinned = PinnedMemory(self.name, self.loop, system, options.pinned_limit)
        self.oom_retry = OomRetry()
        self.workload = Workload()
        self.loans = BusyTime()
        self.worlds: set[int] = set()
        self.lifecycle.listeners.append(self.workload.wake)
        self.registrations: dict[str, Registration] = {}
        self.registration_listeners: list[Callable[[], object]] = []
        self.families: dict[str, OpFamily] = {}
        self.capabilities: Mapping[str, frozenset[DType]] = {}
        self.has_graphs = False
        self.attributions: set[Attribution] = set()
        self.restarts = 0
        self.rebuild_seconds = 0.5
        self._faulted_at = 0.0
        self._had_process_fault = False

    # -- guards

    def guard(self) -> None:
        """Raise unless this is the loop, thread and process that own the device, and it is open.

        Raises
        ------
        ClosedError, DeviceLostError
        """
        # A device that is READY, and the place as `Home.is_here` does, without a call: this is on
        # the way of every op. asyncio's own query of the running loop calls getpid() each time.
        refs, home = self.refs, self.home
        if get_ident() == home.thread and self.loop.is_running() and refs.live_generation and not self.is_closing and not home.is_inherited:
            return
        self.check_home()
        if self.lifecycle.is_final:
            raise self.lifecycle.final_error()
        if self.is_closing:
            raise ClosedError(f"device {self.name} is closing", device=self.name)

    def check_home(self) -> None:
        """Raise unless this is the device's loop, thread and process, whatever its state.

        Raises
        ------
        ClosedError
        """
        if not self.home.is_here:
            error = self.home.wrong_place_error()
            error.device = self.name
            raise error

    @property
    def is_poisoned(self) -> bool:
        """Whether a fault of scope PROCESS or DEVICE has surfaced.

        If its context was in this process, no other one can be made here.
        """
        return self._had_process_fault or getattr(self.backend, "fault", None) is not None

    @property
    def is_ready(self) -> bool:
        """Whether the state is READY: ops run now."""
        return self.lifecycle.state is DeviceState.READY

    # -- changes of state

    def withdraw_registration(self, name: str) -> Registration | None:
        """Forget a registered library, and return its registration, or ``None``; tell listeners."""
        registration = self.registrations.pop(name, None)
        self.on_registrations_changed()
        return registration

    def on_registrations_changed(self) -> None:
        """Tell the listeners that a library was registered or unregistered."""
        for listener in self.registration_listeners:
            listener()

    def on_context_ready(self, began: float, **log_fields: object) -> None:
        """Enter the next generation, and log it; called when its context is ready.

        ``began`` is when its making began (``time.perf_counter()``); ``log_fields`` are logged too.
        """
        if self.lifecycle.generation:
            self.restarts += 1
            self.rebuild_seconds = time.perf_counter() - self._faulted_at
        self.refs.live_generation = generation = self.lifecycle.generation + 1
        self.durable.on_generation(generation)
        self.lifecycle.enter_ready()
        seconds = round(time.perf_counter() - began, 4)
        logger.info("context_ready", device=self.name, generation=generation, seconds=seconds, restarts=self.restarts, **log_fields)

    def on_context_lost(self, error: AccelError, decide_rebuild: Callable[[AccelError], bool]) -> None:
        """Make ordinary refs stale, and enter REBUILDING or LOST; called at a context's fault.

        ``decide_rebuild`` is called once, and returns whether another context follows. If it enters
        a final state itself, that stays.
        """
        self.refs.live_generation = 0
        self._had_process_fault |= error.scope >= FaultScope.PROCESS
        self._faulted_at = time.perf_counter()
        is_rebuilt = decide_rebuild(error)
        if self.lifecycle.is_final:
            return
        if is_rebuilt:
            self.lifecycle.enter_rebuilding(error)
        else:
            self.give_up(error)

    def give_up(self, error: BaseException | None) -> None:
        """Enter LOST, unless the state is final: no context follows.

        Durable memory is kept until the device is reopened or closed.
        """
        self.refs.live_generation = 0
        if not self.lifecycle.is_final:
            logger.error("device_lost", device=self.name, generation=self.lifecycle.generation, error=error)
            self.lifecycle.enter_lost(error if isinstance(error, AccelError) else None)
            self.pinned.on_device_ended()

    def begin_closing(self) -> None:
        """Refuse further work; what was sent may end. Errors of refs say that the device closes."""
        self.is_closing = self.refs.is_closing = True
        self.lifecycle.wake()  # what waits for a spare to be ready

    def close(self) -> None:
        """Enter CLOSED, and release the durable memory; the last step of closing."""
        self.begin_closing()
        self.refs.live_generation = 0
        self.lifecycle.enter_closed()
        self.durable.close()
        self.pinned.on_device_ended()
