"""The log of a child, which goes to the log of its parent."""

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
"""Events that the parent logs itself, with more fields."""


class ToldLog(logging.Handler):
    """Sends each event of accel's logger to the parent.

    Parameters
    ----------
    channel
        The connection to the parent.
    loop
        The loop of the channel; events come from any thread.
    level
        The lowest level that is sent.
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
        except Exception:  # a failure to log must not harm what is logged
            self.handleError(record)

    def _send(self, data: bytes) -> None:
        try:
            self._channel.send(Kind.LOG, data)
        except AccelError:  # the parent is gone
            return
