"""The ``solver`` family on a cuSOLVER that only takes down its calls: what is refused, what is kept, and what a failure says."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel import DType, InvalidArgumentError, LibraryError, UnsupportedError, ops
from accel_cuda.errors import error_of
from accel_cuda.families.cublas import CUBLAS
from accel_cuda.families.solver import SolverLibrary
from accel_cuda.families.solver_calls import CUSOLVER
from tests.cuda_support import FakeLibrary, Names, Numbers, ref

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("nothing_left")

ON_DEVICE, ON_HOST = 4096, 64


class Solver(FakeLibrary):
    """Every call works in 4096 bytes; those of one kind in memory of the host's too."""

    def __init__(self) -> None:
        super().__init__(CUSOLVER.module, CUSOLVER.error)
        self.needs_host = "xsyevd"

    def __getattr__(self, name: str) -> Any:
        answered = super().__getattr__(name)
        if not name.endswith("_buffer_size"):
            return answered

        def sizes(*arguments: int) -> Any:
            answered(*arguments)
            return (ON_DEVICE, ON_HOST * (name.removesuffix("_buffer_size") == self.needs_host)) if name[0] == "x" else ON_DEVICE

        return sizes


class Stream:
    """Launches nothing."""

    functions = Names()
    handle = 5
    is_capturing = False
    pointer = transfers = None
    blas = SimpleNamespace(
        gemm=None,
        batched_gemm=None,
        operation=lambda dtype: defaultdict(int),
        factors=lambda dtype, *factors: factors,
        call=lambda *arguments: None,
    )

    def __init__(self, context: Any) -> None:
        self.context = context

    def ready(self) -> Any:
        return self.context

    def at_close(self, close: Any) -> None: ...

    def copy(self, *arguments: int) -> None: ...

    def fill(self, *arguments: Any) -> None: ...

    def launch(self, *arguments: Any) -> None: ...

    def failure(self, status: int, call: str, library: str) -> Exception:
        return error_of(status, call, library=library)


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch) -> Solver:
    made = Solver()
    made.install(monkeypatch, CUBLAS.name, CUSOLVER.name)
    monkeypatch.setattr(sys.modules["nvmath"], "CudaDataType", Numbers(), raising=False)
    return made


@pytest.fixture
def lane(solver: Solver, context: Any) -> Any:
    return SimpleNamespace(stream=Stream(context))


@pytest.fixture
def library(context: Any, solver: Solver) -> SolverLibrary:
    return SolverLibrary(context)


def call(library: SolverLibrary, lane: Any, op: Any, a: np.ndarray[Any, Any], made: Sequence[np.ndarray[Any, Any]]) -> None:
    """Do what the layers above do."""
    library.measure(op)
    scratch = np.empty(library.scratch_nbytes(op), np.uint8)  # type: ignore[arg-type]
    library.kernels[op.kind](lane, op, op.plan(), (a.ctypes.data,), (*[each.ctypes.data for each in made], scratch.ctypes.data))


def test_what_the_host_takes_part_in_is_no_part_of_a_graph(library: SolverLibrary, lane: Any, solver: Solver) -> None:
    a, made, info = np.eye(3), np.empty((3, 3)), np.empty((), np.int32)
    lane.stream.is_capturing = True
    call(library, lane, ops.Cholesky(ref((3, 3), DType.FLOAT64)), a, (made, info))
    begun = [each for each in solver.called if each[0] in ("create", "set_stream", "xpotrf")]
    assert [each[:2] for each in begun] == [("create",), ("set_stream", 1), ("xpotrf", 1), ("set_stream", 1)], "no handle is made meanwhile"
    assert [each[2] for each in begun if each[0] == "set_stream"] == [lane.stream.handle, 0]
    with pytest.raises(UnsupportedError, match="svdvals cannot become a part of a graph"):
        call(library, lane, ops.Svdvals(ref((3, 3), DType.FLOAT64)), a, (made, info))
    solver.needs_host = "xgeqrf"
    with pytest.raises(UnsupportedError, match="geqrf cannot become a part of a graph: cuSOLVER computes a part of it on the host"):
        call(library, lane, ops.Qr(ref((3, 3), DType.FLOAT64)), a, (made, made.copy()))


def test_memory_of_the_host_is_kept_until_the_stream_has_passed(library: SolverLibrary, lane: Any, context: Any) -> None:
    kept = library.loaded()._used
    a, values, info = np.eye(3), np.empty(3), np.empty((), np.int32)
    context.driver.fails["query"] = 600  # not ready
    for count in (1, 2):
        call(library, lane, ops.Eigvalsh(ref((3, 3), DType.FLOAT64)), a, (values, info))
        assert len(kept) == count
    context.driver.fails.clear()
    call(library, lane, ops.Eigvalsh(ref((3, 3), DType.FLOAT64)), a, (values, info))
    assert [len(room) for _, room in kept] == [ON_HOST]
    library.close()
    assert not kept


def test_a_call_that_fails_says_what_the_library_answered(library: SolverLibrary, lane: Any, solver: Solver) -> None:
    a, made, info = np.eye(3), np.empty((3, 3)), np.empty((), np.int32)
    op = ops.Cholesky(ref((3, 3), DType.FLOAT64))
    assert library.may_block(lane, op)
    assert (library.scratch_nbytes(op), library.commands(op)) == (None, 64)
    solver.fails["xpotrf_buffer_size"] = 3
    with pytest.raises(InvalidArgumentError, match="buffer_size of potrf"):
        library.measure(op)
    solver.fails = {"xpotrf": 7}
    with pytest.raises(LibraryError) as told:
        call(library, lane, op, a, (made, info))
    assert (told.value.code, told.value.library) == (7, "cusolver")
