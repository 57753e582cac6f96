"""Streams of the CUDA backend as options ask for them, and what libraries take to work in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.own_library_support import Spread

if TYPE_CHECKING:
    from accel.engine.options import Library

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LONG, SMALL = 1 << 29, 512  # elements: a kernel of about a millisecond that fills the device, and one of a few blocks


async def test_libraries_take_workspace_only_where_they_are_used(device: accel.Device) -> None:
    x = await device.put(np.eye(8, dtype=np.float32))
    await device.elementwise.unary("neg", x)
    assert device.info().memory.workspace == 0
    await device.blas.gemm(x, x)
    assert device.info().memory.workspace == 32 * MIB
    await device.blas.gemm(x, x)
    await device.elementwise.unary("neg", x)
    assert device.info().memory.workspace == 32 * MIB


@pytest.mark.parametrize("streams", [8, 1, 2])
async def test_every_library_that_was_named_is_warm(streams: int) -> None:
    """Also where it shares a stream with others: nothing that its ops need is made later, so none is enqueued beside the loop."""
    libraries: tuple[Library, ...] = ("elementwise", "reduce", "blas", "fft")
    async with accel.System() as system:
        device = await system.open_device("cuda", streams=streams, libraries=libraries)
        context = device._host.context
        of_library = {library: context.lanes.routes[library].stream for library in libraries}
        assert of_library["blas"].blas is not None
        assert of_library["reduce"].workspaces
        assert context.device.families.states["fft"].library is not None
        x = await device.put(np.ones((8, 8), np.float32))
        # cuBLAS loads a kernel with the first call that needs it.
        for library, op in (("elementwise", accel.ops.Unary(accel.UnaryOp.NEG, x)), ("reduce", accel.ops.Reduce(accel.ReduceOp.SUM, x))):
            assert not context.device.may_block(context.lanes.routes[library], op), library


class Spreading(accel.KernelLibrary):
    """Copies in whichever stream it is given."""

    name = "spread"
    several_streams = True

    @accel.kernel(Spread)
    def spread(self, op: Spread, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        stream.copy(outputs[0].address, inputs[0].address, inputs[0].nbytes)


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_library_of_the_users_that_takes_several_streams_does_not_wait_behind_a_long_op(host: Any) -> None:
    plan = FaultPlan().hang_at(2, op="spread")
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host, faults=plan)
        try:
            await device.register(Spreading)
            x = await device.put(np.arange(1000.0))
            await device.run(Spread(x))
            slow = asyncio.ensure_future(device.run(Spread(x)))
            while device.info().in_flight < 1:
                await asyncio.sleep(0)
            for _ in range(5):
                np.testing.assert_array_equal(await device.get(await device.run(Spread(x), timeout=20)), np.arange(1000.0))
            assert not slow.done()
        finally:
            plan.release()
        await slow
