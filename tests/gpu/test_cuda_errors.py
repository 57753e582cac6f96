"""The tables of statuses: their rows, and that none of the enums' members is missing where the packages are installed."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest

from accel import AccelError, DriverError, FaultScope, OutOfMemoryError
from accel_cuda import errors

_ENUMS = (
    ("cuda.bindings.driver", "CUresult", errors.DRIVER, "CUDA_ERROR_"),
    ("cuda.bindings.nvrtc", "nvrtcResult", errors.NVRTC, "NVRTC_ERROR_"),
    ("nvmath.bindings.cublas", "Status", errors.CUBLAS, ""),
    ("nvmath.bindings.cufft", "Result", errors.CUFFT, ""),
    ("nvmath.bindings.curand", "Status", errors.CURAND, ""),
)


@pytest.mark.parametrize(("module", "name", "table", "prefix"), _ENUMS, ids=[f"{module}.{name}" for module, name, _, _ in _ENUMS])
def test_every_status_has_its_row_under_its_name(module: str, name: str, table: Any, prefix: str) -> None:
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        pytest.skip(f"{top} is not installed")
    found = {int(each): each.name.removeprefix(prefix) for each in getattr(importlib.import_module(module), name) if int(each)}
    assert {code: table[code].name for code in found if code in table} == found


def test_codes_that_end_the_process_are_faults_of_the_process() -> None:
    for code in (214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999):
        assert errors.error_of(code, "f").scope is FaultScope.PROCESS, code


def test_ordinary_codes_leave_the_context_alone() -> None:
    for code in (1, 2, 400, 600, 701, 720, 801, 909):
        assert errors.error_of(code, "f").scope is FaultScope.OP, code


def test_out_of_memory_is_what_python_calls_it() -> None:
    error = errors.error_of(2, "cuMemCreate", device="cuda:0")
    assert isinstance(error, OutOfMemoryError)
    assert error.retryable
    assert (error.code, error.library, error.device) == (2, "driver", "cuda:0")


@pytest.mark.parametrize("library", ["driver", "cublas", "cufft", "curand", "nvrtc"])
def test_an_unknown_status_is_named(library: str) -> None:
    error = errors.error_of(123456, "call", library=library)
    assert error.code == 123456
    assert error.scope is FaultScope.OP


def test_every_row_makes_an_error_that_says_what_to_do_and_pickles() -> None:
    for code in errors.DRIVER:
        error = errors.error_of(code, "cuThing")
        assert error.remedy
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, AccelError)
        assert (type(copy), copy.code, copy.scope) == (type(error), code, error.scope)
    assert isinstance(errors.error_of(700, "cuEventQuery"), DriverError)
