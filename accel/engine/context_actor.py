"""The actor that makes contexts: one instance per generation, replaced by its supervisor when the context faults.

The supervision loop that runs this actor is what rebuilds the context: a fault fails the actor, ``restarting`` gives the dead context back, the
fresh instance's ``started`` makes the next one, within the budget and after the delays of the device's :class:`~accel.RestartStrategy`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

from accel._log import get_logger
from accel.actors import Actor, ActorContext, ActorRef
from accel.actors.acquire import acquire
from accel.backend import PreparesLibraries, TellsFaults
from accel.engine.captures import captures_of
from accel.engine.context import Context
from accel.engine.durable_binding import bind_durable
from accel.engine.in_flight import fault_behind
from accel.engine.kernel_actor import NEVER_ENDS, KernelActor
from accel.engine.kernel_library import Operand, OwnLibrary
from accel.engine.lane import Lane
from accel.engine.launches import Port
from accel.engine.leaving import LeavingLibraries, withdraw
from accel.engine.op_error import op_error
from accel.engine.program import Capture
from accel.engine.registration import Unregistration
from accel.engine.streams import BATCH
from accel.errors import AccelError, ActorStoppedError, ClosedError, OutOfMemoryError, StaleRefError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import AccelDevice
    from accel.engine.context import ContextSharing
    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.lane_pool import LanePool
    from accel.engine.registration import DurableArgument, Registration

__all__ = ["ContextActor", "Request"]

logger = get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """What a context asks of its actor.

    Attributes
    ----------
    generation : int
        The context's. The actor of the next context has the same mailbox, and refuses it; see :meth:`refused`.
    """

    generation: int

    def refused(self) -> ClosedError:
        """Return why it is not answered any more. Of what waits for the answer, the context that asked knows that it has faulted."""
        return ClosedError("the context that asked for this has faulted", remedy="Send the op again.")


@dataclass(frozen=True, slots=True)
class OpenLibrary(Request):
    """Asks for the kernel actor of a library; answered with its :class:`~accel.engine.launches.Port`, or with why there is none."""

    library: str


@dataclass(frozen=True, slots=True)
class EquipLane(Request):
    """Asks that another lane of the context's pool takes ops of a library; see :class:`~accel.engine.lane_pool.LanePool`. There is no answer."""

    library: str


@dataclass(frozen=True, slots=True)
class CloseLibrary(Request):
    """Asks that a registered library is closed, of which no more ops are sent. There is no answer but that of the submission."""

    submission: Unregistration


class ContextActor(Actor["OpenLibrary | EquipLane | CloseLibrary", "Port | AccelError | None"]):
    """Owns one context, its lanes, and its kernel actors (which are its children, and end with it).

    Parameters
    ----------
    core
        What the device keeps over all generations.
    owner
        Told the context once it is ready, and ``None`` when it is not any more.
    share
        Makes what shares a context's memory with other libraries.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, owner: ContextOwner, share: Callable[[Context], ContextSharing]) -> None:
        self._core = core
        self._owner = owner
        self._share = share
        self._context: Context | None = None
        self._shared: list[Lane] = []  # by libraries, where the ``streams`` option bounds their number
        self._turn = itertools.count()
        self._lanes: dict[str, Lane] = {}  # of libraries that are being opened, and of built-in ones that could not be
        self._own_lanes: dict[str, Lane] = {}  # of registered libraries that are open, or are being opened
        self._free_lanes: list[Lane] = []  # of registered libraries that have left, or could not be opened
        self._leaving: LeavingLibraries | None = None
        self._is_calling = False  # code of a registered library, on a worker thread

    async def started(self, context: ActorContext) -> None:
        """Make the context, warm the libraries that were asked for, and declare the generation ready."""
        core = self._core
        began = time.perf_counter()
        device = await acquire(core.system, partial(core.memory_back.retry_on_oom, core.backend.open, core.description.index), _abandon)
        try:
            watcher = core.options.completion.open(device, core.loop, core.shared)
        except BaseException:
            await core.system.run_blocking(_abandon, device)
            raise
        actor, generation = context.self_ref, core.lifecycle.generation + 1
        made = Context(
            core,
            self._owner,
            device,
            watcher,
            open_port=partial(_open_port, actor, generation),
            equip_lane=partial(_equip_lane, actor, generation),
            withdraw=partial(withdraw, close=partial(_close_library, actor, generation)),
            share=self._share,
        )
        self._leaving = LeavingLibraries(made)
        try:
            # Not through the mailbox, which is not served before this returns.
            libraries = core.options.libraries
            for library in dict.fromkeys(("memory", *libraries, *core.options.priorities, *((BATCH,) if libraries else ()))):
                port = made.ports[library] = await self._open(made, library, context)
                lanes = made.pool.lanes_with(library) if made.pool is not None and library in made.pool.libraries else [port.lane]
                if isinstance(device, PreparesLibraries):
                    for lane in lanes:
                        await core.system.run_blocking(made.offloaded.make, device.prepare, library, lane.compute)
            await core.pinned.attach(device)
            await bind_durable(made)
            core.capabilities = made.lanes[0].compute.capabilities()
            core.has_graphs = bool(device.kernels(Capture.library))
            await self._open_eager(made, context)
            made.check_alive()
        except BaseException:
            await made.close(abandon=True)
            raise
        self._context = made
        made.on_fault = context.self_ref.fail
        if isinstance(device, TellsFaults):
            device.on_fault = partial(_told, made)
        self._owner.published(made)
        core.refs.sharing = made.sharing
        core.became_ready(began)

    async def receive(self, message: OpenLibrary | EquipLane | CloseLibrary, context: ActorContext) -> Port | AccelError | None:
        """Make the kernel actor of a library, or begin to end it, or give a lane of the pool what a library needs there."""
        made = self._context
        assert made is not None, "a context actor that runs has a context"
        if isinstance(message, EquipLane):
            if made.pool is not None:
                await self._equip_next(made, made.pool, message.library)
            return None
        if isinstance(message, CloseLibrary):
            self._close_library(made, message.submission, context)
            return None
        # The answer may not be taken: what waited for it was cancelled. So what was made is kept here.
        port = made.ports.get(message.library)
        if port is None:
            try:
                port = made.ports[message.library] = await self._open_any(made, message.library, context)
            except Exception as error:  # what a library needs and is not there is not the context's end: it goes on
                # A copy, without the traceback, which keeps the registration with its refs.
                return op_error(error, f"opening library {message.library!r}", self._core.loop, library=message.library).clone()
        return port

    async def _open_any(self, made: Context, library: str, context: ActorContext) -> Port:
        """Return the port of a library, made anew; of a registered one its instance too."""
        registration = self._core.own.get(library)
        if registration is None:
            return await self._open(made, library, context)
        own: OwnLibrary | None = None
        try:
            own = await self._open_own(made, registration, context)
            port = await self._open(made, library, context)
            if self._core.own.get(library) is not registration:  # unregistered meanwhile, or the call that registered it was cancelled
                raise ClosedError(f"library {library!r} is not registered any more", library=library, device=self._core.name)  # noqa: TRY301
        except BaseException:
            await self._end_port(made, library, context)
            if own is not None and made.fault is None:
                await self._core.system.run_blocking(own.close)
            self._give_lane(library)
            raise
        made.kernels.add_own(own)
        return port

    async def _open_own(self, made: Context, registration: Registration, context: ActorContext) -> OwnLibrary:
        """Make the instance of a registered library, and open it with its stream."""
        library, description = registration.name, self._core.description

        def operand(argument: DurableArgument) -> Operand:
            address = made.durables.address(made.buffers, argument.buffer)
            if address is None:
                raise StaleRefError(
                    f"buffer {argument.buffer}, which library {library!r} was registered with, is not in memory any more", reason="freed"
                )
            return Operand(address + argument.offset, argument.shape, argument.dtype, False, description.backend, description.index)

        own = await self._call_own(made, library, lambda: OwnLibrary(library, registration.make(operand), description))
        captures, pool = own.library.captures, made.pool if own.library.several_streams else None
        if pool is not None:
            pool.libraries.add(library)
            lane = (await self._first_of(made, pool, context)).lane
        else:
            lane = self._lanes[library] = self._own_lanes[library] = await self._lane(made, library, captures=captures, is_own=True)
        with captures_of(self._core).one_more() if captures else contextlib.nullcontext():
            await self._call_own(made, library, lambda: own.library.open(lane.stream))
        return own

    async def _open_eager(self, made: Context, context: ActorContext) -> None:
        """Open the registered libraries that are to be open before the generation begins. It begins without those that cannot be."""
        core = self._core
        for registration in [each for each in core.own.values() if each.is_eager and not each.is_leaving]:
            try:
                registration.check()
                made.ports[registration.name] = await self._open_any(made, registration.name, context)
            except Exception as raised:
                error = op_error(raised, f"opening library {registration.name!r}", core.loop, library=registration.name)
                if error.is_fault:
                    raise
                logger.warning("library_not_opened", device=core.name, generation=made.generation, library=registration.name, error=error)

    def _close_library(self, made: Context, submission: Unregistration, context: ActorContext) -> None:
        """Begin to end a registered library, beside the mailbox: other libraries are opened meanwhile."""
        assert self._leaving is not None, "an actor that runs has made a context"
        library = submission.library
        self._leaving.close(submission, partial(self._end_port, made, library, context), partial(self._give_lane, library))

    @staticmethod
    async def _end_port(made: Context, library: str, context: ActorContext) -> None:
        """End the kernel actor of a registered library, with all that it has enqueued; those of the pool go on without it."""
        if made.pool is not None:
            made.pool.libraries.discard(library)
        for lane in made.lanes:
            lane.provided.discard(library)
        actor = next((child for child in context.children if child.name == library), None)
        if actor is not None:
            await actor.stop()

    def _give_lane(self, library: str) -> None:
        """Keep the lane that a registered library had to itself for the next one: streams are not closed before their context."""
        self._lanes.pop(library, None)
        lane = self._own_lanes.pop(library, None)
        if lane is not None and lane not in self._shared:
            self._free_lanes.append(lane)

    async def _call_own(self, made: Context, library: str, call: Callable[[], T]) -> T:
        """Return what code of a registered library returns, called on a worker thread; raise what is behind what it raises."""

        def answer() -> T | AccelError:
            self._is_calling = True
            try:
                return made.offloaded.make(call)
            except BaseException as raised:  # also a CancelledError, which awaiting this must not raise
                is_out_of_memory = made.is_out_of_memory(raised)
                what = f"opening library {library!r}"
                return op_error(raised, what, self._core.loop, is_out_of_memory=is_out_of_memory, library=library)
            finally:
                self._is_calling = False

        found = await self._core.system.run_blocking(answer)
        if not isinstance(found, AccelError):
            return found
        if isinstance(found, OutOfMemoryError):
            made.buffers.release_idle()
        # A copy: this frame keeps the error that it found, and the traceback this frame.
        raise found.clone() if found.is_fault else made.fault_of(made.lanes[0].stream, found) or found.clone()

    async def _open(self, made: Context, library: str, context: ActorContext) -> Port:
        pool = made.pool
        if pool is not None and library in pool.libraries:
            await made.provide_workspaces((await self._first_of(made, pool, context)).lane, library)
            for port in pool.ports:
                if not port.lane.needs_workspace(library):
                    port.lane.provided.add(library)
            return pool.ports[0]
        shared = self._lanes.get(library)
        if shared is None:
            shared = self._lanes[library] = await self._lane(made, library, captures=library == Capture.library)
        await made.provide_workspaces(shared, library)
        port = await self._port(made, shared, library, context)
        del self._lanes[library]
        return port

    async def _port(self, made: Context, lane: Lane, name: str, context: ActorContext) -> Port:
        # Never full: the context sends no more than max_in_flight at once.
        size = self._core.options.max_in_flight * 2 + 2
        return Port(lane, await context.spawn(KernelActor, made, name=name, mailbox_size=size, restart=NEVER_ENDS))

    async def _first_of(self, made: Context, pool: LanePool, context: ActorContext) -> Port:
        """Return the first lane of the pool, whose lanes are made where there are none."""
        if not pool.ports:
            await self._fill(made, pool, context)
        return pool.ports[0]

    async def _fill(self, made: Context, pool: LanePool, context: ActorContext) -> None:
        """Make the lanes of the pool, in one call. Where the first one is there, and another cannot be made, the pool has fewer."""
        lanes, raised = await self._core.system.run_blocking(made.offloaded.make, self._make_lanes, made, pool.limit)
        made.lanes += lanes
        if raised is not None:
            error = op_error(raised, "adding a stream", self._core.loop)
            if error.is_fault or not lanes:
                raise raised
            logger.info("stream_not_added", device=self._core.name, streams=len(lanes), error=error)
        for lane in lanes:
            pool.add(await self._port(made, lane, f"pool-{len(pool.ports) + 1}", context))

    async def _equip_next(self, made: Context, pool: LanePool, library: str) -> None:
        """Let one more lane take ops of a library, if there is memory for it."""
        try:
            lane = next((port.lane for port in pool.ports if library not in port.lane.provided), None)
            if lane is not None:
                pool.equipping = lane
                await self._equip(made, lane, library)
        except Exception as raised:
            pool.stop_equipping()
            error = op_error(raised, "giving a stream its workspaces", self._core.loop)
            if error.is_fault:
                made.report_fault(error)
            else:
                logger.info("stream_not_equipped", device=self._core.name, library=library, error=error)
        finally:
            pool.answered()

    async def _equip(self, made: Context, lane: Lane, library: str) -> None:
        """Give a lane what ops of a library need there."""
        await made.provide_workspaces(lane, library)
        if isinstance(made.device, PreparesLibraries) and library in (*self._core.options.libraries, BATCH):
            await self._core.system.run_blocking(made.offloaded.make, made.device.prepare, library, lane.compute)

    async def _lane(self, made: Context, library: str, *, captures: bool, is_own: bool = False) -> Lane:
        """Return the lane that the ``streams`` option gives to a library."""
        limit = self._core.options.lanes
        # While a stream is captured, whatever is enqueued there becomes a part of the graph: so what captures has a stream of its own.
        if captures or limit is None:
            return await self._new_lane(made, library, is_own=is_own)
        if len(self._shared) >= limit:
            return self._shared[next(self._turn) % limit]
        lane = await self._new_lane(made, library, is_own=is_own)
        self._shared.append(lane)
        return lane

    async def _new_lane(self, made: Context, library: str, *, is_own: bool) -> Lane:
        priorities = self._core.options.priorities
        for lane in self._free_lanes if is_own else ():
            if priorities.get(lane.name, 0) == priorities.get(library, 0):
                self._free_lanes.remove(lane)
                return lane
        lane = await self._core.system.run_blocking(made.offloaded.make, self._make_lane, made, library)
        made.lanes.append(lane)
        return lane

    @staticmethod
    def _make_lane(made: Context, library: str) -> Lane:
        device: AccelDevice = made.device
        stream = device.create_stream(priority=made.core.options.priorities.get(library, 0))
        lane = Lane(library, device, stream, device.create_compute(stream, library), made.events)
        made.failures.listen(lane)
        return lane

    @classmethod
    def _make_lanes(cls, made: Context, count: int) -> tuple[list[Lane], Exception | None]:
        """Return the lanes, up to the first that cannot be made, and why it cannot."""
        lanes: list[Lane] = []
        try:
            while len(lanes) < count:
                lanes.append(cls._make_lane(made, BATCH))
        except Exception as raised:
            return lanes, raised
        return lanes, None

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """Give the dead context back, waiting for nothing that runs in it."""
        if self._context is not None and self._context.fault is None:
            self._context.report_fault(fault_behind(error), is_survived=True)
        logger.info("context_rebuilding", device=self._core.name, generation=self._core.lifecycle.generation)
        await self._close(abandon=True)

    async def stopped(self, context: ActorContext) -> None:
        """Give the context back; with nothing left in its streams, their threads have ended when this returns."""
        made = self._context
        await self._close(abandon=made is None or made.fault is not None or made.in_flight > 0 or self._is_calling)

    async def _close(self, *, abandon: bool) -> None:
        made, self._context = self._context, None
        if made is not None:
            self._owner.published(None)
            if self._leaving is not None:
                await self._leaving.aclose()
            await made.close(abandon=abandon)


_ContextActorRef: TypeAlias = "ActorRef[OpenLibrary | EquipLane | CloseLibrary, Port | AccelError | None]"


async def _open_port(actor: _ContextActorRef, generation: int, library: str) -> Port:
    answer = await actor.ask(OpenLibrary(generation, library))
    if isinstance(answer, AccelError):
        raise answer.clone()
    assert answer is not None, "a port was asked for"
    return answer


def _equip_lane(actor: _ContextActorRef, generation: int, library: str) -> None:
    with contextlib.suppress(ActorStoppedError):  # the device closes
        actor.tell(EquipLane(generation, library))


def _close_library(actor: _ContextActorRef, generation: int, submission: Unregistration) -> None:
    with contextlib.suppress(ActorStoppedError):  # the device closes, and answers it
        actor.tell(CloseLibrary(generation, submission))


def _abandon(device: AccelDevice) -> None:
    device.close(abandon=True)


def _told(context: Context, error: AccelError) -> None:
    """Take note, on whatever thread, of a fault that surfaced elsewhere in the process; this context may not have queried the driver since."""
    with contextlib.suppress(RuntimeError):  # its loop has ended
        context.core.loop.call_soon_threadsafe(lambda: context.report_fault(error.clone()))
