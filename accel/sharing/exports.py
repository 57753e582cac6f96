"""Memory exported to other libraries: the tensors over it, and its release after the last one."""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING

from accel._log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from accel.backend import SlabMemory
    from accel.ref import AccelRef

__all__ = ["BufferExports", "Keepalive", "Sharers", "close_when_dropped"]

logger = get_logger()


class Keepalive:
    """Held by a tensor of another library, and holds our ref: that lives as long as the tensor."""

    __slots__ = ("__weakref__", "ref")

    def __init__(self, ref: AccelRef) -> None:
        self.ref = ref


class BufferExports:
    """The tensors of other libraries over the memory of one buffer.

    Attributes
    ----------
    keepalives : WeakSet of Keepalive
        One for each tensor that lives.
    is_permanent : bool
        Whether the memory counts as exported until the buffer is freed: an interface such as CUDA's
        array interface never tells the end of its use.
    """

    __slots__ = ("is_permanent", "keepalives")

    def __init__(self) -> None:
        self.keepalives: weakref.WeakSet[Keepalive] = weakref.WeakSet()
        self.is_permanent = False

    def are_live(self) -> bool:
        """Return whether another library may still use the memory."""
        return self.is_permanent or len(self.keepalives) > 0


class Sharers:
    """All exports of the buffers that have one usage: one buffer, or the results of a graph.

    It is the ``is_shared`` of their :class:`~accel.memory.SharedUsage`: a call tells whether other
    libraries may still use the memory.
    """

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: list[BufferExports] = []

    def add(self, exports: BufferExports) -> None:
        """Add the exports of one more buffer, once; forget those that have ended."""
        self._all = [*(known for known in self._all if known is not exports and known.are_live()), exports]

    def join(self, other: Sharers) -> None:
        """Add the exports of another usage's buffers; that usage keeps them too."""
        for exports in other._all:
            self.add(exports)

    def __call__(self) -> bool:
        """Return whether another library may still use any of the memory."""
        return any(exports.are_live() for exports in self._all)


def close_when_dropped(memories: Collection[tuple[SlabMemory, list[Keepalive]]], settle: Callable[[], None], name: str) -> None:
    """Close memory that tensors of other libraries use, each piece after its last tensor.

    Starts the thread that does so, and returns at once. Where the system has no thread, the memory
    is left open, with a warning.

    Parameters
    ----------
    memories
        Pieces of memory, each with the keepalives of its tensors, of which there is one at least.
    settle
        Blocks until all work on the device is over that any library has enqueued by then; if it
        raises, the memory is left.
    name
        Of the device.

    Notes
    -----
    A tensor is dropped on any thread, also inside the garbage collector, where nothing can be
    waited for: the thread, a daemon, waits for the drops, and ends with the last piece.
    """
    # The weak references whose tensors were dropped. SimpleQueue.put is reentrant, as code that runs
    # inside the garbage collector must be.
    dropped: SimpleQueue[weakref.ref[Keepalive]] = SimpleQueue()
    # Weak reference of each tensor that lives -> its piece. The thread keeps the references by this:
    # a weak reference that is itself dropped calls nothing.
    pieces: dict[weakref.ref[Keepalive], SlabMemory] = {}
    for memory, keepalives in memories:
        pieces.update((weakref.ref(keepalive, dropped.put), memory) for keepalive in keepalives)

    def close_pieces() -> None:
        """Close each piece after its last tensor. The body of the thread."""
        while pieces:
            memory = pieces.pop(dropped.get())
            if any(other is memory for other in pieces.values()):
                continue
            try:
                settle()
                memory.close()
            except Exception as error:  # the other pieces are closed all the same
                logger.warning("exported_memory_left", device=name, nbytes=memory.nbytes, error=error)

    try:
        threading.Thread(target=close_pieces, name=f"accel-{name}-exported", daemon=True).start()
    except RuntimeError as error:  # without a thread the tensors stay valid, the memory open
        nbytes = sum(memory.nbytes for memory, _ in memories)
        logger.warning("exported_memory_left", device=name, nbytes=nbytes, error=error)
