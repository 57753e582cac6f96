"""A child that sends nonsense is killed, and its device says so; the parent is never harmed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import accel
from accel.remote import link

pytestmark = pytest.mark.usefixtures("nothing_left")

ONCE = accel.RestartStrategy(max_restarts=0)


@pytest.mark.parametrize("child", ["noise", "no_json", "no_error"])
async def test_nonsense_at_the_beginning_is_an_error_of_the_opening(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TARGET", f"tests.hostile_children:{child}")
    async with accel.System() as system:
        with pytest.raises(accel.HostDiedError):
            await asyncio.wait_for(system.open_device("cpu", host="process", restart=ONCE), 20)
        cpu = await system.open_device("cpu", host="inline")
        await cpu.zeros(4)


@pytest.mark.parametrize("child", ["answers_unasked", "cut_numbers", "slab_without_memory", "half_a_place"])
async def test_nonsense_later_on_loses_the_child(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TARGET", f"tests.hostile_children:{child}")
    async with accel.System() as system:
        device = await asyncio.wait_for(system.open_device("cpu", host="process", restart=ONCE), 20)
        with pytest.raises(accel.AccelError):
            await asyncio.wait_for(device.zeros(4), 20)
        async with asyncio.timeout(20):
            while device.state is not accel.DeviceState.LOST:
                await asyncio.sleep(0)
        with pytest.raises(accel.DeviceLostError):
            await device.zeros(4)


async def test_an_event_of_the_log_is_refused_or_taken_and_is_no_error_of_the_parent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
    async with accel.System() as system:
        monkeypatch.setattr(link, "TARGET", "tests.hostile_children:log_that_is_too_deep")
        with pytest.raises(accel.HostDiedError):
            await asyncio.wait_for(system.open_device("cpu", host="process", restart=ONCE), 20)
        monkeypatch.setattr(link, "TARGET", "tests.hostile_children:log_with_odd_keys")
        device = await asyncio.wait_for(system.open_device("cpu", host="process", restart=ONCE), 20)
        assert device.state is accel.DeviceState.READY
        assert caplog.text.count(" odd ") == 12
    assert not raised
