"""The statuses of the CUDA driver.

The scopes follow the vendor's descriptions, corrected by measurement: every fault that a kernel can cause, the device assert included, leaves the whole
process unable to use CUDA, so its scope is PROCESS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel import (
    BackendUnavailableError,
    ClosedError,
    CompileError,
    DriverError,
    FaultScope,
    InvalidArgumentError,
    KernelFaultError,
    NotInitializedError,
    OutOfMemoryError,
    UnsupportedError,
)
from accel_cuda.errors.meaning import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.errors.meaning import Meaning

__all__ = ["DRIVER"]

_NEW_PROCESS = "CUDA is lost to this process until it ends: use a process host, or start the process again."
_BUG = "This is a bug of the caller or of accel: report it with the whole message."
_DRIVER = "Install the NVIDIA driver that the toolkit needs (580 or later for CUDA 13), and restart the machine."
_MPS = "Look at the MPS control daemon (`nvidia-cuda-mps-control`), or unset CUDA_MPS_PIPE_DIRECTORY to go without it."
_CAPTURE = "Do not use a stream in this way while it is being captured into a graph."
_BUILD = "Build the code for this device: NVRTC with the device's own architecture, cubin instead of PTX."
_HARDWARE = "Look at `nvidia-smi -q` and the system log (Xid); the GPU may need a reset or to be replaced."

DRIVER: Mapping[int, Meaning] = {
    **rows(OutOfMemoryError, "2 OUT_OF_MEMORY", retryable=True),
    **rows(DriverError, "600 NOT_READY", "Ask again later.", retryable=True),
    # What a kernel can do to itself. One of these, and every context of the process answers with it from then on.
    **rows(
        KernelFaultError,
        "700 ILLEGAL_ADDRESS 710 ASSERT 714 HARDWARE_STACK_ERROR 715 ILLEGAL_INSTRUCTION 716 MISALIGNED_ADDRESS 717 INVALID_ADDRESS_SPACE "
        "718 INVALID_PC 719 LAUNCH_FAILED 721 TENSOR_MEMORY_LEAK",
        _NEW_PROCESS,
        scope=FaultScope.PROCESS,
        retryable=True,
    ),
    # As final, but other work, another client or the hardware may have caused it.
    **rows(
        DriverError,
        "702 LAUNCH_TIMEOUT 226 CONTAINED 810 MPS_CLIENT_TERMINATED 911 EXTERNAL_DEVICE 999 UNKNOWN",
        _NEW_PROCESS,
        scope=FaultScope.PROCESS,
        retryable=True,
    ),
    **rows(DriverError, "214 ECC_UNCORRECTABLE 220 NVLINK_UNCORRECTABLE", _HARDWARE, scope=FaultScope.PROCESS),
    **rows(
        DriverError, "709 CONTEXT_IS_DESTROYED", "Something in this process reset the device.", scope=FaultScope.CONTEXT, retryable=True
    ),
    **rows(ClosedError, "4 DEINITIALIZED", "The process is ending.", scope=FaultScope.PROCESS),
    **rows(NotInitializedError, "3 NOT_INITIALIZED", "Call cuInit first; after a fork, start a fresh process instead (spawn)."),
    # What keeps CUDA from being used at all.
    **rows(BackendUnavailableError, "100 NO_DEVICE", "Check `nvidia-smi -L` and CUDA_VISIBLE_DEVICES; containers need `--gpus all`."),
    **rows(BackendUnavailableError, "101 INVALID_DEVICE", "Use a device that `python -m accel devices` lists."),
    **rows(
        BackendUnavailableError,
        "46 DEVICE_UNAVAILABLE",
        "Another process has it: wait for it to end, or have the compute mode set to default (`nvidia-smi -q -d COMPUTE`).",
        retryable=True,
    ),
    **rows(BackendUnavailableError, "34 STUB_LIBRARY", "Take the toolkit's stubs folder out of LD_LIBRARY_PATH."),
    **rows(BackendUnavailableError, "36 CALL_REQUIRES_NEWER_DRIVER 803 SYSTEM_DRIVER_MISMATCH 804 COMPAT_NOT_SUPPORTED_ON_DEVICE", _DRIVER),
    **rows(BackendUnavailableError, "102 DEVICE_NOT_LICENSED", "Give the virtual GPU its licence."),
    **rows(BackendUnavailableError, "802 SYSTEM_NOT_READY", "Start the fabric manager (`nvidia-fabricmanager`).", retryable=True),
    **rows(
        BackendUnavailableError,
        "805 MPS_CONNECTION_FAILED 806 MPS_RPC_FAILURE 807 MPS_SERVER_NOT_READY 808 MPS_MAX_CLIENTS_REACHED 809 MPS_MAX_CONNECTIONS_REACHED",
        _MPS,
        retryable=True,
    ),
    # What the call asked for is not to be had here.
    **rows(
        UnsupportedError,
        "801 NOT_SUPPORTED 215 UNSUPPORTED_LIMIT 217 PEER_ACCESS_UNSUPPORTED 224 UNSUPPORTED_EXEC_AFFINITY 225 UNSUPPORTED_DEVSIDE_SYNC "
        "811 CDP_NOT_SUPPORTED 812 CDP_VERSION_MISMATCH 221 JIT_COMPILER_NOT_FOUND 223 JIT_COMPILATION_DISABLED",
    ),
    **rows(
        CompileError,
        "200 INVALID_IMAGE 209 NO_BINARY_FOR_GPU 218 INVALID_PTX 222 UNSUPPORTED_PTX_VERSION 300 INVALID_SOURCE",
        _BUILD,
    ),
    **rows(DriverError, "800 NOT_PERMITTED", "The driver forbids it: check the container's and the user's rights."),
    **rows(DriverError, "304 OPERATING_SYSTEM", "Check the limits on open files and locked memory (`ulimit -n`, `ulimit -l`)."),
    **rows(
        DriverError,
        "301 FILE_NOT_FOUND 302 SHARED_OBJECT_SYMBOL_NOT_FOUND 303 SHARED_OBJECT_INIT_FAILED 500 NOT_FOUND",
        "Check that the libraries belong together: `python -m accel doctor`.",
    ),
    # Launches that did not take place; the context goes on.
    **rows(
        InvalidArgumentError,
        "701 LAUNCH_OUT_OF_RESOURCES 720 COOPERATIVE_LAUNCH_TOO_LARGE 912 INVALID_CLUSTER_SIZE 703 LAUNCH_INCOMPATIBLE_TEXTURING",
        "Launch with fewer threads, registers or bytes of shared memory a block.",
    ),
    **rows(DriverError, "909 TIMEOUT", "Wait longer.", retryable=True),
    **rows(DriverError, "916 KEY_ROTATION", "Try again.", retryable=True),
    **rows(
        DriverError,
        "900 STREAM_CAPTURE_UNSUPPORTED 901 STREAM_CAPTURE_INVALIDATED 902 STREAM_CAPTURE_MERGE 903 STREAM_CAPTURE_UNMATCHED "
        "904 STREAM_CAPTURE_UNJOINED 905 STREAM_CAPTURE_ISOLATION 906 STREAM_CAPTURE_IMPLICIT 907 CAPTURED_EVENT "
        "908 STREAM_CAPTURE_WRONG_THREAD 910 GRAPH_EXEC_UPDATE_FAILURE 918 GRAPH_RECAPTURE_FAILURE",
        _CAPTURE,
    ),
    # Wrong handles, arguments and states.
    **rows(
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
