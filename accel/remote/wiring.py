"""Ops as they are sent: what cannot go to another process as it is has something that stands for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.device.graph import Replay
from accel.ops import Launch
from accel.remote.messages import WireReplay

if TYPE_CHECKING:
    from accel.ops import KernelOp
    from accel.remote.compiling import SentKernels

__all__ = ["to_wire"]


def to_wire(op: KernelOp, kernels: SentKernels) -> KernelOp:
    """Return an op that has no array as it is sent."""
    if type(op) is Launch:
        return kernels.to_wire(op)
    return WireReplay(op.program.handle.buffer) if type(op) is Replay else op
