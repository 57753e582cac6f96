"""Ops on managed memory, which moves between device and host."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from accel.errors import InvalidArgumentError
from accel.ops.base import KernelOp, Plan, op, operand
from accel.ref import AccelRef
from accel.values import check_choice

__all__ = ["Advise", "Prefetch"]

Advice: TypeAlias = Literal["read_mostly", "preferred_device", "preferred_host", "accessed_by_device", "accessed_by_host"]
ADVICES: tuple[Advice, ...] = get_args(Advice)


def _managed(ref: object) -> AccelRef:
    found = operand("ref", ref)
    if found.is_strided:
        raise InvalidArgumentError(f"{found!r} is no run of bytes", remedy="Give its base, or a contiguous part.")
    if not found.is_managed:
        raise InvalidArgumentError(f"{found!r} is not managed memory", remedy="Make the buffer with device.managed(shape, dtype).")
    return found


@op("memory")
class Prefetch(KernelOp):
    """Move a managed buffer, or a view of one, before it is used there.

    Parameters
    ----------
    ref
        What is moved, by pages.
    to
        ``"device"`` or ``"host"``.
    """

    ref: AccelRef
    to: Literal["device", "host"] = "device"

    def plan(self) -> Plan:
        ref = _managed(self.ref)
        check_choice("to", self.to, "device", "host")
        return Plan((ref,), (), ())


@op("memory")
class Advise(KernelOp):
    """Tell the driver how a managed buffer, or a view of one, is going to be used.

    Parameters
    ----------
    ref
        What the advice is about, by pages.
    advice
        One of :data:`ADVICES`.
    undo
        Take the advice back.
    """

    ref: AccelRef
    advice: Advice
    undo: bool = False

    def plan(self) -> Plan:
        ref = _managed(self.ref)
        check_choice("advice", self.advice, *ADVICES)
        return Plan((ref,), (), ())
