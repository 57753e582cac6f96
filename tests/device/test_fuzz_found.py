"""What random calls have found, each as a test of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import accel
from accel import ops
from accel.patterns import DynamicBatcher
from tests.device_support import failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        yield device
        assert (device.generation, device.state) == (1, accel.DeviceState.READY)


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


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_view_owns_nothing_that_could_be_freed(host: Literal["inline", "process"]) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        x = await device.put(np.arange(4.0))
        await failure(device.free(x[1:]), accel.InvalidArgumentError)
        np.testing.assert_array_equal(await device.get(x), np.arange(4.0))


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


async def test_an_error_in_the_plan_of_a_users_op_is_seen_as_it_is(device: accel.Device) -> None:
    class Own(accel.KernelOp):
        library = "own"
        kind = "own"

        def plan(self) -> Any:
            raise ZeroDivisionError("the user's own")

    await failure(device.run(Own()), ZeroDivisionError)


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
