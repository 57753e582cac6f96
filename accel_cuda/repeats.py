"""Calls of a library that come again and again with the same arguments: captured once, and launched as a graph of one call from then on.

cuBLAS chooses a kernel anew each time, which takes the processor 10 us, and 15 to 70 after a long wait, when its caches are cold. To launch a graph of what it
chose takes 3 to 5, and the same kernel computes the same numbers (``docs/hardware.md``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from accel_cuda.graph import CudaGraph
    from accel_cuda.stream import CudaStream

__all__ = ["Repeats"]

_OFTEN = 8
"""So many times a call is made before it is worth a graph, which takes as long as ten calls."""
_KEPT = 128
"""So many graphs a stream has at most."""
_COUNTED = 512
"""Of so many calls that have none it is known how often they came."""
_UNUSED = 4096
"""A graph that so many launches of others have passed by makes room."""


class _Repeated:
    """A graph, and when it was used last, in launches."""

    __slots__ = ("graph", "pointer", "used")

    def __init__(self, graph: CudaGraph, used: int) -> None:
        self.graph = graph
        self.pointer = graph.pointer
        self.used = used


class Repeats:
    """The calls of one library in one stream; one thread at a time.

    Parameters
    ----------
    stream
        Where the calls go.
    wish
        Called when a call has come often enough.

    Attributes
    ----------
    wished : dict
        Calls that have come often enough, and have no graph yet: :meth:`make` makes it.
    """

    __slots__ = ("_count", "_made", "_refused", "_seen", "_stream", "_wish", "wished")

    def __init__(self, stream: CudaStream, wish: Callable[[], None]) -> None:
        self._stream = stream
        self._wish = wish
        self._count = 0
        self._made: dict[Hashable, _Repeated] = {}
        self._seen: dict[Hashable, int] = {}
        self._refused: dict[Hashable, None] = {}
        self.wished: dict[tuple[Any, ...], None] = {}

    def __len__(self) -> int:
        return len(self._made)

    def launch(self, call: tuple[Any, ...]) -> bool:
        """Launch the graph of a call; ``False`` if it has none: then it is counted, and has to be made.

        Raises
        ------
        AccelError
            What the driver says.
        """
        stream, made = self._stream, self._made.get(call)
        if stream.is_capturing:  # what is captured shall have the library's own kernels, and no graph in a graph
            return False
        if made is None:
            self._take_note(call)
            return False
        self._count = made.used = self._count + 1
        stream.launch_graph(made.pointer)
        return True

    def _take_note(self, call: tuple[Any, ...]) -> None:
        seen = self._seen
        count = seen.pop(call, 0) + 1  # put back at the end: the table is in order of last use
        if count >= _OFTEN and call not in self._refused and len(self.wished) < _KEPT:
            self.wished[call] = None
            self._wish()
            return
        seen[call] = count
        if len(seen) > _COUNTED:
            del seen[next(iter(seen))]

    def make(self, capture: Callable[[tuple[Any, ...]], CudaGraph]) -> None:
        """Make the graphs that are wished for, by ``capture``. May block; nothing else is enqueued meanwhile.

        A call that cannot be captured, or for which there is no room, stays as it is.
        """
        wished, self.wished = self.wished, {}
        for call in wished:
            try:
                if self._has_room():
                    self._made[call] = _Repeated(capture(call), self._count)
                    continue
            except AccelError as error:
                if error.is_fault:
                    raise
            if len(self._refused) >= _COUNTED:
                self._refused.clear()
            self._refused[call] = None

    def _has_room(self) -> bool:
        """Return whether there may be another graph, for which one that was not used for long is given back."""
        made = self._made
        if len(made) < _KEPT:
            return True
        oldest = min(made, key=lambda call: made[call].used)
        if self._count - made[oldest].used <= _UNUSED:
            return False
        self._stream.synchronize()  # it may be on the device yet
        made.pop(oldest).graph.close()
        return True

    def close(self) -> None:
        """Give the graphs back; none of them is on the device any more."""
        made, self._made = self._made, {}
        self.wished = {}
        for each in made.values():
            each.graph.close()
