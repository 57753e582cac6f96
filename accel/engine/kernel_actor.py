"""The kernel actor of a library: opens, owns and closes what it needs in a context's lanes.

It is a child of the context's actor, started at the library's first use. If the library cannot be
opened, the actor stops with the error, and the library's next op starts another one. Ops do not
pass through it: they go from the context to a lane.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar, TypeVar

from accel._log import get_logger
from accel.actors import Actor, ActorContext, Directive, RestartStrategy
from accel.backend import PreparesLibraries
from accel.engine.captures import captures_of
from accel.engine.lane import Lane
from accel.engine.launches import complete_at_mark
from accel.engine.op_error import op_error
from accel.engine.registration import RegisteredLibrary
from accel.errors import AccelError, ClosedError, OutOfMemoryError, StaleRefError
from accel.libraries.kernel_library import Operand

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.engine.context import Context
    from accel.engine.registration import DurableArgument, Registration, Unregistration

__all__ = ["NEVER_ENDS", "KernelActor"]

logger = get_logger()

T = TypeVar("T")

NEVER_ENDS = RestartStrategy(decide=lambda _: Directive.RESUME)
"""The restart strategy of actors that fail the op and keep running, whatever is raised."""


class KernelActor(Actor["Lane | Unregistration", None]):
    """Owns the workspaces and kernels of one library in a context, or the instance of a user's.

    Its messages are further lanes for the library's ops, and the end of a user's library.

    Parameters
    ----------
    context
        The context.
    library
        The library's name.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, context: Context, library: str) -> None:
        self._context = context
        self._library = library
        self._user_library: RegisteredLibrary | None = None  # of a registered library, the instance

    async def started(self, context: ActorContext) -> None:
        """Open the library, and route its ops to a lane."""
        try:
            await self._open()
        except AccelError as error:
            # The actor's start keeps the error, and the frames of its traceback would keep the
            # registration, with its arguments.
            raise error.with_traceback(None)  # noqa: B904

    async def _open(self) -> None:
        """Open the library: its lane, its workspaces there, and the route of its ops to it.

        The route is set once the workspaces are there: from then on the context dispatches ops.
        """
        context, library, lanes = self._context, self._library, self._context.lanes
        registration = context.core.registrations.get(library)
        if registration is not None:
            lane = await self._open_registered(registration)
        elif library in lanes.pooled_libraries:
            lane = lanes.pool[0]
        else:
            lane = await lanes.dedicated_lane(library, captures=library == "capture")
        await context.provide_workspaces(lane, library)
        if library in lanes.pooled_libraries:
            # Libraries of the option `libraries=` are ready in all lanes; others get workspaces
            # there when they need them.
            while lanes.unused and library in context.core.options.libraries:
                lanes.grow()
            for other in lanes.pool:
                if not lanes.takes_workspaces or not other.needs_workspace(library):
                    other.ready_libraries.add(library)
        lanes.routes[library] = lane
        if library in context.core.options.libraries:
            for prepared in lanes.lanes_for(library):
                await self._load_kernels(prepared)

    async def receive(self, message: Lane | Unregistration, context: ActorContext) -> None:
        """Prepare one more lane for the library, or close the instance of a user's library.

        The instance is closed once its ops have ended. If that cannot be waited for, as where the
        context has faulted or is closed, the instance is abandoned.
        """
        if isinstance(message, Lane):
            await self._prepare_lane(message)
            return
        device_context = self._context
        try:
            await self._wait_lanes_completed()
            with device_context.opening:
                await self._close()
        except Exception as error:
            log = logger.warning if device_context.fault is None else logger.debug
            log("library_not_closed", device=device_context.core.name, library=self._library, error=error)

    async def _wait_lanes_completed(self) -> None:
        """Wait until all ops that were dispatched so far have ended, in all lanes of the context.

        Batches and replays of graphs may have ops of the library in any lane. Raises the context's
        fault.
        """
        context = self._context
        last_ops = [(lane, lane.issued) for lane in context.lanes.all]
        for lane, seq in last_ops:
            if lane.completed < seq:
                await lane.wait_enqueued(seq)
                complete_at_mark(context, lane, seq, "passed")
        await context.wait_until(lambda: all(lane.completed >= seq for lane, seq in last_ops))

    async def stopped(self, context: ActorContext) -> None:
        """Close the instance of a user's library.

        If the context has faulted, or ends with work in flight, the instance is abandoned. The
        library's workspaces and kernels end with the lanes.
        """
        if self._context.fault is None and not self._context.in_flight:
            await self._close()

    async def _close(self) -> None:
        """Close the instance of a user's library, if there is one, on a worker thread.

        Once: after an unregistration :meth:`stopped` calls this again. The call is counted in
        ``context.offloaded``, so that streams and memory stay until it has returned.
        """
        user_library, self._user_library = self._user_library, None
        if user_library is not None:
            core = self._context.core
            await core.system.run_blocking(self._context.offloaded.call, user_library.close, core.loop)

    async def _prepare_lane(self, lane: Lane) -> None:
        """Give one more lane the library's workspaces; no op waits for it.

        If that fails, as for lack of memory, it is logged, and no lane asks for workspaces again in
        this generation. A fault is reported to the context.
        """
        context, lanes = self._context, self._context.lanes
        try:
            lanes.equipping = lane
            await context.provide_workspaces(lane, self._library)
            if self._library in context.core.options.libraries:
                await self._load_kernels(lane)
        except Exception as raised:
            lanes.stop_equipping()
            error = op_error(raised, "giving a stream its workspaces", context.core.loop)
            if error.is_fault:
                context.report_fault(error)
            else:
                logger.info("stream_not_equipped", device=context.core.name, library=self._library, error=error)
        finally:
            lanes.on_equipped()

    async def _load_kernels(self, lane: Lane) -> None:
        """Have the backend load the kernels of a library of ``libraries=`` for a lane.

        Does nothing where it has none to load ahead.
        """
        context = self._context
        if isinstance(context.device, PreparesLibraries):
            await context.core.system.run_blocking(context.offloaded.call, context.device.prepare, self._library, lane.stream)

    # -- libraries of the user's

    async def _open_registered(self, registration: Registration) -> Lane:
        """Make the instance of a registered library, open it, and return the lane of its ops.

        The instance's methods are the kernels of its ops from then on. If that fails, the instance
        is closed, and its lane kept for another library. An instance whose ``open`` may still run
        on a worker thread, because this was cancelled, is abandoned instead.
        """
        context, library, lanes = self._context, self._library, self._context.lanes
        try:
            self._user_library = user_library = await self._call_library(
                lambda: RegisteredLibrary(library, registration.create_instance(self._operand), context.core.description, context.members)
            )
            instance = user_library.instance
            if instance.several_streams:
                lane = lanes.pool[0]
            else:
                lane = await lanes.dedicated_lane(library, is_registered=True, captures=instance.captures)
            with captures_of(context.core).capturing() if instance.captures else contextlib.nullcontext():
                await self._call_library(lambda: instance.open(lane.stream))
            # The instance is opened in a stream of its own; its ops run in that of all collectives.
            op_lane = await lanes.dedicated_lane("collective") if instance.collective else lane
            # It may have been unregistered, or the call that registered it cancelled.
            if context.core.registrations.get(library) is not registration:
                raise ClosedError(f"library {library!r} is not registered any more", library=library, device=context.core.name)  # noqa: TRY301
        except BaseException:
            if context.fault is None and library not in context.libraries.opening_calls:
                await self._close()
            lanes.remove_library(library)
            raise
        if instance.several_streams:
            lanes.pooled_libraries.add(library)
        context.kernels.add_registered(user_library)
        return op_lane

    def _operand(self, argument: DurableArgument) -> Operand:
        """Return the memory of a durable argument of the registration.

        Called on a worker thread, for each one, when the instance is made: it gets an operand where
        the user gave a ref.
        """
        context, description = self._context, self._context.core.description
        address = context.durables.address(context.buffers, argument.buffer)
        if address is None:
            raise StaleRefError(
                f"buffer {argument.buffer}, which library {self._library!r} was registered with, is not in memory any more", reason="freed"
            )
        return Operand(address + argument.offset, argument.shape, argument.dtype, False, description.backend, description.index)

    async def _call_library(self, call: Callable[[], T]) -> T:
        """Call code of a user's library on a worker thread, and return its result.

        An exception is raised as an error that names the library, or as the fault that caused it.
        """
        context, library = self._context, self._library

        def call_and_catch() -> T | AccelError:
            """Return the result of the call, or its error; on the worker thread."""
            context.libraries.opening_calls.append(library)  # atomic, as the removal below: several threads do this
            try:
                return context.offloaded.call(call)
            except BaseException as raised:  # a CancelledError too: it would look like the actor's
                is_out_of_memory = context.is_out_of_memory(raised)
                what = f"opening library {library!r}"
                return op_error(raised, what, context.core.loop, is_out_of_memory=is_out_of_memory, library=library)
            finally:
                context.libraries.opening_calls.remove(library)

        result = await context.core.system.run_blocking(call_and_catch)
        if not isinstance(result, AccelError):
            return result
        if isinstance(result, OutOfMemoryError):
            context.buffers.close_idle_slabs()
        # Raise the fault that has caused the error, else a clone of the error: the traceback of
        # what is raised holds this frame, and the frame holds `result`.
        raise (None if result.is_fault else context.fault_of(context.lanes.pool[0].stream, result)) or result.clone()
