"""Requests in flight, and what is asked of an op before it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.errors import AccelError, InvalidArgumentError
from accel.ops import Get, Put
from accel.process.protocol import MAX_MESSAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from accel.engine.submission import Submission
    from accel.ops import KernelOp
    from accel.remote.arrays import SharedArray

__all__ = ["PendingRequest", "array_of", "too_long"]


class PendingRequest:
    """A message that the child has not answered: ops of a submission, or one piece of an array.

    Attributes
    ----------
    submission
        The submission.
    first, count
        Which of its ops the child has, and how many end with the answer: none if it is a piece.
    arrays
        Their shared memory, which is released when they have ended.
    landing
        Those of them that are then copied into the user's arrays.
    is_over : bool
        Whether the child has answered, and what came back was copied.
    error : AccelError or None
        The error of a piece.
    """

    __slots__ = ("arrays", "count", "error", "first", "is_over", "landing", "submission")

    def __init__(
        self,
        submission: Submission,
        first: int,
        count: int,
        arrays: Sequence[SharedArray] = (),
        landing: Sequence[SharedArray] = (),
    ) -> None:
        self.submission = submission
        self.first = first
        self.count = count
        self.arrays = arrays
        self.landing = landing
        self.is_over = False
        self.error: AccelError | None = None


def too_long(what: str, nbytes: int, remedy: str) -> InvalidArgumentError:
    """Return the error for what does not fit into a message."""
    return InvalidArgumentError(
        f"{what} is {nbytes} bytes as a message to the device's process, and a message has at most {MAX_MESSAGE}", remedy=remedy
    )


def array_of(op: KernelOp) -> np.ndarray[Any, Any] | None:
    """Return the host array that an op reads or fills, if it has one."""
    return op.source if type(op) is Put else op.destination if isinstance(op, Get) else None
