"""The children of a device that serve no generation: spare ones, and those that were killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from accel._log import get_logger
from accel.errors import HostDiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.process.exit_status import ExitStatus
    from accel.process.forkserver_client import ForkserverSlot
    from accel.remote.link import Link, Starter

__all__ = ["Children", "Spare"]

logger = get_logger()

_STATES = ("ready", "starting", "failed", "none")
"""States of a spare, the most useful one first."""


class Spare(Protocol):
    """A place for one spare child, kept by an actor: :class:`~accel.remote.standby.StandbyActor`.

    Attributes
    ----------
    state : str
        The state of the child: ``"none"``, ``"starting"``, ``"ready"``, or ``"failed"`` once its
        budget is spent.
    """

    state: str

    @property
    def pid(self) -> int | None:
        """Process id of the child; ``None`` if there is none."""

    def take(self) -> Link | None:
        """Give the child away: return it and forget it. ``None`` if there is none to promote."""


class Children:
    """Spare children to promote, and killed children to wait for, over all generations.

    Parameters
    ----------
    device
        Its name.
    forkserver
        Holds the device's forkserver, while there is one.
    node
        Starts children on another machine; ``None``: they are started here.

    Attributes
    ----------
    spares : list of Spare
        Places of spares; the one that was started last is the last.
    """

    def __init__(self, device: str, forkserver: ForkserverSlot, node: Starter | None = None) -> None:
        self.forkserver = forkserver
        self.node = node
        self._device = device
        self.spares: list[Spare] = []
        self._ending: dict[Link, bool] = {}  # killed -> whether the log says that it does not end

    @property
    def standby(self) -> str:
        """The state of the spare that would be promoted next; see :class:`Spare`."""
        return min((spare.state for spare in self.spares), key=_STATES.index, default="none")

    @property
    def node_address(self) -> str | None:
        """The address of the machine that they are on; ``None``: this one."""
        return None if self.node is None else self.node.address

    @property
    def is_spare_ready(self) -> bool | None:
        """Whether a spare is ready: ``None`` while one may become so, ``False`` if none will."""
        states = {spare.state for spare in self.spares}
        if "ready" in states:
            return True
        return None if states - {"failed"} else False

    @property
    def spare_pid(self) -> int | None:
        """The process id of the spare that would be promoted next; ``None`` on another machine."""
        return None if self.node is not None else next((spare.pid for spare in self._by_readiness()), None)

    def take_spare(self) -> Link | None:
        """Remove the spare that is nearest to ready, and return it; ``None`` if there is none.

        A new generation begins in it. The caller owns it from here on, and promotes or kills it;
        the actor that kept it starts another.
        """
        for spare in self._by_readiness():
            if (link := spare.take()) is not None:
                return link
        return None

    def _by_readiness(self) -> list[Spare]:
        """Return the places of spares, ready ones first, of equal ones the oldest first."""
        return sorted(self.spares, key=lambda spare: _STATES.index(spare.state))

    def kill(self, link: Link, on_ended: Callable[[], object] | None = None) -> None:
        """Kill a child, close its channel, and call ``on_ended`` once it has ended.

        Returns at once; :meth:`wait_ended` waits for the end.
        """

        def on_exit(status: ExitStatus) -> None:
            self._ending.pop(link, None)
            if on_ended is not None:
                on_ended()

        link.kill()
        link.channel.close()
        if link.child.exit is None:
            self._ending[link] = False
            link.on_exit = on_exit
        else:
            on_exit(link.child.exit)

    async def wait_ended(self) -> bool:
        """Wait until the children that were killed have ended, and return whether they have.

        Ten seconds after a child was killed it is no longer waited for, and the log says so once
        (``child_not_ended``). Its memory is never given out again before it has ended.
        """
        for link in tuple(self._ending):
            timed_out: HostDiedError | None = None
            try:
                await link.child.aclose(grace=0.0)
            except HostDiedError as error:
                timed_out = error
            if timed_out is not None and not self._ending.get(link, True):  # not there: it has ended after all
                self._ending[link] = True
                logger.error("child_not_ended", device=self._device, pid=link.pid, error=timed_out)
        return not self._ending
