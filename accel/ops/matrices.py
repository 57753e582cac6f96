"""What ops on dense matrices have in common: which matrices they take, and how they tell of those that have no solution."""

from __future__ import annotations

from dataclasses import KW_ONLY
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.dtype import DType
from accel.errors import AccelError, InvalidArgumentError, LinAlgError, UnsupportedError
from accel.ops.base import FamilyOp, Plan, Shape, Spec, Status, op, operand
from accel.ops.fields import to_flag
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["REALS", "OfMatrices", "matrix", "right_sides"]

REALS = {DType.FLOAT32: DType.FLOAT32, DType.FLOAT64: DType.FLOAT64, DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}
"""Dtypes of matrices -> those of their eigenvalues and singular values."""


@op("solver", convert={"check": to_flag})
class OfMatrices(FamilyOp[Any]):
    """An op on matrices of which only the device knows whether it succeeds."""

    a: AccelRef
    _: KW_ONLY
    check: bool = True

    def checked(self, reads: tuple[AccelRef, ...], creates: tuple[Spec, ...], batch: Shape, what: Callable[..., str]) -> Plan:
        """Return the plan of an op that writes an ``info`` for each matrix behind its results: as its status, or as its last result.

        ``what(info=...)`` returns what an ``info`` that is not 0 says of the matrix.
        """
        info = Spec(batch, DType.INT32)
        if self.check:
            return Plan(reads, (), creates, dtype=reads[0].dtype, status=Status(info, partial(_failure, self.kind, what)))
        return Plan(reads, (), (*creates, info), dtype=reads[0].dtype)


def matrix(op: FamilyOp[Any], name: str, value: AccelRef, *, square: bool = True) -> AccelRef:
    """Return a matrix, or a stack of them, if it is one that the family takes."""
    ref = operand(name, value)
    if ref.ndim < 2 or (square and ref.shape[-1] != ref.shape[-2]):
        raise InvalidArgumentError(
            f"{name} has shape {ref.shape}",
            remedy=f"Give a {'square ' * square}matrix, or a stack of them: (..., {'n, n' if square else 'm, n'}).",
        )
    if ref.dtype not in REALS:
        raise UnsupportedError(
            f"{op.kind} is not offered for {ref.dtype.value}",
            remedy="Convert it with elementwise.cast to float32, float64, complex64 or complex128.",
        )
    return ref


def _failure(kind: str, what: Callable[..., str], info: np.ndarray[Any, Any]) -> AccelError | None:
    """Return the error of a status: the first matrix that failed, and how."""
    if not info.any():
        return None
    values = tuple([int(each) for each in info.ravel()])
    number = next(number for number, each in enumerate(values) if each)
    which = "the matrix" if not info.ndim else f"matrix {tuple(int(i) for i in np.unravel_index(number, info.shape))}"
    return LinAlgError(f"{kind}: {which} {what(info=values[number])}", info=values if info.ndim else values[0])


def right_sides(name: str, n: int, b: AccelRef) -> tuple[Shape, int]:
    """Return the stack, and the number, of right-hand sides of n equations; only an array of one dimension is a vector, as numpy has it."""
    if not b.ndim or b.shape[0 if b.ndim == 1 else -2] != n:
        raise InvalidArgumentError(f"b has shape {b.shape}, and {name} has {n} rows", remedy="Give (n,), or (..., n, k).")
    return b.shape[:-2], 1 if b.ndim == 1 else b.shape[-1]
