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
from accel.ref import AccelRef
from accel_cuda.core.memo import Memo
from accel_cuda.core.stream import WORKSPACE, CudaStream
from accel_cuda.families import linalg, linalg_plans
from accel_cuda.families.linalg import LinalgLibrary, spread
from accel_cuda.families.linalg_plans import CUBLASLT
from tests.cuda_support import FakeLibrary, FakeLibraryError, Numbers

if TYPE_CHECKING:
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
