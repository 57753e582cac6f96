"""The host of a device: makes its contexts, decides what follows a fault, reopens it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from accel._log import get_logger
from accel.actors import Actor, ActorContext, Directive, Terminated
from accel.actors.supervision import default_decision
from accel.engine.attribution import attribute
from accel.engine.lifecycle import DeviceState
from accel.engine.op_error import op_error
from accel.errors import AccelError, ClosedError, DeviceLostError, FaultScope, InvalidArgumentError, UnsupportedError
from accel.shortage import is_shortage

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from accel.actors import ActorRef
    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner

    MakeContextActor: TypeAlias = "Callable[[DeviceCore, ContextOwner], Actor[Any, Any]]"
    """Makes the actor of one context, here or in a child."""

__all__ = ["ChildProcesses", "Host"]

logger = get_logger()

_CONTEXT = "context"
"""Name of the actor that owns a device's context, a child of the device's actor."""


class ChildProcesses(Protocol):
    """The children of a device besides the one that holds its context."""

    @property
    def standby(self) -> str:
        """The state of the spare child; see :class:`~accel.DeviceInfo`."""

    @property
    def node_address(self) -> str | None:
        """The address of the machine that they are on; ``None``: this one."""

    @property
    def is_spare_ready(self) -> bool | None:
        """Whether a spare child is ready; ``None`` while one is starting."""

    @property
    def spare_pid(self) -> int | None:
        """Process id of the spare child."""

    async def wait_ended(self) -> bool:
        """Wait until the children that were killed have ended, and return whether they have."""


class Host:
    """Makes the contexts of one device over all generations.

    The only place that decides whether another context follows a fault.

    Contexts are made in this process until a fault of scope PROCESS: no other context can be made
    here after that. Then the device moves to a child, if it may. A child that faults, dies or hangs
    is replaced. After a fault of scope DEVICE no context follows.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    inline
        Makes the actor of a context in this process; ``None`` where all contexts are in children.
    remote
        Makes the actor of a context in a child; ``None`` where the device never moves to one.
    children
        The other child processes of the device.
    start_forkserver, start_spare
        Start the actors that keep a forkserver and a spare child, under the device's actor;
        ``None`` without them. The first one is stopped last, because the forkserver collects
        children.

    Attributes
    ----------
    kind : str
        ``"inline"`` while contexts are made in this process, ``"process"`` while they are made in
        children.
    context : object or None
        The context of the present generation; ``None`` while there is none.
    children : ChildProcesses
    """

    def __init__(
        self,
        core: DeviceCore,
        *,
        inline: MakeContextActor | None,
        remote: MakeContextActor | None,
        children: ChildProcesses,
        start_forkserver: Callable[[ActorContext], Awaitable[object]] | None = None,
        start_spare: Callable[[ActorContext], Awaitable[object]] | None = None,
    ) -> None:
        self.kind = "process" if inline is None else "inline"
        self.context: Any = None
        self.children = children
        self._core = core
        self._actor_factories = {"inline": inline, "process": remote}
        self._start_forkserver = start_forkserver
        self._start_spare = start_spare
        # The device decides, and asks the user's function; see _decide.
        self._user_decide = core.options.restart.decide
        self._restart = dataclasses.replace(core.options.restart, decide=self._decide)
        self._owner: ActorContext | None = None
        self._context_actor: ActorRef[Any, Any] | None = None
        self._monitor: ActorRef[Terminated | _Reopen, None] | None = None
        self._reopening: asyncio.Future[AccelError | None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child with the context; ``None`` inline, and without a context."""
        context = self.context
        return None if context is None or context.fault is not None else getattr(context, "pid", None)

    # -- place

    async def open(self, owner: ActorContext) -> None:
        """Make the first context under the device's actor, and watch the actor that owns it.

        Raises
        ------
        AccelError
            If there is no context to be had.
        """
        self._owner = owner
        if self._start_forkserver is not None:
            await self._start_forkserver(owner)
        actor = await self._start_context_actor(owner)
        self._monitor = await owner.spawn(_Monitor, self, name="monitor")
        actor.watch(self._monitor)
        if self._start_spare is not None:
            await self._start_spare(owner)

    async def _start_context_actor(self, owner: ActorContext) -> ActorRef[Any, Any]:
        """Start the actor that makes and owns the contexts, and return it once the first is ready.

        Its supervisor restarts it for each later context, until the restart budget is spent.
        """
        # A remote context's actor is told of each array that is to be copied back.
        mailbox_size = self._core.options.max_in_flight + 1024
        self._context_actor = actor = await owner.spawn(
            self._create_context_actor, name=_CONTEXT, mailbox_size=mailbox_size, restart=self._restart
        )
        return actor

    def _create_context_actor(self) -> Actor[Any, Any]:
        """Return a new actor for the next context, inline or remote as :attr:`kind` says."""
        create = self._actor_factories[self.kind]
        assert create is not None, "the device only moves to a place that it has"
        return create(self._core, self)

    def on_published(self, context: object) -> None:
        """See :class:`~accel.engine.in_flight.ContextOwner`."""
        self.context = context

    def _move_to_child(self, error: AccelError | None) -> None:
        """Have all further contexts made in children: a fault has poisoned this process."""
        self.kind = "process"
        logger.warning("device_moves_to_a_child", device=self._core.name, generation=self._core.lifecycle.generation, error=error)

    # -- decision

    def on_fault(self, error: AccelError) -> bool:
        """Decide what follows a fault, and fail the context's actor with that directive.

        Returns whether another context follows; if not, the device is lost at once. A fault while
        an :class:`Attribution` is in flight costs no restart (RENEW) unless no cause is found.
        """
        actor = self._context_actor
        if actor is None or self.context is None:
            # The context is still being made: its actor's start raises the fault, and its
            # supervisor then asks `_decide`.
            return True
        try:
            directive = self._decide(error)
        except Exception as broken:  # the user's `decide` raised
            directive = default_decision(error)
            logger.exception("actor_decision_failed", device=self._core.name, directive=directive.value, error=broken)
        if directive is Directive.RESTART:
            if attribute(self._core.attributions, actor.charge_restart):
                directive = Directive.RENEW
            elif actor.restarts_left() <= 0:
                directive = Directive.STOP
        actor.fail(error, directive)
        return directive in (Directive.RESTART, Directive.RENEW)

    def _decide(self, error: BaseException) -> Directive:
        """Return the directive for a fault of a context, or for an error in its start.

        Asks the user's ``decide`` of the restart strategy, if there is one; else the error's scope
        decides. Moves the device to a child where no other context can be made in this process.
        """
        if self._core.lifecycle.is_final:
            return Directive.STOP
        scope = error.scope if isinstance(error, AccelError) else FaultScope.OP
        may_move = self.kind == "inline" and self._actor_factories["process"] is not None
        if self._user_decide is not None:
            directive = Directive(self._user_decide(error))
            if directive is Directive.RESUME and isinstance(error, AccelError) and error.is_fault:
                directive = Directive.RESTART  # a context that has faulted cannot go on
        else:
            # From this scope on no context follows.
            final_scope = FaultScope.PROCESS if self.kind == "inline" and not may_move else FaultScope.DEVICE
            directive = Directive.RESTART if scope < final_scope else Directive.STOP
            if is_shortage(error):  # the machine's, which ends at some time: it costs no budget
                directive = Directive.RENEW
        if directive is Directive.RESTART and may_move and isinstance(error, AccelError) and scope >= FaultScope.PROCESS:
            self._move_to_child(error)
        return directive

    def on_actor_stopped(self, error: BaseException | None) -> None:
        """Declare the device LOST: the context's actor has stopped and is restarted no more.

        The actor of before a reopening may stop late: that changes nothing.
        """
        if self._reopening is None and self._context_actor is not None and not self._context_actor.is_alive:
            self._core.give_up(error)

    async def wait_spare_ready(self) -> bool:
        """Wait until a spare child is ready; return ``False`` if there will be none.

        There is none without ``standby=``, and once the device is lost or closes.
        """
        core = self._core
        while not (core.lifecycle.is_final or core.is_closing):
            if (is_ready := self.children.is_spare_ready) is not None:
                return is_ready
            await core.lifecycle.wait_changed()
        return False

    async def wait_idle(self) -> None:
        """Wait until no caller waits and nothing is in flight, or the device is lost or closed.

        Ops in flight in a context that has faulted do not count: they never end.
        """
        # `workload.wait_changed` returns whenever an op, or a caller's wait, has ended.
        core = self._core
        while not core.lifecycle.is_final:
            context = self.context
            if not core.workload.pending and (context is None or context.fault is not None or not context.in_flight):
                return
            await core.workload.wait_changed()

    # -- reopening

    def reopen(self) -> asyncio.Future[AccelError | None]:
        """Begin to reopen a lost device, or join the attempt that has begun.

        The device is REBUILDING from now on; the monitor starts the new context. The future's
        result is the error that keeps the device LOST, or ``None`` once it is READY.

        Raises
        ------
        ClosedError, DeviceLostError, InvalidArgumentError, UnsupportedError
            It is closed; its actor has ended; it is not lost; or its process cannot have a context
            any more.
        """
        core, lifecycle = self._core, self._core.lifecycle
        core.check_home()
        if core.is_closing or lifecycle.state is DeviceState.CLOSED:
            raise ClosedError(f"device {core.name} is closed", device=core.name, generation=lifecycle.generation)
        if self._reopening is None:
            if lifecycle.state is not DeviceState.LOST:
                raise InvalidArgumentError(
                    f"device {core.name} is {lifecycle.state.value}: only one that is lost is reopened",
                    device=core.name,
                    remedy="Look at device.state first. A device that is rebuilding becomes ready, or lost, by itself.",
                )
            if self._monitor is None:
                raise DeviceLostError(
                    f"device {core.name} is lost, and its queue has ended", device=core.name, remedy="Close it, and open another one."
                )
            self._move_if_poisoned()
            self._monitor.tell(_Reopen())  # before the state changes: this may raise
            self._reopening = core.loop.create_future()
            logger.warning("device_reopening", device=core.name, generation=lifecycle.generation)
            lifecycle.enter_rebuilding(lifecycle.cause)
        return self._reopening

    def _move_if_poisoned(self) -> None:
        """Move a lost device to a child if a fault has poisoned this process.

        Called before it is reopened.

        Raises
        ------
        UnsupportedError
            If the device may not move.
        """
        core = self._core
        if self.kind == "inline" and core.is_poisoned:
            if self._actor_factories["process"] is None:
                raise UnsupportedError(
                    f"device {core.name} with host='inline' cannot be reopened: its fault has poisoned this process",
                    device=core.name,
                    remedy="Restart the process, or open the device with host='auto' or 'process', which go on in a child.",
                )
            self._move_to_child(core.lifecycle.cause)

    async def restart_context_actor(self, monitor: ActorRef[Terminated | _Reopen, None]) -> None:
        """Start another context actor, with a new restart budget, once the last one has stopped.

        Called by the monitor. Ends the attempt of :meth:`reopen`, with the error if no context can
        be made, which is not raised.
        """
        core, owner = self._core, self._owner
        assert owner is not None, "it was opened"
        try:
            if self._context_actor is not None:
                await self._context_actor.wait_stopped()
            actor = await self._start_context_actor(owner)
        except Exception as error:
            self.end_reopening(op_error(error, f"reopening {core.name}", core.loop, device=core.name))
        else:
            actor.watch(monitor)
            self.end_reopening(None)

    def end_reopening(self, error: BaseException | None) -> None:
        """End the attempt of :meth:`reopen`, if there is one.

        With ``error`` the device is LOST again; without, its new context is READY already.
        """
        attempt, self._reopening = self._reopening, None
        if attempt is not None:
            if error is not None:
                self._core.give_up(error)
            attempt.set_result(None if error is None else self._core.lifecycle.final_error())

    def on_device_actor_stopped(self) -> None:
        """Reopen the device no more: its actor has stopped."""
        self._monitor = None
        self.end_reopening(DeviceLostError(f"the actor of {self._core.name} ended while the device was reopened", device=self._core.name))


class _Reopen:
    """The message that asks :class:`_Monitor` for another context of a device that was lost."""


class _Monitor(Actor["Terminated | _Reopen", None]):
    """Watches the context's actor, and starts another one when the device is reopened.

    It is an actor of its own, because the device's actor may be waiting for a context.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, host: Host) -> None:
        self._host = host

    async def receive(self, message: Terminated | _Reopen, context: ActorContext) -> None:
        """Declare the device LOST when the context's actor has stopped, or start another one."""
        if isinstance(message, _Reopen):
            await self._host.restart_context_actor(context.self_ref)
        else:
            self._host.on_actor_stopped(message.error)

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """End the attempt to reopen, in which this actor raised."""
        self._host.end_reopening(error)

    async def stopped(self, context: ActorContext) -> None:
        """Reopen the device no more: the device's actor stops, and this one with it."""
        self._host.on_device_actor_stopped()
