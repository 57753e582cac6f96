"""The system of an application with its device, or pool of devices: opened and closed with it, and what happens when a device is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from accel._log import get_logger
from accel.device import Device, Pool, System
from accel.errors import ClosedError, DeviceLostError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

__all__ = ["Enough", "OnLost", "Opened", "check_unused", "open_system"]

OnLost: TypeAlias = Literal["stay", "reopen", "exit"]
Enough: TypeAlias = Literal["any", "all"] | int
"""How many devices of a pool must serve; see :meth:`accel.Pool.health`."""
Opened: TypeAlias = Device | Pool
"""What an application works on."""

logger = get_logger()

_SHORTEST, _LONGEST = 1.0, 60.0
"""Seconds between two attempts to reopen a device. The first attempt is immediate, and each pause is twice the last, so that a device that
faults again and again is not opened in a loop."""

_LASTING = 60.0
"""Seconds after which a reopened device counts as healthy: the next attempt is immediate again."""


def check_unused(route: str, **options: object) -> None:
    """Raise if an option of a route is given where there is none.

    Raises
    ------
    InvalidArgumentError
    """
    for name, value in options.items():
        if value is not None:
            raise InvalidArgumentError(f"{name} is given, and {route} is None", remedy=f'Give a path: {route}="/{route}".')


@contextlib.asynccontextmanager
async def open_system(
    device: str, pool: str | Sequence[str] | None, enough: Enough, close_timeout: float, on_lost: OnLost, options: dict[str, Any]
) -> AsyncIterator[tuple[System, Opened]]:
    """Open a system with a device, or a pool where one is named, and close all at the end.

    ``overload`` is ``"reject"`` unless given: an overloaded web service must answer before its clients give up.

    Raises
    ------
    InvalidArgumentError
        A device and a pool are named, or ``enough`` is wrong, or given without a pool.
    """
    options = {"overload": "reject", **options}
    async with System(close_timeout=close_timeout) as system:
        opened: Opened

        def is_live() -> bool:
            return (opened.health(enough) if isinstance(opened, Pool) else opened.health()).is_live

        if pool is None:
            if enough != "any":
                raise InvalidArgumentError(f"enough is {enough!r} without a pool", remedy="Name its devices: pool='cuda'.")
            opened = await system.open_device(device, **options)
            devices = [opened]
        else:
            if device != "auto":
                raise InvalidArgumentError(f"device is {device!r}, and pool {pool!r}", remedy="Name the pool's devices alone.")
            opened = await system.open_pool(pool, **options)
            opened.health(enough)  # it checks `enough`
            devices = [*opened]
        watches = [asyncio.create_task(_watch(each, on_lost, is_live), name="accel-on-lost") for each in devices]
        try:
            yield system, opened
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.wait(watches)


async def _watch(device: Device, on_lost: OnLost, is_live: Callable[[], bool]) -> None:
    """Apply ``on_lost`` each time the device is lost, until it is closed; ``"exit"`` once the service is not live any more."""
    loop = asyncio.get_running_loop()
    pause, reopened_at = 0.0, loop.time() - _LASTING
    while on_lost != "stay" and await _is_lost(device):
        if on_lost == "exit" and is_live():
            await asyncio.sleep(_SHORTEST)  # other devices serve, until they are lost too
            continue
        if on_lost == "exit":
            logger.error("service_exits", device=device.name, generation=device.generation, signal="SIGTERM")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        pause = 0.0 if loop.time() - reopened_at >= _LASTING else min(max(_SHORTEST, 2 * pause), _LONGEST)
        await asyncio.sleep(pause)
        reopened_at = loop.time()
        try:
            await device.reopen()
        except DeviceLostError as error:
            logger.warning("device_not_reopened", device=device.name, generation=device.generation, error=error)
        except InvalidArgumentError:
            continue  # the application has reopened it itself
        except (UnsupportedError, ClosedError) as error:
            logger.warning("device_stays_lost", device=device.name, generation=device.generation, error=error)
            return


async def _is_lost(device: Device) -> bool:
    """Wait until the device is lost or closed; return whether it was lost."""
    try:
        async for _ in device.generations():
            pass
    except DeviceLostError:
        return True
    return False
