"""The spare of ``standby="model"``: it has the memory and the instances of libraries too."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Literal

from accel._log import get_logger
from accel.errors import AccelError
from accel.remote.durable import encode_slab
from accel.remote.messages import Kind, pickled_library
from accel.remote.standby import StandbyActor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.engine.core import DeviceCore
    from accel.engine.registration import Registration
    from accel.remote.children import Children
    from accel.remote.link import Link
    from accel.storage.durable import KeptSlab

__all__ = ["ModelStandbyActor"]

logger = get_logger()


class ModelStandbyActor(StandbyActor):
    """Keeps a spare child that has mapped the memory of registered libraries and opened the eager ones.

    A slab or library that a spare cannot map or open is logged once, and left to its promotion.

    Parameters
    ----------
    core, children, readiness
        As for :class:`StandbyActor`.
    """

    def __init__(self, core: DeviceCore, children: Children, readiness: Literal["imports", "context", "model"]) -> None:
        super().__init__(core, children, readiness)
        self._prepared: Link | None = None  # the spare, once it has its context
        self._logged: weakref.WeakSet[Registration] = weakref.WeakSet()

    def _subscriptions(self) -> list[tuple[list[Callable[[], object]], Callable[[], object]]]:
        """Listen to the registered libraries, too."""
        return [*super()._subscriptions(), (self._core.registration_listeners, self._on_registrations)]

    def _on_prepared(self, link: Link) -> None:
        """Have the spare, which has its context now, updated to the registered libraries."""
        self._prepared = link
        self._on_registrations()

    def _on_registrations(self) -> None:
        """Have the spare updated: the registered libraries have changed, or it has its context."""
        link = self._link
        if link is not None and link is self._prepared:  # not ready again until it is updated
            link.is_warm = False
            self.state = "starting"
            self._request_check()

    async def _update(self, link: Link) -> None:
        """Update the spare to the libraries that are registered now; then it is ready.

        Each step must end within ``busy_timeout``. Does nothing for a spare that is ready, or has
        no context yet.
        """
        if link is not self._prepared or link.is_warm:
            return
        link.watchdog.begin_step(self._core.options.limits.busy_timeout)
        while self._is_spare(link) and await self._update_step(link):
            link.watchdog.begin_step(self._core.options.limits.busy_timeout)
        if self._is_spare(link):
            self._set_ready(link)

    async def _update_step(self, link: Link) -> bool:
        """Have the spare close, map or open one thing; return ``False`` if nothing was left to do.

        Registrations may change during each step, so every call compares anew. A step that has
        failed counts as done.
        """
        registrations = self._core.registrations
        # Close libraries that are registered no more.
        for name, registration in link.libraries.items():
            if registrations.get(name) is not registration:
                del link.libraries[name]  # so leave the loop: the next call begins anew
                await self._ask(link, Kind.UNREGISTER, name.encode(), registration)
                return True
        # Unmap slabs that no library uses any more.
        slabs = {
            slab.number: slab
            for slab in self._core.durable.slabs_of(buffer for library in registrations.values() for buffer in library.buffers)
        }
        link.unmap_slabs(number for number in tuple(link.mapped_slabs) if number not in slabs)
        # Map the next slab that a library's buffers are in, or open the next library.
        for registration in tuple(registrations.values()):
            slab = next((slab for slab in slabs.values() if link.mapped_slabs.get(slab.number) != slab.blocks), None)
            if slab is not None:
                link.mapped_slabs[slab.number] = slab.blocks
                await self._ask(link, Kind.MAP_SLAB, encode_slab(slab), registration, (slab,))
                return True
            if registration.is_eager and not registration.unregistrations and registration.name not in link.libraries:
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

    async def _ask(self, link: Link, kind: Kind, data: bytes, registration: Registration, slabs: Iterable[KeptSlab] = ()) -> None:
        """Have the spare do something for a library, and wait for it. An error is only logged.

        The message takes the descriptors of ``slabs`` with it.
        """
        try:
            await link.ask(kind, data, fds=[slab.fd for slab in slabs])
        except AccelError as error:
            if self._is_spare(link):
                self._log(registration, error)

    def _log(self, registration: Registration, error: AccelError) -> None:
        """Log, once for each library, why the spare is without it."""
        if registration not in self._logged:
            self._logged.add(registration)
            logger.warning("standby_without_library", device=self._core.name, library=registration.name, error=error)
