"""The statuses of cuFFT and cuRAND. The common prefix is left out of the names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel import BackendUnavailableError, InvalidArgumentError, LibraryError, OutOfMemoryError, UnsupportedError
from accel_cuda.errors.meaning import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.errors.meaning import Meaning

__all__ = ["CUFFT", "CURAND"]

CUFFT: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "2 ALLOC_FAILED 13 NO_WORKSPACE", retryable=True),
    **rows(LibraryError, "1 INVALID_PLAN 5 INTERNAL_ERROR 6 EXEC_FAILED 7 SETUP_FAILED 10 INCOMPLETE_PARAMETER_LIST 12 PARSE_ERROR"),
    **rows(InvalidArgumentError, "3 INVALID_TYPE 4 INVALID_VALUE 8 INVALID_SIZE 9 UNALIGNED_DATA"),
    **rows(UnsupportedError, "11 INVALID_DEVICE 14 NOT_IMPLEMENTED 15 LICENSE_ERROR 16 NOT_SUPPORTED"),
    **rows(
        BackendUnavailableError,
        "17 MISSING_DEPENDENCY 18 NVRTC_FAILURE 19 NVJITLINK_FAILURE 20 NVSHMEM_FAILURE",
        "cuFFT compiles some kernels when they are first used: install what it does that with, in a checkout: pip install '.[cuda]'",
    ),
}
"""cuFFT (``CUFFT_``). A fault of the device shows as EXEC_FAILED: ask the driver which."""

CURAND: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "102 ALLOCATION_FAILED", retryable=True),
    **rows(LibraryError, "101 NOT_INITIALIZED 201 LAUNCH_FAILURE 202 PREEXISTING_FAILURE 203 INITIALIZATION_FAILED 999 INTERNAL_ERROR"),
    **rows(InvalidArgumentError, "103 TYPE_ERROR 104 OUT_OF_RANGE 105 LENGTH_NOT_MULTIPLE"),
    **rows(UnsupportedError, "100 VERSION_MISMATCH 106 DOUBLE_PRECISION_REQUIRED 204 ARCH_MISMATCH"),
}
"""cuRAND (``CURAND_STATUS_``). A fault of the device shows as LAUNCH_FAILURE: ask the driver which."""
