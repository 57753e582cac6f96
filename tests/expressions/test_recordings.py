"""Expressions that become recorded graphs, on a CPU device that is given graphs: the same results, the same order, and nothing kept alive."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuDevice
from accel.expressions import recordings
from accel.testing import FaultPlan


class Native:
    """What a capture makes: the ops, bound to their addresses. It runs them one by one; a GPU keeps its commands instead."""

    def __init__(self, launches: Any) -> None:
        self.launches = launches

    def run(self, lane: Any) -> None:
        """Enqueue the ops."""
        for kernel, op, plan, inputs, outputs in self.launches:
            kernel(lane, op, plan, inputs, outputs)

    def close(self) -> None:
        """Give it back."""
        self.launches = ()


class Graphs:
    """Graphs as kernels of the CPU device. Counts the calls of recorded expressions."""

    def __init__(self) -> None:
        self.calls = 0
        self.keeps_ops = True

    def capture(self, lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        op.program.native = Native(list(op.program._launches) if self.keeps_ops else ())

    def replay(self, lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        op.program.native.run(lane)

    def call(self, lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        self.calls += 1
        op.copy_in(lane, inputs, outputs)
        op.program.native.run(lane)
        op.copy_out(lane, outputs)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Give CPU devices in this process graphs."""
    made, original = Graphs(), CpuDevice.kernels
    kernels = {"capture": {"capture": made.capture}, "graph": {"replay": made.replay, "call": made.call}}
    monkeypatch.setattr(CpuDevice, "kernels", lambda self, library: kernels.get(library) or original(self, library))
    return made


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence().entropy)


async def test_a_network_is_recorded_and_gives_the_same_results(graphs: Graphs, device: accel.Device, rng: np.random.Generator) -> None:
    xp = device.xp
    w, v, b = rng.standard_normal((8, 16)), rng.standard_normal((16, 4)), rng.standard_normal(16)
    weights = await accel.evaluate(*map(xp.asarray, (w, v, b)))
    found = []
    for _ in range(7):
        x = rng.standard_normal((5, 8))
        there = await xp.asarray(x)
        y, z = await accel.evaluate(hidden := (there @ weights[0] + weights[2]).relu(), hidden @ weights[1] * 2.0 + there.sum())
        found.append((x, y, z))
    for x, y, z in found:  # at the end: no call may have overwritten what an earlier one returned
        hidden_ = np.maximum(x @ w + b, 0)
        np.testing.assert_allclose(await y.numpy(), hidden_, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(await z.numpy(), hidden_ @ v * 2.0 + x.sum(), rtol=1e-12, atol=1e-12)
    assert graphs.calls == 4


async def test_operands_that_begin_to_vary_are_copied_from_then_on(
    graphs: Graphs, device: accel.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    xp = device.xp
    a, b = rng.standard_normal((2, 6))
    x, y = await accel.evaluate(xp.asarray(a), xp.asarray(b))
    for _ in range(5):
        np.testing.assert_allclose(await (x * y - 1.0).numpy(), a * b - 1.0)
    assert graphs.calls == 2
    for _ in range(6):
        b = rng.standard_normal(6)
        y = await xp.asarray(b)
        np.testing.assert_allclose(await (x * y - 1.0).numpy(), a * b - 1.0)
    assert graphs.calls == 5
    for _ in range(6):  # both vary now
        a, b = rng.standard_normal((2, 6))
        x, y = await accel.evaluate(xp.asarray(a), xp.asarray(b))
        np.testing.assert_allclose(await (x * y - 1.0).numpy(), a * b - 1.0)
    assert graphs.calls == 8


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x + 0.0, lambda x: x + -0.0),
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: x.sum(axis=0), lambda x: x.sum(axis=1)),
        (lambda x: x[1:, :], lambda x: x[:-1, :]),
        (lambda x: x.xp.full((3,), 0.0) * x[0, 0], lambda x: x.xp.full((3,), -0.0) * x[0, 0]),
    ],
    ids=["zero", "number", "axis", "slice", "filled"],
)
async def test_expressions_that_differ_in_a_number_do_not_share_a_graph(
    first: Any, second: Any, rng: np.random.Generator, graphs: Graphs
) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        plain = await system.open_device("cpu")
        a = np.concatenate([np.full((1, 3), -0.0), rng.standard_normal((2, 3))])
        x, same = await device.xp.asarray(a), await plain.xp.asarray(a)
        for each in (first, second):
            expected = await each(same).numpy()
            for _ in range(5):
                found = await each(x).numpy()
                np.testing.assert_array_equal(found, expected)
                np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


async def test_a_recorded_graph_keeps_no_operand_alive(graphs: Graphs, device: accel.Device, rng: np.random.Generator) -> None:
    graphs.keeps_ops = False  # as a GPU's; the results are of no interest
    xp = device.xp
    weights, x = await accel.evaluate(xp.asarray(rng.standard_normal((64, 64))), xp.asarray(rng.standard_normal((64, 64))))
    for _ in range(5):
        x = await (x @ weights * 0.1)
    assert graphs.calls == 2
    dropped = weakref.ref(weights.ref)
    del weights, x
    gc.collect()
    assert dropped() is None


async def test_writes_before_and_behind_keep_their_order(graphs: Graphs, device: accel.Device, rng: np.random.Generator) -> None:
    xp = device.xp
    x = await xp.asarray(np.zeros(1000))
    for number in range(12):
        await device.put(np.full(1000, float(number)), out=x.ref)
        task = asyncio.ensure_future((x * 2.0 + 1.0).numpy())
        await asyncio.sleep(0)
        later = asyncio.ensure_future(device.put(np.full(1000, -1.0), out=x.ref))
        np.testing.assert_array_equal(await task, np.full(1000, 2.0 * number + 1.0))
        await later


async def test_two_tasks_share_a_graph(graphs: Graphs, device: accel.Device, rng: np.random.Generator) -> None:
    xp = device.xp

    async def client() -> None:
        for _ in range(20):
            a = rng.standard_normal((4, 4))
            x = await xp.asarray(a)
            np.testing.assert_allclose(await (x @ x + 1.0).numpy(), a @ a + 1.0)

    await asyncio.gather(*[client() for _ in range(8)])
    assert len(xp.recordings._structures) >= 1


async def test_large_expressions_are_not_recorded(graphs: Graphs, device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_MOST_BYTES", 1000)
    x = await device.xp.asarray(np.ones(1000))
    for _ in range(5):
        await (x + 1.0)
    assert graphs.calls == 0


async def test_the_memory_of_recorded_graphs_is_bounded(
    graphs: Graphs, device: accel.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "_MOST_KEPT", 100_000)
    xp = device.xp
    a = rng.standard_normal(4000)
    x = await xp.asarray(a)
    for number in range(10):
        for _ in range(4):
            np.testing.assert_allclose(await (x + float(number)).numpy(), a + number)
    assert xp.recordings._kept <= 100_000
    kept = [each for each in xp.recordings._structures.values() if each.function is not None]
    assert 1 <= len(kept) <= 3


async def test_after_a_rebuild_it_is_recorded_anew(
    graphs: Graphs, device: accel.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    xp = device.xp
    a = rng.standard_normal(10)
    x = xp.asarray(await device.put(a, durable=True))
    for _ in range(4):
        np.testing.assert_allclose(await (x * 3.0).numpy(), a * 3)
    generation, calls = device.generation, graphs.calls
    device._host.context.report_fault(accel.DriverError("made up", scope=accel.FaultScope.CONTEXT))
    async for now in device.generations():
        if now > generation:
            break
    for _ in range(5):
        np.testing.assert_allclose(await (x * 3.0).numpy(), a * 3)
    assert graphs.calls - calls == 2


@pytest.mark.parametrize("options", [{"debug": True}, {"faults": FaultPlan()}], ids=["debug", "faults"])
async def test_devices_that_count_ops_record_nothing(options: Any, graphs: Graphs) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", **options)
        x = await device.xp.asarray(np.ones(10))
        for _ in range(5):
            await (x + 1.0)
        assert graphs.calls == 0


async def test_a_result_that_is_an_operand_is_not_recorded(graphs: Graphs, device: accel.Device) -> None:
    x = await device.xp.asarray(np.arange(6.0))
    for _ in range(6):
        y = await device.xp.reshape(x, (2, 3))
        np.testing.assert_array_equal(await y.numpy(), np.arange(6.0).reshape(2, 3))


async def test_a_process_host_calls_recorded_graphs(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        device._core.has_graphs = True  # the child enqueues the ops of a graph one by one
        xp = device.xp
        w = rng.standard_normal((8, 4))
        there = await xp.asarray(w)
        for _ in range(6):
            a = rng.standard_normal((3, 8))
            x = await xp.asarray(a)
            np.testing.assert_allclose(await (x @ there + 1.0).numpy(), a @ w + 1.0)
        assert [each.function is not None for each in xp.recordings._structures.values()].count(True) == 1
