"""Which ops of the CUDA backend are enqueued beside the loop, without a GPU: those that would make or load something there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accel import DType, Transpose
from accel_cuda.blocking import Blocking


class Lane:
    """A lane of which nothing is made yet, as it is in the lane of batches."""

    def __init__(self) -> None:
        self.compute = SimpleNamespace(has_workspace=False, has_blas=False)


def ref(*shape: int, offset: int = 0) -> Any:
    return SimpleNamespace(shape=shape, dtype=DType.FLOAT16, offset=offset)


def gemm(offset: int = 0, kind: str = "gemm") -> Any:
    none = Transpose.NONE
    return SimpleNamespace(
        kind=kind, library="blas", a=ref(4, 4), b=ref(4, 4, offset=offset), transpose_a=none, transpose_b=none, allow_tf32=False
    )


def conv2d(stride: int = 1, padding: int = 0) -> Any:
    return SimpleNamespace(
        kind="conv2d", library="dnn", input=ref(1, 8, 9, 9), filter=ref(8, 8, 1, 1), stride=(stride, stride), padding=(padding, padding)
    )


@pytest.fixture
def blocking() -> Blocking:
    return Blocking({}, pinned=None)  # type: ignore[arg-type]  # no copy is asked about


@pytest.mark.parametrize(("library", "kind"), [("reduce", "reduce"), ("dnn", "attention"), ("blas", "dot"), ("blas", "nrm2")])
def test_what_takes_the_workspace_is_beside_until_it_is_there(blocking: Blocking, library: str, kind: str) -> None:
    lane, op = Lane(), SimpleNamespace(kind=kind, library=library)
    assert blocking.may_block(lane, op)
    assert blocking.may_block(lane, op)
    lane.compute.has_workspace = True
    # No cuBLAS handle: these are kernels of the backend's own.
    assert not blocking.may_block(lane, op)


@pytest.mark.parametrize("kind", ["gemm", "gemm_batched"])
def test_a_product_is_beside_the_first_time_and_where_there_is_no_handle(blocking: Blocking, kind: str) -> None:
    lane, other = Lane(), Lane()
    lane.compute.has_blas = True
    assert blocking.may_block(lane, gemm(kind=kind))
    assert not blocking.may_block(lane, gemm(kind=kind))
    assert blocking.may_block(other, gemm(kind=kind))
    # The library has other kernels for what is not aligned.
    assert blocking.may_block(lane, gemm(2, kind))
    assert not blocking.may_block(lane, gemm(2, kind))
    assert not blocking.may_block(lane, gemm(32, kind))


def test_a_convolution_is_known_by_all_that_decides_how_it_is_made(blocking: Blocking) -> None:
    lane, other = Lane(), Lane()
    for op in (conv2d(2), conv2d(1), conv2d(1, 1)):
        assert blocking.may_block(lane, op)
        assert not blocking.may_block(lane, op)
    assert blocking.may_block(other, conv2d(1))


def test_scaling_needs_nothing(blocking: Blocking) -> None:
    assert not any(blocking.may_block(Lane(), SimpleNamespace(kind=kind, library="blas")) for kind in ("axpy", "scal"))
