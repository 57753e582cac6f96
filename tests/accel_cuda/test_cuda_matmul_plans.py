"""cuBLASLt's products on a library that only takes down its calls: what is asked of it, which memory each call gets, and what may block."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel import DType, UnsupportedError, ops
from accel_cuda.core.stream import WORKSPACE, CudaStream
from accel_cuda.families import linalg_plans
from accel_cuda.families.linalg import LinalgLibrary, spread
from accel_cuda.families.linalg_plans import CUBLASLT
from tests.cuda_support import FakeLibrary, FakeLibraryError, Numbers, ref

RESULT = np.dtype([("algo", "<u8", (8,)), ("workspace_size", "<u8"), ("state", "<i4"), ("waves_count", "<f4"), ("reserved", "<i4", (4,))])
A, B, OUT, WORK, SCRATCH = (place << 30 for place in range(1, 6))


class FakeLt(FakeLibrary):
    """Its descriptors are numbers, and it has some algorithms for everything."""

    def __init__(self) -> None:
        super().__init__(CUBLASLT.module, CUBLASLT.error)
        self.matmul_heuristic_result_dtype = RESULT
        self.algorithms = 3
        self.workspace = 1000
        for name in ("matmul_desc", "matrix_layout", "matmul_preference"):
            setattr(self, f"get_{name}_attribute_dtype", lambda attribute: np.int64)

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        self.called.append(("matmul_algo_get_heuristic", *arguments))
        if "matmul_algo_get_heuristic" in self.fails:
            raise FakeLibraryError(self.fails["matmul_algo_get_heuristic"])
        wanted, results, count = arguments[-3:]
        found = min(wanted, self.algorithms)
        ctypes.c_int32.from_address(count).value = found
        for i in range(found):
            ctypes.c_uint64.from_address(results + i * RESULT.itemsize + 64).value = self.workspace * (i + 1)


@pytest.fixture
def stream(context: Any) -> CudaStream:
    made = CudaStream(context, {})
    made.use_workspace(WORK, WORKSPACE)
    return made


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> FakeLt:
    fake = FakeLt()
    fake.install(monkeypatch, CUBLASLT.name)
    monkeypatch.setattr(linalg_plans, "_setter", lambda path: lambda *_: 0)
    monkeypatch.setattr(
        linalg_plans, "load_module", lambda name, distribution: SimpleNamespace(CudaDataType=Numbers(), ComputeType=Numbers())
    )
    return fake


def run(library: LinalgLibrary, stream: CudaStream, op: Any, inputs: list[int]) -> None:
    """Run an op as the engine does."""
    if library.scratch_nbytes(op) is None:
        library.measure(op)
    assert library.scratch_nbytes(op) is not None
    library.kernels["matmul"](SimpleNamespace(stream=stream), op, None, inputs, [OUT, SCRATCH])


def matmuls(lt: FakeLt) -> list[tuple[Any, ...]]:
    return [call[1:] for call in lt.called if call[0] == "matmul"]


def test_every_product_of_a_broadcast_is_computed_once(rng: np.random.Generator) -> None:
    for _ in range(200):
        batch = tuple(int(each) for each in rng.integers(1, 4, int(rng.integers(0, 5))))
        a, b = (tuple(1 if rng.integers(2) else each for each in batch)[int(rng.integers(0, len(batch) + 1)) :] for _ in range(2))
        batch = np.broadcast_shapes(a, b)
        joins = bool(rng.integers(2))
        part = spread(batch, a, b, joins_rows=joins)
        found = {}
        for start_a, start_b, start in part.starts:
            for i in range(part.batch):
                for row in range(part.rows):
                    number = start * part.rows + i + row
                    assert number not in found
                    found[number] = (start_a * part.rows + i * part.step_a + row, start_b + i * part.step_b)
        numbers_a, numbers_b = (np.broadcast_to(np.arange(int(np.prod(each))).reshape(each), batch).ravel().tolist() for each in (a, b))
        assert [found[i] for i in range(len(found))] == list(zip(numbers_a, numbers_b, strict=True)), (batch, a, b, joins)
        assert part.rows == 1 or joins


def test_autotune_times_the_candidates_once(context: Any, stream: CudaStream, lt: FakeLt) -> None:
    library = LinalgLibrary(context)
    elapsed = iter([3.0, 1.0, 2.0])
    answered = context.driver.call

    def call(name: str, *arguments: Any) -> Any:
        return next(elapsed) if name == "cuEventElapsedTime" else answered(name, *arguments)

    context.driver.call = call
    op = ops.Matmul(ref((5, 7), DType.FLOAT32), ref((7, 3), DType.FLOAT32), autotune=True)
    stream.is_capturing = True
    run(library, stream, op, [A, B])
    assert len(matmuls(lt)) == 1, "nothing can be timed while a graph is made"
    stream.is_capturing = False
    lane = SimpleNamespace(stream=stream)
    assert library.may_block(lane, op)
    run(library, stream, op, [A, B])
    assert not library.may_block(lane, op)
    calls = matmuls(lt)
    assert len(calls) == 1 + 3 * 6 + 1
    assert calls[-1][14] == 2000
    run(library, stream, op, [A, B])
    assert len(matmuls(lt)) == len(calls) + 1


def test_an_algorithm_that_the_library_refuses_to_run_gives_way_to_the_next(
    context: Any, stream: CudaStream, lt: FakeLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lt, "workspace", 0)
    library = LinalgLibrary(context)
    op = ops.Matmul(ref((5, 7), DType.FLOAT32), ref((7, 3), DType.FLOAT32))
    refused = 2

    def matmul(*arguments: Any) -> None:
        nonlocal refused
        lt.called.append(("matmul", *arguments))
        refused -= 1
        if refused >= 0:
            raise FakeLibraryError(15)

    setattr(lt, "matmul", matmul)  # noqa: B010 - a type checker knows no such attribute
    run(library, stream, op, [A, B])
    run(library, stream, op, [A, B])
    calls = matmuls(lt)
    assert len({call[12] for call in calls[:3]}) == 3, "three algorithms"
    assert calls[2][12] == calls[3][12], "the third one is kept"
    refused = 1
    with pytest.raises(UnsupportedError, match="matmul answered NOT_SUPPORTED"):
        run(library, stream, op, [A, B])


def test_autotune_passes_over_what_cannot_be_run(context: Any, stream: CudaStream, lt: FakeLt) -> None:
    library = LinalgLibrary(context)
    op = ops.Matmul(ref((5, 7), DType.FLOAT32), ref((7, 3), DType.FLOAT32), autotune=True)

    def matmul(*arguments: Any) -> None:
        lt.called.append(("matmul", *arguments))
        if arguments[14] == 1000:
            raise FakeLibraryError(15)

    setattr(lt, "matmul", matmul)  # noqa: B010 - a type checker knows no such attribute
    run(library, stream, op, [A, B])
    assert matmuls(lt)[-1][14] == 2000


def test_what_the_library_has_no_algorithm_for_is_unsupported(context: Any, stream: CudaStream, lt: FakeLt) -> None:
    library = LinalgLibrary(context)
    op = ops.Matmul(ref((5, 7), DType.INT8), ref((7, 3), DType.INT8))
    for fails, algorithms in (({"matmul_algo_get_heuristic": 15}, 3), ({}, 0)):
        lt.fails, lt.algorithms = fails, algorithms
        with pytest.raises(UnsupportedError, match=r"int8 \(5, 7\) @ int8 \(7, 3\) to int32") as caught:
            run(library, stream, op, [A, B])
        assert "transpose_b=True" in str(caught.value.remedy)
    assert lt.names().count("matmul_desc_destroy") == 2
