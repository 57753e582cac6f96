"""What both integrations open for the life of an application: a system and one device."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from accel.device import System

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.device import Device

__all__ = ["open_system"]


@contextlib.asynccontextmanager
async def open_system(device: str, close_timeout: float, options: dict[str, Any]) -> AsyncIterator[tuple[System, Device]]:
    """Open a system and a device, and close both at the end.

    A web service that cannot keep up should say so while its clients still listen, so ``overload`` is ``"reject"`` unless given.
    """
    async with System(close_timeout=close_timeout) as system:
        yield system, await system.open_device(device, **{"overload": "reject", **options})
