"""The children of one device that hold no context: the spare child, and children that are ending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel._log import get_logger
from accel.errors import HostDiedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.errors import AccelError
    from accel.process.exit_status import ExitStatus
    from accel.process.forks import ForkSource
    from accel.remote.link import Link

__all__ = ["Children"]

logger = get_logger()


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
    standby : str
        What there is of a spare child: ``"none"``, ``"starting"``, ``"ready"``, or ``"failed"``: its budget is spent.
    spare_pid : int or None
        Its process id.
    take_spare : callable
        Returns the spare child, which is then the caller's, or ``None``.
    """

    def __init__(self, device: str, forkserver: ForkSource) -> None:
        self.forkserver = forkserver
        self._device = device
        self.standby = "none"
        self.spare_pid: int | None = None
        self.take_spare: Callable[[], Link | None] = lambda: None
        self._ending: dict[DyingChild, None] = {}

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
