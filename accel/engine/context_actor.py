"""The actor that makes contexts: one instance per generation, replaced after a fault.

A rebuild is a restart of this actor by its supervisor: a fault fails the actor, ``restarting``
closes the dead context, and ``started`` of a fresh instance makes the next one, within the budget
and after the delays of the device's :class:`~accel.RestartStrategy`.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Never

from accel._log import get_logger
from accel.actors import Actor, ActorContext, ActorTree
from accel.actors.acquire import acquire
from accel.backend import ObservesWork, TellsFaults
from accel.engine.context import Context
from accel.engine.kernel_actor import NEVER_ENDS, KernelActor
from accel.engine.lanes import make_streams
from accel.engine.op_error import op_error
from accel.storage.closing import close_all
from accel.storage.durable_slabs import map_slabs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.actors import ActorRef
    from accel.backend import AccelDevice, HeldSlab
    from accel.engine.context import ContextSharing
    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.lane import Lane
    from accel.engine.lanes import Streams
    from accel.errors import AccelError
    from accel.storage.durable import KeptSlab

__all__ = ["ContextActor"]

logger = get_logger()


class ContextActor(Actor[Never, None]):
    """Owns one context, with its lanes.

    The kernel actors of the libraries are its children, and end with it.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    owner
        Gets the context once it is ready, ``None`` after its end, and decides what follows a fault.
    share
        Makes the object that shares a context's memory with other libraries.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, owner: ContextOwner, share: Callable[[Context], ContextSharing]) -> None:
        self._core = core
        self._owner = owner
        self._share = share
        self._context: Context | None = None

    async def started(self, context: ActorContext) -> None:
        """Make the context, open the libraries of ``libraries=``, and begin the generation.

        If this raises, what was made is closed. The first start then fails ``open_device``; for a
        later one the supervisor decides about another attempt.
        """
        core = self._core
        began = time.perf_counter()
        # 1. The backend's part, on a worker thread: what was opened is closed if this is cancelled.
        kept_slabs = await core.durable.slabs_to_bind()
        opened = await acquire(core.system, partial(_open, core, kept_slabs), _close_opened)
        device, streams, slabs = opened
        try:
            watcher = core.options.completion.open(device, core.loop, core.shared)
        except BaseException:
            await core.system.run_blocking(_close_opened, opened)
            raise
        # 2. The context, with its durable memory, its lanes, and the libraries of `libraries=`.
        device_context = Context(core, self._owner, device, watcher, self._share, partial(_open_library, context))
        device_context.durables.mapped_ahead.update(slabs)
        try:
            # Before anything frees memory: a free of a buffer that is not bound yet would be lost.
            _bind_durable(device_context, kept_slabs)
            device_context.lanes.adopt(streams)
            for library in core.options.libraries:
                await device_context.libraries.open(library)
            await core.pinned.attach(device)
            # 3. Checksums and registered libraries, before the first op of the generation.
            await device_context.verify_checksums()
            core.capabilities = device.capabilities
            core.has_graphs = bool(device.kernels("capture"))
            await self._open_eager_libraries(device_context)
            device_context.check_alive()
        except BaseException:
            await device_context.close(abandon=True)
            raise
        # 4. The generation begins: ops are dispatched to the context.
        self._context = device_context
        if isinstance(device, ObservesWork) and device.probe is not None:
            core.probes.add(device.probe)
        if isinstance(device, TellsFaults):
            device.on_fault = partial(_on_backend_fault, device_context)
        self._owner.on_published(device_context)
        core.refs.sharing = device_context.sharing
        core.on_context_ready(began)

    def owned(self) -> tuple[ActorTree, ...]:
        """See :meth:`Actor.owned`: the lanes, and the streams that have no lane yet."""
        if self._context is None:
            return ()
        lanes = self._context.lanes
        return (*[_tree_of(lane) for lane in lanes.all], *[ActorTree(name=name, state="idle", depth=0) for name, _ in lanes.unused])

    async def _open_eager_libraries(self, device_context: Context) -> None:
        """Open the registered libraries that are ``eager``, before the generation begins.

        One that cannot be opened is logged; the generation begins without it.
        """
        core = self._core
        for registration in tuple(core.registrations.values()):
            if not registration.is_eager or registration.unregistrations:
                continue
            try:
                registration.check()
                await device_context.libraries.open(registration.name)
            except Exception as raised:
                error = op_error(raised, f"opening library {registration.name!r}", core.loop, library=registration.name)
                if error.is_fault:
                    raise
                logger.warning(
                    "library_not_opened", device=core.name, generation=device_context.generation, library=registration.name, error=error
                )

    async def receive(self, message: Never, context: ActorContext) -> None:
        """Never called: the actor gets no messages."""

    # -- the end

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """Close the dead context, without waiting for work that runs in it."""
        await self._close(abandon=True)

    async def stopped(self, context: ActorContext) -> None:
        """Close the context; abandon what might not end: work in flight, or a call that opens a user's library."""
        closing = self._context
        await self._close(
            abandon=closing is None or closing.fault is not None or closing.in_flight > 0 or bool(closing.libraries.opening_calls)
        )

    async def _close(self, *, abandon: bool) -> None:
        """Close the context, if there is one; ops are dispatched to it no more."""
        device_context, self._context = self._context, None
        if device_context is not None:
            self._owner.on_published(None)
            await device_context.close(abandon=abandon)


class _Opened(NamedTuple):
    """The backend's part of a new context: the device, its streams, and mapped slabs by number."""

    device: AccelDevice
    streams: Streams
    slabs: dict[int, HeldSlab]


def _open(core: DeviceCore, kept_slabs: Iterable[KeptSlab]) -> _Opened:
    """Make the backend's context and its streams, and map the durable memory; blocks."""
    device = core.oom_retry.retry_on_oom(core.backend.open, core.description.index)
    try:
        streams, raised = make_streams(device, core.options.streams)
        slabs = map_slabs(device, kept_slabs)
    except BaseException:
        device.close(abandon=True)
        raise
    if raised is not None:
        logger.info("stream_not_added", device=core.name, streams=len(streams), error=raised)
    return _Opened(device, streams, slabs)


def _bind_durable(context: Context, kept_slabs: Iterable[KeptSlab]) -> None:
    """Make buffers of the durable memory that was mapped: refs to it are valid in this context.

    The book is given the event that is set once the context has unmapped a slab again.
    """
    book = context.core.durable
    book.is_offered = context.durables.is_offered
    for slab in kept_slabs:
        book.on_slab_mapped(slab.number, context.durables.bind(context.buffers, slab).closed)


async def _open_library(owner: ActorContext, context: Context, library: str) -> ActorRef[Any, None]:
    """Start the kernel actor of a library, and return it once the library is open."""
    with context.opening:
        return await owner.spawn(KernelActor, context, library, name=library, restart=NEVER_ENDS)


def _tree_of(lane: Lane) -> ActorTree:
    """Return a lane's entry in ``system.tree()``: ``depth`` counts its unfinished ops."""
    unfinished = lane.issued - lane.completed
    return ActorTree(name=lane.name, state="busy" if unfinished else "idle", depth=unfinished)


def _close_opened(opened: _Opened) -> None:
    """Close what :func:`_open` has made, because no context will own it; blocks."""
    try:
        close_all(opened.slabs.values())
    finally:
        opened.device.close(abandon=True)


def _on_backend_fault(context: Context, error: AccelError) -> None:
    """Report a fault that the backend has seen elsewhere in the process. Thread-safe.

    Another device of the process may see it first, because all of them fail together.
    """
    with contextlib.suppress(RuntimeError):  # its loop has ended
        context.core.loop.call_soon_threadsafe(lambda: context.report_fault(error.clone()))
