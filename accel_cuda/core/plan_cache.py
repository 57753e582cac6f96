"""The plans of one context: each is made once, for all its streams, and a bounded number of them is kept.

A library's plan holds host state (its stream, its work area), so one thread at a time uses a plan. Making a plan, and destroying one, may wait for the
device: both happen on the thread that needs a new plan, and no other thread waits for it unless it needs a new plan too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from accel_cuda.core.stream import CudaStream
    from accel_cuda.core.transfers import StreamTransfers

__all__ = ["PlanCache"]

K = TypeVar("K", bound=Hashable)
P = TypeVar("P")


class _Entry(Generic[P]):
    """A plan, and its uses.

    Attributes
    ----------
    lock : Lock
        Held by the thread that uses the plan.
    is_warm : bool
        Whether the plan was used: its kernels are loaded.
    is_gone : bool
        Whether the plan is, or will be, destroyed: a thread that waited for the lock looks for the plan again.
    uses : dict
        What is in flight in a stream -> the number of the plan's last use there.
    """

    __slots__ = ("is_gone", "is_warm", "lock", "plan", "uses")

    def __init__(self, plan: P) -> None:
        self.plan = plan
        self.lock = threading.Lock()
        self.is_warm = False
        self.is_gone = False
        self.uses: dict[StreamTransfers, int] = {}

    def retire(self) -> bool:
        """Let the plan go if no thread uses it, and every stream is known to have passed its last use; return whether it is gone. Never blocks."""
        if not self.lock.acquire(blocking=False):
            return False
        self.is_gone = all(transfers.finished >= number for transfers, number in self.uses.items())
        self.lock.release()
        return self.is_gone


class _Use(Generic[K, P]):
    """One use of a plan. A class, because a generator costs more than all that is done here."""

    __slots__ = ("_cache", "_entry", "_key", "_stream")

    _entry: _Entry[P]

    def __init__(self, cache: PlanCache[K, P], key: K, stream: CudaStream) -> None:
        self._cache = cache
        self._key = key
        self._stream = stream

    def __enter__(self) -> P:
        self._entry = entry = self._cache.acquire(self._key)
        if self._stream.is_capturing:
            self._cache.hold(self._key)
        return entry.plan

    def __exit__(self, error: object, *_: object) -> None:
        entry, stream = self._entry, self._stream
        if error is None:
            entry.is_warm = True
        if not stream.is_capturing:
            entry.uses[stream.transfers] = stream.transfers.number()
        entry.lock.release()


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
        return self._entry(key).plan

    def use(self, key: K, stream: CudaStream) -> _Use[K, P]:
        """Have a plan for what a ``with`` block enqueues into ``stream``; other threads that want the plan wait for the end of the block.

        May block where the plan is not there. A plan that is new may load kernels at its first use.
        """
        return _Use(self, key, stream)

    def close(self) -> None:
        """Destroy all plans. May block; the streams have ended, and the context is current and healthy."""
        with self._lock:
            entries = [*self._plans.values(), *self._held.values()]
            self._plans.clear()
            self._held.clear()
        self._end(entries)

    def _found(self, key: K) -> _Entry[P] | None:
        """Return the entry of a plan that is there, as the most recently used one. With the lock."""
        entry = self._plans.get(key)
        if entry is None:
            return self._held.get(key)
        self._plans.move_to_end(key)
        return entry

    def acquire(self, key: K) -> _Entry[P]:
        """Return the entry of a plan, which is this thread's until its lock is released. May block."""
        while True:
            entry = self._entry(key)
            entry.lock.acquire()
            if not entry.is_gone:
                return entry
            entry.lock.release()

    def _entry(self, key: K) -> _Entry[P]:
        """Return the entry of a plan. One thread makes a plan that is not there; others that want a new one wait."""
        with self._lock:
            entry = self._found(key)
        if entry is not None:
            return entry
        with self._making:
            with self._lock:
                entry = self._found(key)
            if entry is None:
                self._evict()
                entry = _Entry(self._make(key))
                with self._lock:
                    self._plans[key] = entry
                    self.made += 1
            return entry

    def hold(self, key: K) -> None:
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
                if entry.retire():
                    gone.append(self._plans.pop(key))
        self._end(gone)

    def _end(self, entries: list[_Entry[P]]) -> None:
        for entry in entries:
            self._destroy(entry.plan)
