"""The children of one device that hold no context: spare children, and children that are ending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from accel._log import get_logger
from accel.errors import HostDiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.process.exit_status import ExitStatus
    from accel.process.forks import ForkSource
    from accel.remote.link import Link

__all__ = ["Children", "Spare"]

logger = get_logger()

_STATES = ("ready", "starting", "failed", "none")


class Spare(Protocol):
    """A place for one spare child.

    Attributes
    ----------
    state : str
        The state of the child: ``"none"``, ``"starting"``, ``"ready"``, or ``"failed"`` once its
        budget is spent.
    """

    state: str

    @property
    def pid(self) -> int | None:
        """Process id of the child."""

    def take(self) -> Link | None:
        """Return the child, which is then the caller's, or ``None``."""


class Children:
    """The children of a device over all its generations, but for the one that serves.

    Parameters
    ----------
    device
        Its name.
    forkserver
        Has the forkserver, while there is one.

    Attributes
    ----------
    spares : list of Spare
        The one that was started last is the last one.
    """

    def __init__(self, device: str, forkserver: ForkSource) -> None:
        self.forkserver = forkserver
        self._device = device
        self.spares: list[Spare] = []
        self._ending: dict[Link, bool] = {}  # and whether the log says that it does not end

    @property
    def standby(self) -> str:
        """The state of the spare child that is promoted next; see :class:`Spare`."""
        return min((spare.state for spare in self.spares), key=_STATES.index, default="none")

    @property
    def is_spare_ready(self) -> bool | None:
        """Whether a spare child is ready; ``None`` while one may get ready."""
        states = {spare.state for spare in self.spares}
        if "ready" in states:
            return True
        return None if states - {"failed"} else False

    @property
    def spare_pid(self) -> int | None:
        """The process id of that child."""
        return next((spare.pid for spare in self._by_readiness()), None)

    def take_spare(self) -> Link | None:
        """Return the readiest spare child, then the caller's; ``None`` if there is none."""
        for spare in self._by_readiness():
            if (link := spare.take()) is not None:
                return link
        return None

    def _by_readiness(self) -> list[Spare]:
        return sorted(self.spares, key=lambda spare: _STATES.index(spare.state))

    def kill(self, link: Link, then: Callable[[], object] | None = None) -> None:
        """Kill a child, and call ``then`` once it has ended. Returns at once."""

        def on_exit(status: ExitStatus) -> None:
            self._ending.pop(link, None)
            if then is not None:
                then()

        link.kill()
        link.channel.close()
        if link.child.exit is None:
            self._ending[link] = False
            link.on_exit = on_exit
        else:
            on_exit(link.child.exit)

    async def wait_gone(self) -> bool:
        """Wait until the children that were killed have ended, and return whether they have.

        Ten seconds after a child was killed it is no longer waited for, and the log says so once
        (``child_not_ended``). What it uses is never given out again before it has ended.
        """
        for link in tuple(self._ending):
            left: HostDiedError | None = None
            try:
                await link.child.aclose(grace=0.0)
            except HostDiedError as error:
                left = error
            if left is not None and not self._ending.get(link, True):
                self._ending[link] = True
                logger.error("child_not_ended", device=self._device, pid=link.pid, error=left)
        return not self._ending
