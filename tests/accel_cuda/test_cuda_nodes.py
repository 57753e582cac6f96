"""GPUs on a node: an agent on this machine starts their children."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness
from accel_cuda import CudaBackend
from tests.device_support import generation
from tests.node_support import AgentProcess, running_agent

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent() as agent:
        yield agent


@pytest.mark.parametrize("check", checks("device"), ids=lambda check: check.name)
async def test_device_conformance_on_a_node(check: Check, agent: AgentProcess) -> None:
    await check.run(DeviceHarness(CudaBackend(), options={"node": agent.node}))


async def test_durable_memory_stays_on_the_node(agent: AgentProcess, rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", node=agent.node, standby="context")
        data = rng.random(1 << 22)
        kept = await device.put(data, durable=True)
        assert await device.spare_ready()
        pid = device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(generation(device, 2), 60)
        np.testing.assert_array_equal(await device.get(kept), data)


async def test_ranks_on_two_nodes_sum(agent: AgentProcess) -> None:
    if len(CudaBackend().devices()) < 2:
        pytest.skip("needs two GPUs")
    with running_agent("127.0.0.3") as other:
        async with accel.System() as system:
            places = [("cuda:0", agent.node), ("cuda:1", other.node)]
            devices = [await system.open_device(spec, node=node, libraries=("collective",)) for spec, node in places]
            world = await system.open_world(devices)
            sums = await world.all_reduce([await device.full(1 << 20, float(rank + 1)) for rank, device in enumerate(devices)])
            for device, total in zip(devices, sums, strict=True):
                np.testing.assert_array_equal(await device.get(total), np.full(1 << 20, 3.0))
