"""Wrong arguments of a device's methods are refused before anything is sent, in words that say what to do."""

from __future__ import annotations

import warnings
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import accel
from accel import ops
from accel.patterns import DynamicBatcher
from accel.testing import FaultPlan
from tests.device_support import failure, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with opened() as device:
        yield device
        assert (device.generation, device.state) == (1, accel.DeviceState.READY)


SCALED: dict[str, Any] = {
    "gemm alpha": lambda d, m, v, value: d.blas.gemm(m, m, alpha=value),
    "gemm beta": lambda d, m, v, value: d.blas.gemm(m, m, beta=value, out=m),
    "gemm_batched alpha": lambda d, m, v, value: d.blas.gemm_batched(m, m, alpha=value),
    "gemv alpha": lambda d, m, v, value: d.blas.gemv(m, v, alpha=value),
    "axpy alpha": lambda d, m, v, value: d.blas.axpy(v, v, alpha=value),
    "scal alpha": lambda d, m, v, value: d.blas.scal(v, value),
    "batch": lambda d, m, v, value: scaled_in_a_batch(d, v, value),
}


async def scaled_in_a_batch(device: accel.Device, ref: accel.AccelRef, value: Any) -> None:
    async with device.batch() as batch:
        batch.blas.scal(ref, value)


@pytest.mark.parametrize("call", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("value", [2**2000, None, "2", [1.0], np.ones(1), 1j, np.complex64(1)], ids=["huge", *map(repr, range(6))])
async def test_what_is_no_factor_is_refused_and_the_context_lives(device: accel.Device, call: Any, value: Any) -> None:
    matrix, vector = await device.zeros((2, 2)), await device.full(2, 3.0)
    error = await failure(call(device, matrix, vector, value), accel.InvalidArgumentError)
    assert error.op is not None
    assert error.device == "cpu:0"
    assert (device.generation, device.state) == (1, accel.DeviceState.READY)
    np.testing.assert_array_equal(await device.get(vector), [3.0, 3.0])


@pytest.mark.parametrize("value", [2**2000, "1", [1.0], 1j], ids=["huge", "text", "list", "complex"])
async def test_what_is_no_scale_of_attention_is_refused(device: accel.Device, value: Any) -> None:
    q = await device.zeros((1, 1, 2, 2))
    await failure(device.dnn.attention(q, q, q, scale=value), accel.InvalidArgumentError)
    assert device.generation == 1


FACTORS = [2, True, np.float32(2), np.int8(2), np.bool_(True), np.array(2.0), ml_dtypes.bfloat16(2), Fraction(2), Decimal(2)]


@pytest.mark.parametrize("value", FACTORS, ids=lambda value: type(value).__name__)
async def test_every_number_is_a_factor(device: accel.Device, value: Any) -> None:
    x = await device.put(np.ones(2, np.float32))
    await device.blas.scal(x, value)
    np.testing.assert_array_equal(await device.get(x), [float(value)] * 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
async def test_factors_beyond_the_dtype_are_infinite(device: accel.Device, dtype: str) -> None:
    kind = accel.DType.of(dtype).numpy
    one = await device.put(np.ones((1, 1), kind))
    vector = await device.put(np.ones(1, kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [
            await device.blas.gemm(one, one, alpha=1e300),
            await device.blas.gemm(one, one, out=await device.put(np.ones((1, 1), kind)), beta=2**1000),
            await device.blas.gemv(one, vector, alpha=1e300),
            await device.blas.axpy(vector, await device.zeros(1, dtype), alpha=1e300),
            await device.blas.scal(await device.put(np.ones(1, kind)), 1e300),
        ]
        for result in results:
            assert np.isinf(np.real(await device.get(result)).astype(np.float64)).all()
    assert device.generation == 1


WRONG: dict[str, Any] = {
    "axis twice": lambda d, m, v, _: d.reduce("sum", m, axis=(0, 0)),
    "axis text": lambda d, m, v, _: d.reduce("sum", m, axis="0"),
    "axis float": lambda d, m, v, _: d.reduce("sum", m, axis=1.0),
    "padding float": lambda d, m, v, image: d.dnn.conv2d(image, image, padding=1.5),
    "stride text": lambda d, m, v, image: d.dnn.conv2d(image, image, stride="1"),
    "stride of three": lambda d, m, v, image: d.dnn.conv2d(image, image, stride=(1, 1, 1)),
    "run nothing": lambda d, m, v, _: d.run(None),
    "run a name": lambda d, m, v, _: d.run("gemm"),
    "run a class": lambda d, m, v, _: d.run(ops.Gemm),
    "put None": lambda d, m, v, _: d.put(None),
    "put a dict": lambda d, m, v, _: d.put({}),
    "put masked": lambda d, m, v, _: d.put(np.ma.array([1.0, 2.0], mask=[True, False])),
    "put a large masked": lambda d, m, v, _: d.put(np.ma.ones((600, 600)).T),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
async def test_wrong_arguments_are_refused(device: accel.Device, call: Any) -> None:
    refs = await device.zeros((2, 2)), await device.zeros(2), await device.zeros((1, 1, 2, 2))
    error = await failure(call(device, *refs), accel.InvalidArgumentError)
    assert error.remedy != accel.InvalidArgumentError.default_remedy
    assert device.info().in_flight == 0


async def test_numbers_of_numpy_are_ints_too(device: accel.Device) -> None:
    image = await device.put(np.ones((1, 1, 3, 3), np.float32))
    window = await device.put(np.ones((1, 1, 2, 2), np.float32))
    assert (await device.dnn.conv2d(image, window, stride=np.int64(1), padding=[np.int8(1), 0])).shape == (1, 1, 4, 2)  # type: ignore[arg-type,list-item]
    assert (await device.run(ops.Conv2d(image, window, stride=2))).shape == (1, 1, 1, 1)
    assert (await device.reduce("sum", image, axis=np.int32(-1))).shape == (1, 1, 3)  # type: ignore[arg-type]


async def test_the_argument_is_named(device: accel.Device) -> None:
    assert "array is None" in str(await failure(device.put(None), accel.InvalidArgumentError))
    assert "array is a dict" in str(await failure(device.put({}), accel.InvalidArgumentError))
    assert "masked" in str(await failure(device.put(np.ma.ones(2)), accel.InvalidArgumentError))
    with pytest.raises(accel.InvalidArgumentError, match="3 is not a token"):
        device.resolve(3)  # type: ignore[arg-type]
    a, b = await device.zeros(2), await device.zeros(3)
    error = await failure(device.copy(a, b), accel.InvalidArgumentError)
    assert "source is float32[2], destination is float32[3]" in str(error)
    assert (error.op, error.device) == ("copy", "cpu:0")


async def test_errors_of_a_check_name_op_and_device(device: accel.Device) -> None:
    a, b = await device.zeros((2, 3)), await device.zeros((2, 3), "float64")
    for call in (device.blas.gemm(a, a), device.blas.gemm(a, b), device.blas.gemm(a, 3)):  # type: ignore[arg-type]
        error = await failure(call, accel.InvalidArgumentError)
        assert (error.op, error.device) == ("gemm", "cpu:0")
    await device.free(a)
    stale = await failure(device.elementwise.unary("neg", a), accel.StaleRefError)
    assert (stale.op, stale.device) == ("unary", "cpu:0")
    with pytest.raises(accel.InvalidArgumentError) as caught:
        async with device.batch() as batch:
            batch.blas.dot(b, b, out=b)
    assert (caught.value.op, caught.value.device) == ("dot", "cpu:0")


async def test_what_is_not_offered_is_called_by_its_own_name(device: accel.Device) -> None:
    x, whole = await device.zeros(2, "complex64"), await device.zeros(2, "int32")
    error = await failure(device.blas.nrm2(x), accel.UnsupportedError)
    assert "sqrt" not in str(error)
    assert "nrm2" in str(error)
    assert "view('float32')" in str(error)
    error = await failure(device.blas.dot(whole, whole), accel.UnsupportedError)
    assert "dot is not offered for int32" in str(error)
    error = await failure(device.elementwise.unary("exp", whole), accel.UnsupportedError)
    assert "unary.exp is not offered for int32" in str(error)
    norm = await device.blas.nrm2(await device.put(np.array([3 + 4j, 12j], np.complex64).view(np.float32)))
    np.testing.assert_allclose(await device.get(norm), 13.0)


FILLS: list[tuple[Any, str]] = [
    *((300, "uint8"), (-1, "uint8"), (2**63, "int64"), (1e10, "int32"), (float("nan"), "int32"), (float("inf"), "uint64")),
    *((1.5, "int8"), (np.float32(2.25), "int32"), (2, "bool"), (0.5, "bool"), (float("nan"), "bool"), (1 + 0j, "bool")),
    *((1j, "float32"), (1 + 0j, "int8"), (np.complex64(1), "float64")),
    *((None, "float32"), ("1", "float32"), ([1.0], "float32"), (None, "bool"), ("", "bool"), (2**2000, "float64"), (2**2000, "complex64")),
]


@pytest.mark.parametrize(("value", "dtype"), FILLS, ids=lambda part: repr(part)[:24])
async def test_what_the_dtype_cannot_hold_is_refused(device: accel.Device, value: Any, dtype: str) -> None:
    error = await failure(device.full(2, value, dtype), accel.InvalidArgumentError)
    assert (error.op, error.device) == ("fill", "cpu:0")
    with pytest.raises(accel.InvalidArgumentError):
        async with device.batch() as batch:
            batch.full(2, value, dtype)


HELD: list[tuple[Any, str, Any]] = [
    *((255, "uint8", 255), (-128, "int8", -128), (2**64 - 1, "uint64", 2**64 - 1), (-(2**63), "int64", -(2**63)), (2.0, "int32", 2)),
    *((-2.0, "int32", -2), (True, "int8", 1), (np.int64(7), "uint16", 7), (1, "bool", True), (0.0, "bool", False)),
    *((1e300, "float32", np.inf), (float("nan"), "float16", np.nan), (Fraction(1, 2), "float64", 0.5), (np.array(2), "float32", 2.0)),
    *((1e300, "bfloat16", np.inf), (1j, "complex64", 1j), (1e300, "complex64", np.inf), (np.bool_(True), "float32", 1.0)),
    *((ml_dtypes.bfloat16(1.5), "float32", 1.5), (0.1, "float32", np.float32(0.1)), (2**53 + 1, "float64", 2.0**53)),
]


@pytest.mark.parametrize(("value", "dtype", "expected"), HELD, ids=lambda part: repr(part)[:24])
async def test_what_the_dtype_can_hold_is_filled_in_without_a_warning(device: accel.Device, value: Any, dtype: str, expected: Any) -> None:
    kind = accel.DType.of(dtype).numpy
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        result = await device.get(await device.full(2, value, dtype))
    assert result.dtype == kind
    np.testing.assert_array_equal(result, np.array([expected] * 2, kind))


async def test_a_ref_of_a_closed_device_says_so_and_is_true_and_stale() -> None:
    async with opened() as device:
        ref, empty = await device.zeros(2), await device.zeros((0, 3))
        scalar = await device.zeros(())
        assert all([ref, empty, scalar])
        assert "stale" not in repr(ref)
        await device.aclose()
        assert "stale" in repr(ref)
        assert ref
        with pytest.raises(accel.StaleRefError, match="its device is closed") as caught:
            ref.check()
        assert (caught.value.reason, caught.value.remedy) == ("generation", "Open the device again, and put the data on it.")


@pytest.mark.parametrize("kind", ["nope", "free", "", "blas"])
def test_a_fault_plan_for_an_op_that_never_comes_is_refused(kind: str) -> None:
    for plan in (FaultPlan().hang_at, FaultPlan().poison_at, FaultPlan().out_of_memory_at):
        with pytest.raises(accel.InvalidArgumentError, match="gemm"):
            plan(1, op=kind)


class Liar:
    def __index__(self) -> int:
        raise ValueError("not now")


@pytest.mark.parametrize("shape", [2**55, 2**62, 2**63, (2**63, 2**63)], ids=str)
@pytest.mark.parametrize("limit", [None, 1 << 20], ids=str)
async def test_what_no_memory_can_hold_is_out_of_memory(shape: Any, limit: int | None) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", memory_limit=limit)
        for call in (device.empty(shape), device.zeros(shape, "int8"), device.rng.uniform(shape)):
            error = await failure(call, accel.OutOfMemoryError)
            assert error.requested is not None
        assert device.generation == 1
        np.testing.assert_array_equal(await device.get(await device.zeros(3)), np.zeros(3))


async def test_padding_takes_no_memory_on_a_cpu(device: accel.Device) -> None:
    rng = np.random.default_rng()
    x, w = await device.put(rng.standard_normal((2, 1, 3, 3))), await device.put(rng.standard_normal((2, 1, 3, 3)))
    far = 1 << 29
    result = await device.get(await device.dnn.conv2d(x, w, stride=far - 1, padding=(far, far)))
    assert result.shape == (2, 2, 3, 3)
    expected = np.zeros((2, 2, 3, 3))
    # In one direction the window in the middle begins at -1 and sees the rows 0 and 1; the first and the last one see padding only.
    expected[:, :, 1, 1] = np.einsum("ncij,kcij->nk", (await device.get(x))[:, :, :2, :2], (await device.get(w))[:, :, 1:, 1:])
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("numbers", [{"padding": 2**30}, {"stride": 2**31, "padding": 1}, {"padding": (0, 2**62)}], ids=str)
async def test_convolutions_that_kernels_cannot_count_are_refused(device: accel.Device, numbers: Any) -> None:
    x = await device.zeros((1, 1, 3, 3))
    error = await failure(device.dnn.conv2d(x, x, **numbers), accel.InvalidArgumentError)
    assert "32 bits" in str(error)


async def test_a_view_owns_nothing_that_could_be_freed(hosted: accel.Device) -> None:
    x = await hosted.put(np.arange(4.0))
    await failure(hosted.free(x[1:]), accel.InvalidArgumentError)
    np.testing.assert_array_equal(await hosted.get(x), np.arange(4.0))


@pytest.mark.parametrize("dtype", ["\ud800", "é", 10**400, object(), Liar()], ids=["surrogate", "accent", "huge", "object", "liar"])
async def test_what_numpy_chokes_on_is_no_dtype(device: accel.Device, dtype: Any) -> None:
    await failure(device.zeros(2, dtype), accel.InvalidArgumentError)


async def test_a_ref_is_no_dtype(device: accel.Device) -> None:
    x = await device.zeros(2)
    await failure(device.zeros(2, x), accel.InvalidArgumentError)
    with pytest.raises(accel.InvalidArgumentError):
        x.view(x)


async def test_numbers_that_are_none_when_asked_are_refused(device: accel.Device) -> None:
    x: Any = await device.zeros((2, 2))
    for index in (Liar(), slice(Liar(), 2), int):
        with pytest.raises(accel.InvalidArgumentError):
            x[index]
    with pytest.raises(accel.InvalidArgumentError):
        x.reshape(Liar())
    await failure(device.zeros(Liar()), accel.InvalidArgumentError)


async def test_ops_of_wrong_parts_are_refused_with_what_was_wrong(device: accel.Device) -> None:
    wrong: list[Any] = [
        *(ops.Fill((2,), "float32"), ops.Fill([2], accel.DType.FLOAT32), ops.Empty((-2,), accel.DType.INT8), ops.Empty(("a",), accel.DType.INT8)),  # type: ignore[arg-type]
        *(ops.Get(await device.zeros(2), None), ops.Put([1.0])),  # type: ignore[arg-type]
    ]  # fmt: skip
    for op in wrong:
        error = await failure(device.run(op), accel.InvalidArgumentError)
        assert (error.op, error.device) == (op.kind, "cpu:0")


async def test_timeouts_that_no_timer_holds(device: accel.Device) -> None:
    await failure(device.zeros(2, timeout=10**400), accel.InvalidArgumentError)

    async def handler(items: list[int]) -> list[int]:
        return items

    async with DynamicBatcher(handler) as batcher:
        assert await batcher.submit(1, timeout=10**400) == 1
        assert batcher.statistics().queued == 0


async def test_arguments_of_a_kernel_that_are_no_sequence(device: accel.Device) -> None:
    kernel: Any = None
    with pytest.raises(accel.InvalidArgumentError, match="args"):
        await device.compiler.launch(kernel, 1, 1, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["options", "parameters"])
async def test_a_ref_is_no_list_of_texts(device: accel.Device, name: str) -> None:
    arguments: Any = {name: await device.zeros(3)}
    error = await failure(device.compiler.compile("source", "copy", **arguments), accel.InvalidArgumentError)
    assert name in error.message
