"""Devices on a node compute, move arrays and are named as devices of this machine are."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuBackend
from accel.testing.conformance import Check, checks
from accel.testing.conformance.device_harness import DeviceHarness
from tests.node_support import AgentProcess, proxy_to, running_agent

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent() as agent:
        yield agent


@pytest.fixture(scope="module")
def other_agent() -> Iterator[AgentProcess]:
    with running_agent("127.0.0.3") as agent:
        yield agent


@pytest.mark.parametrize("check", checks("device"), ids=lambda check: check.name)
async def test_device_conformance_on_a_node(check: Check, agent: AgentProcess) -> None:
    await check.run(DeviceHarness(CpuBackend(), options={"node": agent.node}))


async def test_a_device_on_a_node_is_named_after_it(agent: AgentProcess) -> None:
    async with accel.System() as system:
        device, other = [await system.open_device("cpu", node=agent.node) for _ in range(2)]
        assert [device.name, other.name] == [f"cpu:0@{agent.address}", f"cpu:0@{agent.address}#2"]
        info = device.info()
        assert (info.node, info.host, info.spare) == (agent.address, "process", None)
        assert info.pid in agent.children()


async def test_arrays_of_all_sizes_arrive(agent: AgentProcess, rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", node=agent.node)
        for nbytes in (0, 1, 8, 100_000, (1 << 20) + 3, 80 << 20):
            array = np.frombuffer(rng.bytes(nbytes), np.uint8)
            ref = await device.put(array)
            np.testing.assert_array_equal(await device.get(ref), array)
            pinned = await device.pinned((nbytes,), "uint8")
            pinned[:] = array[::-1]
            await device.put(pinned, out=ref)
            pinned[:] = 0
            await device.get(ref, out=pinned)
            np.testing.assert_array_equal(pinned, array[::-1])


async def test_ops_around_arrays_keep_their_order(agent: AgentProcess, rng: np.random.Generator) -> None:
    async with accel.System() as system, proxy_to(agent.address) as proxy:
        proxy.piece = 1 << 14
        device = await system.open_device("cpu", node=accel.Node(proxy.address, agent.node.token))
        target = await device.zeros(1 << 17, "float64")

        async def step(number: int) -> None:
            async with device.batch() as batch:
                batch.put(np.full(1 << 17, float(number)), out=target)
                doubled = batch.elementwise.binary("add", target, target)
            np.testing.assert_array_equal(await device.get(doubled), np.full(1 << 17, 2.0 * number))

        await asyncio.gather(*[step(number) for number in range(8)])


async def test_small_ops_overtake_a_large_result(agent: AgentProcess) -> None:
    async with accel.System() as system, proxy_to(agent.address) as proxy:
        device = await system.open_device("cpu", node=accel.Node(proxy.address, agent.node.token))
        small, large = await device.zeros(4), await device.zeros(4 << 20, "float64")
        proxy.piece, proxy.delay = 1 << 16, 0.002  # a second for the large one
        getting = asyncio.ensure_future(device.get(large))
        for _ in range(5):
            await device.elementwise.unary("neg", small)
        assert not getting.done()
        proxy.delay = 0.0
        np.testing.assert_array_equal(await getting, np.zeros(4 << 20))


async def test_a_pool_over_two_nodes(agent: AgentProcess, other_agent: AgentProcess) -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", count=2, nodes=[agent.node, other_agent.node])
        assert [device.name for device in pool] == [
            f"cpu:0@{agent.address}",
            f"cpu:0@{agent.address}#2",
            f"cpu:0@{other_agent.address}",
            f"cpu:0@{other_agent.address}#2",
        ]
        assert {(link.way, link.peer) for link in await pool.links()} == {("host", None)}
        large = await pool[0].put(np.arange(1 << 14))
        np.testing.assert_array_equal(await pool[2].get(await pool[2].put(large)), np.arange(1 << 14))
        with pytest.raises(accel.UnsupportedError, match="memory of one machine"):
            await system.open_world([pool[0], pool[2]])
        with pytest.raises(accel.UnsupportedError, match="memory of one machine"):
            await system.open_world("cpu", nodes=[agent.node, other_agent.node])
        assert set(system.devices) == set(pool)  # those that were opened for the world are closed
        with pytest.raises(accel.UnsupportedError, match="another machine"):
            await pool[0].zeros(4, shareable=True)
        moved = await pool[3].put(await pool[0].get(await pool[0].put(np.arange(3.0))))
        np.testing.assert_array_equal(await pool[3].get(moved), np.arange(3.0))


async def test_a_world_on_one_node(agent: AgentProcess) -> None:
    async with accel.System() as system:
        world = await system.open_world("cpu", ranks=2, nodes=[agent.node])
        parts = [await device.full(3, float(rank + 1)) for rank, device in enumerate(world.devices)]
        sums = await world.all_reduce(parts)
        for device, total in zip(world.devices, sums, strict=True):
            np.testing.assert_array_equal(await device.get(total), np.full(3, 3.0))


async def test_options_that_a_node_cannot_honour_are_refused(agent: AgentProcess) -> None:
    async with accel.System() as system:
        with pytest.raises(accel.UnsupportedError, match="inline"):
            await system.open_device("cpu", node=agent.node, host="inline")
        with pytest.raises(accel.InvalidArgumentError, match="host:port"):
            await system.open_device("cpu", node="here")
        with pytest.raises(accel.InvalidArgumentError, match="nodes="):
            await system.open_pool("cpu", node=agent.node)
        with pytest.raises(accel.BackendUnavailableError, match=r"cpu:3.* is not there"):
            await system.open_device("cpu:3", node=agent.node)
        with pytest.raises(accel.InvalidArgumentError, match="names no device"):
            await system.open_device("tpu", node=agent.node)


async def test_a_node_that_is_not_there_is_told(agent: AgentProcess) -> None:
    async with accel.System() as system:
        with pytest.raises(accel.BackendUnavailableError, match="cannot be reached") as caught:
            await system.open_device("cpu", node=accel.Node("127.0.0.2:1", agent.node.token))
        assert "python -m accel node" in str(caught.value.remedy)


async def test_buffers_get_to_a_node_and_back_through_the_host(agent: AgentProcess) -> None:
    array = np.arange(1 << 17, dtype="float64")
    async with accel.System() as system:
        here, there = await system.open_device("cpu", host="process"), await system.open_device("cpu", node=agent.node)
        assert {link.way for link in await system.links()} == {"host"}
        copy = await here.put(await there.put(await here.put(array)))
        np.testing.assert_array_equal(await here.get(copy), array)
        memory = await here.share(await here.zeros(3, shareable=True))
        for refused in (there.attach(memory), there.zeros(3, shareable=True), there.share(await there.zeros(3))):
            with pytest.raises(accel.UnsupportedError):
                await refused
        os.close(memory.fd)


async def test_a_token_of_a_buffer_on_a_node_is_copied_by_the_process_that_opened_it(agent: AgentProcess) -> None:
    async with accel.System() as system, accel.System() as others:
        there = await system.open_device("cpu", node=agent.node)
        here = await others.open_device("cpu", host="inline")
        token = there.publish(ref := await there.put(np.arange(6.0).reshape(2, 3)))
        np.testing.assert_array_equal(await here.get(await here.put(token)), np.arange(6.0).reshape(2, 3))
        np.testing.assert_array_equal(await here.get(await here.put(there.publish(ref[:, 1]))), [1.0, 4.0])
        with pytest.raises(accel.UnsupportedError, match=r"put\(token\)"):
            await here.attach(there.publish(ref))  # the buffer is on another machine
        copied = await there.put(here.publish(kept := await here.zeros(3)))
        assert (await there.get(copied)).tolist() == [0.0] * 3
        copied = await there.put(here.publish(kept), node=agent.node)  # of the same machine, by way of this one
        assert (await there.get(copied)).tolist() == [0.0] * 3
        with pytest.raises(accel.UnsupportedError):
            await there.attach(here.publish(kept))
