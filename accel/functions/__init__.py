"""Functions of the user's own as ops."""

from __future__ import annotations

from accel.functions.kernel_op import FunctionOp, OpFunction, kernel_op

__all__ = ["FunctionOp", "OpFunction", "kernel_op"]
