"""Ops that are sent as several: composed ops, and ops that run on copies of strided views."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from accel.engine.kernels import LIBRARIES
from accel.engine.submission import result_of
from accel.errors import InvalidArgumentError
from accel.ops import Copy, Empty, Part, Plan
from accel.ops.composed import ComposedPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.engine.core import DeviceCore
    from accel.ops import KernelOp
    from accel.ops.composed import ComposedOp
    from accel.ref import AccelRef
    from accel.storage.refs import Recording

__all__ = ["OpList", "PlanOnCopies", "plan_for_strided"]

_NO_FIELD = "Give each ref a field of the op, or a place in a tuple that is one; or copy it first: await device.arrays.part(view, ...)."


class PlanOnCopies(Plan):
    """The plan of an op that runs on copies of some of its operands.

    Attributes
    ----------
    copied : tuple of AccelRef
        Strided views among ``reads`` and ``writes`` that the op's kernel does not take.
    """

    copied: tuple[AccelRef, ...]


def plan_for_strided(op: KernelOp, plan: Plan) -> Plan:
    """Return the plan of an op with strided operands; ``plan`` itself if its kernel takes them all.

    Else it is a :class:`PlanOnCopies`.

    Raises
    ------
    InvalidArgumentError
        If the op copies to the host, or lends the buffer: the device makes a copy of it before.
    """
    strided = {id(ref): ref for ref in plan.reads + plan.writes if ref.is_strided and not op.takes_strided(ref)}
    if not strided:
        return plan
    if op.library == "memory" and not plan.writes and not plan.creates:
        raise InvalidArgumentError(
            f"{op.kind} takes no strided view: its elements are not one run", remedy="Copy it first: await device.arrays.part(view, ...)."
        )
    with_copies = PlanOnCopies(*plan)
    with_copies.copied = tuple(strided.values())
    return with_copies


class OpList:
    """Ops in the order in which they are sent, with the refs of their results.

    A *given* op, one that the caller adds, may be sent as several: with copies of its operands, or
    as the ops that compute it.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    check
        Returns the plan of an op; see :meth:`accel.engine.sender.Sender.check`.
    generation
        Generation of the refs of results.

    Attributes
    ----------
    generation : int
        Generation of the refs that are made from now on.
    ops, plans, outputs : list
        See :class:`~accel.engine.submission.BatchSubmission`.
    """

    def __init__(self, core: DeviceCore, check: Callable[[KernelOp, Recording | None], Plan], generation: int) -> None:
        self._core = core
        self._check = check
        self.generation = generation
        self._given: list[int] = []  # for each op, the index of the given op that it is a part of
        self._count = 0  # of the given ops
        self.ops: list[KernelOp] = []
        self.plans: list[Plan] = []
        self.outputs: list[tuple[AccelRef, ...]] = []

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget the ops and their results. No more are added; :meth:`given_index` goes on."""
        self.ops, self.plans, self.outputs, self._count = [], [], [], 0

    def given_index(self, index: int | None) -> int | None:
        """Return the index of the given op that op ``index`` is a part of.

        ``None`` where an error does not say which op failed.
        """
        return None if index is None or not 0 <= index < len(self._given) else self._given[index]

    def add(self, op: KernelOp[Any], plan: Plan, recording: Recording | None = None, returned: tuple[AccelRef, ...] | None = None) -> Any:
        """Add a checked op, and return its result: the refs of what it makes or writes.

        Parameters
        ----------
        op, plan
            The op, and its plan as checked.
        recording
            The batch or graph that records it; ``None`` for an awaited op.
        returned
            The refs to return for what it writes, where it writes copies of them; ``None`` for the
            refs that it writes.
        """
        if type(plan) is PlanOnCopies or type(plan) is ComposedPlan:
            return self._add_as_several(op, plan, recording)
        core = self._core
        result_refs = core.refs.make(plan.creates, self.generation) if plan.creates else ()
        # Of an op for which that fails, nothing is added.
        result = result_of(op, (plan.writes if returned is None else returned) + result_refs, core.loop)
        if recording is not None:
            for ref in result_refs:
                core.refs.recording[ref.buffer] = recording
        self.ops.append(op)
        self.plans.append(plan)
        self.outputs.append(result_refs)
        self._given.append(self._count)
        self._count += 1
        return result

    def _add_as_several(self, op: KernelOp[Any], plan: Plan, recording: Recording | None) -> Any:
        """Add the ops that a given one is sent as, and return its result; all have its index.

        If one of them is refused, none is added.
        """
        count, start = self._count, len(self.ops)
        try:
            if isinstance(plan, ComposedPlan):
                result = cast("ComposedOp", op).compose(lambda part: self.add(part, self._check(part, recording), recording))
            elif isinstance(op, Copy):
                part = Part(op.source, ..., out=op.destination)
                result = self.add(part, self._check(part, recording), recording)
            else:
                result = self._add_on_copies(op, cast("PlanOnCopies", plan), recording)
        except BaseException:
            self._remove_from(start)
            self._count = count
            raise
        # add() has counted each part as a given op.
        self._given[start:] = [count] * (len(self.ops) - start)
        self._count = count + 1
        return result

    def _remove_from(self, start: int) -> None:
        """Remove the ops from index ``start`` on, with their results."""
        for refs in self.outputs[start:]:
            for ref in refs:
                self._core.refs.recording.pop(ref.buffer, None)
                ref.is_freed = True
        for recorded in (self.ops, self.plans, self.outputs, self._given):
            del recorded[start:]

    def _add_on_copies(self, op: KernelOp[Any], plan: PlanOnCopies, recording: Recording | None) -> Any:
        """Add copies of strided operands, the op on these copies, and the copies back.

        Return the result of the op, with the refs that the caller gave.
        """

        def add_copy(copy: KernelOp[AccelRef]) -> AccelRef:
            """Add an op that makes or writes one ref, and return that."""
            written: AccelRef = self.add(copy, self._check(copy, recording), recording)
            return written

        copies: dict[int, AccelRef] = {}
        for ref in plan.copied:
            # A user's kernel may write only a part of its result: the rest keeps its contents.
            is_read = plan.updates or op.library not in LIBRARIES or any(ref is read for read in plan.reads)
            copies[id(ref)] = add_copy(Part(ref, ...) if is_read else Empty(ref.shape, ref.dtype))
        dense = _replace_views(op, copies)
        dense_plan = self._check(dense, recording)
        if isinstance(dense_plan, PlanOnCopies):
            raise InvalidArgumentError(f"{dense_plan.copied[0]!r} is in no field of {op.kind}", op=op.kind, remedy=_NO_FIELD)
        result = self.add(dense, dense_plan, recording, plan.writes)
        for ref in plan.copied:
            if any(ref is written for written in plan.writes):
                add_copy(Part(copies[id(ref)], ..., out=ref))
        return result


def _replace_views(op: Any, copies: Mapping[int, AccelRef]) -> KernelOp[Any]:
    """Return the op with its strided views replaced by their copies, in fields and in tuples.

    ``copies`` maps the id of a view to its copy. An op that is no dataclass is returned as it is.
    """
    if not dataclasses.is_dataclass(op) or isinstance(op, type):
        return cast("KernelOp[Any]", op)
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if id(value) in copies:
            changed[field.name] = copies[id(value)]
        elif type(value) is tuple and any(id(item) in copies for item in value):
            changed[field.name] = tuple([copies.get(id(item), item) for item in value])
    return cast("KernelOp[Any]", dataclasses.replace(op, **changed))
