"""Ops as they are sent: what cannot go to another process as it is has something that stands for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.device.graph import Replay
from accel.device.remote.messages import WireReplay
from accel.ops import Launch

if TYPE_CHECKING:
    from accel.device.remote.compiling import SentKernels
    from accel.ops import KernelOp

__all__ = ["wired"]


def wired(op: KernelOp, kernels: SentKernels) -> KernelOp:
    """Return an op that has no array as it is sent."""
    if type(op) is Launch:
        return kernels.wired(op)
    return WireReplay(op.program.handle.buffer) if type(op) is Replay else op
