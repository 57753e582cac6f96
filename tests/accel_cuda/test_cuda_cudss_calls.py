"""cuDSS on a library that only takes down its calls: what it is given, and what a pivot of 0 does."""

from __future__ import annotations

import ctypes
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
INFO, SAFE, MARKS, WORK = STATUS + 16, COPIES, COPIES + 256, COPIES + 512


class FakeSolver(FakeLibrary):
    """Its objects are numbers, and the pivots that it finds to be 0 are set by the test: of each factorization."""

    def __init__(self) -> None:
        super().__init__(CUDSS.module, CUDSS.error)
        self.pivots: list[int] = []
        self.config: list[tuple[int, float]] = []

    def __getattr__(self, name: str) -> Any:
        answered = super().__getattr__(name)
        if name[0].isupper() or name == "create":
            return answered

        def call(*arguments: Any) -> Any:
            answered(*arguments)
            if name == "get_config_param_dtype":
                return np.float64 if arguments[0] == self.ConfigParam["PIVOT_EPSILON"] else np.int32
            if name == "config_set":
                kind = ctypes.c_double if arguments[3] == 8 else ctypes.c_int32
                self.config.append((arguments[1], kind.from_address(arguments[2]).value))
            if name == "data_get":
                value = self.pivots.pop(0) if arguments[2] == self.DataParam["NPIVOTS"] else 0
                (ctypes.c_int64 if arguments[4] == 8 else ctypes.c_int32).from_address(arguments[3]).value = value
            self.handles += name.endswith("_create") or name.startswith("matrix_create")
            return self.handles

        return call

    def calls(self, name: str) -> list[list[Any]]:
        return [arguments for each, *arguments in self.called if each == name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSolver:
    fake = FakeSolver()
    fake.install(monkeypatch, CUDSS.name)
    return fake


@pytest.fixture
def lane(context: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    filled: list[Any] = []
    turned: list[Any] = []
    monkeypatch.setattr(CudaStream, "fill", lambda self, *each: filled.append(each))
    blas = SimpleNamespace(
        operation=lambda dtype: {Transpose.TRANSPOSE: 1}, factors=lambda dtype, *factors: factors, call=lambda *each: turned.append(each)
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
    return SimpleNamespace(stream=stream, filled=filled, turned=turned, told=told)


def matrix(n: int = 4, nnz: int = 9, dtype: DType = DType.FLOAT64, index: DType = DType.INT32) -> SparseRef:
    return SparseRef("csr", ref(nnz, dtype=dtype), ref(nnz, dtype=index), ref(n + 1, dtype=index), (n, n))


def solve(library: SparseLibrary, lane: Any, op: Any) -> None:
    op.plan()
    assert library.may_block(lane, op)
    library.measure(op)
    library.kernels[op.kind](lane, op, op.plan(), (DATA, INDICES, INDPTR, B), (OUT, STATUS, COPIES))


def test_a_system_is_ordered_factored_and_solved(fake: FakeSolver, context: Any, lane: Any) -> None:
    library, op = SparseLibrary(context), ops.Spsolve(matrix(), ref(4, dtype=DType.FLOAT64))
    assert library.scratch_nbytes(op) == 512
    fake.pivots = [0, 0]
    for _ in range(2):
        solve(library, lane, op)
    assert fake.names().count("create") == fake.names().count("set_async_workspace_allocator") == 1
    assert fake.calls("matrix_create_csr")[0][:7] == [4, 4, 9, MARKS, 0, SAFE, DATA]
    assert [call[:4] for call in fake.calls("matrix_create_dn")[:2]] == [[4, 1, 4, OUT], [4, 1, 4, B]]
    phases = [call[1] for call in fake.calls("execute")]
    assert phases == [int(fake.Phase.ANALYSIS), int(fake.Phase.FACTORIZATION), int(fake.Phase.SOLVE)] * 2
    assert {tuple(call[4:]) for call in fake.calls("execute")[:3]} == {tuple(fake.calls("execute")[0][4:])}
    settings = {"PIVOT_EPSILON": float(np.finfo(np.float64).tiny), "IR_N_STEPS": 2, "MATCHING_ALG": 6}
    assert fake.config == [(int(fake.ConfigParam[name]), value) for name, value in settings.items()] * 2
    assert lane.filled == [(INFO, bytes(4), 1)] * 2
    made = [name for name in fake.names() if name.startswith("matrix_create") or name in ("config_create", "data_create")]
    ended = [name for name in fake.names() if name in ("matrix_destroy", "config_destroy", "data_destroy")]
    assert len(made) == len(ended) == 10


def test_where_a_pivot_is_0_it_is_tried_without_matching(fake: FakeSolver, context: Any, lane: Any) -> None:
    library, op = SparseLibrary(context), ops.Spsolve(matrix(index=DType.INT64), ref(4, dtype=DType.FLOAT64))
    matched = int(fake.ConfigParam["MATCHING_ALG"])
    fake.pivots = [2, 0]
    solve(library, lane, op)
    assert [each for each in fake.config if each[0] == matched] == [(matched, 6)]
    assert [call[1] for call in fake.calls("execute")].count(int(fake.Phase.SOLVE)) == 1
    assert lane.filled == [(INFO, bytes(4), 1)]
    lane.filled.clear()
    fake.called.clear()
    fake.pivots = [2, 3]
    solve(library, lane, op)
    assert [call[1] for call in fake.calls("execute")].count(int(fake.Phase.SOLVE)) == 0
    assert lane.filled == [(OUT, b"\xff", 32), (INFO, (3).to_bytes(4, "little"), 1)]
    assert len(fake.calls("data_create")) == len(fake.calls("data_destroy")) == 2


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
    assert len(fake.calls("execute")) == 2, "once with matching, and once without"
    assert len(fake.calls("matrix_destroy")) == 3
    assert len(fake.calls("data_destroy")) == len(fake.calls("config_destroy")) == 2


def test_without_the_library_the_error_says_how_to_install_it(context: Any, lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, distribution: str, extra: str = "cuda") -> str:
        raise BackendUnavailableError(f"{distribution} is not installed", remedy=libraries._INSTALL.format(extra))

    monkeypatch.setattr(libraries, "load_library", missing)
    with pytest.raises(BackendUnavailableError, match="nvidia-cudss-cu13") as caught:
        solve(SparseLibrary(context), lane, ops.Spsolve(matrix(), ref(4, dtype=DType.FLOAT64)))
    assert "pip install '.[sparse-direct]'" in caught.value.remedy
