"""The checksum of a durable buffer, and whether it is of what the buffer holds: which ops may have changed that since it was taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from accel.ops import Plan

__all__ = ["KnownChecksum", "Writer"]


class Writer(Protocol):
    """A submission, as far as it writes durable buffers: see :class:`accel.engine.submission.Submission`."""

    future: asyncio.Future[Any]

    @property
    def plans(self) -> Sequence[Plan]:
        """What the ops do to memory."""

    @property
    def may_have_run(self) -> bool:
        """Whether some of it is, or was, on the device."""


class KnownChecksum:
    """What is known of one buffer's checksum. Used on the loop's thread only.

    Ops that write a buffer reach the device in the order in which they are sent. So a checksum is of what every op left that was sent before the op that
    makes it, and good until one that was sent after that reaches the device: not if that is dropped before.
    """

    __slots__ = ("_changed", "_open", "_sent", "_taken", "_value")

    def __init__(self) -> None:
        self._value: int | None = None
        self._taken = 0  # how many writers had been sent when it was taken
        self._changed = 0  # the last writer that may have reached the device, of those that have ended
        self._sent = 0
        self._open: dict[Writer, int] = {}  # writers that have not ended

    @property
    def sent(self) -> int:
        """How many writers were sent."""
        return self._sent

    @property
    def value(self) -> int | None:
        """The checksum of what the buffer holds; ``None`` where that is not known."""
        if self._changed > self._taken or any(number > self._taken and each.may_have_run for each, number in self._open.items()):
            return None
        return self._value

    def write(self, submission: Writer) -> None:
        """Take note of a writer that is sent, or sent again in another generation."""
        if submission not in self._open:
            submission.future.add_done_callback(lambda _: self._ended(submission))
        self._sent += 1
        self._open[submission] = self._sent

    def _ended(self, submission: Writer) -> None:
        number = self._open.pop(submission)
        if submission.may_have_run:
            self._changed = max(self._changed, number)

    def take(self, value: int, sent: int) -> None:
        """Keep a checksum requested after ``sent`` writers, unless a newer one is known."""
        if self._value is None or sent >= self._taken:
            self._value, self._taken = value, sent

    def take_now(self, value: int) -> None:
        """Keep a checksum of what the buffer holds before anything is launched in a generation that begins."""
        self._value, self._taken = value, self._sent
        for each in self._open:
            if not each.may_have_run:
                self._sent = self._open[each] = self._sent + 1

    def forget(self) -> None:
        """Take note that the buffer's contents are not sound."""
        self._value = None
