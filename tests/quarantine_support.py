"""A device without a process, whose quarantine has none either: trials and deaths are counted, and cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import accel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["Item", "Serving", "Twin", "died", "hung"]

Item = tuple[str, int]
"""What becomes of it, and a number: ``("fine", 3)``. Others are ``poison``, ``hang``, ``once`` (faults once in quarantine), ``error`` and ``stale``."""


def died() -> accel.ContextPoisonedError:
    """Return the fault of a context whose process was killed."""
    return _fault(accel.HostDiedError("killed", signal=9))


def hung() -> accel.ContextPoisonedError:
    """Return the fault of a context that was ended because it hung."""
    return _fault(accel.HostDiedError("hung", hung=True))


def _fault(cause: accel.HostDiedError) -> accel.ContextPoisonedError:
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
    """The device that serves, the handler on it, and what makes the handler in quarantine."""

    def __init__(self) -> None:
        self.served: list[list[Item]] = []
        self.tried: list[Item] = []
        self.deaths: Counter[Item] = Counter()
        self.twins: list[Twin] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def generations(self) -> AsyncIterator[int]:
        yield len(self.served) + 1

    @asynccontextmanager
    async def quarantine(self) -> AsyncIterator[Twin]:
        self.twins.append(Twin())
        yield self.twins[-1]
        await self.twins[-1].aclose()

    async def handler(self, items: list[Item]) -> list[int | Exception]:
        self.served.append(items)
        await asyncio.sleep(0)
        if any(kind in ("poison", "hang", "once", "stale") for kind, _ in items):
            raise died()
        return [number for _, number in items]

    async def make(self, device: Any) -> Callable[[list[Item]], Awaitable[list[int | Exception]]]:
        generation = device.generation

        async def twin(items: list[Item]) -> list[int | Exception]:
            (item,) = items
            kind, number = item
            await self.gate.wait()
            if device.generation != generation:
                raise AssertionError("the handler of a context that is gone")
            self.tried.append(item)
            if kind == "error":
                raise ValueError(number)
            if kind == "stale" and self.tried.count(item) == 1:
                raise accel.StaleRefError("of an earlier context")
            if kind in ("poison", "hang") or (kind == "once" and not self.deaths[item]):
                self.deaths[item] += 1
                device.generation += 1
                raise hung() if kind == "hang" else died()
            return [number]

        return twin
