"""The log of a child: its events are sent to the parent, which logs them."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from accel.errors import AccelError
from accel.remote.messages import Kind

if TYPE_CHECKING:
    import asyncio

    from accel.process.channel import Channel

__all__ = ["ForwardingHandler"]

_MAX_TEXT = 8000
"""Characters of a value in an event; a longer one is cut."""

_LOGGED_BY_PARENT = frozenset(("context_ready", "actor_failed"))
"""Events that are not sent: the parent logs its own, with more fields."""


class ForwardingHandler(logging.Handler):
    """Sends each event of accel's logger to the parent.

    Making one sets the level of accel's logger, and keeps its events from the root's handlers.

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
        """Send one event to the parent, unless that logs its own. Thread-safe; never raises."""
        try:
            fields = dict(getattr(record, "accel", {}) or {"event": record.getMessage()})
            event = str(fields.pop("event"))
            if event in _LOGGED_BY_PARENT:
                return
            if record.exc_info is not None and record.exc_info[1] is not None:
                fields.setdefault("error", repr(record.exc_info[1]))
            pairs = {str(key): value if isinstance(value, (int, float, bool)) else str(value)[:_MAX_TEXT] for key, value in fields.items()}
            data = json.dumps([record.levelname.lower(), event, pairs]).encode()
            self._loop.call_soon_threadsafe(self._send, data)
        except Exception:  # a failure to log must not harm what is logged
            self.handleError(record)

    def _send(self, data: bytes) -> None:
        """Send an encoded event. On the loop's thread."""
        try:
            self._channel.send(Kind.LOG, data)
        except AccelError:  # the parent is gone
            return
