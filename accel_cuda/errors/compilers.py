"""The statuses of the compiler, NVRTC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel import CompileError, OutOfMemoryError
from accel_cuda.errors.meaning import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.errors.meaning import Meaning

__all__ = ["NVRTC"]

NVRTC: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "1 OUT_OF_MEMORY 14 PCH_CREATE_HEAP_EXHAUSTED", retryable=True),
    **rows(
        CompileError,
        "2 PROGRAM_CREATION_FAILURE 3 INVALID_INPUT 4 INVALID_PROGRAM 5 INVALID_OPTION 6 COMPILATION 7 BUILTIN_OPERATION_FAILURE "
        "8 NO_NAME_EXPRESSIONS_AFTER_COMPILATION 9 NO_LOWERED_NAMES_BEFORE_COMPILATION 10 NAME_EXPRESSION_NOT_VALID 11 INTERNAL_ERROR "
        "12 TIME_FILE_WRITE_FAILED 13 NO_PCH_CREATE_ATTEMPTED 15 PCH_CREATE 16 CANCELLED 17 TIME_TRACE_FILE_WRITE_FAILED",
    ),
    **rows(CompileError, "18 BUSY", "Try again.", retryable=True),
}
"""Every status of NVRTC but success. ``NVRTC_ERROR_`` is left out of the names."""
