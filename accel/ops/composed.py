"""Ops that other ops compute, on every backend, with what these have there.

A backend may have a kernel of its own for one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from accel.dtype import DType
from accel.ops.base import FamilyOp, KernelOp, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.ref import AccelRef

__all__ = ["ComposedOp", "ComposedPlan", "Run"]


Run: TypeAlias = "Callable[[KernelOp[AccelRef]], AccelRef]"
"""Adds an op to those that are sent together, and returns the ref that it makes or writes."""


class ComposedPlan(Plan):
    """The plan of a :class:`ComposedOp`: operands and results as in any plan. The engine asks the op for the ops that compute it.

    With a ``capability`` that the device offers for ``dtype``, it is the plan of an ordinary op, which the backend's kernel computes.
    """

    __slots__ = ()


class ComposedOp(FamilyOp):
    """An op that ordinary ops compute: they are sent as one batch, or recorded in its place.

    A backend may have a kernel that takes their place.

    Its plan is a :class:`ComposedPlan`. What is in between is buffers of the device, which are freed when the ops have ended. An awaited op raises what one of
    its ops raises; in a batch or graph, ``.op_index`` is its own place.
    """

    __slots__ = ()

    @abstractmethod
    def compose(self, run: Run) -> AccelRef:
        """Run the ops, and return the ref of the result.

        Parameters
        ----------
        run
            Takes each op.
        """

    def takes_strided(self, ref: AccelRef) -> bool:
        return True  # its ops say which of them do

    def composed(
        self, reads: tuple[AccelRef, ...], writes: tuple[AccelRef, ...], creates: tuple[Any, ...], capability: str = "", dtype: DType = DType.UINT8
    ) -> ComposedPlan:  # fmt: skip
        """Return the plan of these operands and results.

        Parameters
        ----------
        capability, dtype
            What a backend offers that has a kernel for the op; see :class:`accel.ops.Plan`.
        """
        return ComposedPlan(reads, writes, creates, capability, dtype)
