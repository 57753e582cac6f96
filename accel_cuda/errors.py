"""What each status of the driver, of cuBLAS, cuFFT, cuRAND and NVRTC means: one table per library, status -> class, scope, whether to retry, and what to do.

The scopes follow the vendor's descriptions, corrected by measurement: every fault that a kernel can cause, the device assert included, leaves the whole
process unable to use CUDA, so its scope is PROCESS. A status that is missing from a table (one of a newer release) is a
:class:`~accel.DriverError` or :class:`~accel.LibraryError` of scope OP that names the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel import (
    AccelError,
    BackendUnavailableError,
    ClosedError,
    CompileError,
    DriverError,
    FaultScope,
    InvalidArgumentError,
    LibraryError,
    NotInitializedError,
    OutOfMemoryError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CUBLAS", "CUFFT", "CURAND", "DRIVER", "NOT_READY", "NVRTC", "Meaning", "error_of"]

NOT_READY = 600
"""What a query answers while there is still work ahead of the mark; not an error."""

_OP, _CONTEXT, _PROCESS, _DEVICE = FaultScope.OP, FaultScope.CONTEXT, FaultScope.PROCESS, FaultScope.DEVICE


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one status means.

    Parameters
    ----------
    name
        The library's name for it, without the common prefix.
    kind
        Class of the error.
    scope
        How much it takes with it.
    retryable
        Whether the same call, sent again, can succeed.
    remedy
        What to do; empty for the class's own.
    """

    name: str
    kind: type[AccelError]
    scope: FaultScope
    retryable: bool
    remedy: str


def _rows(
    kind: type[AccelError], entries: str, remedy: str = "", *, scope: FaultScope = _OP, retryable: bool = False
) -> dict[int, Meaning]:
    """Return the rows for ``entries``, which are "code NAME" pairs."""
    words = entries.split()
    return {int(code): Meaning(name, kind, scope, retryable, remedy) for code, name in zip(words[::2], words[1::2], strict=True)}


_NEW_PROCESS = "CUDA is lost to this process until it ends: use a process host, or start the process again."
_BUG = "This is a bug of the caller or of accel: report it with the whole message."
_DRIVER = "Install the NVIDIA driver that the toolkit needs (580 or later for CUDA 13), and restart the machine."
_MPS = "Look at the MPS control daemon (`nvidia-cuda-mps-control`), or unset CUDA_MPS_PIPE_DIRECTORY to go without it."
_CAPTURE = "Do not use a stream in this way while it is being captured into a graph."
_BUILD = "Build the code for this device: NVRTC with the device's own architecture, cubin instead of PTX."
_HARDWARE = "Look at `nvidia-smi -q` and the system log (Xid); the GPU may need a reset or to be replaced."

DRIVER: Mapping[int, Meaning] = {
    **_rows(OutOfMemoryError, "2 OUT_OF_MEMORY", retryable=True),
    **_rows(DriverError, "600 NOT_READY", "Ask again later.", retryable=True),
    # What a kernel can do to itself. One of these, and every context of the process answers with it from then on.
    **_rows(
        DriverError,
        "700 ILLEGAL_ADDRESS 710 ASSERT 714 HARDWARE_STACK_ERROR 715 ILLEGAL_INSTRUCTION 716 MISALIGNED_ADDRESS 717 INVALID_ADDRESS_SPACE "
        "718 INVALID_PC 719 LAUNCH_FAILED 721 TENSOR_MEMORY_LEAK 702 LAUNCH_TIMEOUT 226 CONTAINED 911 EXTERNAL_DEVICE 999 UNKNOWN",
        _NEW_PROCESS,
        scope=_PROCESS,
        retryable=True,
    ),
    **_rows(DriverError, "810 MPS_CLIENT_TERMINATED", _NEW_PROCESS, scope=_PROCESS, retryable=True),
    **_rows(DriverError, "214 ECC_UNCORRECTABLE 220 NVLINK_UNCORRECTABLE", _HARDWARE, scope=_PROCESS),
    **_rows(DriverError, "709 CONTEXT_IS_DESTROYED", "Something in this process reset the device.", scope=_CONTEXT, retryable=True),
    **_rows(ClosedError, "4 DEINITIALIZED", "The process is ending.", scope=_PROCESS),
    **_rows(NotInitializedError, "3 NOT_INITIALIZED", "Call cuInit first; after a fork, start a fresh process instead (spawn)."),
    # What keeps CUDA from being used at all.
    **_rows(BackendUnavailableError, "100 NO_DEVICE", "Check `nvidia-smi -L` and CUDA_VISIBLE_DEVICES; containers need `--gpus all`."),
    **_rows(BackendUnavailableError, "101 INVALID_DEVICE", "Use a device that `python -m accel devices` lists."),
    **_rows(
        BackendUnavailableError,
        "46 DEVICE_UNAVAILABLE",
        "Another process has it: wait for it to end, or have the compute mode set to default (`nvidia-smi -q -d COMPUTE`).",
        retryable=True,
    ),
    **_rows(BackendUnavailableError, "34 STUB_LIBRARY", "Take the toolkit's stubs folder out of LD_LIBRARY_PATH."),
    **_rows(
        BackendUnavailableError, "36 CALL_REQUIRES_NEWER_DRIVER 803 SYSTEM_DRIVER_MISMATCH 804 COMPAT_NOT_SUPPORTED_ON_DEVICE", _DRIVER
    ),
    **_rows(BackendUnavailableError, "102 DEVICE_NOT_LICENSED", "Give the virtual GPU its licence."),
    **_rows(BackendUnavailableError, "802 SYSTEM_NOT_READY", "Start the fabric manager (`nvidia-fabricmanager`).", retryable=True),
    **_rows(
        BackendUnavailableError,
        "805 MPS_CONNECTION_FAILED 806 MPS_RPC_FAILURE 807 MPS_SERVER_NOT_READY 808 MPS_MAX_CLIENTS_REACHED 809 MPS_MAX_CONNECTIONS_REACHED",
        _MPS,
        retryable=True,
    ),
    # What the call asked for is not to be had here.
    **_rows(
        UnsupportedError,
        "801 NOT_SUPPORTED 215 UNSUPPORTED_LIMIT 217 PEER_ACCESS_UNSUPPORTED 224 UNSUPPORTED_EXEC_AFFINITY 225 UNSUPPORTED_DEVSIDE_SYNC "
        "811 CDP_NOT_SUPPORTED 812 CDP_VERSION_MISMATCH 221 JIT_COMPILER_NOT_FOUND 223 JIT_COMPILATION_DISABLED",
    ),
    **_rows(
        CompileError,
        "200 INVALID_IMAGE 209 NO_BINARY_FOR_GPU 218 INVALID_PTX 222 UNSUPPORTED_PTX_VERSION 300 INVALID_SOURCE",
        _BUILD,
    ),
    **_rows(DriverError, "800 NOT_PERMITTED", "The driver forbids it: check the container's and the user's rights."),
    **_rows(DriverError, "304 OPERATING_SYSTEM", "Check the limits on open files and locked memory (`ulimit -n`, `ulimit -l`)."),
    **_rows(
        DriverError,
        "301 FILE_NOT_FOUND 302 SHARED_OBJECT_SYMBOL_NOT_FOUND 303 SHARED_OBJECT_INIT_FAILED 500 NOT_FOUND",
        "Check that the libraries belong together: `python -m accel doctor`.",
    ),
    # Launches that did not take place; the context goes on.
    **_rows(
        InvalidArgumentError,
        "701 LAUNCH_OUT_OF_RESOURCES 720 COOPERATIVE_LAUNCH_TOO_LARGE 912 INVALID_CLUSTER_SIZE 703 LAUNCH_INCOMPATIBLE_TEXTURING",
        "Launch with fewer threads, registers or bytes of shared memory a block.",
    ),
    **_rows(DriverError, "909 TIMEOUT", "Wait longer.", retryable=True),
    **_rows(DriverError, "916 KEY_ROTATION", "Try again.", retryable=True),
    **_rows(
        DriverError,
        "900 STREAM_CAPTURE_UNSUPPORTED 901 STREAM_CAPTURE_INVALIDATED 902 STREAM_CAPTURE_MERGE 903 STREAM_CAPTURE_UNMATCHED "
        "904 STREAM_CAPTURE_UNJOINED 905 STREAM_CAPTURE_ISOLATION 906 STREAM_CAPTURE_IMPLICIT 907 CAPTURED_EVENT "
        "908 STREAM_CAPTURE_WRONG_THREAD 910 GRAPH_EXEC_UPDATE_FAILURE 918 GRAPH_RECAPTURE_FAILURE",
        _CAPTURE,
    ),
    # Wrong handles, arguments and states.
    **_rows(
        DriverError,
        "1 INVALID_VALUE 5 PROFILER_DISABLED 6 PROFILER_NOT_INITIALIZED 7 PROFILER_ALREADY_STARTED 8 PROFILER_ALREADY_STOPPED "
        "201 INVALID_CONTEXT 202 CONTEXT_ALREADY_CURRENT 205 MAP_FAILED 206 UNMAP_FAILED 207 ARRAY_IS_MAPPED 208 ALREADY_MAPPED "
        "210 ALREADY_ACQUIRED 211 NOT_MAPPED 212 NOT_MAPPED_AS_ARRAY 213 NOT_MAPPED_AS_POINTER 216 CONTEXT_ALREADY_IN_USE "
        "219 INVALID_GRAPHICS_CONTEXT 400 INVALID_HANDLE 401 ILLEGAL_STATE 402 LOSSY_QUERY 704 PEER_ACCESS_ALREADY_ENABLED "
        "705 PEER_ACCESS_NOT_ENABLED 708 PRIMARY_CONTEXT_ACTIVE 711 TOO_MANY_PEERS 712 HOST_MEMORY_ALREADY_REGISTERED "
        "713 HOST_MEMORY_NOT_REGISTERED 913 FUNCTION_NOT_LOADED 914 INVALID_RESOURCE_TYPE 915 INVALID_RESOURCE_CONFIGURATION "
        "917 STREAM_DETACHED",
        _BUG,
    ),
}
"""Every status of the driver but success. ``CUDA_ERROR_`` is left out of the names."""

CUBLAS: Mapping[int, Meaning] = {
    **_rows(OutOfMemoryError, "3 ALLOC_FAILED", retryable=True),
    **_rows(LibraryError, "1 NOT_INITIALIZED 11 MAPPING_ERROR 14 INTERNAL_ERROR 13 EXECUTION_FAILED"),
    **_rows(InvalidArgumentError, "7 INVALID_VALUE"),
    **_rows(UnsupportedError, "8 ARCH_MISMATCH 15 NOT_SUPPORTED 16 LICENSE_ERROR"),
}
"""Every status of cuBLAS but success. A fault of the device shows as EXECUTION_FAILED: ask the driver which."""

NVRTC: Mapping[int, Meaning] = {
    **_rows(OutOfMemoryError, "1 OUT_OF_MEMORY 14 PCH_CREATE_HEAP_EXHAUSTED", retryable=True),
    **_rows(
        CompileError,
        "2 PROGRAM_CREATION_FAILURE 3 INVALID_INPUT 4 INVALID_PROGRAM 5 INVALID_OPTION 6 COMPILATION 7 BUILTIN_OPERATION_FAILURE "
        "8 NO_NAME_EXPRESSIONS_AFTER_COMPILATION 9 NO_LOWERED_NAMES_BEFORE_COMPILATION 10 NAME_EXPRESSION_NOT_VALID 11 INTERNAL_ERROR "
        "12 TIME_FILE_WRITE_FAILED 13 NO_PCH_CREATE_ATTEMPTED 15 PCH_CREATE 16 CANCELLED 17 TIME_TRACE_FILE_WRITE_FAILED",
    ),
    **_rows(CompileError, "18 BUSY", "Try again.", retryable=True),
}
"""Every status of NVRTC but success. ``NVRTC_ERROR_`` is left out of the names."""

CUFFT: Mapping[int, Meaning] = {
    **_rows(OutOfMemoryError, "2 ALLOC_FAILED 13 NO_WORKSPACE", retryable=True),
    **_rows(LibraryError, "1 INVALID_PLAN 5 INTERNAL_ERROR 6 EXEC_FAILED 7 SETUP_FAILED 10 INCOMPLETE_PARAMETER_LIST 12 PARSE_ERROR"),
    **_rows(InvalidArgumentError, "3 INVALID_TYPE 4 INVALID_VALUE 8 INVALID_SIZE 9 UNALIGNED_DATA"),
    **_rows(UnsupportedError, "11 INVALID_DEVICE 14 NOT_IMPLEMENTED 15 LICENSE_ERROR 16 NOT_SUPPORTED"),
    **_rows(
        BackendUnavailableError,
        "17 MISSING_DEPENDENCY 18 NVRTC_FAILURE 19 NVJITLINK_FAILURE 20 NVSHMEM_FAILURE",
        "cuFFT compiles some kernels when they are first used: install what it does that with: pip install 'accel-actors[cuda]'.",
    ),
}
"""Every status of cuFFT but success. A fault of the device shows as EXEC_FAILED: ask the driver which."""

CURAND: Mapping[int, Meaning] = {
    **_rows(OutOfMemoryError, "102 ALLOCATION_FAILED", retryable=True),
    **_rows(LibraryError, "101 NOT_INITIALIZED 201 LAUNCH_FAILURE 202 PREEXISTING_FAILURE 203 INITIALIZATION_FAILED 999 INTERNAL_ERROR"),
    **_rows(InvalidArgumentError, "103 TYPE_ERROR 104 OUT_OF_RANGE 105 LENGTH_NOT_MULTIPLE"),
    **_rows(UnsupportedError, "100 VERSION_MISMATCH 106 DOUBLE_PRECISION_REQUIRED 204 ARCH_MISMATCH"),
}
"""Every status of cuRAND but success, for kernel actors that call it. A fault of the device shows as LAUNCH_FAILURE: ask the driver which."""

_TABLES: Mapping[str, tuple[Mapping[int, Meaning], type[AccelError]]] = {
    "driver": (DRIVER, DriverError),
    "cublas": (CUBLAS, LibraryError),
    "cufft": (CUFFT, LibraryError),
    "curand": (CURAND, LibraryError),
    "nvrtc": (NVRTC, LibraryError),
}


def error_of(status: int, call: str, *, library: str = "driver", **fields: Any) -> AccelError:
    """Return the error that ``status`` stands for.

    Parameters
    ----------
    status
        What the library answered; not success.
    call
        Name of the function that answered.
    library
        Whose status it is: ``"driver"``, ``"cublas"``, ``"cufft"``, ``"curand"`` or ``"nvrtc"``.
    **fields
        Further fields of the error, such as ``device=``.
    """
    table, fallback = _TABLES[library]
    meaning = table.get(status) or Meaning("a status that this release does not know", fallback, _OP, retryable=False, remedy="")
    if meaning.remedy:
        fields.setdefault("remedy", meaning.remedy)
    error: AccelError = meaning.kind(
        f"{call} answered {meaning.name}", code=status, library=library, scope=meaning.scope, retryable=meaning.retryable, **fields
    )
    return error
