"""Tiny ops that one task awaits one after the other: their ends are taken in the turn in which they are sent, and others get their turns all the same."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel import registry
from accel.completion import AdaptiveCompletion, Pacing
from accel.completion.reactor import Reactor
from accel.engine import sender
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, task, until
from tests.late_backend import LateDevice, LateStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.completion.strategy import Pending
    from accel.cpu.stream import CpuEvent

PATIENT = AdaptiveCompletion(Pacing(brief=1.0))
"""What is brief anywhere, on a machine that is busy too."""

pytestmark = pytest.mark.usefixtures("nothing_left")


class Met:
    """Which marks were looked for at once, and found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.found = 0
        meets = Reactor.meets_at_once

        def noted(reactor: Reactor, pending: Pending) -> bool:
            self.asked += 1
            found = meets(reactor, pending)
            self.found += found
            return found

        monkeypatch.setattr(Reactor, "meets_at_once", noted)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has done an op before its mark is recorded."""
    record = LateStream.record

    def recorded(stream: LateStream, event: CpuEvent) -> bool:
        with contextlib.suppress(accel.AccelError):  # a fault is told where it always is
            stream.synchronize()
        return record(stream, event)

    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateStream, "record", recorded)


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("late", completion=PATIENT, libraries=["elementwise", "memory"])


@pytest.fixture
def met(device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> Met:
    return Met(monkeypatch)


async def turning(seen: list[float]) -> None:
    while True:
        seen.append(time.perf_counter())
        await asyncio.sleep(0)


async def test_tiny_ops_of_one_task_end_without_turns_and_right(device: accel.Device, met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng().standard_normal(8)
    x = await device.put(values)
    stopped = time.perf_counter()
    monkeypatch.setattr(sender, "perf_counter", lambda: stopped)  # however long ops take here
    for _ in range(200):
        await device.elementwise.unary("neg", x, out=x)
    assert met.found >= 198, "but for the first, after which it is known"
    await device.elementwise.unary("abs", x, out=x)
    np.testing.assert_array_equal(await device.get(x), np.abs(values))
    assert device.info().in_flight == 0


async def test_others_get_their_turns(device: accel.Device, met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    x = await device.put(np.ones(8))
    ticks = itertools.count(int(time.perf_counter() * 1e5))
    monkeypatch.setattr(sender, "perf_counter", lambda: next(ticks) * 1e-5)
    turns: list[float] = []
    other = task(turning(turns))
    await asyncio.sleep(0)
    for _ in range(300):
        before = met.found
        turned = len(turns)
        for _ in range(12):  # of which each takes 0.01 ms, by this clock
            await device.elementwise.unary("neg", x, out=x)
        assert met.found > before
        assert len(turns) > turned
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_a_timeout_ends_a_loop_of_tiny_ops(device: accel.Device) -> None:
    x = await device.put(np.ones(8))
    began = time.perf_counter()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            while True:
                await device.elementwise.unary("neg", x, out=x)
    assert time.perf_counter() - began < 5.0
    await until(lambda: device.info().in_flight == 0, "all retired")


async def test_where_several_wait_nobody_stays(device: accel.Device, met: Met) -> None:
    refs = [await device.put(np.ones(8)) for _ in range(4)]
    met.asked = 0

    async def client(ref: accel.AccelRef) -> None:
        for _ in range(20):
            await device.elementwise.unary("neg", ref, out=ref)

    await bounded(asyncio.gather(*map(client, refs)))
    # The last of them may have been alone at its end.
    assert met.asked <= 20


async def test_an_op_that_takes_longer_is_not_waited_for_again(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    async with accel.System() as system:
        device = await system.open_device("late", libraries=["elementwise", "memory"])
        x = await device.put(np.ones(8))
        monkeypatch.setattr(LateDevice, "delay", 1e-3)
        for _ in range(30):
            await device.elementwise.unary("neg", x, out=x)
        (known,) = (
            estimate
            for reactor in device._core.shared.values()
            if isinstance(reactor, Reactor)
            for kind, estimate in reactor._predictor._estimates.items()
            if "unary" in kind  # type: ignore[operator]
        )
        assert known.mean > 1e-4
        met.found = 0
        for _ in range(10):
            await device.elementwise.unary("neg", x, out=x)
        assert not met.found


async def test_a_fault_is_told(met: Met) -> None:
    async with accel.System() as system:
        faults = FaultPlan().poison_at(12, op="unary")
        device = await system.open_device("late", faults=faults, completion=PATIENT, libraries=["elementwise", "memory"])
        x = await device.put(np.ones(8))
        for _ in range(11):
            await device.elementwise.unary("neg", x, out=x)
        await failure(bounded(device.elementwise.unary("neg", x, out=x)), accel.ContextPoisonedError)
        async for generation in device.generations():
            if generation == 2:
                break
        assert (await device.get(await device.put([3.0]))).tolist() == [3.0]
