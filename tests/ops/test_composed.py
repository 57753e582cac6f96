"""Ops that other ops compute, and a backend that has a kernel for one of them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import pytest

import accel
from accel import DType
from accel.cpu import backend
from accel.cpu.backend import CpuDevice
from accel.cpu.views import array
from accel.enums import CAPABILITIES
from accel.family import BackendPart
from accel.ops import Binary, ComposedOp, Family, OpNamespace, Plan, Spec, method, op

if TYPE_CHECKING:
    from accel.ops.composed import Run

M = TypeVar("M")


@op("sums_of_two")
class Doubled(ComposedOp):
    """``x + x``."""

    x: accel.AccelRef

    def plan(self) -> Plan:
        return self.composed((self.x,), (), (Spec(self.x.shape, self.x.dtype),), "doubled", self.x.dtype)

    def compose(self, run: Run) -> accel.AccelRef:
        return run(Binary("add", self.x, self.x))


def doubled(lane: Any, op: Doubled, plan: Any, inputs: Any, outputs: Any) -> None:
    """Enqueue a sum of which the test can tell that it is this kernel's."""
    x, out = (array(address, op.x.shape, op.x.dtype.numpy) for address in (inputs[0], outputs[0]))
    lane.stream.submit(lambda: np.add(2 * x, 100, out=out), 0.0)


@op("sums_of_two")
class HalfRefused(ComposedOp):
    """Writes ``out``, then asks for a sum whose operands do not fit."""

    x: accel.AccelRef
    out: accel.AccelRef

    def plan(self) -> Plan:
        return self.composed((self.x,), (self.out,), (), "half_refused", self.x.dtype)

    def compose(self, run: Run) -> accel.AccelRef:
        kept.append(run(Binary("add", self.x, self.x)))
        run(Binary("add", kept[-1], self.x, out=self.out))
        return run(Binary("add", self.x, kept[-1], out=self.x[:0]))


kept: list[accel.AccelRef] = []
"""Refs that :class:`HalfRefused` was given."""


class SumOps(OpNamespace[M]):
    """Sums."""

    library: ClassVar[str] = "sums_of_two"
    doubled = method(Doubled)
    half_refused = method(HalfRefused)


SUMS = Family(SumOps, parts={"cpu": BackendPart({"doubled": doubled})})


class Offering(CpuDevice):
    """A context that says that there is a kernel for float32."""

    capabilities = MappingProxyType({**CAPABILITIES, "doubled": frozenset({DType.FLOAT32})})


@pytest.mark.parametrize(("dtype", "has_kernel"), [("float32", True), ("float64", False)])
async def test_a_kernel_takes_the_place_of_ops_for_dtypes_that_are_offered(
    monkeypatch: pytest.MonkeyPatch, dtype: str, *, has_kernel: bool
) -> None:
    monkeypatch.setattr(backend, "CpuDevice", Offering)
    expected = [102, 104] if has_kernel else [2, 4]
    async with accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.put(np.array([1, 2], dtype))
        sums = device.family(SumOps)
        np.testing.assert_array_equal(await device.get(await sums.doubled(x)), expected)
        async with device.batch() as batch:
            made = batch.run(Doubled(x))
        np.testing.assert_array_equal(await device.get(made), expected)
        async with device.graph() as graph:
            made = graph.run(Doubled(x))
        await graph.replay()
        np.testing.assert_array_equal(await device.get(made), expected)
        await graph.aclose()


async def test_where_nothing_is_offered_other_ops_compute_it(hosted: accel.Device) -> None:
    x = await hosted.put(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(await hosted.get(await hosted.run(Doubled(x))), [2, 4])


async def test_a_block_sends_nothing_of_an_op_that_was_refused_halfway() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        x, out = await device.put(np.ones(2)), await device.zeros(2, "float64")
        async with device.batch() as batch:
            before = batch.run(Binary("add", x, x))
            with pytest.raises(accel.InvalidArgumentError):
                batch.run(HalfRefused(x, out))
            assert len(batch) == 1
            with pytest.raises(accel.StaleRefError):
                batch.run(Binary("add", kept[-1], x))
            after = batch.run(Doubled(before))
        np.testing.assert_array_equal(await device.get(out), [0, 0])
        np.testing.assert_array_equal(await device.get(after), [4, 4])
        assert not device._core.refs.recording
