"""Which ops of the CUDA backend are enqueued beside the loop, without a GPU: those that would make or load something there."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from accel import DType, ReduceOp, Transpose
from accel_cuda.core.blocking import Blocking
from accel_cuda.families.context import ContextFamilies
from accel_cuda.families.parts import PARTS


class Lane:
    """A lane of which nothing is made yet, as it is in the lane of batches."""

    def __init__(self) -> None:
        self.stream = SimpleNamespace(workspaces=[], blas=None)


def run(blocking: Blocking, lane: Lane, op: Any, error: Exception | None = None) -> None:
    """Enqueue an op beside the loop, as its kernel is."""

    def kernel(*arguments: Any) -> None:
        if error is not None:
            raise error

    def enqueue() -> None:
        with contextlib.suppress(ValueError):
            blocking.noting(op.library, {op.kind: kernel})[op.kind](lane, op, None, (), ())

    thread = threading.Thread(target=enqueue)
    thread.start()
    thread.join()


def ref(*shape: int, offset: int = 0) -> Any:
    return SimpleNamespace(shape=shape, dtype=DType.FLOAT16, offset=offset, is_strided=False)


def gemm(offset: int = 0, kind: str = "gemm", out: int | None = None, beta: float = 0.0) -> Any:
    none, target = Transpose.NONE, None if out is None else ref(4, 4, offset=out)
    return SimpleNamespace(
        kind=kind, library="blas", a=ref(4, 4), b=ref(4, 4, offset=offset), out=target, beta=beta, transpose_a=none, transpose_b=none,
        allow_tf32=False,
    )  # fmt: skip


@pytest.fixture
def blocking() -> Blocking:
    programs: Any = SimpleNamespace(missing=frozenset())
    context: Any = SimpleNamespace(multiprocessors=132)
    families = ContextFamilies(context, programs)
    return Blocking(families.checks(), families.signatures(), pinned=None)  # type: ignore[arg-type]  # no copy is asked about


def test_what_takes_the_workspace_is_beside_until_it_is_there(blocking: Blocking) -> None:
    lane = Lane()
    op = SimpleNamespace(kind="reduce", library="reduce", x=ref(8), op=ReduceOp.SUM, middle=lambda: (1, 8, 1))
    assert blocking.may_block(lane, op)
    assert blocking.may_block(lane, op)
    lane.stream.workspaces.append(1)
    assert not blocking.may_block(lane, op)


@pytest.mark.parametrize("kind", ["gemm", "gemm_batched"])
def test_a_product_is_beside_the_first_time_and_where_there_is_no_handle(blocking: Blocking, kind: str) -> None:
    lane, other = Lane(), Lane()
    lane.stream.blas = object()
    assert blocking.may_block(lane, gemm(kind=kind))
    run(blocking, lane, gemm(kind=kind))
    assert not blocking.may_block(lane, gemm(kind=kind))
    assert blocking.may_block(other, gemm(kind=kind))
    # The library has other kernels for what is not aligned.
    assert blocking.may_block(lane, gemm(2, kind))
    run(blocking, lane, gemm(2, kind))
    assert not blocking.may_block(lane, gemm(2, kind))
    assert not blocking.may_block(lane, gemm(32, kind))
    # And for results that are not aligned, and those that are added to what is there.
    for other_kernel in (gemm(0, kind, out=2), gemm(0, kind, out=0, beta=1.0)):
        assert blocking.may_block(lane, other_kernel)
        run(blocking, lane, other_kernel)
        assert not blocking.may_block(lane, other_kernel)


@pytest.mark.parametrize("op", [gemm(), gemm(kind="gemm_batched")], ids=["gemm", "gemm_batched"])
def test_what_was_asked_about_and_never_loaded_is_beside_again(blocking: Blocking, op: Any) -> None:
    """It was dropped before its turn, it failed, or it is another lane's that is still loading."""
    lane = Lane()
    lane.stream.blas = object()
    assert blocking.may_block(lane, op)
    assert blocking.may_block(lane, op)
    run(blocking, lane, op, error=ValueError("no room"))
    assert blocking.may_block(lane, op)
    run(blocking, lane, op)
    assert not blocking.may_block(lane, op)


def test_what_one_lane_has_loaded_the_others_have(blocking: Blocking) -> None:
    """Functions are loaded into the context."""
    lane, other = Lane(), Lane()
    lane.stream.blas = other.stream.blas = object()
    assert blocking.may_block(lane, gemm())
    assert blocking.may_block(other, gemm())
    run(blocking, lane, gemm())
    assert not blocking.may_block(other, gemm())


def solve(dtype: DType = DType.FLOAT32, lower: bool = False, batch: int = 1) -> Any:
    a = SimpleNamespace(shape=(batch, 400, 400) if batch > 1 else (400, 400), dtype=dtype, offset=0, is_strided=False)
    return SimpleNamespace(kind="trsm", library="blas", a=a, b=a, out=None, side="left", lower=lower, batch_count=batch)


def test_a_typed_call_is_beside_the_first_time_for_each_form_and_dtype(blocking: Blocking) -> None:
    lane = Lane()
    assert blocking.may_block(lane, solve())
    run(blocking, lane, solve())
    assert blocking.may_block(lane, solve())  # the lane has no handle
    lane.stream.blas = object()
    assert not blocking.may_block(lane, solve())
    assert blocking.may_block(lane, solve(lower=True))
    assert blocking.may_block(lane, solve(DType.FLOAT64))


def test_a_solution_counts_the_launches_of_its_rows_and_matrices() -> None:
    count = PARTS["blas"].commands["trsm"]
    assert callable(count)
    assert count(solve(batch=3)) == 3 * count(solve()) > 3 * 400 // 64


def test_a_batch_of_many_calls_is_always_enqueued_off_the_loop(blocking: Blocking) -> None:
    lane = Lane()
    lane.stream.blas = object()
    for batch, may_block in ((3, False), (100, False), (10000, False)):
        run(blocking, lane, solve(batch=batch))
        assert blocking.may_block(lane, solve(batch=batch)) is may_block
    few, many = (SimpleNamespace(**{**vars(solve(batch=batch)), "kind": "trmm"}) for batch in (3, 100))
    for op in (few, many):
        run(blocking, lane, op)
        assert blocking.may_block(lane, op) is (op is many)
    wide = SimpleNamespace(**{**vars(few), "a": SimpleNamespace(**{**vars(few.a), "shape": (3, 4096, 4096)})})
    run(blocking, lane, wide)
    assert blocking.may_block(lane, wide)  # few calls, of many launches each


def test_only_so_many_signatures_are_remembered(blocking: Blocking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_cuda.core.memo._MOST", 2)
    lane = Lane()
    lane.stream.blas = object()
    for offset in (0, 2, 4, 4):
        run(blocking, lane, gemm(offset))
    assert [blocking.may_block(lane, gemm(offset)) for offset in (0, 2, 4)] == [True, False, False]


def test_a_group_of_many_products_is_always_enqueued_off_the_loop(blocking: Blocking) -> None:
    def group(count: int) -> Any:
        return SimpleNamespace(
            kind="gemm_grouped", library="blas", a=(ref(8),) * count, b=(ref(8),) * count, out=None, transpose_a=0, transpose_b=0,
            allow_tf32=False, beta=0.0,
        )  # fmt: skip

    lane = Lane()
    lane.stream.blas = object()
    for count in (3, 1000):
        assert blocking.may_block(lane, group(count))
        run(blocking, lane, group(count))
    assert [blocking.may_block(lane, group(count)) for count in (3, 1000)] == [False, True]
