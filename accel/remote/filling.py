"""The spare child of ``standby="model"``: it has the memory and the instances of libraries too."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Literal

from accel._log import get_logger
from accel.errors import AccelError
from accel.remote.durable import kept_message
from accel.remote.messages import Kind, pickled_library
from accel.remote.standby import StandbyActor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.engine.core import DeviceCore
    from accel.engine.registration import Registration
    from accel.remote.children import Children
    from accel.remote.link import Link
    from accel.storage.durable import Kept

__all__ = ["ModelStandbyActor"]

logger = get_logger()


class ModelStandbyActor(StandbyActor):
    """Keeps a spare child with the memory of registered libraries, and the eager ones open.

    What a spare cannot map or open is logged once, and left to its promotion.

    Parameters
    ----------
    core, children, ahead
        As for :class:`StandbyActor`.
    """

    def __init__(self, core: DeviceCore, children: Children, ahead: Literal["imports", "context", "model"]) -> None:
        super().__init__(core, children, ahead)
        self._with_context: Link | None = None
        self._logged: weakref.WeakSet[Registration] = weakref.WeakSet()

    def _listening(self) -> list[tuple[list[Callable[[], object]], Callable[[], object]]]:
        return [*super()._listening(), (self._core.own_listeners, self._refill)]

    def _on_context(self, link: Link) -> None:
        self._with_context = link
        self._refill()

    def _refill(self) -> None:
        """Have the spare brought up to what is registered now; it is not ready until then."""
        link = self._link
        if link is not None and link is self._with_context:
            link.is_warm = False
            self.state = "starting"
            self._look()

    async def _fill(self, link: Link) -> None:
        """Bring the spare up to what is registered, each step within ``busy_timeout``."""
        if link is not self._with_context or link.is_warm:
            return
        link.watchdog.begin(self._core.options.limits.busy_timeout)
        while self._is_spare(link) and await self._fill_step(link):
            link.watchdog.begin(self._core.options.limits.busy_timeout)
        if self._is_spare(link):
            self._on_warm(link)

    async def _fill_step(self, link: Link) -> bool:
        """Have the spare take the next step, and return whether there was one."""
        own = self._core.own
        for name, registration in link.libraries.items():
            if own.get(name) is not registration:
                del link.libraries[name]
                await self._ask(link, Kind.UNREGISTER, name.encode(), registration)
                return True
        slabs = {
            slab.number: slab for slab in self._core.durable.slabs_of(buffer for library in own.values() for buffer in library.buffers)
        }
        link.unmap(number for number in tuple(link.mapped) if number not in slabs)
        for registration in tuple(own.values()):
            slab = next((slab for slab in slabs.values() if link.mapped.get(slab.number) != slab.blocks), None)
            if slab is not None:
                link.mapped[slab.number] = slab.blocks
                await self._ask(link, Kind.HELD, kept_message(slab), registration, (slab,))
                return True
            if registration.is_eager and not registration.is_leaving and registration.name not in link.libraries:
                link.libraries[registration.name] = registration
                try:
                    registration.check()
                    data = pickled_library(registration)
                except AccelError as error:
                    self._log(registration, error)
                else:
                    await self._ask(link, Kind.REGISTER, data, registration)
                return True
        return False

    async def _ask(self, link: Link, kind: Kind, data: bytes, registration: Registration, slabs: Iterable[Kept] = ()) -> None:
        try:
            await link.ask(kind, data, fds=[slab.fd for slab in slabs])
        except AccelError as error:
            if self._is_spare(link):
                self._log(registration, error)

    def _log(self, registration: Registration, error: AccelError) -> None:
        if registration not in self._logged:
            self._logged.add(registration)
            logger.warning("standby_without_library", device=self._core.name, library=registration.name, error=error)
