"""A device without a process, whose quarantine has none either: trials and deaths are counted, and cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import accel
from accel.patterns import DynamicBatcher
from tests.batcher_support import settled
from tests.device_support import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = [
    "FINE",
    "KILLED",
    "POISON",
    "Batcher",
    "Item",
    "Serving",
    "Twin",
    "answers",
    "crashed",
    "failed",
    "hung",
    "killed",
    "kinds",
    "serving",
]

Item = tuple[str, int]
"""What becomes of it, and a number: ``("fine", 3)``. See :meth:`Serving.make` for the others."""

FAULTS = frozenset({"poison", "killed", "assert", "other", "unknown", "hang", "once", "late", "stale", "lost"})
"""Items of which the device that serves faults. All that faults crashes, but ``"killed"`` and ``"once"`` end as if they were killed from outside."""

_STATUSES = frozenset({"assert", "other", "unknown"})
"""Items that do not end the process. Their status on the device that serves is 710, unless all are unknown."""


def crashed() -> accel.ContextPoisonedError:
    """Return the fault of a context whose process crashed."""
    return _fault(accel.HostDiedError("crashed", signal=11))


def killed() -> accel.ContextPoisonedError:
    """Return the fault of a context whose process was killed."""
    return _fault(accel.HostDiedError("killed", signal=9))


def hung() -> accel.ContextPoisonedError:
    """Return the fault of a context that was ended because it hung."""
    return _fault(accel.HostDiedError("hung", hung=True))


def failed(status: int) -> accel.ContextPoisonedError:
    """Return the fault of a context of which the driver gives this status; 999 is of no kernel."""
    return _fault((accel.KernelFaultError if status < 999 else accel.DriverError)("failed", code=status, scope=accel.FaultScope.PROCESS))


def _fault(cause: accel.AccelError) -> accel.ContextPoisonedError:
    fault = accel.ContextPoisonedError("faulted", device="fake:0", code=700)
    fault.__cause__ = cause
    return fault


_ENDS: dict[str, Callable[[], accel.ContextPoisonedError]] = {
    "poison": crashed,
    "killed": killed,
    "once": killed,
    "hang": hung,
    "assert": partial(failed, 710),
    "other": partial(failed, 719),
    "unknown": partial(failed, 999),
}
"""What an item does in quarantine."""


Batcher = DynamicBatcher[Item, int]

FINE: Item = ("fine", 1)
POISON: Item = ("poison", 2)
KILLED: Item = ("killed", 2)


class Twin:
    """A device in quarantine."""

    def __init__(self) -> None:
        self.generation = 1
        self.state = accel.DeviceState.READY

    async def generations(self) -> AsyncIterator[int]:
        yield self.generation

    async def aclose(self, *, timeout: float | None = None) -> None:
        self.state = accel.DeviceState.CLOSED


class Serving:
    """The device that serves, the handler on it, and what makes the handler in quarantine.

    Attributes
    ----------
    served, trials, deaths, twins, starts
        Calls of the handler; calls in quarantine; how often a context there died of each item, or of a group whose first such item it was; quarantines; how
        often a handler was made there.
    faults
        Calls of the handler that are to fault whatever their items are.
    fault
        What they raise.
    ends
        What is raised to those who wait for the device, if anything.
    gate
        Trials wait for it.
    """

    def __init__(self, faults: int = 0, fault: Callable[[], accel.ContextPoisonedError] = crashed) -> None:
        self.served: list[list[Item]] = []
        self.trials: list[list[Item]] = []
        self.deaths: Counter[Item] = Counter()
        self.twins: list[Twin] = []
        self.starts = 0
        self.faults = faults
        self.fault = fault
        self.ends: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.waits = asyncio.Event()

    @property
    def tried(self) -> list[Item]:
        """The items that ran in quarantine."""
        return [item for trial in self.trials for item in trial]

    async def generations(self) -> AsyncIterator[int]:
        if self.ends is not None:
            raise self.ends
        yield len(self.served) + 1

    @asynccontextmanager
    async def quarantine(self) -> AsyncIterator[Twin]:
        self.twins.append(Twin())
        yield self.twins[-1]
        await self.twins[-1].aclose()

    async def handler(self, items: list[Item]) -> list[int | Exception]:
        self.served.append(items)
        await asyncio.sleep(0)
        if self.faults or any(kind in FAULTS for kind, _ in items):
            if self.faults:
                self.faults -= 1
                raise self.fault()
            kinds = {kind for kind, _ in items} & FAULTS
            if kinds <= {"killed", "once"}:
                raise killed()
            raise crashed() if kinds.isdisjoint(_STATUSES) else failed(999 if kinds == {"unknown"} else 710)
        return [number for _, number in items]

    async def make(self, device: Any) -> Callable[[list[Item]], Awaitable[list[int | Exception]]]:
        self.starts += 1
        generation = device.generation

        async def twin(items: list[Item]) -> list[int | Exception]:
            assert device.generation == generation, "the handler is of a context that is gone"
            self.trials.append(items)
            self.waits.set()
            await self.gate.wait()
            for item in items:
                kind, number = item
                if kind == "error":
                    raise ValueError(number)
                if kind == "stale" or (kind == "late" and self.tried.count(item) == 1):
                    raise accel.StaleRefError("of an earlier context")
                if kind == "lost":
                    return [accel.DeviceLostError("lost")] * len(items)
                if kind in _ENDS and not (kind == "once" and self.deaths[item]):
                    self.deaths[item] += 1
                    device.generation += 1
                    end = _ENDS[kind]
                    raise end()
            return [number for _, number in items]

        return twin


@asynccontextmanager
async def serving(device: Serving, **options: Any) -> AsyncIterator[Batcher]:
    chosen: Any = device
    async with Batcher(device.handler, **{"idempotent": True, "device": chosen, "quarantine": device.make} | options) as batcher:
        yield batcher
    assert settled(batcher.statistics())
    assert batcher.statistics().isolating == 0
    assert all(twin.state is accel.DeviceState.CLOSED for twin in device.twins)


async def answers(batcher: Batcher, items: list[Item]) -> list[Any]:
    return await bounded(asyncio.gather(*map(batcher.submit, items), return_exceptions=True))


def kinds(results: list[Any]) -> list[Any]:
    return [type(result) if isinstance(result, Exception) else result for result in results]
