"""The caller of the only op that a child has reads the connection itself, turn by turn, while the answer is near: it need not be woken then."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel.engine.in_flight import ContextBase
    from accel.engine.submission import Submission
    from accel.process.channel import Channel
    from accel.remote.attention import Pacing

__all__ = ["Looker"]

_LOOKS = 4
"""So often in a row: a look takes a microsecond, a turn of the loop three and more."""


class Looker:
    """Looks for the answers to ops of one child; see :meth:`accel.completion.Watcher.attend_once`, which does so for marks.

    Parameters
    ----------
    context
        Whose ops.
    channel
        Where answers come from. The event loop reads it anyway.
    pacing
        Knows whether one is near.
    """

    __slots__ = ("_channel", "_context", "_pacing")

    def __init__(self, context: ContextBase, channel: Channel, pacing: Pacing) -> None:
        self._context = context
        self._channel = channel
        self._pacing = pacing

    def attend(self, submission: Submission) -> None:
        """Leave it to the loop, which turns."""
        self._pacing.stay()

    def attend_once(self, submission: Submission) -> bool:
        """Read what has come; return ``False`` if the caller is to do so again after another turn of the loop."""
        future = submission.future
        if future.done():
            return True
        for _ in range(_LOOKS):
            if self._channel.look() or self._context.in_flight != 1:
                break
        if future.done():
            return True
        if self._context.in_flight == 1 and self._pacing.is_awake:
            return False
        self._pacing.stay()
        return True
