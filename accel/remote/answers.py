"""The child's answers: submissions of the parent, and the messages that report their ends."""

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
from accel.remote.messages import Failure, Kind, Lent, Timed

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.engine.loans import Loan
    from accel.errors import AccelError
    from accel.process.channel import Channel
    from accel.telemetry.probe import DeviceWork

__all__ = ["Answers", "RemoteBatch", "RemoteGraph", "RemoteLoan", "RemoteOp", "RemoteUnregistration", "reject"]

_FLUSH_COUNT = 16
"""Answers after which the child flushes at once: the parent reads them while the next ops run."""


class _ReportedSubmission:
    """Mixin of a submission whose end is a message to the parent, and not the end of a future.

    Nothing awaits its future in the child; cancelling that only marks the submission as settled. A
    failure is reported when no op of the submission is in a stream any more, because the parent
    then reuses the shared memory of its arrays.
    """

    __slots__ = ()

    number: int
    observed: DeviceWork | None
    outstanding: int
    future: asyncio.Future[Any]
    _answers: Answers
    _failed: AccelError | None
    release_operands: Callable[[], None]

    def report_to(self, answers: Answers, number: int) -> Self:
        """Set where the end is reported, and the parent's number of the request; return itself."""
        # The slots are in the classes below: a mixin beside another base can have none.
        self._answers, self.number, self._failed = answers, number, None  # type: ignore[misc]
        return self

    def succeed(self) -> None:
        """Report the success to the parent, or the failure that :meth:`reject` has left for now.

        Releases the operands in either case, as :meth:`reject` does.
        """
        if not self.future.done():
            self.future.cancel()
            self._answers.report_success(self.number, self.observed)
        elif not self.outstanding:
            self.on_drained()
        self.release_operands()

    def reject(self, error: AccelError) -> None:
        """Report the failure; while ops are in a stream, leave that to :meth:`on_drained`.

        A fault is not left: no op ends after it.
        """
        if not self.future.done():
            self.future.cancel()
            self._failed = error  # type: ignore[misc]  # as above
            if not self.outstanding or error.is_fault:
                self.on_drained()
        self.release_operands()

    def on_drained(self) -> None:
        """Report a failure once no op is in a stream any more."""
        error, self._failed = self._failed, None  # type: ignore[misc]  # as above
        if error is not None:
            self._answers.report_failure(self.number, error, -1 if error.op_index is None else error.op_index, self.observed)


class RemoteOp(_ReportedSubmission, OpSubmission):
    """An op of the parent."""

    __slots__ = ("_answers", "_failed", "number")


class RemoteLoan(RemoteOp):
    """An op of the parent that lends a buffer."""

    __slots__ = ()

    def succeed(self) -> None:
        """Report where the buffer is, and then the success."""
        if not self.future.done():
            self._answers.report_loan(self.number, self.result)
        super().succeed()


class RemoteBatch(_ReportedSubmission, BatchSubmission):
    """A batch of the parent, or the part of it that came in one message.

    Attributes
    ----------
    refused : AccelError or None
        The error of the op after these, which could not be decoded in this process.
    """

    __slots__ = ("_answers", "_failed", "number", "refused")

    refused: AccelError | None

    def succeed(self) -> None:
        """Report the success of all ops, or the error of the one that could not be decoded."""
        refused, self.refused = self.refused, None
        if refused is not None and not self.future.done():
            self.reject(refused)
        else:
            super().succeed()


class RemoteGraph(_ReportedSubmission, GraphSubmission):
    """A graph of the parent, whose capture is reported."""

    __slots__ = ("_answers", "_failed", "number")


class RemoteUnregistration(_ReportedSubmission, Unregistration):
    """The unregistration of a library by the parent."""

    __slots__ = ("_answers", "_failed", "number")


class Answers:
    """Reports to the parent. Ends of one loop iteration leave in one message.

    Parameters
    ----------
    channel
        The connection to the parent.
    memory
        Returns the bytes that are reserved on the device, and those that libraries hold.
    has_faulted, is_idle
        Return whether the context has faulted; whether nothing is in flight.
    on_broken
        Ends the generation, because of an error of accel itself.

    Attributes
    ----------
    loop : AbstractEventLoop
        The child's event loop.
    """

    def __init__(
        self,
        channel: Channel,
        memory: Callable[[], tuple[int, int]],
        has_faulted: Callable[[], bool],
        is_idle: Callable[[], bool],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._channel = channel
        self._memory = memory
        self._has_faulted = has_faulted
        self._is_idle = is_idle
        self._loans: dict[int, Loan] = {}  # by the numbers of the ops that lent
        self._on_broken = on_broken
        self._succeeded: list[int] = []  # numbers for the next DONE message
        self._times: list[bytes] = []  # entries of the next TIMES message
        self._sent_memory = (0, 0)  # the values of the last MEMORY message

    def begin_generation(self) -> None:
        """Send the pending answers, and forget which memory was reported: a generation begins.

        So the parent gets the memory in use with the first answer, although it did not change.
        """
        self.flush()
        self._sent_memory = (0, 0)

    def report_success(self, number: int, work: DeviceWork | None = None) -> None:
        """Report a success: at once if many have ended, or nothing is in flight or received; else soon.

        Soon is in the next loop iteration, in one message with the others of this one.
        """
        ended = self._succeeded
        if work is not None:
            self._add_time(number, work)
        ended.append(number)
        if len(ended) >= _FLUSH_COUNT or (self._is_idle() and not self._channel.has_undelivered):
            self.flush()
        elif len(ended) == 1:
            self.loop.call_soon(self.flush)

    def report_loan(self, number: int, loan: Loan) -> None:
        """Report where a lent buffer is, and keep the loan until :meth:`end_loan`."""
        self._channel.send(Kind.LENT, Lent.pack(number, loan.slab, loan.slab_nbytes, loan.offset), fds=() if loan.fd < 0 else (loan.fd,))
        self._loans[number] = loan

    def end_loan(self, number: int) -> None:
        """End a loan: the parent has no more use for it."""
        self._loans.pop(number).end()

    def _add_time(self, number: int, work: DeviceWork) -> None:
        """Add the device time of a request, if it was measured, to the next TIMES message."""
        if work.device_seconds is not None:
            self._times.append(Timed.pack(number, round(work.device_seconds * 1e9)))

    def report_failure(self, number: int, error: AccelError, index: int, work: DeviceWork | None = None) -> None:
        """Report a failure, after the successes before it.

        Nothing is reported once the context has faulted: the fault ends all requests.
        """
        if work is not None:
            self._add_time(number, work)
        self.flush()
        if self._has_faulted():
            return
        self._channel.send(Kind.FAILED, Failure.pack(number, index), encode_error(error))

    def flush(self) -> None:
        """Send the answers, and the memory in use if that has changed.

        An error here ends the process: the parent would wait for the answers for ever.
        """
        try:
            self._send()
        except Exception as error:
            self._on_broken(error)

    def _send(self) -> None:
        """Send how much memory is in use, if that has changed, and the successes so far.

        The successes are last: they wake callers in the parent, which then see memory and times.
        """
        memory = self._memory()
        if memory != self._sent_memory:
            self._sent_memory = memory
            self._channel.send(Kind.MEMORY, struct.pack("<QQ", *memory))
        if self._times:
            times, self._times = self._times, []
            self._channel.send(Kind.TIMES, b"".join(times))
        if self._succeeded:
            ended, self._succeeded = self._succeeded, []
            self._channel.send(Kind.DONE, struct.pack(f"<{len(ended)}Q", *ended), now=True)


def reject(submission: Any, raised: BaseException, loop: asyncio.AbstractEventLoop) -> None:
    """Fail a submission whose dispatch raised, at the op that the error names, or the first."""
    error = op_error(raised, f"sending {submission.name}", loop)
    submission.reject_from(error.op_index or 0, error.clone(op=error.op or submission.name))
