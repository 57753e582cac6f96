"""The children of one device that hold no context: spare children, and children that are ending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from accel._log import get_logger
from accel.errors import HostDiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.errors import AccelError
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
        What there is of the child: ``"none"``, ``"starting"``, ``"ready"``, or ``"failed"``: its budget is spent.
    """

    state: str

    @property
    def pid(self) -> int | None:
        """Process id of the child."""

    def take(self) -> Link | None:
        """Return the child, which is then the caller's, or ``None``."""


class Children:
    """What outlives a generation.

    Parameters
    ----------
    device
        Its name.
    forkserver
        What children are forked from, where there is such a process.

    Attributes
    ----------
    spares : list of Spare
        The one that was started last is the last one.
    """

    def __init__(self, device: str, forkserver: ForkSource) -> None:
        self.forkserver = forkserver
        self._device = device
        self.spares: list[Spare] = []
        self._ending: dict[DyingChild, None] = {}

    @property
    def standby(self) -> str:
        """What there is of the spare child that is promoted next; see :class:`Spare`."""
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
        """Return the spare child that is the closest to being ready, which is then the caller's; ``None`` if there is none."""
        for spare in self._by_readiness():
            if (link := spare.take()) is not None:
                return link
        return None

    def _by_readiness(self) -> list[Spare]:
        return sorted(self.spares, key=lambda spare: _STATES.index(spare.state))

    def kill(self, link: Link, then: Callable[[], object] | None = None) -> None:
        """Kill a child, and call ``then`` once nothing of it is left. Returns at once."""
        link.kill()
        link.channel.close()
        link.listener = dying = DyingChild(self._ending, link, then)
        if link.child.exit is None:
            self._ending[dying] = None
        else:
            dying.exited(link.child.exit)

    async def gone(self) -> bool:
        """Wait until nothing is left of the children that were killed, and return whether it is so.

        Ten seconds after a child was killed it is not waited for any more: the log says so, once (``child_not_ended``). What it uses is never given out
        again before it has ended.
        """
        for dying in tuple(self._ending):
            left: HostDiedError | None = None
            try:
                await dying.link.child.aclose(grace=0.0)
            except HostDiedError as error:
                left = error
            if left is not None and not dying.is_given_up:
                dying.is_given_up = True
                logger.error("child_not_ended", device=self._device, pid=dying.link.pid, error=left)
        return not self._ending


class DyingChild:
    """Listens to a child that was killed, until it has ended."""

    def __init__(self, ending: dict[DyingChild, None], link: Link, then: Callable[[], object] | None) -> None:
        self.link = link
        self.is_given_up = False
        self._ending = ending
        self._then = then

    def received(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Ignore what the child has sent before it was killed."""

    def lost(self, error: AccelError | None) -> None:
        """Ignore that the connection is lost."""

    def expired(self, why: str) -> None:
        """Never called: the watchdog has stopped."""

    def exited(self, status: ExitStatus) -> None:
        """See that nothing is left."""
        self._ending.pop(self, None)
        then, self._then = self._then, None
        if then is not None:
            then()
