"""Handles of NVIDIA's libraries, on a library that only takes down its calls: one for each stream, with the stream's workspace, destroyed with it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from accel import BackendUnavailableError, ClosedError, DriverError, DType, InvalidArgumentError, LibraryError, OutOfMemoryError, Transpose
from accel_cuda.core.libraries import VendorLibrary
from accel_cuda.core.library_handle import LibraryHandle
from accel_cuda.core.stream import CudaStream
from accel_cuda.families.cublas import ADDRESSES, blas_of
from tests.cuda_support import FakeLibrary, Numbers

SOLVER = VendorLibrary("cusolver", "nvidia-cusolver", "nvmath.bindings.cusolverDn", "nvmath.bindings.cusolver.cuSOLVERError")
ALLOC_FAILED, EXECUTION_FAILED, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 6, 7, 700
ADDRESS, NBYTES = 1 << 30, 4096


@pytest.fixture
def stream(context: Any) -> CudaStream:
    return CudaStream(context, {})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary(SOLVER.module, SOLVER.error)
    fake.install(monkeypatch, SOLVER.name)
    return fake


def test_the_workspace_is_set_after_the_stream_which_would_reset_it(stream: CudaStream, library: FakeLibrary) -> None:
    handle = LibraryHandle(SOLVER, stream, ADDRESS, NBYTES)
    assert library.called == [("create",), ("set_stream", handle.value, stream.handle), ("set_workspace", handle.value, ADDRESS, NBYTES)]


def test_a_library_without_workspaces_is_given_none(stream: CudaStream, library: FakeLibrary) -> None:
    LibraryHandle(SOLVER, stream)
    assert library.names() == ["create", "set_stream"]


def test_each_stream_has_its_handle_which_ends_with_it(context: Any, stream: CudaStream, library: FakeLibrary) -> None:
    other = CudaStream(context, {})
    handles = [LibraryHandle(SOLVER, each).value for each in (stream, other)]
    assert handles == [1, 2]
    other.close()
    assert library.called[-1] == ("destroy", 2)
    stream.close()
    assert library.called[-1] == ("destroy", 1)
    assert library.names().count("destroy") == 2


def test_a_handle_that_cannot_be_destroyed_keeps_nothing_else_from_being_given_back(
    context: Any, stream: CudaStream, library: FakeLibrary
) -> None:
    LibraryHandle(SOLVER, stream)
    library.fails["destroy"] = 7
    stream.close()
    assert context.driver.names()[-1] == "cuStreamDestroy"


@pytest.mark.parametrize(("call", "destroyed"), [("create", 0), ("set_stream", 1), ("set_workspace", 1)])
def test_a_handle_that_cannot_be_made_is_told_by_the_librarys_status_and_given_back(
    stream: CudaStream, library: FakeLibrary, call: str, destroyed: int
) -> None:
    library.fails[call] = ALLOC_FAILED
    with pytest.raises(OutOfMemoryError, match=call) as caught:
        LibraryHandle(SOLVER, stream, ADDRESS, NBYTES)
    assert (caught.value.code, caught.value.library, caught.value.device) == (ALLOC_FAILED, "cusolver", "cuda:0")
    stream.close()
    assert library.names().count("destroy") == destroyed


def test_a_failure_is_the_devices_fault_where_there_is_one(context: Any, stream: CudaStream, library: FakeLibrary) -> None:
    handle = LibraryHandle(SOLVER, stream)
    library.fails["xgetrf"] = EXECUTION_FAILED
    with pytest.raises(LibraryError, match="EXECUTION_FAILED"):
        handle.call("xgetrf", 8)
    context.driver.fails["cuStreamQuery"] = ILLEGAL_ADDRESS
    with pytest.raises(DriverError) as caught:
        handle.call("xgetrf", 8)
    assert caught.value.code == ILLEGAL_ADDRESS
    assert library.called[-1] == ("xgetrf", handle.value, 8)


@pytest.mark.parametrize("missing", ["nvidia-cusolver", "nvmath-python"])
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    stream: CudaStream, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == SOLVER.wheel:
        library.install(monkeypatch)  # and no shared library
    else:
        monkeypatch.setitem(sys.modules, SOLVER.module, None)
    with pytest.raises(BackendUnavailableError, match=missing) as caught:
        LibraryHandle(SOLVER, stream)
    assert "pip install '.[cuda]'" in caught.value.remedy
    assert library.called == []


def test_products_have_a_handle_with_the_workspace_that_the_lane_was_lent(
    context: Any, stream: CudaStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    cublas = FakeLibrary("nvmath.bindings.cublas", "cuBLASError")
    cublas.install(monkeypatch, "cublas")
    monkeypatch.setattr(sys.modules["nvmath"], "CudaDataType", Numbers(), raising=False)
    monkeypatch.setattr(context, "workspaces_of", lambda library: 1, raising=False)
    nbytes = stream.workspace_wanted("blas")
    stream.use_workspace(ADDRESS, nbytes)
    assert stream.workspace_wanted("blas") == 0
    assert blas_of(stream) is stream.blas
    assert cublas.called[:3] == [("create",), ("set_stream", 1, stream.handle), ("set_workspace", 1, ADDRESS, nbytes - ADDRESSES)]
    blas_of(stream).gemm(Transpose.NONE, Transpose.NONE, 2, 2, 2, 1.0, 4096, 2, 8192, 2, 0.0, 12288, 2, DType.FLOAT64)
    assert cublas.called[-1][:2] == ("gemm_ex_64", 1)
    assert cublas.names().count("create") == 1
    stream.release_workspaces()
    stream.use_workspace(2 * ADDRESS, nbytes)
    assert cublas.called[-1] == ("set_workspace", 1, 2 * ADDRESS, nbytes - ADDRESSES)
    cublas.fails["set_workspace"] = INVALID_VALUE
    stream.release_workspaces()
    with pytest.raises(InvalidArgumentError, match="set_workspace"):
        stream.use_workspace(ADDRESS, nbytes)
    stream.close()
    assert cublas.names()[-1] == "destroy"


@pytest.mark.parametrize("is_lent", [False, True])
def test_products_in_a_stream_that_is_closed_make_nothing(
    context: Any, stream: CudaStream, monkeypatch: pytest.MonkeyPatch, is_lent: bool
) -> None:
    cublas = FakeLibrary("nvmath.bindings.cublas", "cuBLASError")
    cublas.install(monkeypatch, "cublas")
    monkeypatch.setattr(sys.modules["nvmath"], "CudaDataType", Numbers(), raising=False)
    if is_lent:
        stream.use_workspace(ADDRESS, NBYTES)
    stream.close()
    context.driver.called.clear()
    for enqueue in (lambda: blas_of(stream), stream.prepare_workspace)[: 2 - is_lent]:
        with pytest.raises(ClosedError):
            enqueue()
    assert (cublas.called, context.driver.called, stream.blas) == ([], [], None), "it would never be given back"
