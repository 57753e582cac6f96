"""The plans of one context: each is made once, for all its streams, and a bounded number of them is kept.

A library's plan holds host state (its stream, its work area), so one thread at a time uses a plan. Making a plan, and destroying one, may wait for the
device: both happen on the thread that needs a new plan, and no other thread waits for it unless it needs a new plan too.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from accel_cuda.core.event import CudaEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_cuda.core.stream import CudaStream

__all__ = ["PlanCache"]

K = TypeVar("K", bound=Hashable)
P = TypeVar("P")


class _Entry(Generic[P]):
    """A plan, and its uses.

    Attributes
    ----------
    lock : Lock
        Held by the thread that uses the plan.
    users : int
        Threads that use the plan or wait for it; the cache's lock guards it.
    is_warm : bool
        Whether the plan was used: its kernels are loaded.
    events : dict
        Handle of a stream -> the event behind the plan's last use there. Where a handle is given to a new stream, the old one has ended.
    """

    __slots__ = ("events", "is_warm", "lock", "plan", "users")

    def __init__(self, plan: P) -> None:
        self.plan = plan
        self.lock = threading.Lock()
        self.users = 1
        self.is_warm = False
        self.events: dict[int, CudaEvent] = {}

    def is_idle(self) -> bool:
        """Return whether no thread uses the plan, and every stream has passed its last use."""
        return not self.users and all(event.query() for event in self.events.values())

    def mark(self, stream: CudaStream) -> None:
        """Record the end of a use. It says nothing of the stream's transfers, and leaves reserved pinned memory alone."""
        event = self.events.get(stream.handle)
        if event is None:
            event = self.events[stream.handle] = CudaEvent(stream.context)
        stream.context.check(stream.context.driver.hot.event_record(event.handle, stream.pointer), "cuEventRecord")
        event.mark(stream.transfers, 0)


class PlanCache(Generic[K, P]):
    """Plans by what they are made for. Any thread may call it.

    A plan beyond the bound is destroyed before the next one is made, once every stream has passed its last use; the least recently used one goes first.
    Plans in use stay beyond the bound. Plans that a graph uses stay beside the others, as long as the context.

    Parameters
    ----------
    make
        Makes a plan. May block. One thread at a time calls it.
    destroy
        Gives a plan back. May block. Raises nothing.
    kept
        How many plans are kept.

    Attributes
    ----------
    made : int
        How many plans were made.
    """

    def __init__(self, make: Callable[[K], P], destroy: Callable[[P], object], kept: int) -> None:
        self._make = make
        self._destroy = destroy
        self._kept = kept
        self._lock = threading.Lock()  # of what follows; held for lookups only
        self._plans: OrderedDict[K, _Entry[P]] = OrderedDict()
        self._held: dict[K, _Entry[P]] = {}
        self._making = threading.Lock()
        self.made = 0

    def __len__(self) -> int:
        """Return how many plans are kept, those of graphs left out."""
        return len(self._plans)

    def is_ready(self, key: K) -> bool:
        """Return whether a plan is there and was used once, so that :meth:`use` does not block. Never blocks.

        The plan counts as the most recently used one, so it is still there when the op that asked is enqueued.
        """
        with self._lock:
            entry = self._found(key)
            return entry is not None and entry.is_warm

    def prepare(self, key: K) -> P:
        """Make a plan if it is not there, and return it for what it tells: only :meth:`use` may enqueue with it. May block."""
        entry = self._taken(key)
        self._given_back(entry)
        return entry.plan

    @contextlib.contextmanager
    def use(self, key: K, stream: CudaStream) -> Iterator[P]:
        """Have a plan for what the block enqueues into ``stream``; other threads that want the plan wait for the end of the block.

        May block where the plan is not there. A plan that is new may load kernels at its first use.
        """
        entry = self._taken(key)
        try:
            if stream.is_capturing:
                self._hold(key)
            with entry.lock:
                try:
                    yield entry.plan
                    entry.is_warm = True
                finally:
                    if not stream.is_capturing:
                        entry.mark(stream)
        finally:
            self._given_back(entry)

    def close(self) -> None:
        """Destroy all plans. May block; the streams have ended, and the context is current and healthy."""
        with self._lock:
            entries = [*self._plans.values(), *self._held.values()]
            self._plans.clear()
            self._held.clear()
        self._end(entries)

    def _found(self, key: K) -> _Entry[P] | None:
        """Return the entry of a plan that is there, as the most recently used one. With the lock."""
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        return self._held.get(key)

    def _taken(self, key: K) -> _Entry[P]:
        """Return the entry of a plan, with one user more. One thread makes a plan that is not there; others that want a new one wait."""
        entry = self._taken_if_there(key)
        if entry is None:
            with self._making:
                entry = self._taken_if_there(key)
                if entry is None:
                    self._evict()
                    entry = _Entry(self._make(key))
                    with self._lock:
                        self._plans[key] = entry
                        self.made += 1
        return entry

    def _taken_if_there(self, key: K) -> _Entry[P] | None:
        with self._lock:
            entry = self._found(key)
            if entry is not None:
                entry.users += 1
            return entry

    def _given_back(self, entry: _Entry[P]) -> None:
        with self._lock:
            entry.users -= 1

    def _hold(self, key: K) -> None:
        """Keep a plan for good: a graph uses it at each replay."""
        with self._lock:
            if key in self._plans:
                self._held[key] = self._plans.pop(key)

    def _evict(self) -> None:
        """Make room for one plan more."""
        gone: list[_Entry[P]] = []
        with self._lock:
            for key, entry in list(self._plans.items()):
                if len(self._plans) < self._kept:
                    break
                if entry.is_idle():
                    gone.append(self._plans.pop(key))
        self._end(gone)

    def _end(self, entries: list[_Entry[P]]) -> None:
        for entry in entries:
            self._destroy(entry.plan)
            for event in entry.events.values():
                event.close()
