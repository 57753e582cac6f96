"""cuDSS on a library that only takes down its calls: what it is not given, what it refuses, and what is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel import BackendUnavailableError, DType, SparseRef, Transpose, UnsupportedError, ops
from accel_cuda.core import libraries
from accel_cuda.core.stream import CudaStream
from accel_cuda.errors import error_of
from accel_cuda.families.sparse import SparseLibrary
from accel_cuda.families.sparse_direct import CUDSS
from tests.accel_cuda.test_cuda_sparse_plans import ref
from tests.cuda_support import FakeLibrary

DATA, INDICES, INDPTR, B, OUT, STATUS, COPIES = (n << 30 for n in range(1, 8))


class FakeSolver(FakeLibrary):
    """Its objects are numbers."""

    def __init__(self) -> None:
        super().__init__(CUDSS.module, CUDSS.error)

    def __getattr__(self, name: str) -> Any:
        answered = super().__getattr__(name)
        if name[0].isupper() or name == "create":
            return answered

        def call(*arguments: Any) -> Any:
            answered(*arguments)
            if name == "get_config_param_dtype":
                return np.float64 if arguments[0] == self.ConfigParam["PIVOT_EPSILON"] else np.int32
            self.handles += name.endswith("_create") or name.startswith("matrix_create")
            return self.handles

        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSolver:
    fake = FakeSolver()
    fake.install(monkeypatch, CUDSS.name)
    return fake


@pytest.fixture
def lane(context: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(CudaStream, "fill", lambda self, *each: None)
    blas = SimpleNamespace(
        operation=lambda dtype: {Transpose.TRANSPOSE: 1}, factors=lambda dtype, *factors: factors, call=lambda *each: None
    )
    told: list[int] = []

    def copy_dtoh(destination: memoryview, source: int) -> None:
        assert source == STATUS
        destination[0] = bool(told)

    monkeypatch.setattr(CudaStream, "copy_dtoh", lambda self, destination, source: copy_dtoh(destination, source))
    monkeypatch.setattr(CudaStream, "launch", lambda self, *each: None)
    monkeypatch.setattr(CudaStream, "synchronize", lambda self: None)
    functions: Any = {f"sparse_{step}_{width}": step for step in ("check", "replace") for width in (4, 8)}
    stream = CudaStream(context, functions)
    stream.blas = blas
    return SimpleNamespace(stream=stream, told=told)


def matrix(n: int = 4, nnz: int = 9, dtype: DType = DType.FLOAT64, index: DType = DType.INT32) -> SparseRef:
    return SparseRef("csr", ref(nnz, dtype=dtype), ref(nnz, dtype=index), ref(n + 1, dtype=index), (n, n))


def solve(library: SparseLibrary, lane: Any, op: Any) -> None:
    op.plan()
    assert library.may_block(lane, op)
    library.measure(op)
    library.kernels[op.kind](lane, op, op.plan(), (DATA, INDICES, INDPTR, B), (OUT, STATUS, COPIES))


def test_a_matrix_whose_indices_are_out_of_range_is_not_given_to_the_library(fake: FakeSolver, context: Any, lane: Any) -> None:
    lane.told.append(1)
    solve(SparseLibrary(context), lane, ops.Spsolve(matrix(), ref(4, dtype=DType.FLOAT64)))
    assert fake.called == []


def test_what_the_library_refuses_twice_is_an_error(fake: FakeSolver, context: Any, lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library, op = SparseLibrary(context), ops.Spsolve(matrix(), ref(4, dtype=DType.FLOAT64))
    monkeypatch.setattr(CudaStream, "failure", lambda self, status, call, library: error_of(status, call, library=library))
    fake.fails["execute"] = 4
    with pytest.raises(UnsupportedError, match="NOT_SUPPORTED"):
        solve(library, lane, op)
    assert fake.names().count("execute") == 2, "once with matching, and once without"
    assert fake.names().count("matrix_destroy") == 3
    assert fake.names().count("data_destroy") == fake.names().count("config_destroy") == 2


def test_without_the_library_the_error_says_how_to_install_it(context: Any, lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, distribution: str, extra: str = "cuda") -> str:
        raise BackendUnavailableError(f"{distribution} is not installed", remedy=libraries._INSTALL.format(extra))

    monkeypatch.setattr(libraries, "load_library", missing)
    with pytest.raises(BackendUnavailableError, match="nvidia-cudss-cu13") as caught:
        solve(SparseLibrary(context), lane, ops.Spsolve(matrix(), ref(4, dtype=DType.FLOAT64)))
    assert "pip install '.[sparse-direct]'" in caught.value.remedy
