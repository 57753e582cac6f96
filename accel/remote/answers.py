"""The parent's submissions in the child, and the messages that report their ends."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, Self

from accel.engine.launches import OpSubmission
from accel.engine.op_error import op_error
from accel.engine.program import GraphSubmission
from accel.engine.registration import Unregistration
from accel.engine.submission import BatchSubmission
from accel.remote.error_codec import encode_error
from accel.remote.messages import Failure, Kind, Timed

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.errors import AccelError
    from accel.process.channel import Channel
    from accel.telemetry.probe import DeviceWork

__all__ = ["Answers", "RemoteBatch", "RemoteGraph", "RemoteOp", "RemoteUnregistration", "reject"]

_SEVERAL = 16
"""Answers after which the child flushes: the parent reads them while the next ops run."""


class _Answered:
    """A submission whose end is reported to the parent by a message.

    A failure is reported when no op of the submission is in a stream any more: the parent then
    reuses the shared memory of its arrays.
    """

    __slots__ = ()

    number: int
    observed: DeviceWork | None
    outstanding: int
    future: asyncio.Future[Any]
    _answer: Answers
    _failed: AccelError | None
    release_operands: Callable[[], None]

    def answered_by(self, answer: Answers, number: int) -> Self:
        """Return itself, whose end is reported under the parent's number."""
        # Slots of the classes below.
        self._answer, self.number, self._failed = answer, number, None  # type: ignore[misc]
        return self

    def succeed(self) -> None:
        """Report the success to the parent."""
        if not self.future.done():
            self.future.cancel()
            self._answer.done(self.number, self.observed)
        elif not self.outstanding:
            self.over()
        self.release_operands()

    def reject(self, error: AccelError) -> None:
        """Report the failure, or leave that to :meth:`over` while ops are in a stream."""
        if not self.future.done():
            self.future.cancel()
            self._failed = error  # type: ignore[misc]  # as above
            if not self.outstanding or error.is_fault:
                self.over()
        self.release_operands()

    def over(self) -> None:
        """Report a failure once no op is in a stream any more."""
        error, self._failed = self._failed, None  # type: ignore[misc]  # as above
        if error is not None:
            self._answer.failed(self.number, error, -1 if error.op_index is None else error.op_index, self.observed)


class RemoteOp(_Answered, OpSubmission):
    """An op of the parent's."""

    __slots__ = ("_answer", "_failed", "number")


class RemoteBatch(_Answered, BatchSubmission):
    """A batch of the parent's.

    Attributes
    ----------
    refused : AccelError or None
        The error of the op behind these, which could not be made in this process.
    """

    __slots__ = ("_answer", "_failed", "number", "refused")

    refused: AccelError | None

    def succeed(self) -> None:
        """Report the success of all ops, or the error of the op that could not be made."""
        refused, self.refused = self.refused, None
        if refused is not None and not self.future.done():
            self.reject(refused)
        else:
            super().succeed()


class RemoteGraph(_Answered, GraphSubmission):
    """A capture of the parent's."""

    __slots__ = ("_answer", "_failed", "number")


class RemoteUnregistration(_Answered, Unregistration):
    """The end of a registered library of the parent's."""

    __slots__ = ("_answer", "_failed", "number")


class Answers:
    """Reports to the parent. Ends of one loop iteration leave in one message.

    Parameters
    ----------
    channel
        The connection to the parent.
    memory
        Returns the bytes that are reserved on the device, and those that libraries hold.
    is_over, is_idle
        Whether the context has faulted; whether nothing is in flight.
    on_broken
        Called with an error of accel itself.

    Attributes
    ----------
    loop : AbstractEventLoop
        Of the child.
    """

    def __init__(
        self,
        channel: Channel,
        memory: Callable[[], tuple[int, int]],
        is_over: Callable[[], bool],
        is_idle: Callable[[], bool],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._channel = channel
        self._memory = memory
        self._is_over = is_over
        self._is_idle = is_idle
        self._on_broken = on_broken
        self._ended: list[int] = []
        self._times: list[bytes] = []
        self._told = (0, 0)

    def begin(self) -> None:
        """Send the pending answers before a generation begins, and report memory anew."""
        self.flush()
        self._told = (0, 0)

    def done(self, number: int, work: DeviceWork | None = None) -> None:
        """Report a success: at once if nothing is in flight or several have ended, else soon."""
        ended = self._ended
        if work is not None:
            self._note_time(number, work)
        ended.append(number)
        if len(ended) >= _SEVERAL or (self._is_idle() and not self._channel.has_more):
            self.flush()
        elif len(ended) == 1:
            self.loop.call_soon(self.flush)

    def _note_time(self, number: int, work: DeviceWork) -> None:
        if work.device_seconds is not None:
            self._times.append(Timed.pack(number, round(work.device_seconds * 1e9)))

    def failed(self, number: int, error: AccelError, index: int, work: DeviceWork | None = None) -> None:
        """Report a failure, after the successes before it, unless the context has faulted."""
        if work is not None:
            self._note_time(number, work)
        self.flush()
        if self._is_over():
            return
        self._channel.send(Kind.FAILED, Failure.pack(number, index), encode_error(error))

    def flush(self) -> None:
        """Send the answers. An error here ends the generation: the parent would wait for them."""
        try:
            self._tell()
        except Exception as error:
            self._on_broken(error)

    def _tell(self) -> None:
        memory = self._memory()
        if memory != self._told:
            self._told = memory
            self._channel.send(Kind.MEMORY, struct.pack("<QQ", *memory))
        if self._times:
            times, self._times = self._times, []
            self._channel.send(Kind.TIMES, b"".join(times))
        if self._ended:
            ended, self._ended = self._ended, []
            self._channel.send(Kind.DONE, struct.pack(f"<{len(ended)}Q", *ended), now=True)


def reject(submission: Any, raised: BaseException, loop: asyncio.AbstractEventLoop) -> None:
    """Fail a submission that could not be dispatched."""
    error = op_error(raised, f"sending {submission.name}", loop)
    submission.reject_from(error.op_index or 0, error.clone(op=error.op or submission.name))
