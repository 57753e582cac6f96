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
from accel.engine.op_error import op_error
from accel.engine.own_library import OwnLibrary
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
"""For actors that answer each op with its own error, and go on."""


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
        self._own: OwnLibrary | None = None

    async def started(self, context: ActorContext) -> None:
        """Open the library, and route its ops to a lane."""
        try:
            await self._open()
        except AccelError as error:
            # The actor's start keeps the error, and the frames of its traceback would keep the
            # registration, with its arguments.
            raise error.with_traceback(None)  # noqa: B904

    async def _open(self) -> None:
        context, library, lanes = self._context, self._library, self._context.lanes
        registration = context.core.own.get(library)
        if registration is not None:
            lane = await self._open_own(registration)
        elif library in lanes.spread:
            lane = lanes.pool[0]
        else:
            lane = await lanes.named(library, captures=library == "capture")
        await context.provide_workspaces(lane, library)
        if library in lanes.spread:
            while lanes.unused and library in context.core.options.libraries:
                lanes.grow()
            for other in lanes.pool:
                if not lanes.takes_workspaces or not other.needs_workspace(library):
                    other.provided.add(library)
        lanes.routes[library] = lane
        if library in context.core.options.libraries:
            for prepared in lanes.lanes_with(library):
                await self._prepare(prepared)

    async def receive(self, message: Lane | Unregistration, context: ActorContext) -> None:
        """Prepare one more lane for the library, or close the instance of a user's library.

        The instance is closed once its ops have ended.
        """
        if isinstance(message, Lane):
            await self._equip(message)
            return
        owner = self._context
        try:
            # Batches and replays of graphs may have ops of the library in any lane.
            await owner.wait_passed([(lane, lane.issued) for lane in owner.lanes.all])
            with owner.opening:
                await self._close()
        except AccelError as error:  # the context is gone
            logger.debug("library_not_closed", device=owner.core.name, library=self._library, error=error)

    async def stopped(self, context: ActorContext) -> None:
        """Close the instance of a user's library.

        If the context has faulted, or ends with work in flight, the instance is abandoned. The
        library's workspaces and kernels end with the lanes.
        """
        if self._context.fault is None and not self._context.in_flight:
            await self._close()

    async def _close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            await self._context.core.system.run_blocking(self._context.offloaded.make, own.close)

    async def _equip(self, lane: Lane) -> None:
        """Prepare one more lane for the library's ops, if there is memory for it."""
        context, lanes = self._context, self._context.lanes
        try:
            lanes.equipping = lane
            await context.provide_workspaces(lane, self._library)
            if self._library in context.core.options.libraries:
                await self._prepare(lane)
        except Exception as raised:
            lanes.stop_equipping()
            error = op_error(raised, "giving a stream its workspaces", context.core.loop)
            if error.is_fault:
                context.report_fault(error)
            else:
                logger.info("stream_not_equipped", device=context.core.name, library=self._library, error=error)
        finally:
            lanes.on_equipped()

    async def _prepare(self, lane: Lane) -> None:
        """Make kernels ready in a lane: the library was named when the device was opened."""
        context = self._context
        if isinstance(context.device, PreparesLibraries):
            await context.core.system.run_blocking(context.offloaded.make, context.device.prepare, self._library, lane.stream)

    # -- libraries of the user's

    async def _open_own(self, registration: Registration) -> Lane:
        """Make the instance of a registered library, open it with its stream; return its lane."""
        context, library = self._context, self._library
        own: OwnLibrary | None = None
        try:
            own = await self._call(lambda: OwnLibrary(library, registration.make(self._operand), context.core.description))
            several, captures = own.library.several_streams, own.library.captures
            lane = context.lanes.pool[0] if several else await context.lanes.named(library, is_own=True, captures=captures)
            with captures_of(context.core).one_more() if captures else contextlib.nullcontext():
                await self._call(lambda: own.library.open(lane.stream))
            if context.core.own.get(library) is not registration:  # unregistered meanwhile, or the call that registered it was cancelled
                raise ClosedError(f"library {library!r} is not registered any more", library=library, device=context.core.name)  # noqa: TRY301
        except BaseException:
            if own is not None and context.fault is None:
                await context.core.system.run_blocking(own.close)
            context.lanes.leave(library)
            raise
        if several:
            context.lanes.spread.add(library)
        context.kernels.add_own(own)
        self._own = own
        return lane

    def _operand(self, argument: DurableArgument) -> Operand:
        """Return the memory of a durable argument of the registration."""
        context, description = self._context, self._context.core.description
        address = context.durables.address(context.buffers, argument.buffer)
        if address is None:
            raise StaleRefError(
                f"buffer {argument.buffer}, which library {self._library!r} was registered with, is not in memory any more", reason="freed"
            )
        return Operand(address + argument.offset, argument.shape, argument.dtype, False, description.backend, description.index)

    async def _call(self, call: Callable[[], T]) -> T:
        """Call code of the library on a worker thread; raise the error behind what it raises."""
        context, library = self._context, self._library

        def answer() -> T | AccelError:
            context.libraries.calls += 1
            try:
                return context.offloaded.make(call)
            except BaseException as raised:  # also a CancelledError, which awaiting this must not raise
                is_out_of_memory = context.is_out_of_memory(raised)
                what = f"opening library {library!r}"
                return op_error(raised, what, context.core.loop, is_out_of_memory=is_out_of_memory, library=library)
            finally:
                context.libraries.calls -= 1

        found = await context.core.system.run_blocking(answer)
        if not isinstance(found, AccelError):
            return found
        if isinstance(found, OutOfMemoryError):
            context.buffers.release_idle()
        # A copy: this frame keeps the error that it found, and the traceback this frame.
        raise found.clone() if found.is_fault else context.fault_of(context.lanes.pool[0].stream, found) or found.clone()
