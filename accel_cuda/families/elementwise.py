"""The ``elementwise`` family on a GPU: one program of the backend's own for each dtype, called through the compute interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel import BinaryOp, UnaryOp
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.families.kernels import CODES, instances

if TYPE_CHECKING:
    from accel.ops import Binary, Unary

__all__ = ["PART"]

_UNARY = {dtype: f"unary_{code}" for dtype, code in CODES.items()}
_BINARY = {dtype: f"binary_{code}" for dtype, code in CODES.items()}


def _unary(op: Unary) -> str:
    return _UNARY.get(op.x.dtype, "")


def _binary(op: Binary) -> str:
    return _BINARY.get(op.x.dtype, "")


_SOURCES = (
    Source("unary", lambda code: ("elementwise.cu", instances("UNARY", UnaryOp, "unary", code)), "unary."),
    Source("binary", lambda code: ("elementwise.cu", instances("BINARY", BinaryOp, "binary", code)), "binary."),
)

PART = CudaPart(programs=_SOURCES, program={"unary": _unary, "binary": _binary})
