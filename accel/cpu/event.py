"""Events of the CPU backend: a stream and how far it must have come, so that asking compares two integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel.cpu.context import Context
    from accel.cpu.stream import CpuStream

__all__ = ["CpuEvent"]


class CpuEvent:
    """A mark in a :class:`CpuStream`; see :class:`~accel.backend.AccelEvent`. Made by ``CpuDevice.create_event``."""

    __slots__ = ("_stream", "_ticket", "context")

    def __init__(self, context: Context) -> None:
        self.context = context
        self._stream: CpuStream | None = None
        self._ticket = 0

    def query(self) -> bool:
        """Return whether the stream has passed the mark. Never blocks; an event that was never recorded has passed.

        Raises
        ------
        AccelError
            The context's fault, if the mark was not passed before it; :class:`~accel.ClosedError` if the stream was abandoned.
        """
        stream = self._stream
        if stream is None or stream.completed >= self._ticket:
            return True
        if stream.fault is None:
            return False
        return stream.passed(self._ticket)

    def synchronize(self) -> None:
        """Block this thread until the stream has passed the mark, releasing the GIL; raises as :meth:`query` does."""
        if self._stream is not None:
            self._stream.wait_passed(self._ticket)

    def close(self) -> None:
        """Forget the mark: a closed event has passed. Idempotent."""
        self._stream = None

    def mark(self, stream: CpuStream, ticket: int) -> None:
        """Take the position ``ticket`` of ``stream``; called by :meth:`CpuStream.record`."""
        self._stream, self._ticket = stream, ticket

    def position(self) -> tuple[CpuStream | None, int]:
        """Return the stream and ticket recorded last."""
        return self._stream, self._ticket
