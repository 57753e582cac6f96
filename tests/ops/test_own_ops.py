"""Ops of the user's own: several results, tracebacks from children, and ops that are not frozen."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel.ops import Plan, Spec
from tests.cpu_ops_support import PATIENCE, Halves, Halving, Trip

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])


async def test_an_op_with_several_results_gives_all_of_them(hosted: accel.Device) -> None:
    await hosted.register(Halving)
    x = await hosted.put(np.arange(6.0))
    given: Any = await hosted.run(Halves(x), timeout=PATIENCE)
    async with hosted.batch(timeout=PATIENCE) as batch:
        recorded: Any = batch.run(Halves(x))
        total = batch.reduce("sum", recorded[1])
    async with hosted.graph() as graph:
        replayed: Any = graph.run(Halves(x))
    await graph.replay(timeout=PATIENCE)
    for first, second in (given, recorded, replayed):
        np.testing.assert_array_equal(await hosted.get(first), [0, 1, 2])
        np.testing.assert_array_equal(await hosted.get(second), [3, 4, 5])
    assert await hosted.get(total) == 12
    out = await hosted.zeros(3, "float64")
    given = await hosted.run(Halves(x, out), timeout=PATIENCE)
    written, made = given
    assert written is out
    np.testing.assert_array_equal(await hosted.get(made), [3, 4, 5])


async def test_the_traceback_of_a_kernel_in_a_child_reaches_the_caller() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Halving)
        with pytest.raises(accel.LibraryError, match="ZeroDivisionError: tripped") as caught:
            await device.run(Trip(await device.put(np.ones(2))), timeout=PATIENCE)
        text = "".join(traceback.format_exception(caught.value))
        assert "in deep_in_the_kernel" in text
        assert "cpu_ops_support.py" in text


@dataclass
class Loose(accel.KernelOp):
    """An op whose fields can change."""

    library: ClassVar[str] = "loose"
    kind: ClassVar[str] = "loose"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


async def test_an_op_that_is_not_frozen_is_refused(device: accel.Device) -> None:
    class Mine(accel.KernelLibrary):
        name = "loose"

        @accel.kernel(Loose)
        def loose(self, op: Loose, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
            raise AssertionError("this is never called")

    with pytest.raises(accel.InvalidArgumentError, match="Loose is a dataclass that is not frozen") as refused:
        await device.register(Mine)
    assert "frozen=True" in refused.value.remedy
    x = await device.put(np.ones(2))
    with pytest.raises(accel.InvalidArgumentError, match="Loose is a dataclass that is not frozen"):
        await device.run(Loose(x))
    async with device.batch() as batch:
        with pytest.raises(accel.InvalidArgumentError, match="Loose is a dataclass that is not frozen"):
            batch.run(Loose(x))
