"""Calls of a library that come again and again with the same arguments: captured once, and launched as a graph of one call from then on.

cuBLAS chooses a kernel anew each time, which takes as long as all else that is done for a product, above all after a long wait, when the processor's caches
are cold. To launch a graph of what it chose takes a third or less, and the same kernel computes the same numbers. What each takes is in ``docs/hardware.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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
"""A graph that so many calls of any kind have passed by makes room; a call that finds none asks again after as many of its own."""
_LATER = 512
"""A call that could not be captured without disturbing others asks again after so many of its own."""
_NEVER = 1 << 40


class _Repeated:
    """A graph, and when it was used last, in calls."""

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
        Calls that have come often enough, and have no graph yet; see :meth:`take_wished`.
    """

    __slots__ = ("_count", "_made", "_seen", "_stream", "_wish", "wished")

    def __init__(self, stream: CudaStream, wish: Callable[[], None]) -> None:
        self._stream = stream
        self._wish = wish
        self._count = 0
        self._made: dict[tuple[Any, ...], _Repeated] = {}
        self._seen: dict[tuple[Any, ...], int] = {}
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
        self._count += 1
        if made is None:
            self._take_note(call)
            return False
        made.used = self._count
        stream.launch_graph(made.pointer)
        return True

    def _take_note(self, call: tuple[Any, ...]) -> None:
        seen = self._seen
        count = seen.pop(call, 0) + 1  # put back at the end: the table is in order of last use
        if count >= _OFTEN and len(self.wished) < _KEPT:
            self.wished[call] = None
            self._wish()
            return
        seen[call] = count
        if len(seen) > _COUNTED:
            del seen[next(iter(seen))]

    def take_wished(self) -> list[tuple[Any, ...]]:
        """Return the calls to make graphs of, for which there is room. May block: graphs that were not used for long are given back."""
        wished, self.wished = self.wished, {}
        taken: list[tuple[Any, ...]] = []
        for call in wished:
            if self._has_room(len(taken)):
                taken.append(call)
            else:
                self._seen[call] = _OFTEN - _UNUSED
        return taken

    def _has_room(self, taken: int) -> bool:
        made = self._made
        if len(made) + taken < _KEPT:
            return True
        oldest = min(made, key=lambda call: made[call].used, default=None)
        if oldest is None or self._count - made[oldest].used <= _UNUSED:
            return False
        self._stream.synchronize()  # it may be on the device yet
        made.pop(oldest).graph.close()
        return True

    def add(self, call: tuple[Any, ...], graph: CudaGraph) -> None:
        """Launch this for a call from now on."""
        self._made[call] = _Repeated(graph, self._count)

    def put_off(self, call: tuple[Any, ...]) -> None:
        """Leave a call, which cannot be captured now, as it is for a while."""
        self._seen[call] = _OFTEN - _LATER

    def refuse(self, call: tuple[Any, ...]) -> None:
        """Leave a call, which cannot be captured, as it is."""
        self._seen[call] = -_NEVER

    def close(self) -> None:
        """Give the graphs back; none of them is on the device any more."""
        made, self._made = self._made, {}
        self.wished = {}
        for each in made.values():
            each.graph.close()
