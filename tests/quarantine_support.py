"""A device without a process, whose quarantine has none either: trials and deaths are counted, and cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import accel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["Item", "Serving", "Twin", "died", "failed", "hung"]

Item = tuple[str, int]
"""What becomes of it, and a number: ``("fine", 3)``. See :meth:`Serving.make` for the others."""

FAULTS = frozenset({"poison", "assert", "other", "unknown", "hang", "once", "late", "stale", "lost"})
"""Items of which the device that serves faults."""

_STATUSES = {"assert": 710, "other": 719, "unknown": 999}
"""The driver's status in quarantine, of items that do not end the process. On the device that serves it is 710, unless all are unknown."""


def died() -> accel.ContextPoisonedError:
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
    served, tried, deaths, twins, starts
        Calls of the handler; items that ran in quarantine; how often a context there died of each; quarantines; how often a handler was made there.
    faults
        Calls of the handler that are to fault whatever their items are.
    ends
        What is raised to those who wait for the device, if anything.
    gate
        Trials wait for it.
    """

    def __init__(self, faults: int = 0) -> None:
        self.served: list[list[Item]] = []
        self.tried: list[Item] = []
        self.deaths: Counter[Item] = Counter()
        self.twins: list[Twin] = []
        self.starts = 0
        self.faults = faults
        self.ends: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.waits = asyncio.Event()

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
            self.faults = max(0, self.faults - 1)
            raise (
                died()
                if all(kind not in _STATUSES for kind, _ in items)
                else failed(999 if {kind for kind, _ in items} == {"unknown"} else 710)
            )
        return [number for _, number in items]

    async def make(self, device: Any) -> Callable[[list[Item]], Awaitable[list[int | Exception]]]:
        self.starts += 1
        generation = device.generation

        async def twin(items: list[Item]) -> list[int | Exception]:
            (item,) = items
            kind, number = item
            assert device.generation == generation, "the handler is of a context that is gone"
            self.tried.append(item)
            self.waits.set()
            await self.gate.wait()
            if kind == "error":
                raise ValueError(number)
            if kind == "stale" or (kind == "late" and self.tried.count(item) == 1):
                raise accel.StaleRefError("of an earlier context")
            if kind == "lost":
                return [accel.DeviceLostError("lost")]
            if kind in _STATUSES:
                self.deaths[item] += 1
                device.generation += 1
                raise failed(_STATUSES[kind])
            if kind in ("poison", "hang") or (kind == "once" and not self.deaths[item]):
                self.deaths[item] += 1
                device.generation += 1
                raise hung() if kind == "hang" else died()
            return [number]

        return twin
