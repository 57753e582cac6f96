from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

import accel
from accel.device.info import info_as_json
from accel.telemetry.hardware import HardwareInfo
from accel.testing import FaultPlan


async def test_a_snapshot_is_json_of_devices_and_actors_through_a_fault() -> None:
    secret = accel.DriverError("cannot read /etc/secret at 0xdeadbeef", code=700, scope=accel.FaultScope.CONTEXT)
    async with accel.System("service") as system:
        assert system.snapshot()["devices"] == []
        device = await system.open_device("cpu", memory_limit=1 << 26, faults=FaultPlan().poison_at(2, secret))
        kept = await device.put(np.ones(1024), durable=True)
        (before,) = json.loads(json.dumps(system.snapshot()))["devices"]
        assert (before["name"], before["state"], before["ready"], before["generation"]) == ("cpu:0", "ready", True, 1)
        assert before["memory"] | {"used": 8192, "durable": 8192, "limit": 1 << 26} == before["memory"]
        with pytest.raises(accel.ContextPoisonedError):
            await device.elementwise.unary("neg", kept)
        during = json.dumps(system.snapshot())
        assert json.loads(during)["devices"][0]["ready"] is False
        assert "secret" not in during
        async for generation in device.generations():
            if generation == 2:
                break
        after = system.snapshot()
        assert (after["name"], after["state"]) == ("service", "open")
        assert (after["devices"][0]["generation"], after["devices"][0]["restarts"]) == (2, 1)
        assert after["devices"][0]["hardware"] is None
        assert [actor["name"] for actor in after["actors"]["children"]] == ["device-1(cpu:0)"]


async def test_a_snapshot_is_for_the_loop_of_the_system() -> None:
    async with accel.System() as system:
        with pytest.raises(accel.ClosedError):
            await asyncio.to_thread(system.snapshot)


async def test_a_snapshot_has_what_the_hardware_told() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        told = HardwareInfo(utilization=0.5, xid_errors={79: 2}, age=9.0)
        found = info_as_json(device.info(), device.health(), told)["hardware"]
    assert json.loads(json.dumps(found)) == found
    assert (found["utilization"], found["xid_errors"], found["stale"]) == (0.5, {"79": 2}, True)
