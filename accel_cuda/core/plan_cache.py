"""The plans of one stream: a bounded number of them, made when first needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from accel_cuda.core.event import CudaEvent

if TYPE_CHECKING:
    from accel_cuda.core.stream import CudaStream

__all__ = ["PlanCache"]

K = TypeVar("K", bound=Hashable)
P = TypeVar("P")

_LEAVING = 8
"""Plans that may wait for their last use to end. One more makes the cache wait for the stream."""


class PlanCache(Generic[K, P]):
    """Plans by what they are made for. One thread at a time uses them.

    A plan beyond the bound is destroyed when the stream has passed its last use; the least recently used one goes first. Plans that a graph uses stay
    beside the others, as long as the stream.

    Parameters
    ----------
    stream
        Where the plans are used; its end destroys them.
    make
        Makes a plan. May block.
    destroy
        Gives a plan back. Raises nothing.
    kept
        How many plans are kept.

    Attributes
    ----------
    made, evicted : int
        How many plans were made, and how many of them had to go.
    """

    def __init__(self, stream: CudaStream, make: Callable[[K], P], destroy: Callable[[P], object], kept: int) -> None:
        self._stream = stream
        self._make = make
        self._destroy = destroy
        self._kept = kept
        self._plans: OrderedDict[K, P] = OrderedDict()
        self._leaving: list[tuple[P, CudaEvent]] = []
        self._held: dict[K, P] = {}
        self.made = 0
        self.evicted = 0
        stream.at_close(self.close)

    def __contains__(self, key: K) -> bool:
        return key in self._plans or key in self._held

    def __len__(self) -> int:
        """Return how many plans are kept, those of graphs left out."""
        return len(self._plans)

    def get(self, key: K) -> P:
        """Return a plan for what is enqueued next. May block where it is new."""
        return self._hold(key) if self._stream.is_capturing else self._take(key)

    def close(self) -> None:
        """Destroy all plans. May block; the stream has ended, and the context is current and healthy."""
        for plan in (*self._plans.values(), *self._held.values()):
            self._destroy(plan)
        self._plans.clear()
        self._held.clear()
        self._destroy_left(is_over=True)

    def _take(self, key: K) -> P:
        if key in self._held:
            return self._held[key]
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        plan = self._plans[key] = self._made(key)
        self._evict()
        return plan

    def _hold(self, key: K) -> P:
        """Return a plan that stays: a graph uses it at each replay."""
        if key not in self._held:
            self._held[key] = self._plans.pop(key) if key in self._plans else self._made(key)
        return self._held[key]

    def _made(self, key: K) -> P:
        plan = self._make(key)
        self.made += 1
        return plan

    def _evict(self) -> None:
        """Let plans go that are too many; they are destroyed once the stream has passed their last use."""
        self._destroy_left(is_over=False)
        while len(self._plans) > self._kept:
            _, plan = self._plans.popitem(last=False)
            event = CudaEvent(self._stream.context)
            self._stream.record(event)
            self._leaving.append((plan, event))
            self.evicted += 1
        if len(self._leaving) > _LEAVING:
            self._stream.synchronize()
            self._destroy_left(is_over=True)

    def _destroy_left(self, *, is_over: bool) -> None:
        left = []
        for plan, event in self._leaving:
            if is_over or event.query():
                self._destroy(plan)
                event.close()
            else:
                left.append((plan, event))
        self._leaving = left
