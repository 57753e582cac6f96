"""The handler on a quarantined device: opened on demand, and made anew for each of its contexts."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from accel.errors import AccelError, FaultScope, InvalidArgumentError
from accel.patterns.outcome import is_worth_a_retry
from accel.patterns.recovering import until_ready
from accel.shortage import is_shortage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from accel.device import Device

__all__ = ["QuarantineHandler", "UnusableError"]

_ATTEMPTS = 3
"""How many times the handler is made while faults interrupt that."""

_SHORT, _LONG, _ENDS = 0.05, 1.0, 30.0
"""Seconds between two attempts during a shortage of the machine, first and at most; and after how many it is given up."""


class UnusableError(Exception):
    """The quarantine, or the handler in it, cannot be made; see the ``__cause__``."""


class QuarantineHandler:
    """Opens a device in quarantine, and makes the handler for it.

    Parameters
    ----------
    device
        The :class:`accel.Device` that serves, whose ``quarantine()`` is opened.
    make
        ``await make(device)`` returns the handler for a device; called again after each rebuild, because the new context has none of the old refs.

    Attributes
    ----------
    seconds : float
        How long it took last to have a context and the handler on it.
    """

    def __init__(self, device: Any, make: Callable[[Device], Awaitable[Any]]) -> None:
        self._served = device
        self._make = make
        self._stack = AsyncExitStack()
        self._device: Device | None = None
        self._generation = 0
        self._handler: Any = None
        self.seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is a device in quarantine, which may be lost by now."""
        return self._device is not None

    async def handler(self) -> Callable[[list[Any]], Awaitable[Sequence[Any]]]:
        """Return the handler when it can be used, which may take a new process and new weights.

        Raises
        ------
        UnusableError
            If it cannot be made.
        """
        if self._device is not None and self._device.state.value == "lost":  # while it was not used
            await self.aclose(abandon=True)
        began, attempts, pause = time.perf_counter(), 0, _SHORT
        while True:
            try:
                return await self._of_this_generation()  # type: ignore[no-any-return]
            except Exception as error:
                if is_shortage(error) and time.perf_counter() - began < _ENDS:
                    await self.aclose(abandon=True)
                elif (attempts := attempts + 1) == _ATTEMPTS or not is_worth_a_retry(error):
                    raise UnusableError from error
                else:
                    continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONG)

    def check_usable(self, results: Iterable[Any]) -> None:
        """Raise if a trial ended because the quarantined device is lost or closed.

        Raises
        ------
        UnusableError
        """
        for result in results:
            if isinstance(result, AccelError) and result.scope >= FaultScope.DEVICE:
                raise UnusableError from result

    async def aclose(self, *, abandon: bool = False) -> None:
        """Close the quarantine, if it is open; :meth:`handler` opens another. With ``abandon``, do not wait for work that runs there."""
        device, self._device = self._device, None
        self._handler, self._generation = None, 0
        if device is not None and abandon:
            await device.aclose(timeout=0.0)
        await self._stack.aclose()

    async def _of_this_generation(self) -> Any:
        device, began = self._device, time.perf_counter()
        if device is None:
            opened: Device = await self._stack.enter_async_context(self._served.quarantine())
            self._device = device = opened
        generation = await until_ready(device)
        if generation != self._generation:
            self._handler = None
            handler: Any = await self._make(device)
            if not callable(handler):
                raise InvalidArgumentError(f"quarantine= made {handler!r}", remedy="Return a function defined with 'async def'.")
            self._handler, self._generation = handler, generation
            self.seconds = time.perf_counter() - began
        return self._handler
