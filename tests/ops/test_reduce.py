"""Reductions: axes in any order, what is refused, and how CUDA cuts them. Values are compared by the samples of the family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel import ops
from tests.device_support import failure

if TYPE_CHECKING:
    from accel.enums import ReduceName

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_what_has_no_value_is_refused(device: accel.Device) -> None:
    x, empty = await device.zeros((2, 3, 4)), await device.zeros((2, 0, 4))
    for wrong in (
        device.reduce("sum", x, axis=(0, 0)),
        device.reduce("sum", x, axis=(0, -3)),
        device.reduce("sum", x, axis=(0, 3)),
        device.reduce("sum", x, axis=(0, "1")),  # type: ignore[arg-type]
        device.reduce("argmax", x, axis=(0, 1)),
        device.reduce("sum", x, ddof=1),
        device.reduce("var", x, ddof=0.5),  # type: ignore[arg-type]
        device.reduce("argmin", empty, axis=1),
        device.reduce("max", empty, axis=(0, 1)),
        device.reduce("any", x, out=await device.zeros(())),
    ):
        await failure(wrong, accel.InvalidArgumentError)
    with pytest.raises(accel.InvalidArgumentError):  # before it is sent
        ops.Reduce("max", empty, axis=1).plan()
    assert (await device.get(await device.reduce("max", empty, axis=0))).shape == (0, 4)


@pytest.mark.filterwarnings("error")
async def test_reductions_of_few_elements_and_of_none(device: accel.Device) -> None:
    empty, one = await device.zeros((2, 0, 3)), await device.zeros((2, 1, 3))
    values: dict[ReduceName, float] = {"sum": 0, "prod": 1, "any": 0, "all": 1, "logsumexp": -np.inf, "mean": np.nan, "var": np.nan}
    for op, value in values.items():
        for axis in (1, (1, 2)):
            got = await device.get(await device.reduce(op, empty, axis=axis))
            np.testing.assert_array_equal(got, np.full(got.shape, value))
    np.testing.assert_array_equal(await device.get(await device.reduce("std", one, axis=1, ddof=1)), np.full((2, 3), np.nan))


async def test_axes_of_transposes_are_those_in_memory(device: accel.Device, rng: np.random.Generator) -> None:
    array = rng.standard_normal((2, 3, 4))
    x = await device.put(array)
    turned = x.transpose((2, 0, 1))
    for op, view, axis, expected in (
        ("sum", x[0].T, 0, (3, 4, 1)),
        ("argmax", x[0].T, 1, (1, 3, 4)),
        ("sum", turned, 0, (6, 4, 1)),
        ("sum", turned, (0, 2), (2, 12, 1)),
        ("sum", turned, 1, None),
        ("argmax", x[0].T, None, None),
        ("max", x[0].T, None, (1, 12, 1)),
        ("sum", x[:, ::2].T, 0, None),
        ("sum", x[:, ::-1].T, 1, None),
    ):
        assert ops.Reduce(op, view, axis=axis).middle() == expected, (op, view, axis)  # type: ignore[arg-type]
    for _ in range(30):
        order = tuple(int(n) for n in rng.permutation(3))
        axes: tuple[int, ...] = tuple(int(n) for n in rng.permutation(3)[: rng.integers(1, 4)])
        view, there = x.transpose(order), array.transpose(order)
        np.testing.assert_allclose(await device.get(await device.reduce("sum", view, axis=axes)), there.sum(axes), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(await device.get(await device.reduce("argmin", view, axis=axes[0])), there.argmin(axes[0]))


async def test_neighbouring_axes_are_joined(device: accel.Device) -> None:
    x = await device.zeros((2, 3, 1, 4, 5))
    assert ops.Reduce("sum", x, axis=(1, 2, 3)).middle() == (2, 12, 5)
    assert ops.Reduce("sum", x, axis=(0, 1)).middle() == (1, 6, 20)
    assert ops.Reduce("sum", x, axis=(3, 4)).middle() == (6, 20, 1)
    assert ops.Reduce("sum", x).middle() == (1, 120, 1)
    assert ops.Reduce("sum", x, axis=(2,)).middle() == (120, 1, 1)
    assert ops.Reduce("sum", x, axis=(0, 3)).middle() is None
    assert ops.Reduce("sum", x, axis=(0, 3)).runs() == ((1, False, 0), (2, True, 60), (3, False, 20), (4, True, 5), (5, False, 1))
