"""The child sends its log to the parent, whose log is the one that a service's operators read."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from accel.errors import AccelError
from accel.remote.messages import Kind

if TYPE_CHECKING:
    import asyncio

    from accel.process.channel import Channel

__all__ = ["ToldLog"]

_LONGEST = 8000

_KNOWN = frozenset(("context_ready", "actor_failed"))
"""The parent sees for itself that a context is there, or has faulted, and says more of it."""


class ToldLog(logging.Handler):
    """Sends each event of accel's logger to the parent, instead of printing it.

    Parameters
    ----------
    channel
        The connection to the parent.
    loop
        Where it is used; events come from any thread.
    level
        The lowest that is sent.
    """

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop, level: int) -> None:
        super().__init__(level)
        self._channel = channel
        self._loop = loop
        logger = logging.getLogger("accel")
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one event."""
        try:
            found = dict(getattr(record, "accel", {}) or {"event": record.getMessage()})
            event = str(found.pop("event"))
            if event in _KNOWN:
                return
            if record.exc_info is not None and record.exc_info[1] is not None:
                found.setdefault("error", repr(record.exc_info[1]))
            pairs = {str(key): value if isinstance(value, (int, float, bool)) else str(value)[:_LONGEST] for key, value in found.items()}
            data = json.dumps([record.levelname.lower(), event, pairs]).encode()
            self._loop.call_soon_threadsafe(self._send, data)
        except Exception:  # a log that fails must not harm what it tells of
            self.handleError(record)

    def _send(self, data: bytes) -> None:
        try:
            self._channel.send(Kind.LOG, data)
        except AccelError:  # the parent is gone
            return
