"""cuBLASLt's products on a library that only takes down its calls: what is asked of it, which memory each call gets, and what may block."""

from __future__ import annotations

import ctypes
import secrets
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest

from accel import DType, UnsupportedError, ops
from accel.cpu.views import array
from accel.memory import HostArena
from accel.ref import AccelRef
from accel_cuda.core.memo import Memo
from accel_cuda.core.stream import WORKSPACE, CudaStream
from accel_cuda.families import linalg, linalg_plans
from accel_cuda.families.linalg import LinalgLibrary, spread
from accel_cuda.families.linalg_plans import CUBLASLT
from tests.cuda_support import Context, FakeLibrary, FakeLibraryError, Numbers
from tests.cuda_twins import products

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.ref import RefOwner

RESULT = np.dtype([("algo", "<u8", (8,)), ("workspace_size", "<u8"), ("state", "<i4"), ("waves_count", "<f4"), ("reserved", "<i4", (4,))])
A, B, BIAS, OUT, WORK, SCRATCH = (place << 30 for place in range(1, 7))


class FakeLt(FakeLibrary):
    """Its descriptors are numbers, and it has some algorithms for everything."""

    def __init__(self) -> None:
        super().__init__(CUBLASLT.module, CUBLASLT.error)
        self.matmul_heuristic_result_dtype = RESULT
        self.algorithms = 3
        self.workspace = 1000
        self.put: list[tuple[int, int]] = []
        for name in ("matmul_desc", "matrix_layout", "matmul_preference"):
            setattr(self, f"get_{name}_attribute_dtype", lambda attribute: np.int64)
            setattr(self, f"{name}_set_attribute", self.set_attribute)

    def set_attribute(self, descriptor: int, attribute: int, address: int, nbytes: int) -> None:
        self.put.append((attribute, ctypes.c_int64.from_address(address).value))

    def point(self, descriptor: int, attribute: int, address: Any, nbytes: int) -> int:
        """Do what ctypes would."""
        self.put.append((attribute, address._obj.value))
        return 0

    def matrix_layout_create(self, *arguments: int) -> int:
        self.handles += 1
        self.called.append(("matrix_layout_create", *arguments))
        return self.handles

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
def context() -> Iterator[Any]:
    arena = HostArena(1 << 20, block_bytes=1 << 20)
    made = Context(arena)

    def fill(*arguments: Any) -> int:
        made.driver.called.append(("fill",))
        return 0

    made.driver.hot.fill = {1: fill}
    yield made
    arena.close()


@pytest.fixture
def stream(context: Any) -> CudaStream:
    made = CudaStream(context, {})
    made.use_workspace(WORK, WORKSPACE)
    return made


F = TypeVar("F", bound=FakeLt)


def install(fake: F, monkeypatch: pytest.MonkeyPatch) -> F:
    """Have it loaded, with the function that is called by its address."""
    fake.install(monkeypatch, CUBLASLT.name)
    monkeypatch.setattr(linalg_plans, "_setter", lambda path: fake.point)
    return fake


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> FakeLt:
    fake = install(FakeLt(), monkeypatch)
    monkeypatch.setattr(
        linalg_plans, "load_module", lambda name, distribution: SimpleNamespace(CudaDataType=Numbers(), ComputeType=Numbers())
    )
    return fake


class Names:
    """An enum of bindings, which knows the name of each of its numbers."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getitem__(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    __getattr__ = __getitem__


class ComputingLt(FakeLt):
    """Computes products of the column-major matrices that its descriptors say, in memory of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.types, self.layouts = Names(), dict[int, tuple[int, ...]]()
        self.attributes: dict[int, dict[str, int]] = {}
        self.preferences: list[dict[str, int]] = []
        self.Epilogue = Names()
        for name, enum in (
            ("matmul_desc", "MatmulDescAttribute"),
            ("matrix_layout", "MatrixLayoutAttribute"),
            ("matmul_preference", "MatmulPreferenceAttribute"),
        ):
            names = Names()
            setattr(self, enum, names)
            setattr(self, f"{name}_set_attribute", partial(self.note, names))
            setattr(self, f"{name}_create", self.create_one)

    def create_one(self, *arguments: int) -> int:
        self.handles += 1
        self.layouts[self.handles], self.attributes[self.handles] = arguments, {}
        return self.handles

    def note(self, names: Names, descriptor: int, attribute: int, address: int, nbytes: int) -> None:
        self.attributes[descriptor][names.names[attribute]] = ctypes.c_int64.from_address(address).value

    def point(self, descriptor: int, attribute: int, address: Any, nbytes: int) -> int:
        self.note(self.MatmulDescAttribute, descriptor, attribute, ctypes.addressof(address._obj), nbytes)
        return 0

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        super().matmul_algo_get_heuristic(*arguments)
        self.preferences.append(self.attributes[arguments[6]])

    def matrices(self, address: int, layout: int) -> Any:
        kind, rows, columns, leading = self.layouts[layout]
        told = self.attributes[layout]
        size = (dtype := np.dtype(DTYPES[self.types.names[kind]])).itemsize
        strides = told.get("STRIDED_BATCH_OFFSET", 0) * size, size, leading * size
        return array(address, (told.get("BATCH_COUNT", 1), rows, columns), dtype, strides)

    def matmul(
        self,
        handle: int,
        description: int,
        alpha: int,
        a: int,
        la: int,
        b: int,
        lb: int,
        beta: int,
        c: int,
        lc: int,
        d: int,
        ld: int,
        *rest: int,
    ) -> None:
        told, preference = self.attributes[description], self.preferences[-1]
        for which, address in (("A", a), ("B", b), ("C", c), ("D", d), ("D", told.get("EPILOGUE_AUX_POINTER", 0))):
            assert address % preference[f"MIN_ALIGNMENT_{which}_BYTES"] == 0, which
        assert told.get("BIAS_POINTER", 0) % 16 == 0
        turned = [(lambda x: x, lambda x: x.swapaxes(1, 2), lambda x: x.swapaxes(1, 2).conj())[told[name]] for name in ("TRANSA", "TRANSB")]
        left, right, out = turned[0](self.matrices(a, la)), turned[1](self.matrices(b, lb)), self.matrices(d, ld)
        assert ("REDUCTION_SCHEME_MASK" in preference) == (out.dtype.itemsize <= 2)
        product = left.astype(np.complex128) @ right.astype(np.complex128)
        product = product if out.dtype.kind == "c" else product.real
        epilogue = self.Epilogue.names[told["EPILOGUE"]].split("_")
        if "BIAS" in epilogue:
            product = product + array(told["BIAS_POINTER"], (out.shape[1], 1), np.dtype(DTYPES[self.types.names[told["BIAS_DATA_TYPE"]]]))
        if "AUX" in epilogue:
            leading, step, size = told["EPILOGUE_AUX_LD"], told["EPILOGUE_AUX_BATCH_STRIDE"], out.dtype.itemsize
            array(told["EPILOGUE_AUX_POINTER"], out.shape, out.dtype, (step * size, size, leading * size))[...] = product
        out[...] = np.maximum(product, 0) if "RELU" in epilogue else np.tanh(product) if "GELU" in epilogue else product


DTYPES = {"CUDA_R_16F": "f2", "CUDA_R_32F": "f4", "CUDA_R_64F": "f8", "CUDA_C_64F": "c16"}
PRODUCTS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((5, 7), (7, 3), {}),
    ((7, 5), (7, 3), {"transpose_a": True}),
    ((5, 7), (3, 7), {"transpose_b": True, "bias": True, "activation": "relu"}),
    ((7, 5), (3, 7), {"transpose_a": "c", "transpose_b": "c"}),
    ((7,), (7, 3), {}),
    ((5, 7), (7,), {"bias": True}),
    ((2, 4, 5, 7), (7, 3), {"bias": True, "activation": "gelu", "aux": True}),
    ((2, 1, 5, 7), (4, 7, 3), {"bias": True, "activation": "gelu", "aux": True}),
    ((4, 7, 5), (7, 3), {"transpose_a": True}),
    ((5, 7), (4, 3, 7), {"transpose_b": True}),
    ((3, 1, 2, 1, 5, 7), (2, 4, 7, 3), {}),
    ((3, 1, 2, 5, 7), (2, 1, 7, 3), {"bias": True, "activation": "gelu", "aux": True}),
    ((2, 3, 5, 7), (2, 3, 7, 3), {}),
]


def placed(rng: np.random.Generator, owner: Any, shape: tuple[int, ...], dtype: DType, skip: int) -> tuple[AccelRef, Any]:
    """Return a view that begins ``skip`` elements behind an aligned address, and its elements in memory of the host."""
    held = np.zeros(int(np.prod(shape)) * dtype.itemsize + 1024, np.uint8)
    start = -held.ctypes.data % 256 + skip * dtype.itemsize
    values = held[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype.numpy).reshape(shape)
    values[...] = rng.standard_normal(shape)
    return ref(owner, (values.size + skip,), dtype)[skip:].reshape(shape), values


def transposed(x: Any, option: Any, wide: str) -> Any:
    turned = x.astype(wide).swapaxes(-1, -2) if option else x.astype(wide)
    return turned.conj() if option == "c" else turned


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32, DType.FLOAT64, DType.COMPLEX128])
def test_what_the_library_is_told_gives_the_product(
    dtype: DType, context: Any, stream: CudaStream, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    lt = install(ComputingLt(), monkeypatch)
    monkeypatch.setattr(linalg_plans, "load_module", lambda name, distribution: SimpleNamespace(CudaDataType=lt.types, ComputeType=Names()))
    monkeypatch.setattr(linalg, "_BLAS", frozenset())  # stacks too
    monkeypatch.setattr(linalg, "_SPECS", Memo())  # none of other tests, and none for them
    library, wide = LinalgLibrary(context), "c16" if dtype.is_complex else "f8"
    tolerance = 1e-2 if dtype is DType.FLOAT16 else 1e-5
    context.driver.hot.copy = lambda to, source, nbytes, pointer: ctypes.memmove(to, source, nbytes.value) and 0
    held = np.zeros(1024, np.uint8)
    scratch = held.ctypes.data + -held.ctypes.data % 256
    for shape_a, shape_b, options in PRODUCTS:
        if dtype.is_complex and "bias" in options:
            continue
        case, skips = f"{shape_a} {shape_b} {options}, seed {seed}", rng.integers(0, 3, 5).tolist()
        (ra, a), (rb, b) = placed(rng, owner, shape_a, dtype, skips[0]), placed(rng, owner, shape_b, dtype, skips[1])
        left, right = transposed(a, options.get("transpose_a"), wide), transposed(b, options.get("transpose_b"), wide)
        expected = np.asarray(left @ right)
        given = {"bias": placed(rng, owner, (right.shape[-1] if right.ndim > 1 else 1,), dtype, skips[2])}
        given |= {name: placed(rng, owner, expected.shape, dtype, skip) for name, skip in (("out", skips[3]), ("aux", skips[4]))}
        given = {name: each for name, each in given.items() if name in options or name == "out"}
        op = ops.Matmul(ra, rb, **{**options, **{name: each for name, (each, _) in given.items()}})
        bias = [given["bias"][1].ctypes.data] if "bias" in given else []
        written = [given[name][1].ctypes.data for name in ("out", "aux") if name in given]
        library.kernels["matmul"](SimpleNamespace(stream=stream), op, None, [a.ctypes.data, b.ctypes.data, *bias], [*written, scratch])
        if bias:
            expected = expected + given["bias"][1].astype(wide)
        active = np.maximum(expected, 0) if "relu" in options.values() else np.tanh(expected) if "gelu" in options.values() else expected
        np.testing.assert_allclose(given["out"][1], active, atol=tolerance, rtol=tolerance, err_msg=case)
        if "aux" in given:
            np.testing.assert_allclose(given["aux"][1], expected, atol=tolerance, rtol=tolerance, err_msg=case)


@pytest.fixture
def owner() -> Any:
    return SimpleNamespace(name="cuda", dropped=[], check=lambda ref: None)


def ref(owner: RefOwner, shape: tuple[int, ...], dtype: DType = DType.FLOAT32) -> AccelRef:
    return AccelRef(owner, 1, shape, dtype, 1)


def run(library: LinalgLibrary, stream: CudaStream, op: Any, inputs: list[int]) -> None:
    """Run an op as the engine does."""
    if library.scratch_nbytes(op) is None:
        library.measure(op)
    assert library.scratch_nbytes(op) is not None
    library.kernels["matmul"](SimpleNamespace(stream=stream), op, None, inputs, [OUT, SCRATCH])


def code(name: str) -> int:
    return int(Numbers()[name])


def matmuls(lt: FakeLt) -> list[tuple[Any, ...]]:
    return [call[1:] for call in lt.called if call[0] == "matmul"]


def test_b_is_the_first_matrix_and_the_bias_has_its_address(context: Any, stream: CudaStream, lt: FakeLt, owner: Any) -> None:
    library = LinalgLibrary(context)
    op = ops.Matmul(ref(owner, (5, 7)), ref(owner, (7, 3)), bias=ref(owner, (3,)), activation="gelu")
    lane, other = SimpleNamespace(stream=stream), SimpleNamespace(stream=SimpleNamespace(workspaces=[]))
    assert library.may_block(lane, op)
    run(library, stream, op, [A, B, BIAS])
    assert not library.may_block(lane, op)
    assert library.may_block(other, op), "that stream has no workspace"
    layouts = [call[2:] for call in lt.called if call[0] == "matrix_layout_create"]
    assert layouts == [(7, 5, 7), (3, 7, 3), (3, 5, 3)]  # a, b and the result: rows, columns, leading dimension
    (call,) = matmuls(lt)
    assert call[3:4] + call[5:6] + call[8:9] + call[10:11] == (B, A, OUT, OUT)
    assert call[13:] == (WORK, 1000, stream.handle)
    assert (code("EPILOGUE"), code("GELU_BIAS")) in lt.put
    assert (code("BIAS_POINTER"), 256) in lt.put, "the heuristic is told that there is one"
    assert lt.put[-1] == (code("BIAS_POINTER"), BIAS)
    run(library, stream, op, [A, B, BIAS + 256])
    assert lt.names().count("matmul_algo_get_heuristic") == 1
    assert lt.put[-1] == (code("BIAS_POINTER"), BIAS + 256)
    library.close()
    assert lt.names()[-1] == "destroy"


def test_broadcast_stacks_are_strided_batches(context: Any, stream: CudaStream, lt: FakeLt, owner: Any) -> None:
    library = LinalgLibrary(context)
    op = ops.Matmul(ref(owner, (2, 1, 5, 7)), ref(owner, (4, 7, 3)), activation="relu")
    run(library, stream, op, [A, B])
    calls = matmuls(lt)
    assert [(call[3] - B, call[5] - A, call[10] - OUT) for call in calls] == [(0, 0, 0), (0, 4 * 35, 4 * 4 * 15)]
    assert (code("BATCH_COUNT"), 4) in lt.put
    assert (code("STRIDED_BATCH_OFFSET"), 21) in lt.put
    assert library.commands(op) == 4
    one = ops.Matmul(ref(owner, (2, 4, 5, 7)), ref(owner, (7, 3)))
    run(library, stream, one, [A, B])
    assert len(matmuls(lt)) == 3, "rows of all matrices are those of one"
    assert [call[2:] for call in lt.called if call[0] == "matrix_layout_create"][-1] == (3, 40, 3)


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


def test_products_of_nothing_ask_nothing_of_the_library(context: Any, stream: CudaStream, lt: FakeLt, owner: Any) -> None:
    library = LinalgLibrary(context)
    for a, b in (((0, 3), (3, 4)), ((4, 0), (0, 3)), ((0, 4, 3), (3, 4))):
        op = ops.Matmul(ref(owner, a), ref(owner, b))
        assert library.scratch_nbytes(op) == 0
        assert not library.may_block(None, op)
        run(library, stream, op, [A, B])
    assert "matmul" not in lt.names()
    assert [name for name, *_ in context.driver.called if name == "fill"] == ["fill"], "only sums of nothing are zeros to be written"


def test_autotune_times_the_candidates_once(context: Any, stream: CudaStream, lt: FakeLt, owner: Any) -> None:
    library = LinalgLibrary(context)
    elapsed = iter([3.0, 1.0, 2.0])
    answered = context.driver.call

    def call(name: str, *arguments: Any) -> Any:
        return next(elapsed) if name == "cuEventElapsedTime" else answered(name, *arguments)

    context.driver.call = call
    op = ops.Matmul(ref(owner, (5, 7)), ref(owner, (7, 3)), autotune=True)
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


class FakeBlas:
    """cuBLAS's products, by numpy on memory of the host."""

    def batched_gemm(self, *arguments: Any) -> None:
        *given, dtype, allow_tf32 = arguments
        assert not allow_tf32
        multiply: Any = products
        multiply(*given, dtype)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.COMPLEX128])
def test_stacks_without_more_are_products_of_cublas(dtype: DType, context: Any, owner: Any) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    library, wide = LinalgLibrary(context), "c16" if dtype.is_complex else "f8"
    lane = SimpleNamespace(stream=FakeKernels(context))
    cases: list[tuple[tuple[int, ...], tuple[int, ...], Any, Any]] = [
        ((4, 5, 7), (4, 7, 3), False, False),
        ((4, 7, 5), (4, 3, 7), "c", True),
        ((2, 1, 5, 7), (4, 7, 3), False, False),
        ((4, 7, 5), (7, 3), True, False),
        ((5, 7), (3, 1, 2, 7, 3), False, False),
        ((7,), (2, 7, 3), False, False),
    ]
    for shape_a, shape_b, turn_a, turn_b in cases:
        (ra, a), (rb, b) = placed(rng, owner, shape_a, dtype, 1), placed(rng, owner, shape_b, dtype, 0)
        expected = np.asarray(transposed(a, turn_a, wide) @ transposed(b, turn_b, wide))
        op = ops.Matmul(ra, rb, transpose_a=turn_a, transpose_b=turn_b)
        out = np.zeros(expected.shape, dtype.numpy)
        assert library.scratch_nbytes(op) == 0
        lane.stream.blas = FakeBlas()
        assert library.may_block(lane, op), "the first one loads its kernel"
        library.kernels["matmul"](lane, op, None, [a.ctypes.data, b.ctypes.data], [out.ctypes.data, WORK])
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5, err_msg=f"{shape_a} {shape_b}, seed {seed}")
        assert not library.may_block(lane, op)
        lane.stream.blas = None
        assert library.may_block(lane, op), "the lane has no handle"
    assert library.library is None, "cuBLASLt is not needed"


class FakeKernels:
    """A stream that computes what the kernel for integers would, on memory of the host."""

    functions = {f"matmul_{code}": code for code in ("i16", "i64", "u8")}  # noqa: RUF012 - it is only read

    def __init__(self, context: Any) -> None:
        self.context = context

    def ready(self) -> Any:
        return self.context

    def launch_wide(self, code: str, grid: tuple[int, int], block: tuple[int, int], shared: int, *arguments: int) -> None:
        dtype = np.dtype(code[0] + str(int(code[1:]) // 8))
        a, b, y, m, n, k, row_a, column_a, step_a, row_b, column_b, step_b, batch = arguments
        assert grid == (-(-m // 32) * -(-n // 32), batch)
        assert block == (32, 8)
        size = dtype.itemsize
        left = array(a, (batch, m, k), dtype, (step_a * size, row_a * size, column_a * size))
        right = array(b, (batch, k, n), dtype, (step_b * size, row_b * size, column_b * size))
        np.matmul(left, right, out=array(y, (batch, m, n), dtype))


@pytest.mark.parametrize("dtype", [DType.INT16, DType.INT64, DType.UINT8])
def test_integers_are_multiplied_by_a_kernel(dtype: DType, context: Any, owner: Any) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    library = LinalgLibrary(context)
    cases: list[tuple[tuple[int, ...], tuple[int, ...], bool, bool]] = [
        ((5, 7), (7, 3), False, False),
        ((7, 5), (3, 7), True, True),
        ((2, 1, 5, 7), (4, 7, 3), False, False),
        ((4, 5, 7), (7, 3), False, False),
        ((4, 7, 5), (7, 3), True, False),
        ((7,), (2, 7, 3), False, False),
        ((2, 5, 7), (7,), False, False),
    ]
    for shape_a, shape_b, turn_a, turn_b in cases:
        a, b = (rng.integers(0, 200, shape).astype(dtype.numpy) for shape in (shape_a, shape_b))
        op = ops.Matmul(ref(owner, shape_a, dtype), ref(owner, shape_b, dtype), transpose_a=turn_a, transpose_b=turn_b)
        left, right = a.swapaxes(-1, -2) if turn_a else a, b.swapaxes(-1, -2) if turn_b else b
        expected = np.asarray(left @ right)
        out = np.zeros_like(expected)
        assert not library.may_block(None, op)
        assert library.scratch_nbytes(op) == 0
        lane = SimpleNamespace(stream=FakeKernels(context))
        library.kernels["matmul"](lane, op, None, [a.ctypes.data, b.ctypes.data], [out.ctypes.data, WORK])
        np.testing.assert_array_equal(out, expected, err_msg=f"{shape_a} {shape_b}, seed {seed}")
    assert library.library is None, "cuBLASLt is not needed"


def test_an_algorithm_that_the_library_refuses_to_run_gives_way_to_the_next(
    context: Any, stream: CudaStream, lt: FakeLt, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lt, "workspace", 0)
    library = LinalgLibrary(context)
    op = ops.Matmul(ref(owner, (5, 7)), ref(owner, (7, 3)))
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


def test_a_bias_between_two_vectors_is_copied(context: Any, stream: CudaStream, lt: FakeLt, owner: Any) -> None:
    copied: list[tuple[int, int, int]] = []
    library = LinalgLibrary(context)
    whole = ref(owner, (64,))
    op = ops.Matmul(ref(owner, (5, 7)), ref(owner, (7, 3)), bias=whole[1:4])
    assert library.scratch_nbytes(op) is None, "it is not loaded"
    library.measure(op)
    assert library.scratch_nbytes(op) == 256
    assert library.commands(op) == 3
    copying: Any = SimpleNamespace(
        context=context,
        ready=lambda: context,
        handle=77,
        is_capturing=True,
        copy=lambda to, source, nbytes: copied.append((to, source, nbytes)),
        prepare_workspace=lambda: WORK,
    )
    run(library, copying, op, [A, B, BIAS + 4])
    assert copied == [(SCRATCH, BIAS + 4, 12)]
    assert lt.put[-1] == (code("BIAS_POINTER"), SCRATCH)
    assert matmuls(lt)[-1][13] == WORK
    assert library.scratch_nbytes(ops.Matmul(op.a, op.b, bias=whole[4:7])) == 0


def test_autotune_passes_over_what_cannot_be_run(context: Any, stream: CudaStream, lt: FakeLt, owner: Any) -> None:
    library = LinalgLibrary(context)
    op = ops.Matmul(ref(owner, (5, 7)), ref(owner, (7, 3)), autotune=True)

    def matmul(*arguments: Any) -> None:
        lt.called.append(("matmul", *arguments))
        if arguments[14] == 1000:
            raise FakeLibraryError(15)

    setattr(lt, "matmul", matmul)  # noqa: B010 - a type checker knows no such attribute
    run(library, stream, op, [A, B])
    assert matmuls(lt)[-1][14] == 2000


def test_what_the_library_has_no_algorithm_for_is_unsupported(context: Any, stream: CudaStream, lt: FakeLt, owner: Any) -> None:
    library = LinalgLibrary(context)
    op = ops.Matmul(ref(owner, (5, 7), DType.INT8), ref(owner, (7, 3), DType.INT8))
    for fails, algorithms in (({"matmul_algo_get_heuristic": 15}, 3), ({}, 0)):
        lt.fails, lt.algorithms = fails, algorithms
        with pytest.raises(UnsupportedError, match=r"int8 \(5, 7\) @ int8 \(7, 3\) to int32") as caught:
            run(library, stream, op, [A, B])
        assert "transpose_b=True" in str(caught.value.remedy)
    assert lt.names().count("matmul_desc_destroy") == 2


def test_float8_results_have_scales_and_a_largest_value(context: Any, stream: CudaStream, lt: FakeLt, owner: Any) -> None:
    library = LinalgLibrary(context)
    f8 = DType.FLOAT8_E4M3FN
    numbers = [AccelRef(owner, 10 + i, (), DType.FLOAT32, 1) for i in range(3)]
    a, b = AccelRef(owner, 2, (16, 32), f8, 1), AccelRef(owner, 3, (16, 32), f8, 1)
    op = ops.Matmul(a, b, transpose_b=True, out_dtype=f8, scale_a=numbers[0], scale_out=numbers[1], amax=numbers[2])
    library.kernels["matmul"](SimpleNamespace(stream=stream), op, None, [A, B, 256, 512], [768, OUT, SCRATCH])
    assert lt.put[-3:] == [(code("B_SCALE_POINTER"), 256), (code("D_SCALE_POINTER"), 512), (code("AMAX_D_POINTER"), 768)]
    (call,) = matmuls(lt)
    assert (call[8], call[10]) == (0, OUT)
    assert call[9] != call[11], "what is added is told to be bfloat16"
    assert library.commands(op) == 2
