"""cuSPARSE on a library that only takes down its calls: what is asked of it, which memory each call gets, and what may block."""

from __future__ import annotations

import ctypes
import secrets
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from accel import DType, InvalidArgumentError, SparseRef, Transpose, UnsupportedError, ops
from accel.memory import HostArena
from accel.ref import AccelRef
from accel_cuda.core.stream import CudaStream
from accel_cuda.families import sparse_plans
from accel_cuda.families.sparse import SparseLibrary
from accel_cuda.families.sparse_plans import CUSPARSE
from tests.cuda_support import Context, FakeLibrary, Numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA, INDICES, INDPTR, X, OUT, STATUS, COPIES = (n << 30 for n in range(1, 8))
SAFE, MARKS, WORK = COPIES, COPIES + 256, COPIES + 512
"""Where the copies of the indices, and of indptr, of the first matrix are, and what its call works in."""
SAFE_B, MARKS_B, WORK_B = COPIES + 512, COPIES + 768, COPIES + 1024
"""The same of a second matrix, and what a call works in then."""


class FakeSparse(FakeLibrary):
    """Its descriptors are numbers, and every call works in 1000 bytes."""

    def __init__(self) -> None:
        super().__init__(CUSPARSE.module, CUSPARSE.error)
        self.attributes: list[int] = []
        self.found = 6

    def __getattr__(self, name: str) -> Any:
        answered = super().__getattr__(name)
        if name[0].isupper() or name == "create":
            return answered

        def call(*arguments: Any) -> int:
            answered(*arguments)
            if name == "sp_mat_set_attribute":
                self.attributes.append(ctypes.c_int32.from_address(arguments[2]).value)
            if "buffer_size" in name:
                if name.startswith("sddmm"):
                    ctypes.c_uint64.from_address(arguments[-1]).value = 1000
                return 1000
            if name == "sp_gemm_work_estimation":
                return 300
            if name == "sp_gemm_compute":
                ctypes.c_uint64.from_address(arguments[11]).value = 1000
            if name == "sp_gemm_get_num_products":
                return 77
            if name == "sp_mat_get_size":
                return (4, 8, self.found)  # type: ignore[return-value]
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
def context() -> Iterator[Any]:
    arena = HostArena(1 << 20, block_bytes=1 << 20)
    made = Context(arena)

    def taken(name: str) -> Any:
        def call(*arguments: Any) -> int:
            made.driver.called.append((name, *[getattr(each, "value", each) for each in arguments]))
            return 0

        return call

    made.driver.hot.fill = {1: taken("fill")}
    made.driver.hot.copy = taken("copy")
    yield made
    arena.close()


class Functions(dict[str, str]):
    """Each kernel is its name."""

    def __missing__(self, name: str) -> str:
        return name


@pytest.fixture
def lane(context: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lane that takes down what is launched: `checks` of indices, and `launched`, which is all else."""
    told: list[int] = []
    functions: Any = Functions()
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


def test_csc_is_multiplied_as_csr_of_the_transpose(fake: FakeSparse, context: Any, lane: Any) -> None:
    library = SparseLibrary(context)
    for dtype, transpose, form, turn in (
        (DType.FLOAT32, Transpose.NONE, "csr", 1),
        (DType.FLOAT32, Transpose.CONJUGATE, "csr", 0),
        (DType.COMPLEX64, Transpose.TRANSPOSE, "csr", 0),
        (DType.COMPLEX64, Transpose.CONJUGATE, "csc", 2),
    ):
        fake.called.clear()
        x = ref(6 if transpose is Transpose.NONE else 4, dtype=dtype)
        run(library, lane, ops.Spmv(matrix("csc", dtype=dtype), x, transpose_a=transpose), (DATA, INDICES, INDPTR, X), (OUT,))
        assert fake.calls("sp_mv")[0][1] == turn
        (made,) = fake.calls(f"create_{form}")
        assert made[:3] == ([6, 4, 5] if form == "csr" else [4, 6, 5])


def test_conversions_go_through_csr_and_change_of_order(fake: FakeSparse, context: Any, lane: Any) -> None:
    library = SparseLibrary(context)
    made = OUT, OUT + 4096, OUT + 8192
    for form, kind, steps in (
        ("csr", ops.Tocsc, [("csr2csc_ex2", (4, 6), MARKS, made[2])]),
        ("csc", ops.Tocsr, [("csr2csc_ex2", (6, 4), MARKS, made[2])]),
        ("coo", ops.Tocsr, [("xcoo2csr", MARKS, made[2])]),
        ("csr", ops.Tocoo, [("xcsr2coo", MARKS, made[2])]),
        ("coo", ops.Tocsc, [("xcoo2csr", MARKS, WORK), ("csr2csc_ex2", (4, 6), WORK, made[2])]),
        ("csc", ops.Tocoo, [("csr2csc_ex2", (6, 4), MARKS, WORK), ("xcsr2coo", WORK, made[2])]),
        ("csr", ops.Tocsr, []),
    ):
        fake.called.clear()
        op = kind(matrix(form))
        run(library, lane, op, (DATA, INDICES, INDPTR), made)
        seen: list[Any] = []
        for name, *arguments in fake.called:
            if name == "csr2csc_ex2":
                seen.append((name, tuple(arguments[1:3]), arguments[5], arguments[8]))
                assert arguments[-1] == WORK + (256 if len(steps) > 1 else 0)
            elif name in ("xcoo2csr", "xcsr2coo"):
                seen.append((name, arguments[1], arguments[4]))
                assert arguments[2:4] == [5, 4], "elements and rows"
        assert seen == steps, (form, kind)
        nbytes = 1000 if any(step[0] == "csr2csc_ex2" for step in steps) else 0
        assert library.scratch_nbytes(op) == 512 + nbytes + 256 * (len(steps) > 1)
    with pytest.raises(UnsupportedError, match="int32"):
        run(library, lane, ops.Tocsc(matrix(index=DType.INT64)), (DATA, INDICES, INDPTR), made)


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


def test_a_triangular_system_is_analysed_each_time(fake: FakeSparse, context: Any, lane: Any) -> None:
    library = SparseLibrary(context)
    op = ops.SpsolveTriangular(matrix("csc", (4, 4)), ref(4, 3))
    for _ in range(2):
        run(library, lane, op, (DATA, INDICES, INDPTR, X), (OUT,))
    assert lane.launched == [("sparse_diagonal_f32_4", 1, 256, DATA, SAFE, MARKS, STATUS + 16, 4)] * 2
    assert [each[1] for each in fake.calls("sp_sm_analysis")] == [1, 1], "csr of the transpose, whose transpose is solved"
    steps = ("analysis", "solve", "destroy_descr")
    assert [name[6:] for name in fake.names() if name.startswith("sp_sm_") and name[6:] in steps] == ["destroy_descr", *steps, *steps]
    assert fake.calls("sp_sm_analysis")[0][-1] == WORK
    assert fake.names().count("create_csr") == 1
    assert fake.attributes == [1, 0], "lower csc is upper csr, whose diagonal is read"
    run(
        library,
        lane,
        ops.SpsolveTriangular(matrix("csr", (4, 4)), ref(4), unit_diagonal=True),
        (DATA, INDICES, INDPTR, X),
        (OUT,),
    )
    assert fake.attributes[2:] == [0, 1]
    assert len(lane.launched) == 2, "no diagonal is looked at"
    unchecked = ops.SpsolveTriangular(matrix("csr", (4, 4)), ref(4), check=False)
    run(library, lane, unchecked, (DATA, INDICES, INDPTR, X), (OUT, OUT + 512))
    assert lane.launched[2:] == [("sparse_diagonal_f32_4", 1, 256, DATA, SAFE, MARKS, OUT + 512, 4)], "the info is a result"
    refused = ops.SpsolveTriangular(matrix("csc", (4, 4), dtype=DType.COMPLEX64), ref(4, dtype=DType.COMPLEX64), transpose_a="c")
    with pytest.raises(UnsupportedError, match="conjugate"):
        run(library, lane, refused, (DATA, INDICES, INDPTR, X), (OUT,))


def test_sampled_products_add_to_a_copy_of_the_pattern(fake: FakeSparse, context: Any, lane: Any) -> None:
    library, pattern = SparseLibrary(context), matrix()
    op = ops.Sddmm(ref(4, 3), ref(3, 6), pattern, beta=2.0)
    run(library, lane, op, (X, X + 512, DATA, INDICES, INDPTR), (OUT,))
    assert fake.calls("csr_set_pointers")[0][1:] == [MARKS, SAFE, OUT]
    assert ("copy", OUT, DATA, 20, 77) in lane.stream.context.driver.called
    assert [values for _, values in fake.calls("dn_mat_set_values")] == [X, X + 512]
    assert library.scratch_nbytes(op) == 512 + 1000


def test_a_sum_that_is_larger_than_its_room_is_made_beside_it(fake: FakeSparse, context: Any, lane: Any) -> None:
    library, a, b = SparseLibrary(context), matrix("csc", nnz=5), matrix("csc", nnz=3)
    inputs, outputs = (DATA, INDICES, INDPTR, DATA + 1, INDICES + 1, INDPTR + 1), (OUT, OUT + 256, OUT + 512, OUT + 768)
    for size, made, scratch in ((8, outputs[:2], WORK_B), (4, (WORK_B, WORK_B + 256), WORK_B + 512)):
        fake.called.clear()
        context.driver.called.clear()
        op = ops.Add(a, b, size=size)
        run(library, lane, op, inputs, outputs)
        assert {check[-1] for check in lane.checks if check[0] == "sparse_check_4"} == {1}, "csrgeam2 merges rows that are in order"
        first = fake.calls("xcsrgeam2nnz")[0]
        assert first[1:3] == [6, 4], "csc is csr of the transpose"
        assert [first[i] for i in (4, 5, 6, 8, 9, 10, 12, 13, 14)] == [
            5,
            MARKS,
            SAFE,
            3,
            MARKS_B,
            SAFE_B,
            *outputs[2:],
            scratch,
        ]
        second = fake.calls("scsrgeam2")[0]
        assert [second[i] for i in (5, 6, 7, 8, 11, 12, 13, 14)] == [5, DATA, MARKS, SAFE, 3, DATA + 1, MARKS_B, SAFE_B]
        assert second[16:] == [made[0], outputs[2], made[1], scratch]
        modes = [fake.PointerMode.DEVICE, fake.PointerMode.HOST]
        assert [name for name in fake.names() if name in ("set_pointer_mode", "xcsrgeam2nnz", "scsrgeam2")] == [
            "set_pointer_mode", "xcsrgeam2nnz", "set_pointer_mode", "scsrgeam2",
        ]  # fmt: skip
        assert [call[1] for call in fake.calls("set_pointer_mode")] == modes
        copies = [call[1:4] for call in context.driver.called if call[0] == "copy"]
        assert copies == ([] if size == 8 else [(OUT, WORK_B, 16), (OUT + 256, WORK_B + 256, 16)])
        assert library.scratch_nbytes(op) == scratch - COPIES + 1000
    fake.called.clear()
    run(library, lane, ops.Add(matrix(nnz=0), matrix(nnz=0), size=0), inputs, outputs)
    assert fake.called == []
    with pytest.raises(UnsupportedError, match="int32"):
        run(library, lane, ops.Add(matrix(index=DType.INT64), matrix(index=DType.INT64)), inputs, outputs)


def test_csr_of_a_dense_matrix_is_counted_summed_and_picked(
    fake: FakeSparse, context: Any, lane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    cub = SimpleNamespace(
        is_ready=lambda algorithm: False,
        scratch_nbytes=lambda algorithm, count: 77,
        run=lambda stream, algorithm, scratch, count, x, y: taken.append((algorithm.dtype, scratch, count, x, y)),
    )
    monkeypatch.setattr("accel_cuda.families.sparse.Cub", lambda context: cub)
    monkeypatch.setattr(CudaStream, "launch", lambda self, *arguments: taken.append(arguments))
    library, op = SparseLibrary(context), ops.Fromdense(ref(20, 33, dtype=DType.FLOAT16), size=9)
    lane.stream.functions = {"sparse_count_f16_4": "count", "sparse_pick_f16_4": "pick"}
    assert library.may_block(lane, op)
    run(library, lane, op, (X,), (OUT, OUT + 256, OUT + 512, OUT + 768))
    assert taken == [
        ("count", 3, 256, X, OUT + 512, 20, 33),
        (DType.INT32, COPIES, 21, OUT + 512, OUT + 512),
        ("pick", 3, 256, X, OUT + 512, OUT, OUT + 256, OUT + 768, 20, 33, 9),
    ]
    assert fake.called == []


def test_a_diagonal_is_taken_by_one_kernel(fake: FakeSparse, context: Any, lane: Any) -> None:
    library = SparseLibrary(context)
    for form, n in (("csr", 4), ("csc", 4), ("coo", 5)):
        lane.launched.clear()
        context.driver.called.clear()
        op = ops.Diagonal(matrix(form))
        assert not library.may_block(lane, op)
        run(library, lane, op, (DATA, INDICES, INDPTR), (OUT,))
        assert lane.launched == [(f"sparse_extract{'_coo' * (form == 'coo')}_f32_4", 1, 256, DATA, SAFE, MARKS, OUT, n)]
        assert [call[0] for call in context.driver.called if call[0] == "fill"] == ["fill"], "0 where nothing is stored"
    lane.launched.clear()
    run(library, lane, ops.Diagonal(matrix(nnz=0)), (DATA, INDICES, INDPTR), (OUT,))
    assert lane.launched == []
    assert fake.called == []


def test_a_sparse_product_learns_what_it_works_in_and_how_many_elements_it_has(
    fake: FakeSparse, context: Any, lane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, inputs = SparseLibrary(context), (DATA, INDICES, INDPTR, DATA + 1, INDICES + 1, INDPTR + 1)
    filled: list[Any] = []
    monkeypatch.setattr(CudaStream, "fill", lambda self, *each: filled.append(each))
    for form, shapes in (("csr", [[4, 6, 5], [6, 8, 3], [4, 8, 0]]), ("csc", [[8, 6, 3], [6, 4, 5], [8, 4, 0]])):
        a, b = matrix(form, (4, 6), 5), matrix(form, (6, 8), 3)
        for workspace, needed, products in ((0, 512, -1), (512, 1512, 77)):
            fake.called.clear()
            filled.clear()
            op: Any = ops.SpgemmSize(a, b, workspace=workspace)
            assert library.may_block(lane, op)
            assert library.scratch_nbytes(op) == 1024 + 256 + workspace
            run(library, lane, op, inputs, (OUT,))
            assert [call[:3] for call in fake.calls("create_csr")] == shapes
            assert fake.calls("create_csr")[2][3:6] == [WORK_B, 0, 0], "an indptr of its own"
            assert filled == [(OUT + 8 * i, n.to_bytes(8, "little", signed=True), 1) for i, n in enumerate((needed, products))]
            asked = [call[-1] for call in fake.calls("sp_gemm_work_estimation")]
            assert asked == ([0] if products < 0 else [0, WORK_B + 256])
        outputs = OUT, OUT + 256, OUT + 512, OUT + 768
        for size, found in ((10, 6), (6, 6), (5, 6), (9, 0)):
            fake.called.clear()
            filled.clear()
            fake.found = found
            op = ops.Spgemm(a, b, size=size, workspace=1512)
            run(library, lane, op, inputs, outputs)
            first = fake.calls("create_csr")[0]
            assert first[3:6] == ([MARKS, SAFE, DATA] if form == "csr" else [MARKS_B, SAFE_B, DATA + 1])
            assert [call[-1] for call in fake.calls("sp_gemm_work_estimation")] == [0, WORK_B]
            assert [call[-1] for call in fake.calls("sp_gemm_compute")] == [0, WORK_B + 512]
            written = found if found <= size else 0
            assert [call[1:] for call in fake.calls("csr_set_pointers")] == [[outputs[2], outputs[1], outputs[0]]] * bool(written)
            assert len(fake.calls("sp_gemm_copy")) == bool(written)
            assert filled[-1] == (outputs[3], found.to_bytes(8, "little"), 1)
            assert ((outputs[2], bytes(4), (4 if form == "csr" else 8) + 1) in filled) == (not written)
            rest = size - written
            assert [each for each in filled if each[1] == b"\0"] == [
                (outputs[0] + 4 * written, b"\0", 4 * rest),
                (outputs[1] + 4 * written, b"\0", 4 * rest),
            ] * bool(rest)
            assert [name for name in fake.names() if "destroy" in name] == ["sp_gemm_destroy_descr", *["destroy_sp_mat"] * 3]
        with pytest.raises(InvalidArgumentError, match="1512"):
            run(library, lane, ops.Spgemm(a, b, size=9, workspace=1511), inputs, outputs)
    fake.called.clear()
    run(library, lane, ops.Spgemm(matrix(), matrix(shape=(6, 8), nnz=0), size=0), inputs, outputs)
    assert fake.called == []
    lane.told.append(1)
    run(library, lane, ops.Spgemm(matrix(), matrix(shape=(6, 8)), size=9, workspace=1512), inputs, outputs)
    assert fake.called == [], "the host waits anyway, and has seen that indices are out of range"
    lane.told.clear()
    with pytest.raises(UnsupportedError, match="int32"):
        run(library, lane, ops.SpgemmSize(matrix(index=DType.INT64), matrix(shape=(6, 8), index=DType.INT64)), inputs, (OUT,))
    lane.stream.is_capturing = True
    with pytest.raises(UnsupportedError, match="graph"):
        run(library, lane, ops.Spgemm(matrix(), matrix(shape=(6, 8)), size=9), inputs, outputs)


def blocks(nnz: int = 2, dtype: DType = DType.FLOAT32, columns: int = 3) -> SparseRef:
    return SparseRef("bsr", ref(nnz, 2, columns, dtype=dtype), ref(nnz, dtype=DType.INT32), ref(4, dtype=DType.INT32), (6, 4 * columns))


def test_blocks_have_a_descriptor_for_each_product(fake: FakeSparse, context: Any, lane: Any) -> None:
    library, op = SparseLibrary(context), ops.Spmv(blocks(columns=2), ref(8))
    library.prepare(lane.stream)
    assert library.may_block(lane, op)
    for _ in range(2):
        run(library, lane, op, (DATA, INDICES, INDPTR, X), (OUT,))
    assert not library.may_block(lane, op)
    made = fake.calls("create_bsr")
    assert [each[:8] for each in made[1:]] == [[3, 4, 2, 2, 2, MARKS, SAFE, DATA]] * 2
    assert lane.checks[0] == ("sparse_check_4", 1, 256, INDICES, INDPTR, SAFE, MARKS, STATUS, 2, 4, 3, 4, 0, 0), "in blocks"
    assert {each[-1] for each in made} == {2}, "rows of a block are one after the other"
    assert len(fake.calls("sp_mv_buffer_size")) == 1
    assert len({call[3] for call in fake.calls("sp_mv")}) == 2
    run(library, lane, ops.Spmm(blocks(columns=2), ref(8, 5)), (DATA, INDICES, INDPTR, X), (OUT,))
    assert [call[1:3] for call in fake.calls("sp_mm")] == [[0, 0]]
    library.close()
    destroyed = [call[0] for call in fake.calls("destroy_sp_mat")]
    assert len(destroyed) == len(set(destroyed)) == len(fake.calls("create_bsr"))
    with pytest.raises(UnsupportedError, match="transpose"):
        run(library, lane, ops.Spmv(blocks(columns=2), ref(6), transpose_a=True), (DATA, INDICES, INDPTR, X), (OUT,))
    with pytest.raises(UnsupportedError, match="not square"):
        run(library, lane, ops.Spmv(blocks(), ref(12)), (DATA, INDICES, INDPTR, X), (OUT,))


def test_blocks_are_taken_apart_by_kernels(fake: FakeSparse, context: Any, lane: Any) -> None:
    library = SparseLibrary(context)
    made = OUT, OUT + 4096, OUT + 8192
    assert not library.may_block(lane, ops.Tocsr(blocks()))
    run(library, lane, ops.Tocsr(blocks()), (DATA, INDICES, INDPTR), made)
    run(library, lane, ops.Todense(blocks()), (DATA, INDICES, INDPTR), (OUT,))
    sizes = 3, 2, 3, 12, 12
    assert lane.launched == [
        ("sparse_blocks_csr_f32_4", 1, 256, DATA, SAFE, MARKS, *made, *sizes),
        ("sparse_blocks_dense_f32_4", 1, 256, DATA, SAFE, MARKS, OUT, *sizes),
    ]
    lane.launched.clear()
    run(library, lane, ops.Tocsr(blocks(0)), (DATA, INDICES, INDPTR), made)
    run(library, lane, ops.Todense(blocks(0)), (DATA, INDICES, INDPTR), (OUT,))
    assert lane.launched == []
    assert fake.called == []


def test_elements_that_can_have_no_index_are_refused(fake: FakeSparse, context: Any, lane: Any) -> None:
    library = SparseLibrary(context)
    for a in (matrix(shape=(0, 6)), matrix(shape=(4, 0)), matrix("coo", (0, 6)), matrix("csc", (4, 0))):
        with pytest.raises(InvalidArgumentError, match="index 0 of a sparse matrix is out of range"):
            run(library, lane, ops.Todense(a), (DATA, INDICES, INDPTR), (OUT,))
    assert lane.checks == []
