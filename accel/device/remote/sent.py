"""What the parent keeps of a submission that its child has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.device.remote.arrays import close_all
from accel.device.remote.messages import WireGet, WirePut
from accel.errors import AccelError, UnsupportedError
from accel.ops import Get, Put

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from accel.device.remote.arrays import Outgoing, SharedArrays
    from accel.device.submission import BatchSubmission, Submission
    from accel.ops import KernelOp, Plan

__all__ = ["Sent", "admit", "array_of", "land", "place", "take_back", "with_array"]


class Sent:
    """A submission that the child has."""

    __slots__ = ("arrays", "count", "landing", "submission")

    def __init__(self, submission: Submission, count: int, arrays: Sequence[Outgoing], landing: Sequence[Outgoing]) -> None:
        self.submission = submission
        self.count = count
        self.arrays = arrays
        self.landing = landing


def admit(submission: BatchSubmission, check: Callable[[Plan], None], live: dict[int, int]) -> tuple[int, AccelError | None]:
    """Check the operands of a batch that is about to be sent, and note in ``live`` what it makes. In one go: refs may be dropped whenever others run.

    Returns how many ops, from the first, are as they should be, and what is wrong with the next.
    """
    for index, (plan, made) in enumerate(zip(submission.plans, submission.outputs, strict=True)):
        try:
            check(plan)
        except AccelError as error:
            error.op_index = index
            return index, error
        live.update((ref.buffer, ref.nbytes) for ref in made)
    return len(submission.outputs), None


def array_of(op: KernelOp) -> np.ndarray[Any, Any] | None:
    """Return the host array that an op reads or fills, if it has one."""
    return op.source if type(op) is Put else op.destination if type(op) is Get else None


def place(arrays: SharedArrays, op: KernelOp, index: int | None) -> Outgoing:
    """Make a place in shared memory for the array of an op (of a batch: with its ``index``), and fill it. May block.

    Raises
    ------
    UnsupportedError
        If there is no room.
    """
    array = array_of(op)
    assert array is not None, "other ops need not wait"
    outgoing = arrays.take(array) or arrays.make(array)
    if outgoing is None:
        remedy = "Open the device with a larger pinned_limit."
        raise UnsupportedError("there is no room in shared host memory", remedy=remedy, op=op.kind, op_index=index)
    if type(op) is Put:
        outgoing.fill()
    return outgoing


def with_array(op: Any, outgoing: Outgoing) -> KernelOp:
    """Return the op with a place in shared memory instead of its array."""
    place = outgoing.place.wired
    return WirePut(place, op.out, op.durable) if type(op) is Put else WireGet(op.source, place)


def land(sent: Sent) -> None:
    """Copy what has come back out of shared memory. May block for as long as that takes."""
    for each in sent.landing:
        each.land()


def take_back(submission: Submission, arrays: Sequence[Outgoing], *, is_final: bool) -> None:
    """Undo what was made ready for a batch, unless the child has it.

    Parameters
    ----------
    submission, arrays
        The batch, and what it brings.
    is_final
        Whether no other context gets it: else that one says what has become of its operands.
    """
    if not submission.launched:
        close_all(arrays)
        if is_final:
            submission.void(0)
