"""The tables of statuses: every member of the vendor's enums has a row, and the rows say what FAULTS and ordinary failures are."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import site
import sys
from pathlib import Path

import pytest

from accel import AccelError, DriverError, FaultScope, LibraryError, OutOfMemoryError
from accel_cuda import errors

# What the enums of cuda-bindings 13.3.1 and nvmath-python 1.0.0 hold, which need not be installed
# here; a test with a GPU compares with what is installed there.
RECORDED = {
    "driver": (
        "1 INVALID_VALUE 2 OUT_OF_MEMORY 3 NOT_INITIALIZED 4 DEINITIALIZED 5 PROFILER_DISABLED 6 PROFILER_NOT_INITIALIZED 7 "
        "PROFILER_ALREADY_STARTED 8 PROFILER_ALREADY_STOPPED 34 STUB_LIBRARY 36 CALL_REQUIRES_NEWER_DRIVER 46 DEVICE_UNAVAILABLE 100 "
        "NO_DEVICE 101 INVALID_DEVICE 102 DEVICE_NOT_LICENSED 200 INVALID_IMAGE 201 INVALID_CONTEXT 202 CONTEXT_ALREADY_CURRENT 205 "
        "MAP_FAILED 206 UNMAP_FAILED 207 ARRAY_IS_MAPPED 208 ALREADY_MAPPED 209 NO_BINARY_FOR_GPU 210 ALREADY_ACQUIRED 211 NOT_MAPPED "
        "212 NOT_MAPPED_AS_ARRAY 213 NOT_MAPPED_AS_POINTER 214 ECC_UNCORRECTABLE 215 UNSUPPORTED_LIMIT 216 CONTEXT_ALREADY_IN_USE 217 "
        "PEER_ACCESS_UNSUPPORTED 218 INVALID_PTX 219 INVALID_GRAPHICS_CONTEXT 220 NVLINK_UNCORRECTABLE 221 JIT_COMPILER_NOT_FOUND 222 "
        "UNSUPPORTED_PTX_VERSION 223 JIT_COMPILATION_DISABLED 224 UNSUPPORTED_EXEC_AFFINITY 225 UNSUPPORTED_DEVSIDE_SYNC 226 CONTAINED "
        "300 INVALID_SOURCE 301 FILE_NOT_FOUND 302 SHARED_OBJECT_SYMBOL_NOT_FOUND 303 SHARED_OBJECT_INIT_FAILED 304 OPERATING_SYSTEM "
        "400 INVALID_HANDLE 401 ILLEGAL_STATE 402 LOSSY_QUERY 500 NOT_FOUND 600 NOT_READY 700 ILLEGAL_ADDRESS 701 "
        "LAUNCH_OUT_OF_RESOURCES 702 LAUNCH_TIMEOUT 703 LAUNCH_INCOMPATIBLE_TEXTURING 704 PEER_ACCESS_ALREADY_ENABLED 705 "
        "PEER_ACCESS_NOT_ENABLED 708 PRIMARY_CONTEXT_ACTIVE 709 CONTEXT_IS_DESTROYED 710 ASSERT 711 TOO_MANY_PEERS 712 "
        "HOST_MEMORY_ALREADY_REGISTERED 713 HOST_MEMORY_NOT_REGISTERED 714 HARDWARE_STACK_ERROR 715 ILLEGAL_INSTRUCTION 716 "
        "MISALIGNED_ADDRESS 717 INVALID_ADDRESS_SPACE 718 INVALID_PC 719 LAUNCH_FAILED 720 COOPERATIVE_LAUNCH_TOO_LARGE 721 "
        "TENSOR_MEMORY_LEAK 800 NOT_PERMITTED 801 NOT_SUPPORTED 802 SYSTEM_NOT_READY 803 SYSTEM_DRIVER_MISMATCH 804 "
        "COMPAT_NOT_SUPPORTED_ON_DEVICE 805 MPS_CONNECTION_FAILED 806 MPS_RPC_FAILURE 807 MPS_SERVER_NOT_READY 808 "
        "MPS_MAX_CLIENTS_REACHED 809 MPS_MAX_CONNECTIONS_REACHED 810 MPS_CLIENT_TERMINATED 811 CDP_NOT_SUPPORTED 812 "
        "CDP_VERSION_MISMATCH 900 STREAM_CAPTURE_UNSUPPORTED 901 STREAM_CAPTURE_INVALIDATED 902 STREAM_CAPTURE_MERGE 903 "
        "STREAM_CAPTURE_UNMATCHED 904 STREAM_CAPTURE_UNJOINED 905 STREAM_CAPTURE_ISOLATION 906 STREAM_CAPTURE_IMPLICIT 907 "
        "CAPTURED_EVENT 908 STREAM_CAPTURE_WRONG_THREAD 909 TIMEOUT 910 GRAPH_EXEC_UPDATE_FAILURE 911 EXTERNAL_DEVICE 912 "
        "INVALID_CLUSTER_SIZE 913 FUNCTION_NOT_LOADED 914 INVALID_RESOURCE_TYPE 915 INVALID_RESOURCE_CONFIGURATION 916 KEY_ROTATION 917 "
        "STREAM_DETACHED 918 GRAPH_RECAPTURE_FAILURE 999 UNKNOWN"
    ),
    "nvrtc": (
        "1 OUT_OF_MEMORY 2 PROGRAM_CREATION_FAILURE 3 INVALID_INPUT 4 INVALID_PROGRAM 5 INVALID_OPTION 6 COMPILATION 7 "
        "BUILTIN_OPERATION_FAILURE 8 NO_NAME_EXPRESSIONS_AFTER_COMPILATION 9 NO_LOWERED_NAMES_BEFORE_COMPILATION 10 "
        "NAME_EXPRESSION_NOT_VALID 11 INTERNAL_ERROR 12 TIME_FILE_WRITE_FAILED 13 NO_PCH_CREATE_ATTEMPTED 14 PCH_CREATE_HEAP_EXHAUSTED "
        "15 PCH_CREATE 16 CANCELLED 17 TIME_TRACE_FILE_WRITE_FAILED 18 BUSY"
    ),
    "cublas": (
        "1 NOT_INITIALIZED 3 ALLOC_FAILED 7 INVALID_VALUE 8 ARCH_MISMATCH 11 MAPPING_ERROR 13 EXECUTION_FAILED 14 INTERNAL_ERROR 15 "
        "NOT_SUPPORTED 16 LICENSE_ERROR"
    ),
    "cufft": (
        "1 INVALID_PLAN 2 ALLOC_FAILED 3 INVALID_TYPE 4 INVALID_VALUE 5 INTERNAL_ERROR 6 EXEC_FAILED 7 SETUP_FAILED 8 INVALID_SIZE 9 "
        "UNALIGNED_DATA 10 INCOMPLETE_PARAMETER_LIST 11 INVALID_DEVICE 12 PARSE_ERROR 13 NO_WORKSPACE 14 NOT_IMPLEMENTED 15 LICENSE_ERROR "
        "16 NOT_SUPPORTED 17 MISSING_DEPENDENCY 18 NVRTC_FAILURE 19 NVJITLINK_FAILURE 20 NVSHMEM_FAILURE"
    ),
    "curand": (
        "100 VERSION_MISMATCH 101 NOT_INITIALIZED 102 ALLOCATION_FAILED 103 TYPE_ERROR 104 OUT_OF_RANGE 105 LENGTH_NOT_MULTIPLE 106 "
        "DOUBLE_PRECISION_REQUIRED 201 LAUNCH_FAILURE 202 PREEXISTING_FAILURE 203 INITIALIZATION_FAILED 204 ARCH_MISMATCH 999 "
        "INTERNAL_ERROR"
    ),
    "cusolver": (
        "1 NOT_INITIALIZED 2 ALLOC_FAILED 3 INVALID_VALUE 4 ARCH_MISMATCH 5 MAPPING_ERROR 6 EXECUTION_FAILED 7 INTERNAL_ERROR 8 "
        "MATRIX_TYPE_NOT_SUPPORTED 9 NOT_SUPPORTED 10 ZERO_PIVOT 11 INVALID_LICENSE 12 IRS_PARAMS_NOT_INITIALIZED 13 IRS_PARAMS_INVALID "
        "14 IRS_PARAMS_INVALID_PREC 15 IRS_PARAMS_INVALID_REFINE 16 IRS_PARAMS_INVALID_MAXITER 20 IRS_INTERNAL_ERROR 21 "
        "IRS_NOT_SUPPORTED 22 IRS_OUT_OF_RANGE 23 IRS_NRHS_NOT_SUPPORTED_FOR_REFINE_GMRES 25 IRS_INFOS_NOT_INITIALIZED 26 "
        "IRS_INFOS_NOT_DESTROYED 30 IRS_MATRIX_SINGULAR 31 INVALID_WORKSPACE"
    ),
    "cusparse": (
        "1 NOT_INITIALIZED 2 ALLOC_FAILED 3 INVALID_VALUE 4 ARCH_MISMATCH 5 MAPPING_ERROR 6 EXECUTION_FAILED 7 INTERNAL_ERROR 8 "
        "MATRIX_TYPE_NOT_SUPPORTED 9 ZERO_PIVOT 10 NOT_SUPPORTED 11 INSUFFICIENT_RESOURCES"
    ),
    "cudss": "1 NOT_INITIALIZED 2 ALLOC_FAILED 3 INVALID_VALUE 4 NOT_SUPPORTED 5 EXECUTION_FAILED 6 INTERNAL_ERROR 7 IR_FAILED",
    "cutensor": (
        "1 NOT_INITIALIZED 3 ALLOC_FAILED 7 INVALID_VALUE 8 ARCH_MISMATCH 11 MAPPING_ERROR 13 EXECUTION_FAILED 14 INTERNAL_ERROR 15 "
        "NOT_SUPPORTED 16 LICENSE_ERROR 17 CUBLAS_ERROR 18 CUDA_ERROR 19 INSUFFICIENT_WORKSPACE 20 INSUFFICIENT_DRIVER 21 IO_ERROR"
    ),
}
PROCESS = (214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999)


@pytest.mark.parametrize("library", RECORDED)
def test_every_recorded_status_has_its_row_under_its_name(library: str) -> None:
    words = RECORDED[library].split()
    recorded = {int(code): name for code, name in zip(words[::2], words[1::2], strict=True)}
    assert {code: row.name for code, row in errors.TABLES[library].items()} == recorded


def test_codes_that_end_the_process_are_faults_of_the_process_and_no_others_are() -> None:
    assert {code for code, row in errors.DRIVER.items() if row.scope is FaultScope.PROCESS} == {*PROCESS, 4}
    for code in PROCESS:
        assert errors.error_of(code, "f").is_fault


def test_a_context_that_was_destroyed_can_be_followed_by_another() -> None:
    assert errors.error_of(709, "f").scope is FaultScope.CONTEXT


def test_ordinary_codes_leave_the_context_alone() -> None:
    for code in (1, 2, 400, 600, 701, 720, 801, 909):
        assert errors.error_of(code, "f").scope is FaultScope.OP, code


def test_no_library_declares_a_fault() -> None:
    for library, table in errors.TABLES.items():
        if library != "driver":
            assert all(row.scope is FaultScope.OP for row in table.values()), library


def test_out_of_memory_is_what_python_calls_it() -> None:
    for library, code in (
        ("driver", 2),
        ("cublas", 3),
        ("cublasLt", 3),
        ("cusolver", 2),
        ("cusparse", 2),
        ("cudss", 2),
        ("cutensor", 3),
        ("cudnn", 4004),
        ("nvrtc", 1),
    ):
        error = errors.error_of(code, "call", library=library, device="cuda:0")
        assert isinstance(error, OutOfMemoryError), library
        assert error.retryable
        assert (error.code, error.library, error.device) == (code, library, "cuda:0")


@pytest.mark.parametrize("library", sorted(errors.TABLES))
def test_an_unknown_status_is_named(library: str) -> None:
    error = errors.error_of(123456, "call", library=library)
    assert error.code == 123456
    assert error.scope is FaultScope.OP
    assert type(error) is (DriverError if library == "driver" else LibraryError)


@pytest.mark.parametrize("library", sorted(errors.TABLES))
def test_every_row_makes_an_error_that_says_what_to_do_and_pickles(library: str) -> None:
    for code, row in errors.TABLES[library].items():
        error = errors.error_of(code, "cuThing", library=library)
        assert error.remedy
        assert row.name in error.message
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, AccelError)
        assert (type(copy), copy.code, copy.scope) == (row.kind, code, row.scope)


_ENUMS = {
    "driver": ("cuda.bindings.driver", "CUresult", "CUDA_ERROR_"),
    "nvrtc": ("cuda.bindings.nvrtc", "nvrtcResult", "NVRTC_ERROR_"),
    "cublas": ("nvmath.bindings.cublas", "Status", ""),
    "cufft": ("nvmath.bindings.cufft", "Result", ""),
    "curand": ("nvmath.bindings.curand", "Status", ""),
    "cusolver": ("nvmath.bindings.cusolver", "Status", ""),
    "cusparse": ("nvmath.bindings.cusparse", "Status", ""),
    "cudss": ("nvmath.bindings.cudss", "Status", ""),
    "cutensor": ("nvmath.bindings.cutensor", "Status", ""),
}
_HEADERS = {
    "cudnn": ("nvidia/cudnn/include/cudnn_graph.h", r"CUDNN_STATUS_(\w+)\s*=\s*(\d+)"),
    "nccl": ("nvidia/nccl/include/nccl.h", r"\bnccl(\w+)\s*=\s*(\d+)\s*,"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("library", _ENUMS)
def test_no_status_of_the_installed_bindings_is_missing(library: str) -> None:
    module, name, prefix = _ENUMS[library]
    found = {int(each): each.name.removeprefix(prefix) for each in getattr(importlib.import_module(module), name) if int(each)}
    assert found, "an enum without members"
    table = errors.TABLES[library]
    assert {code: getattr(table.get(code), "name", None) for code in found} == found


@pytest.mark.gpu
@pytest.mark.parametrize("library", _HEADERS)
def test_no_status_of_the_installed_headers_is_missing(library: str) -> None:
    path, pattern = _HEADERS[library]
    folders = [Path(each) for each in (*site.getsitepackages(), *sys.path)]
    header = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if header is None:
        pytest.skip(f"{library} is not installed as a wheel")
    text = header.read_text(errors="replace")
    if library == "nccl":
        text = text[text.index("ncclSuccess") :].partition("}")[0] + ","
    found = {int(code): name for name, code in re.findall(pattern, text) if int(code)}
    assert found, "no status in the header"
    table = errors.TABLES[library]
    assert {code: getattr(table.get(code), "name", None) for code in found if name_of(found[code])} == {
        code: name for code, name in found.items() if name_of(name)
    }


def name_of(name: str) -> bool:
    """Tell statuses from counts (``ncclNumResults``) and from the names of older releases that cuDNN keeps beside the new ones."""
    return name != "NumResults" and not name.endswith("_DEPRECATED")
