"""Requests in flight, and what is checked before one is sent."""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any

from accel.errors import AccelError, InvalidArgumentError
from accel.ops import Get, Put
from accel.process.protocol import MAX_MESSAGE

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    import numpy as np

    from accel.engine.submission import BatchSubmission, Submission
    from accel.ops import KernelOp, Plan
    from accel.remote.arrays import SharedArray

__all__ = ["PendingRequest", "admit", "array_of", "fitting", "land", "too_long"]


_HEAD = 64 << 10
"""Bytes of a message that are kept for what comes with the ops: numbers, and what a fault plan does to some of them."""


class PendingRequest:
    """A message that the child has not answered: some ops of a submission, or one part of a transfer.

    Attributes
    ----------
    submission
        The submission.
    first, count
        Which of its ops the child has.
    arrays
        Their shared memory, which is given back when they have ended.
    landing
        Those of them that are then copied into the user's arrays.
    answer
        Of a part of a transfer: its result is the error, or ``None``.
    """

    __slots__ = ("answer", "arrays", "count", "first", "landing", "submission")

    def __init__(
        self,
        submission: Submission,
        first: int,
        count: int,
        arrays: Sequence[SharedArray],
        landing: Sequence[SharedArray] = (),
        answer: asyncio.Future[AccelError | None] | None = None,
    ) -> None:
        self.submission = submission
        self.first = first
        self.count = count
        self.arrays = arrays
        self.landing = landing
        self.answer = answer

    @property
    def is_last(self) -> bool:
        """Whether the submission ends with it."""
        return self.first + self.count == len(self.submission.kinds)


def admit(
    submission: BatchSubmission, start: int, end: int, check: Callable[[Plan], None], live: dict[int, int]
) -> tuple[int, AccelError | None]:
    """Check the operands of ops of a batch that are about to be sent, and note in ``live`` what they make. In one go: refs may be dropped whenever others run.

    Returns where those end that are as they should be, and what is wrong with the next.
    """
    for index in range(start, end):
        try:
            check(submission.plans[index])
        except AccelError as error:
            error.op_index = index
            return index, error
        live.update((ref.buffer, ref.nbytes) for ref in submission.outputs[index])
    return end, None


def fitting(submission: BatchSubmission, start: int, ids: Sequence[Sequence[int]], written: Sequence[Any]) -> int:
    """Return how many of the ops from ``start`` on, as they are written, go into one message.

    Raises
    ------
    InvalidArgumentError
        If the first alone does not.
    """
    room = MAX_MESSAGE - _HEAD
    for count, (made, op) in enumerate(zip(ids, written, strict=True)):
        nbytes = len(marshal.dumps([list(made), op]))
        room -= nbytes
        if room < 0:
            if count:
                return count
            error = too_long(
                f"{submission.kinds[start]}, op {start} of a batch,",
                nbytes,
                "Put what it holds on the device as an array, and give it the ref.",
            )
            error.op_index = start
            raise error
    return len(written)


def too_long(what: str, nbytes: int, remedy: str) -> InvalidArgumentError:
    """Return the error that says that something does not go into a message."""
    return InvalidArgumentError(
        f"{what} is {nbytes} bytes as a message to the device's process, and a message has at most {MAX_MESSAGE}", remedy=remedy
    )


def array_of(op: KernelOp) -> np.ndarray[Any, Any] | None:
    """Return the host array that an op reads or fills, if it has one."""
    return op.source if type(op) is Put else op.destination if isinstance(op, Get) else None


def land(sent: PendingRequest) -> None:
    """Copy what has come back out of shared memory. May block for as long as that takes."""
    for each in sent.landing:
        each.land()
