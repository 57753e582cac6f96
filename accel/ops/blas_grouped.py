"""Products of matrices of different sizes in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

from accel.enums import Transpose
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, Spec, check_tf32, op, operand, result_in, same_dtype
from accel.ops.blas_operands import (
    FACTORS,
    TRANSPOSES,
    TransposeField,
    applied,
    are_rows,
    check_factors,
    is_stored,
    no_product,
    transpose_of,
)
from accel.ops.fields import unless_none
from accel.ref import AccelRef, overlap

__all__ = ["GemmGrouped"]

_NONE = Transpose.NONE
_EACH = "Give one matrix of each for every product, in tuples or lists."


def _matrices(name: str, value: Any) -> tuple[AccelRef, ...]:
    if not isinstance(value, (tuple, list)):
        raise InvalidArgumentError(f"{name} is a {type(value).__name__}", remedy=_EACH)
    return tuple(value)


@op("blas", convert={"a": _matrices, "b": _matrices, "out": unless_none(_matrices), **TRANSPOSES, **FACTORS})
class GemmGrouped(FamilyOp[tuple[AccelRef, ...]]):
    """``alpha * op(a[i]) @ op(b[i]) + beta * out[i]`` for every i, of matrices of any sizes. The result is a tuple.

    Parameters
    ----------
    a, b
        As many matrices each, at least one, all of one dtype: ``op(a[i])`` of shape (m, k) and ``op(b[i])`` of shape (k, n), of which each product has its own.
    out
        As many matrices (m, n); needed where ``beta`` is not 0. None shares memory with another one, or with an operand.
    alpha, beta, transpose_a, transpose_b, allow_tf32
        As in :class:`Gemm`, for all products.
    """

    a: Sequence[AccelRef]
    b: Sequence[AccelRef]
    _: KW_ONLY
    out: Sequence[AccelRef] | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE
    transpose_b: TransposeField = _NONE
    allow_tf32: bool = False

    def takes_strided(self, ref: AccelRef) -> bool:
        if any(ref is each for each in self.out or ()):
            return are_rows(*ref.shape, *ref.strides)
        operands = ((self.a, self.transpose_a), (self.b, self.transpose_b))
        return all(is_stored(ref, transpose_of(flag)) for refs, flag in operands if any(ref is each for each in refs))

    def sizes(self) -> list[tuple[int, int, int]]:
        """Return m, n and k of each product."""
        found = []
        turn_a, turn_b = transpose_of(self.transpose_a), transpose_of(self.transpose_b)
        for a, b in zip(self.a, self.b, strict=True):
            (m, k), (k_b, n) = applied(a.shape, turn_a), applied(b.shape, turn_b)
            if k != k_b:
                raise no_product(a.shape, b.shape, k, k_b)
            found.append((m, n, k))
        return found

    def plan(self) -> Plan:
        a, b, out = self.a, self.b, self.out
        if not a or len(a) != len(b) or (out is not None and len(out) != len(a)):
            counts = f"{len(a)} and {len(b)}" + ("" if out is None else f", and {len(out)} as out")
            raise InvalidArgumentError(f"{counts} matrices are given", remedy=_EACH)
        given = {f"{name}[{i}]": operand(f"{name}[{i}]", ref, ndim=2) for name, refs in (("a", a), ("b", b)) for i, ref in enumerate(refs)}
        dtype = same_dtype(**given)
        check_factors(self, dtype)
        check_tf32(self.allow_tf32, dtype)
        shapes = [(m, n) for m, n, _ in self.sizes()]
        if out is None:
            return Plan((*a, *b), (), tuple([Spec(shape, dtype) for shape in shapes]), "gemm", dtype)
        for ref, shape in zip(out, shapes, strict=True):
            result_in(ref, shape, dtype)
        _check_apart(out, given)
        return Plan((*a, *b), tuple(out), (), "gemm", dtype, bool(self.beta))

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[AccelRef, ...]:
        return refs


def _check_apart(out: Sequence[AccelRef], given: dict[str, AccelRef]) -> None:
    """See that nothing is written over what is read, or written twice."""
    beside: dict[int, list[tuple[str, AccelRef]]] = {}
    for name, ref in given.items():
        beside.setdefault(ref.buffer, []).append((name, ref))
    for i, ref in enumerate(out):
        others = beside.setdefault(ref.buffer, [])
        for name, other in others:
            if overlap(ref, other):
                raise InvalidArgumentError(f"out[{i}] overlaps {name}", remedy="Give another buffer, or a part that does not overlap.")
        others.append((f"out[{i}]", ref))
