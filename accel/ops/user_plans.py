"""Plans of ops that users have written, which are checked before anything is done with them."""

from __future__ import annotations

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import KernelOp, Plan, Spec, Status
from accel.ref import AccelRef

__all__ = ["are_specs", "check_plan", "with_dtypes"]


def check_plan(op: KernelOp, plan: object) -> Plan:
    """Return what a user's op says of itself, if it is a plan: what it names is used where nothing can be said of it any more.

    Raises
    ------
    InvalidArgumentError
        If it is none.
    """
    if not (
        isinstance(plan, Plan) and isinstance(plan.reads, tuple) and isinstance(plan.writes, tuple) and isinstance(plan.creates, tuple)
    ):
        wrong = f"returned {plan!r:.200}, not a Plan of three tuples"
    elif not _are_refs(plan.reads + plan.writes):
        wrong = "names reads and writes that are not refs"
    elif not (are_specs(plan.creates) or are_specs((plan := with_dtypes(plan)).creates)):
        wrong = f"names results that are not Specs of a shape and a DType: {plan.creates!r:.200}"
    elif plan.status is not None and not (
        isinstance(plan.status, Status) and are_specs((plan.status.spec,)) and callable(plan.status.check)
    ):
        wrong = f"names a status that is no Status of a Spec and a function: {plan.status!r:.200}"
    else:
        return plan
    raise InvalidArgumentError(
        f"plan() of {op.kind} {wrong}", library=op.library, op=op.kind, remedy="Give Plan((x,), (), (Spec(x.shape, x.dtype),))."
    )


def with_dtypes(plan: Plan) -> Plan:
    """Return the plan of a user's op with a :class:`DType` where a result names one: ``"float32"``."""
    for spec in plan.creates:
        if type(spec) is Spec and type(spec.dtype) is not DType:
            named = [each._replace(dtype=DType.of(each.dtype)) if isinstance(each, Spec) else each for each in plan.creates]
            return plan._replace(creates=tuple(named))
    return plan


# Loops, because this is on the way of every op of a user's library, and a generator costs more than what it checks.
def _are_refs(refs: tuple[object, ...]) -> bool:
    for ref in refs:  # noqa: SIM110
        if not isinstance(ref, AccelRef):
            return False
    return True


def are_specs(specs: tuple[object, ...]) -> bool:
    """Return whether each is a :class:`Spec` of a shape and a :class:`DType`."""
    for spec in specs:
        if not (isinstance(spec, Spec) and isinstance(spec.shape, tuple) and isinstance(spec.dtype, DType)):
            return False
        for n in spec.shape:
            if not (isinstance(n, (int, np.integer)) and n >= 0):
                return False
    return True
