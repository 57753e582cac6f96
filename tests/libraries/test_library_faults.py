"""A fault that a library finds first, or that surfaces while it is given its stream, is everybody's: told as one, with the driver's code."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuDevice
from accel.patterns import DynamicBatcher
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, generation, opened, task, turns, until
from tests.op_bugs_support import Bug, Poisoned, PoisonedOnTheLoop
from tests.own_library_support import Scale, Scaling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


pytestmark = pytest.mark.usefixtures("nothing_left")


PATIENCE = 30.0
"""Seconds for what takes one, on a machine that has much else to do."""


@pytest.mark.parametrize(("host", "library"), [("inline", Poisoned), ("inline", PoisonedOnTheLoop), ("process", Poisoned)])
async def test_what_a_library_raises_of_a_dead_context_is_the_fault(host: Any, library: type[Poisoned]) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(library)
        x, durable = await device.put(np.ones(4)), await device.put(np.ones(3), durable=True)
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await asyncio.wait_for(device.run(Bug(x, "poison")), PATIENCE)
        assert caught.value.code == 700
        assert "illegal address" in str(caught.value)
        assert "bug" in caught.value.suspects
        assert x.is_stale
        y = await asyncio.wait_for(device.run(Bug(await device.put(np.ones(4)))), PATIENCE)
        np.testing.assert_array_equal(await device.get(y), np.full(4, 2.0))
        np.testing.assert_array_equal(await device.get(durable), np.ones(3))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


async def handler_on(device: accel.Device) -> Callable[[list[float]], Awaitable[list[float]]]:
    """Return the handler of a batch, for a device."""

    async def handle(batch: list[float]) -> list[float]:
        x = await device.put(np.asarray(batch))
        return [float(each) for each in await device.get(await device.run(Bug(x)))]

    return handle


async def test_the_quarantine_finds_the_one_input_and_all_others_are_answered() -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Poisoned)
        wanted = [float(n) for n in range(16)]
        wanted[5] = -1.0
        async with DynamicBatcher(
            await handler_on(device), max_items=16, idempotent=True, device=device, quarantine=handler_on, close_timeout=5
        ) as batcher:
            answers = await asyncio.wait_for(asyncio.gather(*(batcher.submit(each) for each in wanted), return_exceptions=True), PATIENCE)
        assert isinstance(answers[5], accel.PoisonedInputError)
        assert [answer for n, answer in enumerate(answers) if n != 5] == [each + 1 for each in wanted if each >= 0]
        assert device.state is accel.DeviceState.READY


class Streams:
    """Makes the streams of CPU contexts; has the next one fail, once it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: accel.AccelError) -> None:
        self.armed = False
        self.error = error
        self._make = CpuDevice.create_stream
        streams = self

        def create_stream(device: CpuDevice, *, library: str = "") -> Any:
            if streams.armed:
                streams.armed = False
                raise streams.error
            return streams._make(device)

        monkeypatch.setattr(CpuDevice, "create_stream", create_stream)


async def scaled(device: accel.Device) -> None:
    """Register the library, and see that it is there."""
    await device.register(Scaling)
    await scales(device)


async def scales(device: accel.Device) -> None:
    """See that the library is there."""
    x = await device.put(np.arange(4.0))
    np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), 2 * np.arange(4.0))


async def test_a_fault_while_the_stream_is_made_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, accel.DriverError("illegal address", code=700, scope=accel.FaultScope.CONTEXT))
    async with opened(host="inline") as device:
        ref = await device.put(np.arange(4.0))
        streams.armed = True
        error = await failure(device.register(Scaling), accel.ContextPoisonedError)
        assert (error.code, error.device, error.generation, error.executed, error.retryable) == (700, device.name, 1, "no", True)
        assert isinstance(error.__cause__, accel.DriverError)
        assert ref.is_stale, "the device has noticed"
        await bounded(generation(device, 2))
        assert device.info().restarts == 1
        await scaled(device)


async def test_an_error_that_is_no_fault_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, accel.DriverError("no more streams", code=2))
    async with opened(host="inline") as device:
        streams.armed = True
        await failure(device.register(Scaling), accel.DriverError)
        assert (device.generation, device.state) == (1, accel.DeviceState.READY)
        await scaled(device)


async def test_a_fault_that_loses_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, accel.DriverError("gone", code=700, scope=accel.FaultScope.PROCESS))
    async with opened(host="inline") as device:
        streams.armed = True
        assert not (await failure(device.register(Scaling), accel.ContextPoisonedError)).retryable
        assert device.state is accel.DeviceState.LOST


async def test_a_library_that_finds_the_fault_itself(hosted: accel.Device) -> None:
    error = await failure(hosted.register(Scaling, faults=True), accel.ContextPoisonedError)
    assert (error.code, error.generation) == (700, 1)
    await bounded(generation(hosted, 2))
    await scaled(hosted)


async def test_a_fault_of_another_op_while_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go = threading.Event(), threading.Event()

    def open_slowly(library: Scaling, stream: Any) -> None:
        asked.set()
        assert go.wait(20)

    plan = FaultPlan().poison_at(1, op="fill")
    async with opened(plan, host="inline") as device:
        with monkeypatch.context() as patch:
            patch.setattr(Scaling, "open", open_slowly)
            registering = task(device.register(Scaling))
            await until(asked.is_set)
            await failure(device.zeros(3), accel.ContextPoisonedError)
            await failure(registering, accel.ContextPoisonedError)
            go.set()
        await bounded(generation(device, 2))
        await scaled(device)


@pytest.mark.parametrize(
    ("host", "scope", "turn"),
    [*(("inline", accel.FaultScope.CONTEXT, turn) for turn in range(7)), *(("auto", accel.FaultScope.PROCESS, turn) for turn in (0, 3))],
)
async def test_a_fault_at_any_moment_of_registering(turn: int, host: Any, scope: accel.FaultScope) -> None:
    async with opened(host=host) as device:
        registering = task(device.register(Scaling))
        await turns(turn)
        device._host.context.report_fault(accel.DriverError("now", scope=scope))
        (outcome,) = await asyncio.gather(registering, return_exceptions=True)
        assert outcome is None or type(outcome) is accel.ContextPoisonedError
        await bounded(generation(device, 2))
        await (scales(device) if outcome is None else scaled(device))
        assert device.generation == 2
