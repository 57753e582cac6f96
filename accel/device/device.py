"""The device as its users see it: a stable address, valid over every rebuild of its context."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from accel._log import get_logger
from accel.device.batch import Batch
from accel.device.compiler import Compiler
from accel.device.families import BuiltInFamilies
from accel.device.graph import Graph
from accel.device.hints import DEVICE_HINTS
from accel.device.info import DeviceHealth, DeviceInfo, health_of, snapshot
from accel.device.memory_exchange import MemoryExchange
from accel.device.memory_methods import MemoryMethods
from accel.device.model_methods import ModelMethods
from accel.device.peers import Peers
from accel.device.quarantine import quarantined
from accel.device.rank import DeviceRank
from accel.device.telemetry_methods import TelemetryMethods, monitor_of
from accel.engine.attribution import Attribution
from accel.engine.kernels import LIBRARIES
from accel.engine.lifecycle import DeviceState
from accel.engine.registration import Registration, Unregistration
from accel.errors import ContextPoisonedError, InvalidArgumentError
from accel.expressions import Namespace
from accel.hints import NoModel, NotEntered, hinted
from accel.libraries.kernel_library import KernelLibrary, kernels_of
from accel.ops.namespace import Awaited, OpNamespace, Submitter
from accel.remote.tokens import PublishedRefs
from accel.residents import Residents
from accel.solvers import DeviceSparse
from accel.values import check_timeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from accel.actors import ActorSystem
    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.engine.sender import Sender
    from accel.ops import KernelOp
    from accel.telemetry import Probes

__all__ = ["Device"]

logger = get_logger()

T = TypeVar("T")
N = TypeVar("N", bound=OpNamespace[Any])


@hinted(DEVICE_HINTS)
class Device(MemoryMethods, ModelMethods, TelemetryMethods, BuiltInFamilies[Awaited], NoModel, NotEntered):
    """One opened device.

    Made by :meth:`accel.System.open_device`; several may share one piece of hardware, each with its
    own context and memory.

    Every op is sent at the first step of its ``await``, and runs in the order of sending; buffers
    are kept consistent across streams. An ``await`` ends with the result or with an error.
    Cancelling it detaches the waiter at once: work that has not reached the device is dropped, the
    rest runs on with its memory kept. After a fault the device goes REBUILDING; ops wait for the
    next generation unless they use refs of the old one.

    Methods raise :class:`~accel.ClosedError` after close and on a wrong loop, thread or process,
    and :class:`~accel.DeviceLostError` while the device is lost.
    """

    _not_data: ClassVar[str] = "In a FastAPI handler write `device: DeviceDependency`, from accel.integrations.fastapi."

    def __init__(self, core: DeviceCore, sender: Sender, host: Host, actor: Any, open_quarantine: Callable[[], Awaitable[Device]]) -> None:
        self._core = core  # the state over all generations
        self._sender = sender  # checks ops, and sends them to the actor
        self._host = host  # has the present context
        self._actor = actor
        self._open_quarantine = open_quarantine
        self._submitter: Submitter[Awaited] = Submitter(sender.submit, sender.refuse, "device")
        self._families: dict[Callable[..., object], OpNamespace[Awaited]] = {}  # by their classes
        self._extra_families: dict[str, type[OpNamespace[Any]]] = {}  # by name, those not built in
        self._compiler = Compiler(core, sender, host)
        self._peers = Peers(core, sender, host)
        self._published = PublishedRefs(core, self)
        self._residents = Residents(core, self)
        # None if the hardware is on another machine, or its backend cannot read it.
        self._hardware = None if host.children.node_address else monitor_of(core)
        self._xp = Namespace(self)
        self._sparse = DeviceSparse(self._submitter, self, core.system.run_blocking)
        self._closed: asyncio.Future[None] | None = None  # of the first aclose(), done at its end
        self._own_system: ActorSystem | None = None  # of accel.open_device(), closed with the device

    def __repr__(self) -> str:
        return f"<Device {self.name} {self.state.value} generation {self.generation}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: it lives in one process; send refs, whose tokens device.resolve turns back, or data")

    # -- ops

    def family(self, namespace: Callable[[Submitter[Awaited]], N]) -> N:
        """See :meth:`BuiltInFamilies.family`.

        From then on a family that is not built in is an attribute, by its name, of the device and
        its batches too.

        Raises
        ------
        InvalidArgumentError
            If a device, batch or graph has something else of that name.
        """
        ops: Any = self._families.get(namespace)
        if ops is None:
            ops = namespace(self._submitter)
            _check_name(ops.library)
            self._families[namespace] = ops
            if not (ops.library in vars(self) or hasattr(type(self), ops.library)):
                self._extra_families[ops.library] = type(ops)
                setattr(self, ops.library, ops)
        result: N = ops
        return result

    @property
    def xp(self) -> Namespace:
        """Functions of the Python array API standard, which record expressions that are awaited.

        See :class:`accel.expressions.Namespace`.
        """
        return self._xp

    @property
    def sparse(self) -> DeviceSparse:
        """Sparse matrices; see :class:`~accel.device.DeviceSparse`."""
        return self._sparse

    @property
    def compiler(self) -> Compiler:
        """Kernels of your own; see :class:`~accel.device.Compiler`."""
        return self._compiler

    def run(self, op: KernelOp[T], *, timeout: float | None = None) -> Coroutine[Any, Any, T]:
        """Run any op. Awaited, it returns the one result, or the tuple of results.

        The results of a :class:`~accel.ops.SizedOp` are untrimmed.

        Parameters
        ----------
        op
            What to do. Tokens among its operands (it was pickled) are turned back into refs.
        timeout
            Seconds until waiting ends with :class:`~accel.DeadlineExceededError`; expired work is
            not launched.

        Raises
        ------
        InvalidArgumentError, UnsupportedError, StaleRefError
            Before anything is sent: it is no op, the operands do not fit, this device does not
            offer it, or an operand is gone.
        OutOfMemoryError
            There is no room for the result.
        ContextPoisonedError
            The context faulted while the op was in flight; ``.executed`` says whether it may have
            run.
        MailboxFullError
            The queue is full and the device was opened with ``overload="reject"``.
        """
        running = self._sender.run(op, timeout, takes_tokens=True)
        running.__qualname__ = "Device.run"  # type: ignore[attr-defined]
        return running

    async def register(self, library: type[KernelLibrary], *args: Any, **kwargs: Any) -> None:
        """Let the device run ops of a library of the user's own; see :class:`accel.KernelLibrary`.

        Parameters
        ----------
        library
            The class. An instance is made, and opened on a worker thread, now and for every later
            context.
        *args, **kwargs
            What it is made with. A durable ref, also in a dict, list or tuple, reaches it as an
            :class:`accel.Operand` over the same memory, which is kept as long as the library is
            registered. :meth:`free` refuses such a ref, and ops of the library are refused while
            one is torn.

        Raises
        ------
        InvalidArgumentError
            If the class has no name or no kernels, or the device has a library of this name; if a
            ref is of another device, not durable, or strided.
        StaleRefError
            If the memory of a ref is gone, or torn.
        LibraryError
            If it cannot be made or opened; the device goes on without it.
        ContextPoisonedError
            If the context faults meanwhile, or if that surfaces here.

        Notes
        -----
        Cancelling before the instance is open leaves the device without the library; cancelling
        later leaves the library registered.
        """
        kernels_of(library)
        await self.register_as(library.name, library, *args, **kwargs)

    async def register_as(self, name: str, library: type[KernelLibrary], /, *args: Any, **kwargs: Any) -> None:
        """Register a library under another name than its own; otherwise as :meth:`register`.

        So a device can have several libraries of one class.

        Ops of such a class have their library in a field, ``library: str``, and are those of the
        library that it names.
        """
        core = self._core
        core.guard()
        kernels_of(library)
        if name in core.registrations or name in core.families or name in LIBRARIES:
            raise InvalidArgumentError(f"{core.name} has a library {name!r}", remedy="Give yours another name.", device=core.name)
        # Before the wait: a context that is made meanwhile opens the library too.
        registration = core.registrations[name] = Registration.of(core.refs, name, library, args, kwargs)
        try:
            await self._sender.wait_ready(None)
            await self._host.context.open(name)
        except BaseException:
            context = self._host.context
            # Forget it, unless it was opened before the cancellation, or unregistered meanwhile.
            if core.registrations.get(name) is registration and (context is None or name not in context.registered):
                core.withdraw_registration(name)
            raise
        finally:
            del registration  # an error's traceback keeps this frame, and the registration its refs
        core.on_registrations_changed()

    async def unregister(self, name: str) -> None:
        """End a library that was registered.

        Returns once its instance is closed, and nothing of it is on the device.

        Ops of the library that were sent before run; those that are sent later are refused, as of
        an unknown library, and so are replays of graphs that have some. The refs that it was
        registered with are released. The name can be registered again.

        Parameters
        ----------
        name
            The library's.

        Raises
        ------
        InvalidArgumentError
            If no such library is registered.
        ClosedError, DeviceLostError
            If the device ends before.
        MailboxFullError
            If the queue is full and the device was opened with ``overload="reject"``.

        Notes
        -----
        It takes its place in the device's queue. Cancelling before its turn leaves the library
        registered; after that it ends all the same. Where a context faults before its instance is
        closed, the instance goes with it. While the device is REBUILDING, the library is not opened
        ahead. A device that is lost has no instance: it forgets the library at once, and does not
        open it when it is reopened.
        """
        core = self._core
        core.check_home()
        if core.lifecycle.state is DeviceState.LOST and name in core.registrations:
            core.withdraw_registration(name)
            return
        core.guard()
        registration = core.registrations.get(name)
        if registration is None:
            raise InvalidArgumentError(
                f"{core.name} has no registered library {name!r}", remedy="Give the name of a class that was registered.", device=core.name
            )
        registration.unregistrations += 1  # contexts that are made from now on do not open it
        submission = Unregistration(name, core.loop.create_future(), core.refs.live_generation)
        try:
            await self._sender.run(None, None, submission)
        except ContextPoisonedError:
            # Its dispatch has removed the registration: the instance ended with the context that faulted.
            if core.registrations.get(name) is registration:
                raise
        finally:
            if core.registrations.get(name) is registration:  # not dispatched: it stays
                registration.unregistrations -= 1
                core.on_registrations_changed()
            del submission, registration  # for the same reason as in register_as()

    def batch(self, *, timeout: float | None = None, name: str = "batch") -> Batch:
        """Return a batch: ``async with device.batch() as batch`` records ops without awaiting them.

        They are sent when the block ends.

        Parameters
        ----------
        timeout
            Seconds of waiting, at the beginning of the block for a rebuild and at its end for the
            ops, until :class:`~accel.DeadlineExceededError`.
        name
            What errors that concern all of its ops call it, as their ``op``.
        """
        check_timeout(timeout)
        return Batch(self._core, self._sender, timeout, self._extra_families, name)

    def graph(self, *, timeout: float | None = None) -> Graph:
        """Return a graph: ``async with device.graph() as graph`` records ops without running them.

        ``await graph.replay()`` then runs them all at once.

        Parameters
        ----------
        timeout
            Seconds of waiting, at the beginning of the block for a rebuild and at its end for the
            making of the graph, until :class:`~accel.DeadlineExceededError`.
        """
        check_timeout(timeout)
        return Graph(self._core, self._sender, timeout, self._extra_families)

    def quarantine(self) -> AbstractAsyncContextManager[Device]:
        """Open a second device like this one, for work that may kill its context.

        ::

            async with device.quarantine() as other:
                await other.run(op)

        It has the hardware, the options and the registered libraries of this one, but for those
        that were given refs; a child process, memory and a restart budget are its own. A fault
        there is never counted here. It does not appear in ``system.devices``, takes nothing from a
        ``FaultPlan``, and is closed at the end of the block: at once if the block raises or is
        cancelled.

        Raises
        ------
        AccelError
            At the beginning of the block, if no child comes up; the reason is the error itself, or
            its cause.
        DeviceLostError
            From ops, once a context has failed to come up three times in a row.
        """
        self._core.check_home()
        return quarantined(self._open_quarantine)

    def attribution(self) -> Attribution:
        """Declare work that is examined if the context dies while it is on the device.

        The work is on the device during the block ``with device.attribution() as attribution``.

        A :class:`~accel.patterns.DynamicBatcher` with ``quarantine=`` does this for its batches. A
        death for which the work is found to be the cause does not count in the restart budget.
        """
        self._core.check_home()
        return Attribution(self._core.attributions)

    # -- state

    @property
    def name(self) -> str:
        """Backend and index, such as ``"cpu:0"``, with a number if that name was taken: ``"cpu:0#2"``."""
        return self._core.name

    @property
    def probes(self) -> Probes:
        """The probes of its system: see :class:`accel.Probe`."""
        return self._core.probes

    @property
    def generation(self) -> int:
        """Number of the newest context that became ready, from 1."""
        return self._core.lifecycle.generation

    @property
    def state(self) -> DeviceState:
        """The state of the device."""
        return self._core.lifecycle.state

    def generations(self) -> AsyncIterator[int]:
        """Iterate over generations: the present one now, then the newest after every rebuild.

        Ends when the device is closed; raises :class:`~accel.DeviceLostError` when it is lost.
        """
        self._core.check_home()
        return self._core.lifecycle.generations()

    async def spare_ready(self) -> bool:
        """Wait until a spare child is ready, and return whether there is one.

        There is none without ``standby=``, nor where too many have failed to come up, nor once the
        device is lost or closed. Cancelling ends the wait alone.
        """
        self._core.check_home()
        return await self._host.wait_spare_ready()

    def info(self) -> DeviceInfo:
        """Return a snapshot of the device.

        Never waits, and works in every state. On the device's own loop it first frees the memory of
        dropped refs. Other threads of the process may call it too: it changes nothing there.

        Raises
        ------
        ClosedError
            In a process forked from this one.
        """
        core, context = self._core, self._host.context
        core.refs.check_process()
        if core.home.is_here:
            if context is not None:
                context.apply_frees()
            elif core.lifecycle.is_final:  # else the slabs of dropped refs may be being mapped
                core.durable.apply_frees()
        return snapshot(core, self._host, self._actor.mailbox.statistics())

    def health(self) -> DeviceHealth:
        """Return whether the device serves.

        Never waits, sends nothing to the device; other threads of the process may ask too.

        A READY device does not serve while it closes, nor while it is stalled: its oldest op in
        flight does not end (:attr:`InlineHost.stall_after`), or its child does not answer
        (:attr:`ProcessHost.heartbeat_interval`).

        Raises
        ------
        ClosedError
            In a process forked from this one.
        """
        self._core.refs.check_process()
        return health_of(self._core, self._host.context, {} if self._hardware is None else self._hardware.xid_errors)

    async def wait_idle(self) -> None:
        """Wait until nothing is awaited or in flight, or the device is lost or closed.

        A device that rebuilds, and for which no caller waits, is idle. Something may be sent
        meanwhile, or right after it. Cancelling ends the wait alone.

        Raises
        ------
        ClosedError
            This is not the device's loop.
        """
        self._core.check_home()
        await self._host.wait_idle()

    async def reopen(self) -> None:
        """Bring a lost device up again, with a restart budget as new, and return once it is READY.

        Durable buffers are there again; other refs of before are stale. The new context is in a
        child if a fault has poisoned this process.

        Raises
        ------
        InvalidArgumentError
            The device is not lost; the message says its state.
        UnsupportedError
            A fault has poisoned this process, and ``host="inline"`` allows no other.
        DeviceLostError
            No context came up, for the reason that is its cause: the device is lost as before, and
            can be reopened later.
        ClosedError
            The device is closed, or was meanwhile.

        Notes
        -----
        All callers meanwhile wait for the same attempt. Cancelling one ends the wait, not the
        attempt; ops that are sent meanwhile wait for its end.
        """
        error = await asyncio.shield(self._host.reopen())
        if error is not None:
            raise error.clone()  # each caller gets an error of its own

    # -- the end

    async def aclose(self, *, timeout: float | None = None) -> None:
        """Close the device: take no more work, wait for what was sent, release everything.

        Idempotent; all callers wait for the end.

        Parameters
        ----------
        timeout
            Seconds to wait for work that was sent; ``None``: the system's ``close_timeout``. What
            has not ended then fails with :class:`~accel.ClosedError`.

        Notes
        -----
        Cancelling ends the wait for work that was sent, not the close. In a forked child this does
        nothing: the device is the parent's.
        """
        core = self._core
        if core.home.is_inherited:
            return
        core.check_home()
        check_timeout(timeout)
        # Of open_device(): close the device, by a call without its system, and then its system.
        own_system, self._own_system = self._own_system, None
        if own_system is not None:
            atexit.unregister(self.close_at_exit)
            try:
                await self.aclose(timeout=timeout)
            finally:
                await own_system.aclose()
            return
        # Later callers wait for the first one.
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = core.loop.create_future()
        # From here on nothing is sent; what was sent may end.
        core.begin_closing()
        try:
            async with asyncio.timeout(core.system.close_timeout if timeout is None else timeout):
                await self._residents.aclose()
                await self._host.wait_idle()
        except TimeoutError:
            self._log_work_left()
        finally:
            # What is left fails with ClosedError: the state first, so that its waiters see it.
            core.close()
            self._peers.close()
            if self._hardware is not None:
                self._hardware.close()
            try:
                await self._actor.stop(drain=False)
            finally:
                self._closed.set_result(None)
                if not core.home.is_inherited:
                    await self._published.aclose()
                    await core.pinned.aclose()
                await core.disposal.aclose()

    def as_rank(self) -> DeviceRank:
        """Return the device as a rank, for a :class:`~accel.World`; raises as :class:`DeviceRank`."""
        return DeviceRank(self._core, self._sender, self._host)

    def adopt_system(self, system: ActorSystem) -> None:
        """Have :meth:`aclose` close the device's own system too, for :func:`accel.open_device`.

        At the exit of the program :meth:`close_at_exit` is called, unless the device was closed.
        """
        self._own_system = system
        atexit.register(self.close_at_exit)

    def close_at_exit(self) -> None:
        """Warn that the device was not closed, and close it if its loop can still run.

        Called by ``atexit``, for a device of :func:`accel.open_device`.
        """
        loop = self._core.loop
        if self.state is DeviceState.CLOSED or self._core.home.is_inherited:
            return
        logger.warning("device_not_closed", device=self.name, remedy="End it: await device.aclose().")
        if not (loop.is_running() or loop.is_closed()):
            with contextlib.suppress(Exception):  # its children end with this process in any case
                loop.run_until_complete(self.aclose())

    def _log_work_left(self) -> None:
        """Warn that work in flight had not ended within the timeout of :meth:`aclose`."""
        info = self.info()
        logger.warning(
            "device_closed_with_work_left", device=info.name, queued=info.queued, in_flight=info.in_flight, generation=info.generation
        )


# Python's own errors and warnings name a method as it is called: `Device.put`.
for _base in (MemoryMethods, MemoryExchange, ModelMethods, TelemetryMethods):
    for _method in vars(_base).values():
        if inspect.isfunction(_method):
            _method.__qualname__ = f"Device.{_method.__name__}"


def _check_name(library: str) -> None:
    """Raise if a family of that name would hide an attribute of a device, a batch or a graph.

    Names of built-in families are attributes already, and pass.
    """
    owner = next((kind for kind in (Device, Batch, Graph) if hasattr(kind, library)), None)
    if library not in LIBRARIES and (owner is not None or library.startswith("_")):
        why = "is private" if owner is None else f"is a member of {owner.__name__}"
        raise InvalidArgumentError(
            f"a family cannot be named {library!r}: that {why}", library=library, remedy="Give the family another name."
        )
