"""Callers that sleep until the end of their op is near, and look for it themselves then: however they end, the op is retired and nobody is kept waiting."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import registry
from accel.completion.pacing import Pacing
from accel.completion.reactor import Reactor, ReactorLane
from accel.engine import sender
from accel.testing import FaultPlan
from tests.completion_support import PATIENCE, Event, Mark
from tests.device_support import bounded, failure, task, turns, until
from tests.late_backend import LateDevice, LateEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")

LATE = 0.02


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are so late that nobody stays awake for them."""
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", LATE)


@pytest.fixture(params=["op", "op at once", "batch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How an op is sent; at once it naps, without a turn and a look before, where it is as if all of its kind had taken exactly as long."""
    if request.param == "op at once":
        stopped = time.perf_counter()
        monkeypatch.setattr(sender, "perf_counter", lambda: stopped)  # so that the loop has always just turned
        monkeypatch.setattr(Reactor, "is_far", lambda *_: True)
    return str(request.param)


async def negated(device: accel.Device, x: accel.AccelRef, way: str, timeout: float | None = None) -> accel.AccelRef:
    if way != "batch":
        return await device.elementwise.unary("neg", x, timeout=timeout)
    async with device.batch(timeout=timeout) as batch:
        return batch.elementwise.unary("neg", x)


async def learned(device: accel.Device, way: str) -> accel.AccelRef:
    x = await device.put(np.ones(8))
    for _ in range(6):
        x = await negated(device, x, way)
    return x


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("late")


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of naps, in order: that they began is asserted on."""
    seen: list[str] = []
    begin, end = Reactor.nap, Reactor.end_nap

    def nap(self: Reactor, *arguments: Any) -> Any:
        found = begin(self, *arguments)
        if found is not None:
            seen.append("began")
        return found

    def end_nap(self: Reactor, *arguments: Any) -> bool:
        seen.append("ended")
        return end(self, *arguments)

    monkeypatch.setattr(Reactor, "nap", nap)
    monkeypatch.setattr(Reactor, "end_nap", end_nap)
    return seen


async def test_who_waits_alone_naps_and_finds_the_end(device: accel.Device, way: str, naps: list[str]) -> None:
    x = await learned(device, way)
    for _ in range(50):  # on a busy machine the reactor may wake so late that the end has come
        naps.clear()
        began = time.perf_counter()
        y = await negated(device, x, way)
        assert time.perf_counter() - began >= LATE
        assert naps[:1] == ["began"]
        np.testing.assert_array_equal(await device.get(y), -np.ones(8))
        assert device.info().in_flight == 0
        if naps[:2] == ["began", "ended"]:
            break
    else:
        pytest.fail("no waiter ever had its mark back")


async def test_what_is_surely_far_is_not_looked_for_before_the_nap(
    device: accel.Device, way: str, naps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = await learned(device, way)
    query = LateEvent.query

    def asked(event: LateEvent) -> bool:
        naps.append("asked")
        return query(event)

    monkeypatch.setattr(LateEvent, "query", asked)
    naps.clear()
    await negated(device, x, way)
    assert naps[:2] == (["began", "asked"] if way == "op at once" else ["asked", "began"])


async def test_a_timeout_ends_a_nap(device: accel.Device, way: str, naps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = await learned(device, way)
    monkeypatch.setattr(LateDevice, "delay", 0.5)
    naps.clear()
    began = time.perf_counter()
    await failure(negated(device, x, way, 0.005), accel.DeadlineExceededError)
    assert time.perf_counter() - began < 0.4
    assert naps, "it has napped"
    assert device.info().in_flight == 1, "the device goes on"
    await until(lambda: device.info().in_flight == 0, "the op retired")


async def test_cancelling_a_nap_leaves_the_op_to_its_end(device: accel.Device, way: str, naps: list[str]) -> None:
    x = await learned(device, way)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(15):
        naps.clear()
        waiting = task(negated(device, x, way))
        await until(lambda: bool(naps), "it naps")
        until_then = time.perf_counter() + rng.random() * LATE * 1.2
        while time.perf_counter() < until_then:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        np.testing.assert_array_equal(await bounded(device.get(x)), np.ones(8), err_msg=f"{seed=}")
    await until(lambda: device.info().in_flight == 0, "all retired")


async def test_a_fault_ends_a_nap(way: str, naps: list[str]) -> None:
    async with accel.System() as system:
        device = await system.open_device("late", faults=FaultPlan().poison_at(1, op="fill"))
        x = await learned(device, way)
        naps.clear()
        waiting = task(negated(device, x, way))
        await until(lambda: bool(naps), "it naps")
        await failure(bounded(device.full(4, 1.0)), accel.ContextPoisonedError)
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], accel.ContextPoisonedError)
        y = await bounded(device.put(np.ones(8)))
        assert device.generation == 2
        np.testing.assert_array_equal(await device.get(await bounded(negated(device, y, way))), -np.ones(8))


async def test_an_op_that_its_kernel_has_refused_naps_for_nothing(way: str) -> None:
    """What it may have enqueued is waited for by nobody, whatever its kind takes: its caller has an error."""
    faults = FaultPlan()
    for n in range(7, 13):
        faults.fail_at(n, accel.LibraryError("the second half was refused"), op="unary")
    async with accel.System() as system:
        device = await system.open_device("late", faults=faults)
        x = await learned(device, way)
        for _ in range(6):
            began = time.perf_counter()
            await failure(bounded(negated(device, x, way, 5.0)), accel.LibraryError)
            assert time.perf_counter() - began < PATIENCE / 2, "told, and not found when the time was over"
            await until(lambda: device.info().in_flight == 0, "the rest retired")
        assert faults.fired == 6
        np.testing.assert_array_equal(await device.get(await bounded(negated(device, x, way))), -(await device.get(x)))


async def test_closing_the_device_lets_who_naps_have_the_result(way: str, naps: list[str]) -> None:
    async with accel.System() as system:
        device = await system.open_device("late")
        x = await learned(device, way)
        naps.clear()
        waiting = task(negated(device, x, way))
        await until(lambda: bool(naps), "it naps")
        await device.aclose()
        (ended,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(ended, accel.AccelRef)


async def test_others_that_come_meanwhile_are_answered_too(device: accel.Device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = await learned(device, way)
    seed = random.randrange(2**32)
    rng = random.Random(seed)

    async def client(k: int) -> None:
        y = x
        await asyncio.sleep(rng.random() * 0.05)
        for _ in range(rng.randrange(1, 6)):
            monkeypatch.setattr(LateDevice, "delay", rng.choice((0.0, 1e-3, LATE)))
            y = await negated(device, y, rng.choice(("op", "batch")))
        assert np.abs(await device.get(y)).max() == 1.0, f"{seed=} {k=}"

    await bounded(asyncio.gather(*(client(k) for k in range(12))))
    await until(lambda: device.info().in_flight == 0, "all retired")


async def test_who_leaves_a_nap_takes_no_others_marks_along(device: accel.Device, way: str, naps: list[str]) -> None:
    x = await learned(device, way)
    naps.clear()
    first = task(negated(device, x, way))
    await until(lambda: bool(naps), "it naps")
    second = task(negated(device, x, way))
    await until(lambda: device.info().in_flight == 2, "the other is sent")
    await turns(3)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    np.testing.assert_array_equal(await device.get(await bounded(second)), -np.ones(8))
    await until(lambda: device.info().in_flight == 0, "both retired")
    await bounded(device.aclose())


async def test_a_nap_that_ends_behind_another_mark_keeps_nothing() -> None:
    """A mark that was recorded before, but attended longer, stands before the one whose waiter naps; both end in one look."""
    loop = asyncio.get_running_loop()
    reactor = Reactor(loop, Pacing())
    try:
        ended: list[Any] = []
        lane = ReactorLane(ended.extend, lambda: True)
        before, napping = Mark(Event()), Mark(Event())
        reactor._predictor.observe(napping.kind, 0.05)
        assert reactor.nap(lane, napping) is not None
        reactor.add(lane, before)
        before.event.end()
        napping.event.end()
        await until(lambda: len(ended) == 2, "both ended")
        assert reactor.napping is None
    finally:
        reactor.close()
