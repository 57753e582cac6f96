"""The counters of one device's load: waiting callers, submissions in hand, retired ops."""

from __future__ import annotations

import asyncio

__all__ = ["Workload"]


class Workload:
    """Counters of one device over all its generations. Used on the loop's thread only.

    Attributes
    ----------
    pending : int
        Callers that await a submission.
    in_hand : int
        Submissions that have left the queue and wait for a context, or for room on the device; and
        callers that wait for a context before they send.
    retired : int
        Ops that have ended.
    device_seconds : float
        Device time that was measured.
    changed : Future or None
        What :meth:`wait_changed` waits for; ``None`` while nothing waits.
    """

    __slots__ = ("changed", "device_seconds", "in_hand", "pending", "retired")

    def __init__(self) -> None:
        self.pending = self.in_hand = self.retired = 0
        self.device_seconds = 0.0
        self.changed: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake :meth:`wait_changed`, because something has ended."""
        changed, self.changed = self.changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def wait_changed(self) -> None:
        """Wait until an op or a caller has ended, or the device's state has changed.

        Any number of tasks may wait; cancelling one does not disturb the others.
        """
        if self.changed is None:
            self.changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self.changed)
