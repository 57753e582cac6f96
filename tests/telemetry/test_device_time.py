"""Device time: what work is charged, in this process and in a child."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import numpy as np
import pytest

import accel
from accel.cpu.stream import CpuSpan
from accel.patterns import DynamicBatcher
from accel.remote import requests
from accel.remote.messages import Timed
from tests.device_support import failure, opened, task, until
from tests.telemetry_support import Nap, Napping, Recorder

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])
Host = Literal["inline", "process"]


@HOSTS
async def test_an_op_is_charged_how_long_the_device_worked(host: Host) -> None:
    async with opened(host=host) as device:
        await device.register(Napping)
        x = await device.put(np.ones(4))
        with accel.DeviceTime() as spent:
            await device.run(Nap("napping", x, 0.02))
            await asyncio.sleep(0.3)
        assert spent.seconds is not None
        assert 0.02 <= spent.seconds < 0.3, "the pause is not the device's"
        with accel.DeviceTime() as built_in:
            await device.blas.gemm(await device.put(np.ones((256, 256))), await device.put(np.ones((256, 256))))
        assert 0.0 < (built_in.seconds or 0.0) < 5.0


@HOSTS
async def test_all_ops_of_a_batch_are_charged_together(host: Host) -> None:
    async with opened(host=host) as device:
        await device.register(Napping)
        x = await device.put(np.ones(4))
        with accel.DeviceTime() as spent:
            async with device.batch() as batch:
                for _ in range(4):
                    x = batch.run(Nap("napping", x, 0.005))
                host_array = batch.get(x)
        assert host_array.tolist() == [1.0] * 4
        assert 0.02 <= (spent.seconds or 0.0) < 0.5


async def test_streams_that_overlap_are_charged_their_own_time() -> None:
    async with opened() as device:
        x = await device.put(np.ones(4))
        for name in ("one", "two"):
            await device.register_as(name, Napping)
        for name in ("one", "two"):
            await device.run(Nap(name, x, 0.0))
        began = time.perf_counter()
        with accel.DeviceTime() as spent:
            await asyncio.gather(device.run(Nap("one", x, 0.5)), device.run(Nap("two", x, 0.5)))
        took = time.perf_counter() - began
        assert (spent.seconds or 0.0) >= 1.0
        assert (spent.seconds or 0.0) > took


async def test_waiting_for_another_stream_is_not_charged() -> None:
    async with opened() as device:
        x = await device.put(np.ones(4))
        for name in ("one", "two"):
            await device.register_as(name, Napping)
        for name in ("one", "two"):
            await device.run(Nap(name, x, 0.0))
        out = await device.zeros(4, "float64")
        first = task(device.run(Nap("one", x, 1.0)))
        await until(lambda: device.info().in_flight == 1)
        copying = task(device.copy(x, out))
        with accel.DeviceTime() as spent:
            y = await first
            await device.run(Nap("two", y, 0.001))
        await copying
        assert 0.001 <= (spent.seconds or 0.0) < 0.9


async def test_a_block_is_charged_what_its_tasks_send_and_the_innermost_one_alone() -> None:
    async with opened() as device:
        await device.register(Napping)
        x = await device.put(np.ones(4))
        with accel.DeviceTime() as outer:
            with accel.DeviceTime() as inner:
                await asyncio.gather(*[device.run(Nap("napping", x, 0.1)) for _ in range(3)])
            await device.run(Nap("napping", x, 0.002))
        await device.run(Nap("napping", x, 0.3))
        assert (inner.seconds or 0.0) >= 0.3
        assert 0.002 <= (outer.seconds or 0.0) < 0.25


async def test_what_has_not_ended_is_charged_when_it_has() -> None:
    async with opened() as device:
        await device.register(Napping)
        x = await device.put(np.ones(4))
        with accel.DeviceTime() as spent:
            await failure(device.run(Nap("napping", x, 0.5), timeout=0.05), accel.DeadlineExceededError)
        assert spent.seconds is None
        assert repr(spent) == "<DeviceTime not measured>"
        await until(lambda: spent.seconds is not None)
        assert (spent.seconds or 0.0) >= 0.5


@pytest.mark.parametrize("seconds", [0.001, 1e9])
async def test_a_child_cannot_charge_more_than_its_op_was_away(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(host="process") as device:
        x = await device.put(np.ones(4))
        reported = Timed.iter_unpack

        class Lying:
            @staticmethod
            def iter_unpack(data: bytes) -> Any:
                return [(number, round(seconds * 1e9)) for number, _ in reported(data)]

        monkeypatch.setattr(requests, "Timed", Lying)
        began = time.perf_counter()
        with accel.DeviceTime() as spent:
            await device.elementwise.unary("neg", x)
        assert 0 < (spent.seconds or 0.0) <= min(seconds, time.perf_counter() - began)


async def test_a_device_time_that_cannot_be_read_is_logged_and_not_charged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def seconds(span: CpuSpan) -> float:
        raise ValueError("no clock")

    monkeypatch.setattr(CpuSpan, "seconds", seconds)
    async with opened() as device:
        x = await device.put(np.ones(4))
        with accel.DeviceTime() as spent:
            async with asyncio.timeout(5.0):
                assert (await device.get(await device.elementwise.unary("neg", x))).tolist() == [-1.0] * 4
        assert not spent.seconds
    assert "device_time_not_read" in caplog.text


async def test_a_block_is_not_entered_twice() -> None:
    spent = accel.DeviceTime()
    with spent, pytest.raises(accel.InvalidArgumentError), spent:
        pass
    with spent:
        pass


@HOSTS
async def test_batches_of_a_service_are_charged(host: Host) -> None:
    probe = Recorder()
    async with opened(host=host) as device:
        await device.register(Napping)
        x = await device.put(np.ones(4))

        async def handler(items: list[float]) -> list[float]:
            await asyncio.gather(*[device.run(Nap("napping", x, seconds)) for seconds in items])
            return items

        async with DynamicBatcher(handler, device=device) as batcher:
            assert batcher.statistics().device_seconds == 0.0
            await asyncio.gather(batcher.submit(0.01), batcher.submit(0.02))
            assert 0.03 <= batcher.statistics().device_seconds < 0.5
            device.probes.add(probe)
            await batcher.submit(0.01)
    (batch,) = probe.of("batch_ended")
    assert 0.01 <= batch.device_seconds < 0.5
    assert [work.device_seconds for work in probe.of("op_ended")] == [batch.device_seconds]


@HOSTS
async def test_a_probe_can_have_everything_timed(host: Host) -> None:
    probe = Recorder()
    probe.times_work = True
    async with opened(host=host) as device:
        a = await device.put(np.ones((64, 64)))
        device.probes.add(probe)
        await device.blas.gemm(a, a)
        await device.get(a)
        device.probes.remove(probe)
        assert all(work.device_seconds > 0 for work in probe.of("op_ended"))
        assert len(probe.of("op_ended")) == 2
