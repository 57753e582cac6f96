"""What the compute interface does on the CPU beyond the conformance suite: its own errors, workspaces and cost estimates."""

from __future__ import annotations

import contextlib
import secrets
import tracemalloc
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest

from accel.compute import DeviceCompute
from accel.cpu import costs
from accel.cpu.backend import CpuBackend
from accel.cpu.families.precision import WORKSPACE, blocks
from accel.cpu.views import array
from accel.dtype import DType
from accel.enums import BinaryOp, Causal, ReduceOp, Transpose, UnaryOp
from accel.errors import InvalidArgumentError, NotInitializedError, OutOfMemoryError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array: TypeAlias = np.ndarray[Any, Any]

NONE = Transpose.NONE
TOLERANCE = {2: 1.6e-2, 4: 3e-5, 8: 3e-5, 16: 1e-12}


class LateStream:
    """A stream that runs its work only when it is synchronized."""

    def __init__(self) -> None:
        self.queue: list[tuple[Callable[[], None], object]] = []
        self.costs: list[float] = []

    def submit(self, work: Callable[[], None], cost: float, keep: object = None) -> None:
        self.queue.append((work, keep))
        self.costs.append(cost)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)[0]()


@pytest.fixture
def stream() -> LateStream:
    return LateStream()


@pytest.fixture
def compute(stream: LateStream) -> Iterator[DeviceCompute]:
    with contextlib.closing(DeviceCompute(CpuBackend().open(0), stream)) as compute:  # type: ignore[arg-type]  # all that kernels need of a stream
        compute.init()
        yield compute


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def at(x: Array) -> int:
    return int(x.ctypes.data)


def random(rng: np.random.Generator, shape: tuple[int, ...] | int, dtype: DType) -> Array:
    values: Array = rng.standard_normal(shape)
    if dtype.is_complex:
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype.numpy)


def high(x: Array) -> Array:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def assert_near(got: Array, expected: Array, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[got.dtype.itemsize] if got.dtype != np.float64 else 1e-12
    np.testing.assert_allclose(high(got), expected, rtol=tolerance, atol=tolerance * scale)


def test_nothing_works_before_init(stream: LateStream) -> None:
    compute = DeviceCompute(CpuBackend().open(0), stream)  # type: ignore[arg-type]
    x = np.zeros(4, np.float32)
    calls: list[Callable[[], object]] = [
        lambda: compute.unary(UnaryOp.NEG, at(x), at(x), 4),
        lambda: compute.gemm(NONE, NONE, 1, 1, 1, 1, at(x), 1, at(x), 1, 0, at(x), 1),
        lambda: compute.alloc(8),
        lambda: compute.free(0),
        lambda: compute.copy_htod(at(x), memoryview(b"1234")),
        lambda: compute.copy_dtoh(memoryview(bytearray(4)), at(x)),
        compute.synchronize,
    ]
    for call in calls:
        with pytest.raises(NotInitializedError) as raised:
            call()
        assert raised.value.device == "cpu:0"
    assert not compute.is_initialized
    assert stream.queue == []
    compute.init()
    assert compute.is_initialized


def test_an_unsupported_dtype_names_op_and_device(compute: DeviceCompute, stream: LateStream) -> None:
    with pytest.raises(UnsupportedError, match="int8") as raised:
        compute.gemm(NONE, NONE, 1, 1, 1, 1, 4096, 1, 4096, 1, 0, 4096, 1, dtype=DType.INT8)
    assert (raised.value.op, raised.value.device) == ("gemm", "cpu:0")
    assert stream.queue == []


def test_calls_only_enqueue_until_synchronized(compute: DeviceCompute) -> None:
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    compute.unary(UnaryOp.NEG, at(x), at(y), 4)
    assert y.tolist() == [0.0] * 4
    compute.synchronize()
    assert y.tolist() == [-1.0] * 4


def test_null_pointers_are_refused_where_something_would_be_read_or_written(compute: DeviceCompute, stream: LateStream) -> None:
    x = at(np.zeros(64))
    image = (1, 1, 2, 2)
    calls: list[Callable[[], None]] = [
        lambda: compute.gemm(NONE, NONE, 2, 2, 2, 1, 0, 2, x, 2, 0, x, 2),
        lambda: compute.gemm(NONE, NONE, 2, 2, 2, 1, x, 2, x, 2, 0, 0, 2),
        lambda: compute.batched_gemm(NONE, NONE, 2, 2, 2, 1, x, 2, 4, 0, 2, 4, 0, x, 2, 4, 2),
        lambda: compute.unary(UnaryOp.NEG, 0, x, 4),
        lambda: compute.binary(BinaryOp.ADD, x, 8, x, 4),
        lambda: compute.reduce(ReduceOp.SUM, 0, x, (2, 2), 0),
        lambda: compute.reduce(ReduceOp.SUM, x, 0, (2, 0), 1),
        lambda: compute.attention(x, x, 0, x, 1, 1, 2, 2, 2, 1.0, False),
        lambda: compute.conv2d_forward(x, image, 0, (1, 1, 1, 1), x, image, (1, 1), (0, 0)),
        lambda: compute.copy_htod(0, memoryview(b"1")),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="not the address"):
            call()
    assert stream.queue == []


def test_null_pointers_are_allowed_where_nothing_is_touched(compute: DeviceCompute, rng: np.random.Generator) -> None:
    c = random(rng, (2, 2), DType.FLOAT64)
    expected = 3 * c
    compute.gemm(NONE, NONE, 2, 2, 5, 0, 0, 2, 0, 5, 3, at(c), 2)
    compute.gemm(NONE, NONE, 0, 2, 5, 1, 0, 1, 0, 5, 0, 0, 1)
    compute.unary(UnaryOp.NEG, 0, 0, 0)
    compute.binary(BinaryOp.ADD, 0, 0, 0, 0)
    compute.copy_htod(0, memoryview(b""))
    compute.synchronize()
    np.testing.assert_array_equal(c, expected)


def test_real_elements_refuse_complex_factors(compute: DeviceCompute) -> None:
    x = np.ones(1)
    for alpha, beta in ((1j, 0), (1, 2 + 1j)):
        with pytest.raises(InvalidArgumentError, match="complex number"):
            compute.gemm(NONE, NONE, 1, 1, 1, alpha, at(x), 1, at(x), 1, beta, at(x), 1)
    out = np.zeros(1)
    compute.gemm(NONE, NONE, 1, 1, 1, complex(2), at(x), 1, at(x), 1, complex(0), at(out), 1)
    compute.synchronize()
    assert out[0] == 2.0


def test_a_batch_cannot_share_its_results(compute: DeviceCompute) -> None:
    x = at(np.zeros(64, np.float32))
    with pytest.raises(InvalidArgumentError, match="stride_c is 0"):
        compute.batched_gemm(NONE, NONE, 2, 2, 2, 1, x, 2, 4, x, 2, 4, 0, x, 2, 0, 2)


def test_attention_refuses_an_unknown_causal_form(compute: DeviceCompute) -> None:
    x = at(np.zeros(64, np.float32))
    unknown: Any = "top_left"
    with pytest.raises(InvalidArgumentError, match="'top_left'"):
        compute.attention(x, x, x, x, 1, 1, 2, 2, 2, 1.0, unknown)


def test_memory_is_freed_only_once(compute: DeviceCompute) -> None:
    pointer = compute.alloc(100)
    compute.free(pointer)
    with pytest.raises(InvalidArgumentError, match="not allocated"):
        compute.free(pointer)


def test_memory_that_the_system_does_not_have(compute: DeviceCompute) -> None:
    for nbytes in (1 << 60, 1 << 70):
        with pytest.raises(OutOfMemoryError) as raised:
            compute.alloc(nbytes)
        assert (raised.value.requested, raised.value.device) == (nbytes, "cpu:0")


def test_sigmoid_is_exact_far_from_zero(compute: DeviceCompute) -> None:
    x = np.array([-800.0, -700.0, -100.0, -40.0, 40.0, 800.0])
    y = np.empty_like(x)
    compute.unary(UnaryOp.SIGMOID, at(x), at(y), x.size, dtype=DType.FLOAT64)
    compute.synchronize()
    np.testing.assert_allclose(y, [0.0, np.exp(-700.0), np.exp(-100.0), np.exp(-40.0), 1.0, 1.0], rtol=1e-14)


def test_a_large_half_precision_product_is_cut_into_blocks(compute: DeviceCompute, rng: np.random.Generator) -> None:
    m, n, k = 48, 40_000, 40
    assert n * (k + 2 * m) * 4 > WORKSPACE
    a, b, c = random(rng, (k, m), DType.FLOAT16), random(rng, (n, k), DType.FLOAT16), random(rng, (n, m), DType.FLOAT16)
    expected = 0.5 * high(b) @ high(a) - high(c)
    compute.gemm(NONE, NONE, m, n, k, 0.5, at(a), m, at(b), k, -1, at(c), m, dtype=DType.FLOAT16)
    compute.synchronize()
    assert_near(c, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_batches_of_large_matrices_are_done_one_by_one(compute: DeviceCompute, rng: np.random.Generator, shared: bool) -> None:
    m, n, k = 40, 40_000, 70
    assert (m * n + k * (m + n)) * 4 > WORKSPACE
    a, b = random(rng, (1 if shared else 2, k, m), DType.FLOAT32), random(rng, (2, n, k), DType.FLOAT32)
    c = np.full((2, n, m), np.nan, np.float32)
    stride = 0 if shared else m * k
    compute.batched_gemm(NONE, NONE, m, n, k, 2, at(a), m, stride, at(b), k, n * k, 0, at(c), m, n * m, 2)
    compute.synchronize()
    assert_near(c, 2 * high(b) @ high(a), scale=10)


def test_a_convolution_of_a_large_image_is_cut_into_bands(compute: DeviceCompute, rng: np.random.Generator) -> None:
    channels, size = 12, 210
    assert channels * 9 * size * size * 4 > WORKSPACE
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        x, w = random(rng, (2, channels, size, size), dtype), random(rng, (2, channels, 3, 3), dtype)
        out = np.full((2, 2, size, size), np.nan, dtype.numpy)
        compute.conv2d_forward(at(x), x.shape, at(w), w.shape, at(out), out.shape, (1, 1), (1, 1), dtype=dtype)
        compute.synchronize()
        padded = np.pad(high(x), ((0, 0), (0, 0), (1, 1), (1, 1)))
        expected = sum(
            np.einsum("nchw,kc->nkhw", padded[:, :, r : r + size, s : s + size], high(w)[:, :, r, s]) for r in range(3) for s in range(3)
        )
        assert_near(out, np.asarray(expected), scale=20)


def softmax_of(q: Array, k: Array, v: Array, causal: Causal) -> Array:
    scores = q @ k.swapaxes(1, 2)
    if causal is not False:
        offset = scores.shape[2] - scores.shape[1] if causal == "bottom_right" else 0
        scores = np.where(np.tri(scores.shape[1], scores.shape[2], offset, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    result: Array = weights @ v / weights.sum(axis=2, keepdims=True)
    return result


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_long_attention_stays_within_its_workspace(compute: DeviceCompute, rng: np.random.Generator, causal: Causal) -> None:
    seq_q, seq_kv, dim = 2500, 2600, 4
    assert seq_q * seq_kv * 4 > 1.5 * WORKSPACE
    q, k, v = (random(rng, (1, n, dim), DType.FLOAT32) for n in (seq_q, seq_kv, seq_kv))
    out = np.full(q.shape, np.nan, np.float32)
    tracemalloc.start()
    compute.attention(at(q), at(k), at(v), at(out), 1, 1, seq_q, seq_kv, dim, 1.0, causal)
    compute.synchronize()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The scores of a block of queries, and beside the diagonal a mask.
    assert peak < 1.5 * WORKSPACE
    assert_near(out, softmax_of(high(q), high(k), high(v), causal))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_hidden_key_or_value_does_not_show(compute: DeviceCompute, rng: np.random.Generator, value: float) -> None:
    q, k, v = (random(rng, (3, 6, 4), DType.FLOAT32) for _ in range(3))
    expected = softmax_of(high(q), high(k), high(v), True)
    k[1, 4], v[1, 4], out = value, value, np.empty_like(q)
    compute.attention(at(q), at(k), at(v), at(out), 1, 3, 6, 6, 4, 1.0, True)
    compute.synchronize()
    assert_near(np.delete(out, 1, axis=0), np.delete(expected, 1, axis=0))
    assert_near(out[1, :4], expected[1, :4])
    assert np.isnan(out[1, 4:]).all()


def test_kernels_warn_of_nothing_and_leave_the_callers_error_state(compute: DeviceCompute) -> None:
    x = np.array([0.0, -1.0, np.inf, 1e38], np.float32)
    y = np.empty_like(x)
    with np.errstate(all="raise"):
        compute.unary(UnaryOp.LOG, at(x), at(y), 4)
        compute.unary(UnaryOp.EXP, at(x), at(y), 4)
        compute.binary(BinaryOp.DIV, at(x), at(x), at(y), 4)
        compute.reduce(ReduceOp.MEAN, at(x), at(y), (2, 0), 1)
        compute.gemm(NONE, NONE, 2, 2, 2, 1e30, at(x), 2, at(x), 2, 0, at(y), 2, dtype=DType.FLOAT32)
        compute.synchronize()
        assert set(np.geterr().values()) == {"raise"}


def test_small_calls_are_estimated_below_and_large_ones_above_fifty_microseconds(compute: DeviceCompute, stream: LateStream) -> None:
    x = at(np.zeros(8))
    cheap: list[Callable[[], None]] = [
        lambda: compute.gemm(NONE, NONE, 8, 8, 8, 1, x, 8, x, 8, 0, x, 8),
        lambda: compute.unary(UnaryOp.RELU, x, x, 1000),
        lambda: compute.reduce(ReduceOp.SUM, x, x, (10, 100), 1),
    ]
    dear: list[Callable[[], None]] = [
        lambda: compute.gemm(NONE, NONE, 256, 256, 256, 1, x, 256, x, 256, 0, x, 256),
        lambda: compute.unary(UnaryOp.TANH, x, x, 1_000_000),
        lambda: compute.reduce(ReduceOp.SUM, x, x, (1000, 1000), 1),
        lambda: compute.attention(x, x, x, x, 4, 8, 128, 128, 64, 1.0, False),
        lambda: compute.conv2d_forward(x, (8, 16, 64, 64), x, (16, 16, 3, 3), x, (8, 16, 62, 62), (1, 1), (0, 0)),
    ]
    for calls, low, limit in ((cheap, 0.0, 50e-6), (dear, 50e-6, 1.0)):
        for call in calls:
            call()
            assert low < stream.costs[-1] < limit
    stream.queue.clear()


def test_costs_grow_with_the_work() -> None:
    dtype = np.dtype(np.float16)
    assert costs.matmul(64, 64, 64, dtype) > costs.matmul(64, 64, 64, np.dtype(np.float32)) > costs.matmul(8, 8, 8, dtype)
    assert costs.matmul(8, 8, 8, dtype, 100) > 10 * costs.matmul(8, 8, 8, dtype)
    assert costs.unary(UnaryOp.SIGMOID, 1000, dtype) > costs.unary(UnaryOp.EXP, 1000, dtype) > costs.unary(UnaryOp.RELU, 1000, dtype)


def test_blocks_cover_everything_once_and_stay_within_the_workspace() -> None:
    assert [(part.start, part.stop) for part in blocks(10, 30, 100)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [(part.start, part.stop) for part in blocks(2, 1000, 100)] == [(0, 1), (1, 2)]
    assert list(blocks(0, 30)) == []
    assert [(part.start, part.stop) for part in blocks(3, 0)] == [(0, 3)]


def test_a_view_is_the_memory_itself(rng: np.random.Generator) -> None:
    x = random(rng, (4, 6), DType.FLOAT64)
    assert array(at(x), (4, 6), x.dtype).tolist() == x.tolist()
    assert array(at(x) + 8, (2, 3), x.dtype, (96, 16)).tolist() == x[::2, 1::2].tolist()
    array(at(x), (1,), x.dtype)[0] = 5.0
    assert x[0, 0] == 5.0
