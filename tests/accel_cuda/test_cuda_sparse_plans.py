"""cuSPARSE on a library that only takes down its calls: what is asked of it, which memory each call gets, and what may block."""

from __future__ import annotations

import secrets
from collections import deque
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from accel import DType, InvalidArgumentError, SparseRef, ops
from accel.ref import AccelRef
from accel_cuda.core.stream import CudaStream
from accel_cuda.families import sparse_plans
from accel_cuda.families.sparse import SparseLibrary
from accel_cuda.families.sparse_plans import CUSPARSE
from tests.cuda_support import FakeLibrary, Names, Numbers

DATA, INDICES, INDPTR, X, OUT, STATUS, COPIES = (n << 30 for n in range(1, 8))
SAFE, MARKS, WORK = COPIES, COPIES + 256, COPIES + 512
"""Where the copies of the indices, and of indptr, of the first matrix are, and what its call works in."""


class FakeSparse(FakeLibrary):
    """Its descriptors are numbers, and every call works in 1000 bytes."""

    def __init__(self) -> None:
        super().__init__(CUSPARSE.module, CUSPARSE.error)

    def __getattr__(self, name: str) -> Any:
        answered = super().__getattr__(name)
        if name[0].isupper() or name == "create":
            return answered

        def call(*arguments: Any) -> int:
            answered(*arguments)
            if "buffer_size" in name:
                return 1000
            self.handles += name.startswith("create_") or name.endswith("create_descr")
            return self.handles

        return call

    def calls(self, name: str) -> list[list[Any]]:
        return [arguments for each, *arguments in self.called if each == name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSparse:
    fake = FakeSparse()
    fake.install(monkeypatch, CUSPARSE.name)
    monkeypatch.setattr(sparse_plans, "load_module", lambda name, distribution: SimpleNamespace(CudaDataType=Numbers()))
    return fake


@pytest.fixture
def lane(context: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lane that takes down what is launched: `checks` of indices, and `launched`, which is all else."""
    told: list[int] = []
    functions: Any = Names()
    made = SimpleNamespace(stream=CudaStream(context, functions), checks=[], launched=[], told=told)

    def launch(stream: Any, function: Any, *arguments: int) -> None:
        is_check = function.startswith(("sparse_check", "sparse_replace"))
        (made.checks if is_check else made.launched).append((function, *arguments))

    def copy_dtoh(destination: memoryview, source: int) -> None:
        assert source == STATUS
        destination[0] = bool(told)

    monkeypatch.setattr(CudaStream, "copy_dtoh", lambda self, destination, source: copy_dtoh(destination, source))
    monkeypatch.setattr(CudaStream, "launch", launch)
    monkeypatch.setattr(CudaStream, "synchronize", lambda self: None)
    return made


class Owner:
    name, identity, live_generation, is_closing = "cuda:0", secrets.token_hex(4), 1, False
    dropped: ClassVar[deque[int]] = deque()


def ref(*shape: int, dtype: DType = DType.FLOAT32) -> AccelRef:
    return AccelRef(Owner(), 1, shape, dtype, 1)  # type: ignore[arg-type]


def matrix(
    form: Any = "csr", shape: tuple[int, int] = (4, 6), nnz: int = 5, dtype: DType = DType.FLOAT32, index: DType = DType.INT32
) -> SparseRef:
    marks = nnz if form == "coo" else 1 + shape[form == "csc"]
    return SparseRef(form, ref(nnz, dtype=dtype), ref(nnz, dtype=index), ref(marks, dtype=index), shape)


def run(library: SparseLibrary, lane: Any, op: Any, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    """Do what the layers above do."""
    op.plan()
    if library.scratch_nbytes(op) is None:
        library.measure(op)
    library.kernels[op.kind](lane, op, op.plan(), inputs, (*outputs, *([] if op.plan().status is None else [STATUS]), COPIES))


def test_a_plan_is_made_once_and_pointed_to_each_ops_operands(fake: FakeSparse, context: Any, lane: Any) -> None:
    library, op = SparseLibrary(context), ops.Spmv(matrix(), ref(6), alpha=2.0)
    assert library.may_block(lane, op)
    assert library.scratch_nbytes(op) is None
    library.prepare(lane.stream)
    run(library, lane, op, (DATA, INDICES, INDPTR, X), (OUT,))
    assert library.scratch_nbytes(op) == 512 + 1000, "of the indices, and of the call"
    assert not library.may_block(lane, op)
    assert library.may_block(lane, ops.Spmv(matrix(nnz=6), ref(6))), "a matrix of another size"
    run(library, lane, op, (DATA + 64, INDICES, INDPTR, X), (OUT,))
    assert fake.names().count("create_csr") == fake.names().count("sp_mv_buffer_size") == 1
    ((descriptor, *first), (_, *second)) = fake.calls("csr_set_pointers")
    assert (first, second) == ([MARKS, SAFE, DATA], [MARKS, SAFE, DATA + 64])
    assert lane.checks[:2] == [
        ("sparse_check_4", 1, 256, INDICES, INDPTR, SAFE, MARKS, STATUS, 5, 5, 4, 6, 0, 0),
        ("sparse_replace_4", 1, 256, SAFE, MARKS, STATUS, 5, 5, 4, 6, 0),
    ]
    x, y = [values for _, values in fake.calls("dn_vec_set_values")][:2]
    assert (x, y) == (X, OUT)
    call = fake.calls("sp_mv")[0]
    assert (call[1], call[3], call[-1]) == (0, descriptor, WORK)
    library.close()
    assert [name for name in fake.names() if name.startswith("destroy_")] == ["destroy_dn_vec", "destroy_dn_vec", "destroy_sp_mat"]


def test_without_elements_nothing_is_asked_of_the_library(fake: FakeSparse, context: Any, lane: Any) -> None:
    library, empty, out = SparseLibrary(context), matrix(nnz=0), ref(4)
    library.prepare(lane.stream)
    fake.called.clear()
    plain, scaled = ops.Spmv(empty, ref(6)), ops.Spmv(empty, ref(6), out=out, beta=2.0)
    run(library, lane, plain, (0, 0, INDPTR, X), (OUT,))
    run(library, lane, scaled, (0, 0, INDPTR, X), (OUT,))
    assert [call[0] for call in lane.stream.context.driver.called if call[0] == "fill"] == ["fill"]
    assert lane.launched[-1][0] == "scale_f32"
    assert lane.launched[-1][3:9] == (OUT, 4, 1, 4, 0, 1)
    assert library.may_block(lane, scaled), "the kernel that scales may have to be compiled"
    assert not library.may_block(lane, plain)
    run(library, lane, ops.Tocsc(empty), (0, 0, INDPTR), (0, 0, OUT))
    assert fake.called == []


def test_elements_that_can_have_no_index_are_refused(fake: FakeSparse, context: Any, lane: Any) -> None:
    library = SparseLibrary(context)
    for a in (matrix(shape=(0, 6)), matrix(shape=(4, 0)), matrix("coo", (0, 6)), matrix("csc", (4, 0))):
        with pytest.raises(InvalidArgumentError, match="index 0 of a sparse matrix is out of range"):
            run(library, lane, ops.Todense(a), (DATA, INDICES, INDPTR), (OUT,))
    assert lane.checks == []
