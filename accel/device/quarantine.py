"""A quarantine: a device in a child of its own, where faults are expected; its options, and its block."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Protocol, TypeVar

from accel.actors import Directive, RestartStrategy
from accel.errors import AccelError, FaultScope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from accel.engine.core import DeviceCore

__all__ = ["quarantined", "set_quarantine_options"]

_STARTS = 3
"""How often a context may fail to come up before the quarantine is given up."""

_REBUILDS = 10_000
"""Rebuilds in an hour, more than any search needs: it ends when nothing is left to search, or when
no context comes up."""


def set_quarantine_options(core: DeviceCore) -> None:
    """Set the options of a quarantine: no planned faults, waiting for room, and its own budget.

    Faults are expected there. So the budget has room for any number of them, and only contexts that
    fail to come up several times in a row end the quarantine. Replaces ``core.options``.
    """
    failures, seen_generation = 0, 0

    def decide(error: BaseException) -> Directive:
        """Restart, unless the hardware is lost or several contexts in a row failed to come up.

        The supervisor calls it once for each fault or failed start. Each is counted here, and the
        count starts again once a generation has begun.
        """
        nonlocal failures, seen_generation
        if isinstance(error, AccelError) and error.scope >= FaultScope.DEVICE:
            return Directive.STOP
        if seen_generation != core.lifecycle.generation:
            failures, seen_generation = 0, core.lifecycle.generation
        failures += 1
        return Directive.RESTART if failures < _STARTS else Directive.STOP

    restart = RestartStrategy(max_restarts=_REBUILDS, within=3600.0, backoff=(0.0, 0.05), decide=decide)
    core.options = dataclasses.replace(core.options, faults=None, overload="wait", restart=restart)


class _Closes(Protocol):
    async def aclose(self, *, timeout: float | None = None) -> None: ...


D = TypeVar("D", bound=_Closes)


@contextlib.asynccontextmanager
async def quarantined(open_quarantine: Callable[[], Awaitable[D]]) -> AsyncIterator[D]:
    """Open a quarantine, and close it at the end of the block.

    It is closed after its work has ended, or at once, failing the work, if the block raised or was
    cancelled.
    """
    device = await open_quarantine()
    try:
        yield device
    except BaseException:
        await device.aclose(timeout=0.0)
        raise
    await device.aclose()
