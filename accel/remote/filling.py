"""What a spare child of ``standby="model"`` has besides a context: the memory that registered libraries hold, and the eager ones, open."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from accel._log import get_logger
from accel.errors import AccelError
from accel.remote.durable import kept_message
from accel.remote.messages import Kind, pickled_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.engine.core import DeviceCore
    from accel.engine.registration import Registration
    from accel.remote.link import Link
    from accel.storage.durable import Kept

__all__ = ["Filling"]

logger = get_logger()


class Filling:
    """Brings spare children up to what is registered now. What a spare does not take is logged once, and left to its promotion.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    """

    def __init__(self, core: DeviceCore) -> None:
        self._core = core
        self._logged: weakref.WeakSet[Registration] = weakref.WeakSet()

    async def fill(self, link: Link, is_spare: Callable[[], bool]) -> None:
        """Return once the child has all that it can have, or is no spare any more. Each question is answered within ``busy_timeout``.

        Parameters
        ----------
        link
            The child.
        is_spare
            Whether the child is one still: it may be promoted, or die, at any moment.
        """
        while is_spare():
            link.watchdog.begin(self._core.options.limits.busy_timeout)
            if not await self._step(link, is_spare):
                return

    async def _step(self, link: Link, is_spare: Callable[[], bool]) -> bool:
        """Do what comes next, and return whether there was anything to do."""
        own = self._core.own
        for name, registration in link.libraries.items():
            if own.get(name) is not registration:
                del link.libraries[name]
                await self._ask(link, Kind.UNREGISTER, name.encode(), registration, is_spare)
                return True
        held = {each.number: each for each in self._core.durable.slabs_of(buffer for each in own.values() for buffer in each.buffers)}
        link.unmap(number for number in tuple(link.mapped) if number not in held)
        for registration in tuple(own.values()):
            slab = next((each for each in held.values() if link.mapped.get(each.number) != each.blocks), None)
            if slab is not None:
                link.mapped[slab.number] = slab.blocks
                await self._ask(link, Kind.HELD, kept_message(slab), registration, is_spare, slabs=(slab,))
                return True
            if registration.is_eager and not registration.is_leaving and registration.name not in link.libraries:
                link.libraries[registration.name] = registration
                try:
                    registration.check()
                    data = pickled_library(registration)
                except AccelError as error:
                    self._log(registration, error)
                else:
                    await self._ask(link, Kind.REGISTER, data, registration, is_spare)
                return True
        return False

    async def _ask(
        self, link: Link, kind: Kind, data: bytes, registration: Registration, is_spare: Callable[[], bool], slabs: Iterable[Kept] = ()
    ) -> None:
        try:
            await link.ask(kind, data, fds=[slab.fd for slab in slabs])
        except AccelError as error:
            if is_spare():
                self._log(registration, error)

    def _log(self, registration: Registration, error: AccelError) -> None:
        if registration not in self._logged:
            self._logged.add(registration)
            logger.warning("standby_without_library", device=self._core.name, library=registration.name, error=error)
