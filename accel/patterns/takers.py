"""The takers of a batcher: which of them gets the next batch."""

from __future__ import annotations

import contextlib
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from accel.device import DeviceState
from accel.errors import AccelError, InvalidArgumentError
from accel.patterns.isolation import Isolation
from accel.patterns.quarantine import QuarantineHandler
from accel.patterns.recovering import until_ready
from accel.patterns.requests import Counters
from accel.patterns.shares import Shares
from accel.patterns.taker import Taker
from accel.rendezvous import rendezvous

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.patterns.isolation import IsolationOptions
    from accel.patterns.poison_memory import PoisonMemory
    from accel.patterns.recovering import Recovering
    from accel.patterns.requests import Request, RequestQueue
    from accel.patterns.root import RootTask
    from accel.rendezvous import Key

__all__ = ["Takers"]

_AGAIN, _SOON = 0.05, 0.001
"""The most and the fewest seconds until a taker is looked for again: one that is late, stalled or not ready tells nothing."""

_SAME = 0.001
"""Seconds that two ends may differ and count as one: while one taker suffices it is always the first, and the others sleep."""


class Takers:
    """Several takers of one queue, or one.

    Parameters
    ----------
    max_in_flight
        Batches that each may have at once.
    options
        Of the isolation of each.
    poison
        What they all know to be poison.
    queue
        What they take from.
    launch
        Called when a taker is ready again, or its quarantine is closed.
    interrupted
        Makes the error for requests that are left over when the batcher closes.

    Attributes
    ----------
    all : list of Taker
        In the order in which they were added.
    """

    def __init__(
        self,
        max_in_flight: int,
        options: IsolationOptions,
        poison: PoisonMemory,
        queue: RequestQueue | Shares,
        launch: Callable[[], None],
        interrupted: Callable[[], Exception],
    ) -> None:
        self._max_in_flight = max_in_flight
        self._options = options
        self._poison = poison
        self._queue = queue
        self._launch = launch
        self._interrupted = interrupted
        self._root: RootTask | None = None
        self.all: list[Taker] = []

    @property
    def first(self) -> Taker:
        """The one that has been there longest."""
        return self.all[0]

    @property
    def isolations(self) -> list[Isolation]:
        """Those of the takers that have one."""
        return [taker.isolation for taker in self.all if taker.isolation is not None]

    def of(self, device: Recovering) -> Taker | None:
        """Return the taker of a device, if it has one."""
        return next((taker for taker in self.all if taker.device is device), None)

    def open(self, root: RootTask) -> None:
        """Have quarantines run in tasks of ``root``."""
        self._root = root
        for isolation in self.isolations:
            isolation.open(root)

    def add(self, handler: Any, device: Recovering | None, quarantine: Any) -> None:
        """Add a taker; for the arguments see :class:`accel.patterns.DynamicBatcher`."""
        _check(handler, device, quarantine)
        counters, isolation = Counters(charge=self._queue.charge if isinstance(self._queue, Shares) else None), None
        if quarantine is not None:
            made = QuarantineHandler(device, quarantine)
            isolation = Isolation(device, made, counters, self._poison, self._options, self._launch, self._interrupted)
            if self._root is not None:
                isolation.open(self._root)
        self.all.append(
            Taker(handler, device, counters, isolation, self._hand_over, max_items=self._options.most, max_in_flight=self._max_in_flight)
        )

    def drain(self, taker: Taker) -> None:
        """Let a taker take no more; the keyed items that wait for it, also for room, go to others."""
        taker.is_draining = True
        self._queue.rehome(taker, self.home)

    def remove(self, taker: Taker) -> bool:
        """Remove a taker, and return whether it was there."""
        is_here = taker in self.all
        if is_here:
            self.all.remove(taker)
        return is_here

    def tell_idle(self) -> None:
        """Wake those that wait for takers to be drained, where nothing runs any more."""
        for taker in self.all:
            if (taker.is_draining or taker.is_paused) and taker.is_idle:
                taker.tell_idle()

    def next(self, root: RootTask) -> Taker | None:
        """Return the taker that is expected to end the next batch first, even if it is busy; ``None`` if items have to wait until one is ready, or has room.

        Of those that would end it at about the same time it is the one with the fewest batches, and the first
        in the list. Where it is busy, one that has room is returned if there are items that it alone may take.
        One that fails whatever it is given comes last: it would be the first always, sooner than others
        answer. A device that is being rebuilt, does not answer or is drained takes nothing. Where none will be
        ready again one is returned all the same: what keeps it from that is told to each item by the handler.
        One that is paused takes what no other one may take now.
        """
        if len(self.all) == 1 and not self.all[0].is_draining:
            taker = self.all[0]
            return None if taker.is_away and self._await(self.all, root) else taker
        if not self._has_room:
            return None
        self._rehome()
        takers = [taker for taker in self.all if not taker.is_draining and self._queue.has(taker)]
        ready = [taker for taker in takers if not taker.is_awaited and taker.state is DeviceState.READY]
        if not ready:
            away = [taker for taker in takers if taker.is_away]
            return None if (away and self._await(away, root)) or not takers else takers[0]
        now, usual = perf_counter(), min([taker.seconds for taker in ready if taker.seconds], default=0.0)

        def rank(taker: Taker) -> tuple[bool, bool, float, int]:
            pauses = taker.is_paused and not self._queue.has_own(taker)
            return pauses, taker.is_failing(now), (taker.expected_end(now, usual) - now) // _SAME, taker.in_flight

        answering = (taker for taker in sorted(ready, key=rank) if not taker.is_stalled)
        first = next(answering, None)
        if first is None or first.room:
            return first
        return next((taker for taker in answering if self._queue.has_own(taker) and taker.room), first)

    def soon(self, taker: Taker | None) -> float | None:
        """Return in how many seconds to look again which of several takers is :meth:`next`, where that is ``taker``, and it is busy.

        ``None``: not before a batch ends, because none has room, or there are no others.
        """
        if len(self.all) == 1 or not self._has_room:
            return None
        has_room = any(other.room for other in self.all if other is not taker and other.state is DeviceState.READY)
        return min(_AGAIN, max(taker.seconds, _SOON)) if taker is not None and taker.seconds and has_room else _AGAIN

    @property
    def _has_room(self) -> bool:
        return any(taker.room for taker in self.all)

    def home(self, key: Key) -> Taker | None:
        """Return the taker of all items with this key: another one only if it is lost, closed or drained. ``None``: any."""
        there = {taker.name: taker for taker in self.all if not (taker.is_draining or taker.is_gone)}
        name = rendezvous(key, there)
        return None if name is None else there[name]

    def _rehome(self) -> None:
        """Give the keyed items of takers that are gone to others."""
        for taker in self.all:
            if self._queue.has_own(taker) and (taker.is_draining or taker.is_gone):
                self._queue.rehome(taker, self.home)

    def _await(self, takers: list[Taker], root: RootTask) -> bool:
        """Have items gather until a device is ready, instead of being launched one by one to wait there; return whether they do."""
        for taker in takers:
            if not taker.is_awaited:
                taker.is_awaited = root.start(self._until_ready(taker), "accel-gather", partial(self._awaited, taker))
        return any(taker.is_awaited for taker in takers)

    async def _until_ready(self, taker: Taker) -> None:
        # What keeps it from becoming ready is told to each item by the handler.
        with contextlib.suppress(AccelError, StopAsyncIteration):
            await until_ready(taker.device)  # type: ignore[arg-type]

    def _awaited(self, taker: Taker, task: asyncio.Task[None]) -> None:
        taker.is_awaited = False
        if not task.cancelled():
            self._launch()

    def _hand_over(self, taker: Taker, requests: list[Request]) -> bool:
        """Put requests that a taker has to retry back to the front of the queue, if another one can do that now; return whether it can."""
        can = any(other is not taker and not other.is_draining and other.state is DeviceState.READY for other in self.all)
        if can:
            self._queue.put_back(requests)
        return can


def _check(handler: object, device: object, quarantine: object) -> None:
    """Raise unless the functions can be called, and the device is a device."""
    if not callable(handler):
        raise InvalidArgumentError(f"handler is {handler!r}", remedy="Give a function defined with 'async def'.")
    if device is not None and not callable(getattr(device, "generations", None)):
        raise InvalidArgumentError(f"device is {device!r}", remedy="Give an accel.Device, or None.")
    if quarantine is None:
        return
    if not callable(quarantine):
        raise InvalidArgumentError(
            f"quarantine is {quarantine!r}",
            remedy="Give a function defined with 'async def' that takes a Device and returns a handler, or None.",
        )
    if not callable(getattr(device, "quarantine", None)):
        raise InvalidArgumentError(f"quarantine= with device={device!r}", remedy="Give the accel.Device that the handler uses, too.")
