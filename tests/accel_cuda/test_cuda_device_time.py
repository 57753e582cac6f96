"""Device time on a GPU: what is charged beside what events around the same work say, and what measuring costs."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from tests.device_support import until
from tests.telemetry_support import Recorder

if TYPE_CHECKING:
    from accel.telemetry import DeviceWork

pytestmark = pytest.mark.gpu

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])
Host = Literal["inline", "process"]
SIDE = 4096


async def product(device: accel.Device) -> accel.AccelRef:
    """Return an operand of a product of some milliseconds, which has run once."""
    a = await device.put(np.random.default_rng(1).standard_normal((SIDE, SIDE)).astype(np.float32))
    await device.blas.gemm(a, a)
    await device.get((await device.blas.gemm(a, a))[0, :1])
    return a


@HOSTS
async def test_work_is_charged_what_the_lane_was_busy(host: Host) -> None:
    """P32: one stream without a gap, so that the clock around all of it is the lane's busy time."""
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host, streams=1, libraries=("blas",))
        a = await product(device)
        ratios = []
        for _ in range(5):
            began = time.perf_counter()
            with accel.DeviceTime() as spent:
                async with device.batch() as batch:
                    for _ in range(40):
                        batch.blas.gemm(a, a)
            ratios.append((spent.seconds or 0.0) / (time.perf_counter() - began))
        assert 0.95 <= statistics.median(ratios) <= 1.05, ratios
        began = time.perf_counter()
        with accel.DeviceTime() as spent:
            await asyncio.gather(*[device.blas.gemm(a, a) for _ in range(40)])
        assert 0.95 <= (spent.seconds or 0.0) / (time.perf_counter() - began) <= 1.05


async def test_an_op_is_charged_what_events_of_torch_say() -> None:
    torch = pytest.importorskip("torch")
    async with accel.System() as system:
        device = await system.open_device("cuda", host="inline", libraries=("blas",))
        a = await product(device)
        x = torch.randn((SIDE, SIDE), device="cuda")
        torch.backends.cuda.matmul.allow_tf32 = False
        ours, theirs = [], []
        for _ in range(15):
            with accel.DeviceTime() as spent:
                await device.blas.gemm(a, a)
            ours.append(spent.seconds or 0.0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.mm(x, x)
            end.record()
            end.synchronize()
            theirs.append(begin.elapsed_time(end) * 1e-3)
        assert 0.9 <= statistics.median(ours) / statistics.median(theirs) <= 1.1


async def test_streams_that_overlap_are_each_charged_their_span_and_waits_are_not() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", host="inline", libraries=("blas",))
        a = await product(device)
        with accel.DeviceTime() as alone:
            await device.blas.gemm(a, a)
        with accel.DeviceTime() as chain:  # each waits for the one before, in whatever stream
            b = a
            for _ in range(10):
                b = await device.blas.gemm(a, b, alpha=1e-3)
        assert 8 * (alone.seconds or 0.0) <= (chain.seconds or 0.0) <= 13 * (alone.seconds or 0.0)


@HOSTS
async def test_a_service_a_graph_and_a_transfer_are_charged(host: Host) -> None:
    probe = Recorder()
    probe.times_work = True
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host, libraries=("blas",))
        a = await product(device)

        async def handler(items: list[int]) -> list[int]:
            await asyncio.gather(*[device.blas.gemm(a, a) for _ in items])
            return items

        async with DynamicBatcher(handler, device=device) as batcher:
            await asyncio.gather(*[batcher.submit(n) for n in range(8)])
            assert batcher.statistics().device_seconds > 1e-3
        async with device.graph() as graph:
            for _ in range(4):
                graph.blas.gemm(a, a)
        system.probes.add(probe)
        await graph.replay()
        host_array = np.ones(1 << 26, np.uint8)
        await device.get(await device.put(host_array))
        system.probes.remove(probe)
    work: dict[str, DeviceWork] = {work.name: work for work in probe.of("op_ended")}
    seconds = {name: each.device_seconds or 0.0 for name, each in work.items()}
    assert seconds["replay"] > 1e-3
    for name in ("put", "get"):
        assert 0.0 < seconds[name] <= work[name].ended_at - work[name].sent_at


async def test_a_fault_in_a_measured_batch_is_the_callers_error_and_the_next_one_is_measured() -> None:
    plan = accel.testing.FaultPlan().poison_at(1, op="gemm")
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process", faults=plan)
        a = await device.put(np.ones((64, 64), np.float32), durable=True)
        with accel.DeviceTime(), pytest.raises(accel.ContextPoisonedError):
            await device.blas.gemm(a, a)
        await until(lambda: device.state is accel.DeviceState.READY)
        with accel.DeviceTime() as spent:
            await device.blas.gemm(a, a)
        assert (spent.seconds or 0.0) > 0.0


async def test_measuring_costs_a_batch_of_a_millisecond_two_percent_at_most() -> None:
    """P32: the cost of timing, by passes that take turns."""
    async with accel.System() as system:
        device = await system.open_device("cuda", host="inline", libraries=("blas",))
        a = await product(device)

        async def timed(block: Any) -> float:
            began = time.perf_counter()
            with block:
                for _ in range(50):
                    async with device.batch() as batch:
                        batch.blas.gemm(a, a)
            return time.perf_counter() - began

        class Plain:
            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...

        ratios = []
        for _ in range(9):
            plain = await timed(Plain())
            ratios.append(await timed(accel.DeviceTime()) / plain)
        assert statistics.median(ratios) <= 1.02, ratios
