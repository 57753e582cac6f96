"""The statuses of NVIDIA's libraries, and of its compiler. The common prefix is left out of the names.

Where a library answers that its execution failed, the reason is the device's or the driver's: ask :func:`accel_cuda.errors.error_of` about the driver's
status of the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel import (
    BackendUnavailableError,
    CompileError,
    InvalidArgumentError,
    LibraryError,
    NotInitializedError,
    OutOfMemoryError,
    UnsupportedError,
)
from accel_cuda.errors.meaning import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.errors.meaning import Meaning

__all__ = ["CUBLAS", "CUDNN", "CUDSS", "CUFFT", "CURAND", "CUSOLVER", "CUSPARSE", "CUTENSOR", "NCCL", "NVRTC"]

_VERSIONS = (
    "Install the parts of one release together, in a checkout: pip install --upgrade '.[cuda]'; `python -m accel doctor` lists them."
)
_DRIVER = "Install the NVIDIA driver that the toolkit needs (580 or later for CUDA 13)."
_SINGULAR = "The matrix is singular, or close to it: regularize it, or use a method that copes."
_PEER = "Look at the other processes of the group: one has ended, or the network has failed. Make a new communicator."
_LOG = "Set NCCL_DEBUG=INFO and read what it prints."

CUBLAS: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "3 ALLOC_FAILED", retryable=True),
    **rows(LibraryError, "1 NOT_INITIALIZED 11 MAPPING_ERROR 14 INTERNAL_ERROR 13 EXECUTION_FAILED"),
    **rows(InvalidArgumentError, "7 INVALID_VALUE"),
    **rows(UnsupportedError, "8 ARCH_MISMATCH 15 NOT_SUPPORTED 16 LICENSE_ERROR"),
}
"""cuBLAS and cuBLASLt (``CUBLAS_STATUS_``)."""

CUSOLVER: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "2 ALLOC_FAILED", retryable=True),
    **rows(LibraryError, "1 NOT_INITIALIZED 5 MAPPING_ERROR 6 EXECUTION_FAILED 7 INTERNAL_ERROR 20 IRS_INTERNAL_ERROR"),
    **rows(LibraryError, "10 ZERO_PIVOT 30 IRS_MATRIX_SINGULAR", _SINGULAR),
    **rows(
        InvalidArgumentError,
        "3 INVALID_VALUE 12 IRS_PARAMS_NOT_INITIALIZED 13 IRS_PARAMS_INVALID 14 IRS_PARAMS_INVALID_PREC 15 IRS_PARAMS_INVALID_REFINE "
        "16 IRS_PARAMS_INVALID_MAXITER 22 IRS_OUT_OF_RANGE 25 IRS_INFOS_NOT_INITIALIZED 26 IRS_INFOS_NOT_DESTROYED 31 INVALID_WORKSPACE",
    ),
    **rows(
        UnsupportedError,
        "4 ARCH_MISMATCH 8 MATRIX_TYPE_NOT_SUPPORTED 9 NOT_SUPPORTED 11 INVALID_LICENSE 21 IRS_NOT_SUPPORTED "
        "23 IRS_NRHS_NOT_SUPPORTED_FOR_REFINE_GMRES",
    ),
}
"""cuSOLVER (``CUSOLVER_STATUS_``)."""

CUSPARSE: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "2 ALLOC_FAILED 11 INSUFFICIENT_RESOURCES", retryable=True),
    **rows(LibraryError, "1 NOT_INITIALIZED 5 MAPPING_ERROR 6 EXECUTION_FAILED 7 INTERNAL_ERROR"),
    **rows(LibraryError, "9 ZERO_PIVOT", _SINGULAR),
    **rows(InvalidArgumentError, "3 INVALID_VALUE"),
    **rows(UnsupportedError, "4 ARCH_MISMATCH 8 MATRIX_TYPE_NOT_SUPPORTED 10 NOT_SUPPORTED"),
}
"""cuSPARSE (``CUSPARSE_STATUS_``)."""

CUDSS: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "2 ALLOC_FAILED", retryable=True),
    **rows(LibraryError, "1 NOT_INITIALIZED 5 EXECUTION_FAILED 6 INTERNAL_ERROR 7 IR_FAILED"),
    **rows(InvalidArgumentError, "3 INVALID_VALUE"),
    **rows(UnsupportedError, "4 NOT_SUPPORTED"),
}
"""cuDSS (``CUDSS_STATUS_``)."""

CUTENSOR: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "3 ALLOC_FAILED", retryable=True),
    **rows(
        LibraryError, "1 NOT_INITIALIZED 11 MAPPING_ERROR 13 EXECUTION_FAILED 14 INTERNAL_ERROR 17 CUBLAS_ERROR 18 CUDA_ERROR 21 IO_ERROR"
    ),
    **rows(InvalidArgumentError, "7 INVALID_VALUE 19 INSUFFICIENT_WORKSPACE"),
    **rows(UnsupportedError, "8 ARCH_MISMATCH 15 NOT_SUPPORTED 16 LICENSE_ERROR"),
    **rows(BackendUnavailableError, "20 INSUFFICIENT_DRIVER", _DRIVER),
}
"""cuTENSOR (``CUTENSOR_STATUS_``)."""

CUDNN: Mapping[int, Meaning] = {
    **rows(NotInitializedError, "1001 NOT_INITIALIZED"),
    **rows(
        BackendUnavailableError,
        "1002 SUBLIBRARY_VERSION_MISMATCH 1003 SERIALIZATION_VERSION_MISMATCH 1008 SUBLIBRARY_LOADING_FAILED "
        "3009 NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE 3006 NOT_SUPPORTED_INCOMPATIBLE_CUDART",
        _VERSIONS,
    ),
    **rows(BackendUnavailableError, "3005 NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER", _DRIVER),
    **rows(LibraryError, "1006 RUNTIME_IN_PROGRESS", "Ask again later.", retryable=True),
    **rows(LibraryError, "1007 RUNTIME_FP_OVERFLOW", "Scale the operands, or use a dtype with a larger range."),
    **rows(
        InvalidArgumentError,
        "2000 BAD_PARAM 2002 BAD_PARAM_NULL_POINTER 2003 BAD_PARAM_MISALIGNED_POINTER 2004 BAD_PARAM_NOT_FINALIZED "
        "2005 BAD_PARAM_OUT_OF_BOUND 2006 BAD_PARAM_SIZE_INSUFFICIENT 2007 BAD_PARAM_STREAM_MISMATCH 2008 BAD_PARAM_SHAPE_MISMATCH "
        "2009 BAD_PARAM_DUPLICATED_ENTRIES 2010 BAD_PARAM_ATTRIBUTE_TYPE 2011 BAD_PARAM_CUDA_GRAPH_MISMATCH 2012 BAD_PARAM_DESCRIPTOR_TYPE",
    ),
    **rows(
        UnsupportedError,
        "1004 DEPRECATED 1005 LICENSE_ERROR 3000 NOT_SUPPORTED 3001 NOT_SUPPORTED_GRAPH_PATTERN 3002 NOT_SUPPORTED_SHAPE "
        "3003 NOT_SUPPORTED_DATA_TYPE 3004 NOT_SUPPORTED_LAYOUT 3007 NOT_SUPPORTED_ARCH_MISMATCH "
        "3008 NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING 3010 NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT 3011 NOT_SUPPORTED_PADDING "
        "3012 NOT_SUPPORTED_BAD_LAUNCH_PARAM 3013 NOT_SUPPORTED_CUDA_GRAPH_NATIVE_API 3014 NOT_SUPPORTED_INVALID_DYNAMIC_SHAPE",
    ),
    **rows(
        OutOfMemoryError,
        "4003 INTERNAL_ERROR_HOST_ALLOCATION_FAILED 4004 INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        retryable=True,
    ),
    **rows(
        LibraryError,
        "4000 INTERNAL_ERROR 4001 INTERNAL_ERROR_COMPILATION_FAILED 4002 INTERNAL_ERROR_UNEXPECTED_VALUE "
        "4005 INTERNAL_ERROR_BAD_LAUNCH_PARAM 4006 INTERNAL_ERROR_TEXTURE_CREATION_FAILED 5000 EXECUTION_FAILED "
        "5001 EXECUTION_FAILED_CUDA_DRIVER 5002 EXECUTION_FAILED_CUBLAS 5003 EXECUTION_FAILED_CUDART 5004 EXECUTION_FAILED_CURAND",
    ),
}
"""cuDNN 9 (``CUDNN_STATUS_``)."""

NCCL: Mapping[int, Meaning] = {
    **rows(LibraryError, "1 UnhandledCudaError 2 SystemError 3 InternalError", _LOG),
    **rows(InvalidArgumentError, "4 InvalidArgument 5 InvalidUsage"),
    **rows(LibraryError, "6 RemoteError", _PEER),
    **rows(LibraryError, "7 InProgress", "Ask again later.", retryable=True),
    **rows(LibraryError, "8 Timeout", _PEER),
}
"""NCCL (``nccl``)."""


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
