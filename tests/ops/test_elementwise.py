"""Functions of elements: what is broadcast, which numbers are operands, and what is refused. Values are compared by the samples of the family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel_cuda.families.elementwise import PART
from tests.device_support import failure

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_results_may_overwrite_an_operand_of_their_shape(device: accel.Device, rng: np.random.Generator) -> None:
    x, row = rng.standard_normal((5, 7)), rng.standard_normal(7)
    rx, rrow = await device.put(x), await device.put(row)
    assert await device.elementwise.binary("sub", rrow, rx, out=rx) is rx
    np.testing.assert_array_equal(await device.get(rx), row - x)
    await device.elementwise.where(await device.elementwise.binary("less", rx, 0), 1, rx, out=rx)
    np.testing.assert_array_equal(await device.get(rx), np.where(row - x < 0, 1, row - x))
    limit = await device.put(np.full((5, 7), 0.5))
    await device.elementwise.clip(rx, None, limit, out=limit)
    np.testing.assert_array_equal(await device.get(limit), np.minimum(np.where(row - x < 0, 1, row - x), 0.5))


async def test_broadcast_operands_are_refused_as_results(device: accel.Device) -> None:
    x, row, flat = await device.zeros((5, 7)), await device.zeros(7), await device.zeros(36)
    for wrong in (
        device.elementwise.binary("add", flat[:35].reshape(5, 7), 1, out=flat[1:].reshape(5, 7)),
        device.elementwise.binary("add", flat[:7], x, out=flat[:35].reshape(5, 7)),
        device.elementwise.clip(x, flat[:7], 1, out=flat[:35].reshape(5, 7)),
        device.elementwise.binary("add", x, row, out=row),
        device.elementwise.binary("add", x[0], row, out=x),
        device.elementwise.binary("less", x, row, out=x),
        device.elementwise.cast(x, "int32", out=x.view("int32")),
        device.elementwise.binary("add", x, await device.zeros(5)),
    ):
        await failure(wrong, accel.InvalidArgumentError)


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("int8", (1, -128, True, np.int64(3), 2.0), (128, 0.5, 1j, np.nan)),
        ("uint8", (255,), (-1, 256)),
        ("bool", (True, 0, np.bool_(True)), (2, 0.5)),
        ("float16", (0.5, 10**10, np.inf, np.float64(2)), (1j,)),
        ("complex64", (1j, 2, 0.5), ()),
    ],
)
async def test_numbers_have_the_dtype_beside_them(device: accel.Device, dtype: str, good: Sequence[Any], bad: Sequence[Any]) -> None:
    x = await device.zeros((2, 3), dtype)
    for value in good:
        made = await device.get(await device.elementwise.binary("equal", x, value))
        np.testing.assert_array_equal(made, np.full((2, 3), value == 0))
        assert (await device.elementwise.where(await device.zeros((2, 3), "bool"), value, x)).dtype is x.dtype
    for value in bad:
        error = await failure(device.elementwise.binary("equal", x, value), accel.InvalidArgumentError)
        assert "y is" in str(error)
        with pytest.raises(accel.InvalidArgumentError):  # before it is sent
            ops.Binary("equal", x, value).plan()


async def test_what_is_no_operand_is_refused_with_the_remedy(device: accel.Device) -> None:
    x = await device.zeros((2, 3))
    for wrong in (
        device.elementwise.binary("add", x, np.zeros(3)),  # type: ignore[arg-type]
        device.elementwise.binary("add", 1, 2),
        device.elementwise.where(await device.zeros((2, 3), "bool"), 1, 2),
    ):
        assert "device.put" in str(await failure(wrong, accel.InvalidArgumentError))
    assert "not_equal" in str(await failure(device.elementwise.where(x, x, x), accel.InvalidArgumentError))
    assert "imaginary" in str(
        await failure(device.elementwise.cast(await device.zeros(3, "complex64"), "float32"), accel.InvalidArgumentError)
    )
    await failure(device.elementwise.cast(x, "float8_e4m3fn"), accel.UnsupportedError)
    await failure(device.elementwise.binary("add", x, await device.zeros((2, 3), "float64")), accel.InvalidArgumentError)


class Stream:
    """A CUDA stream that notes how many blocks kernels are launched with."""

    def __init__(self) -> None:
        self.functions = {name: name for name in ("broadcast_add_f32", "broadcast_less_f32", "where_4")}
        self.blocks: list[int] = []

    def ready(self) -> None:
        """Take launches at any time."""

    def launch_with(self, function: str, grid: tuple[int, ...], block: tuple[int, int], argument: Any) -> None:
        self.blocks.append(grid[0])


def blocks(op: ops.KernelOp, *inputs: int, output: int = 1 << 20) -> list[int]:
    stream = Stream()
    PART.kernels[op.kind](SimpleNamespace(stream=stream), op, op.plan(), inputs, (output,))
    return stream.blocks
