"""Ops as they are sent: what cannot go to another process as it is has something that stands for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.device.graph import Replay
from accel.device.remote.messages import WireGet, WirePut, WireReplay
from accel.ops import Get, Launch, Put

if TYPE_CHECKING:
    import numpy as np

    from accel.device.remote.arrays import Outgoing
    from accel.device.remote.compiling import SentKernels
    from accel.device.submission import Submission
    from accel.ops import KernelOp

__all__ = ["Sent", "array_of", "wired", "with_array"]


class Sent:
    """A submission that the child has.

    Parameters
    ----------
    submission, count
        What, and of how many ops.
    arrays
        Shared memory that it uses.
    landing
        Those of them that it fills.
    """

    __slots__ = ("arrays", "count", "landing", "submission")

    def __init__(self, submission: Submission, count: int, arrays: list[Outgoing], landing: list[Outgoing]) -> None:
        self.submission = submission
        self.count = count
        self.arrays = arrays
        self.landing = landing

    def land(self) -> None:
        """Copy what has come where it is wanted. May block for as long as that takes."""
        for each in self.landing:
            each.land()


def array_of(op: KernelOp) -> np.ndarray[Any, Any] | None:
    """Return the host array that an op reads or fills."""
    return op.source if type(op) is Put else op.destination if type(op) is Get else None


def with_array(op: Any, outgoing: Outgoing) -> KernelOp:
    """Return a put or get as it is sent."""
    return WirePut(outgoing.place, op.out) if type(op) is Put else WireGet(op.source, outgoing.place)


def wired(op: KernelOp, kernels: SentKernels) -> KernelOp:
    """Return any other op as it is sent."""
    if type(op) is Launch:
        return kernels.wired(op)
    return WireReplay(op.program.handle.buffer) if type(op) is Replay else op
