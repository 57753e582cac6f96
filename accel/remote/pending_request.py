"""Requests in flight, and the error for a message that is too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import AccelError, InvalidArgumentError
from accel.process.protocol import MAX_MESSAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.engine.submission import Submission
    from accel.remote.arrays import SharedArray

__all__ = ["PendingRequest", "message_too_long"]


class PendingRequest:
    """A message that the child has not answered: ops of a submission, or one chunk of an array.

    Attributes
    ----------
    submission
        Whose ops they are.
    first, count
        The index in the submission of the message's first op, and how many ops end with the answer:
        0 for a chunk.
    arrays
        The shared memory of its arrays, which is released when the child has answered.
    to_copy_back
        Those of them that are copied into the user's arrays before that: the results of gets.
    is_done : bool
        Whether the child has answered, and the arrays were copied back.
    error : AccelError or None
        The error of a chunk.
    """

    __slots__ = ("arrays", "count", "error", "first", "is_done", "submission", "to_copy_back")

    def __init__(
        self,
        submission: Submission,
        first: int,
        count: int,
        arrays: Sequence[SharedArray] = (),
        to_copy_back: Sequence[SharedArray] = (),
    ) -> None:
        self.submission = submission
        self.first = first
        self.count = count
        self.arrays = arrays
        self.to_copy_back = to_copy_back
        self.is_done = False
        self.error: AccelError | None = None


def message_too_long(what: str, nbytes: int, remedy: str) -> InvalidArgumentError:
    """Return the error for ops that do not fit into a message."""
    return InvalidArgumentError(
        f"{what} is {nbytes} bytes as a message to the device's process, and a message has at most {MAX_MESSAGE}", remedy=remedy
    )
