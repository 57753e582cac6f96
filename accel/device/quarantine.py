"""A second device like a given one, in a child of its own, for work that may kill its context."""

from __future__ import annotations

import dataclasses
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from accel.actors import Directive, RestartStrategy
from accel.errors import AccelError, FaultScope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from accel.engine.core import DeviceCore
    from accel.engine.options import DeviceOptions

__all__ = ["opened", "quarantine_options", "set_restarts"]

_STARTS = 3
"""How often a context may fail to come up before the quarantine is given up."""

_REBUILDS = 10_000
"""Rebuilds in an hour, more than any search needs: it ends when nothing is left to search, or when
no context comes up."""


def quarantine_options(options: DeviceOptions) -> DeviceOptions:
    """Return the options of the quarantine of a device that was opened with ``options``.

    It has no planned faults, and waits for room.
    """
    return dataclasses.replace(options, faults=None, overload="wait")


def set_restarts(core: DeviceCore) -> None:
    """Give a quarantine a restart budget of its own.

    It is there to fault, so only a context that does not come up at all ends it.
    """
    failures, seen = 0, 0

    def decide(error: BaseException) -> Directive:
        nonlocal failures, seen
        if isinstance(error, AccelError) and error.scope >= FaultScope.DEVICE:
            return Directive.STOP
        if seen != core.lifecycle.generation:
            failures, seen = 0, core.lifecycle.generation
        failures += 1
        return Directive.RESTART if failures < _STARTS else Directive.STOP

    restart = RestartStrategy(max_restarts=_REBUILDS, within=3600.0, backoff=(0.0, 0.05), decide=decide)
    core.options = dataclasses.replace(core.options, restart=restart)


class Closable(Protocol):
    """A device."""

    async def aclose(self, *, timeout: float | None = None) -> None:
        """Close it."""


D = TypeVar("D", bound=Closable)


@asynccontextmanager
async def opened(open_quarantine: Callable[[], Awaitable[D]]) -> AsyncIterator[D]:
    """Open a quarantine, and close it at the end of the block.

    At once if the block raises or is cancelled.
    """
    device = await open_quarantine()
    try:
        yield device
    except BaseException:
        await device.aclose(timeout=0.0)
        raise
    await device.aclose()
