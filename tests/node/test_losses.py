"""Losses of children, agents and connections are seen, each waiter is answered, and durable memory is back if its machine is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.child_support import links_of
from tests.device_support import failure, generation, task, until
from tests.fork_leaves_support import run
from tests.node_support import TOKEN, AgentProcess, proxy_to, running_agent

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

QUICK = accel.ProcessHost(heartbeat_interval=0.2, heartbeat_timeout=2.0)
KEPT = np.arange(1 << 16, dtype=np.float64)


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent() as agent:
        yield agent


@pytest.fixture
def plan() -> Iterator[FaultPlan]:
    """A plan by which the first ``zeros`` of a device does not end."""
    plan = FaultPlan().hang_at(1, op="fill")
    yield plan
    plan.release()


def memfds(agent: AgentProcess) -> int:
    """Return how many descriptors of memory the agent has."""
    return sum("memfd" in link for link in links_of(agent.process.pid).values())


async def waiting(device: accel.Device) -> asyncio.Future[accel.AccelRef]:
    """Return a wait for an op that does not end by itself."""
    waiter = task(device.zeros(4))
    await until(lambda: device.info().in_flight, "the op is in flight")
    return waiter


async def test_a_child_that_is_killed_is_replaced_and_durable_memory_stays(agent: AgentProcess, plan: FaultPlan) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", node=agent.node, faults=plan)
        kept, plain = await device.put(KEPT, durable=True), await device.put(KEPT)
        waiter, pid = await waiting(device), device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        error = await failure(waiter, accel.ContextPoisonedError)
        assert isinstance(error.__cause__, accel.HostDiedError)
        assert error.__cause__.signal == signal.SIGKILL
        await generation(device, 2)
        np.testing.assert_array_equal(await device.get(kept), KEPT)
        assert plain.is_stale
        await until(lambda: agent.children() == [device.info().pid], "the child of before has ended")
        assert memfds(agent) > 0
    await until(lambda: not agent.children() and not memfds(agent), "the agent has forgotten the device")


async def test_a_spare_on_the_node_takes_over(agent: AgentProcess) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", node=agent.node, standby="context", spares=2)
        kept = await device.put(KEPT, durable=True)
        assert await device.spare_ready()
        pid = device.info().pid
        assert pid is not None
        spares = set(agent.children()) - {pid}
        await until(lambda: len(agent.children()) == 3, "both spares are there")
        assert spares < set(agent.children()), "one spare has ended the other"
        os.kill(pid, signal.SIGKILL)
        await generation(device, 2)
        assert device.info().pid in agent.children()
        np.testing.assert_array_equal(await device.get(kept), KEPT)


@pytest.mark.parametrize("loss", ["cut", "stalled", "stopped"])
async def test_a_device_comes_back_with_its_memory_after_a_loss_of_the_connection(loss: str, agent: AgentProcess, plan: FaultPlan) -> None:
    async with accel.System() as system, proxy_to(agent.address) as proxy:
        node = accel.Node(proxy.address, TOKEN)
        device = await system.open_device("cpu", node=node, host="process" if loss == "cut" else QUICK, faults=plan)
        kept = await device.put(KEPT, durable=True)
        waiter, pid = await waiting(device), device.info().pid
        if loss == "cut":
            proxy.cut()
        elif loss == "stalled":
            proxy.stall()
        else:
            agent.process.send_signal(signal.SIGSTOP)
        error = await failure(waiter, accel.ContextPoisonedError)
        assert isinstance(error.__cause__, accel.HostDiedError)
        proxy.flow()
        agent.process.send_signal(signal.SIGCONT)
        assert not error.__cause__.hung  # that a node is not heard says nothing of the op
        await generation(device, 2)
        np.testing.assert_array_equal(await device.get(kept), KEPT)
        await until(lambda: agent.children() == [device.info().pid], "the child of before has ended")
        assert device.info().pid != pid


async def test_a_spare_gets_durable_memory_once_the_child_of_before_has_ended_on_the_node(agent: AgentProcess, plan: FaultPlan) -> None:
    """Only the connections of the first child are stalled, so that its end is not known by theirs."""
    async with accel.System() as system, proxy_to(agent.address) as proxy:
        host = accel.ProcessHost(heartbeat_interval=0.1, heartbeat_timeout=0.5)
        device = await system.open_device("cpu", node=accel.Node(proxy.address, TOKEN), standby="context", host=host, faults=plan)
        kept = await device.put(KEPT, durable=True)
        assert await device.spare_ready()
        waiter, pid = await waiting(device), device.info().pid
        assert pid in agent.children()
        proxy.stall(slice(3))  # what devices are there, messages, arrays
        await failure(waiter, accel.ContextPoisonedError)
        await generation(device, 2)
        assert pid not in agent.children()
        np.testing.assert_array_equal(await device.get(kept), KEPT)


async def test_a_stall_of_the_arrays_alone_is_a_loss_too(agent: AgentProcess) -> None:
    async def stalls(word: str) -> None:
        async with accel.System() as system, proxy_to(agent.address) as proxy:
            device = await system.open_device("cpu", node=accel.Node(proxy.address, TOKEN), host=QUICK)
            kept = await device.put(KEPT, durable=True)
            proxy.stall(slice(-1, None))
            waiter = task(device.put(KEPT) if word == "put" else device.get(kept))
            error = await failure(waiter, accel.ContextPoisonedError)
            assert "nothing of an array has come for 2 s" in str(error.__cause__)
            await generation(device, 2)
            np.testing.assert_array_equal(await device.get(kept), KEPT)

    await asyncio.gather(stalls("put"), stalls("get"))


async def test_a_cut_in_an_array_leaves_nothing_half_written_unseen(agent: AgentProcess) -> None:
    async with accel.System() as system, proxy_to(agent.address) as proxy:
        device = await system.open_device("cpu", node=accel.Node(proxy.address, TOKEN))
        kept, large = await device.put(KEPT, durable=True), np.ones(2 << 20)
        proxy.delay = 0.01
        putting, getting = task(device.put(large)), task(device.get(kept))
        await until(lambda: device.info().in_flight or device.pending, "an array is on its way")
        await asyncio.sleep(0.05)
        proxy.cut()
        proxy.delay = 0.0
        await failure(putting, accel.ContextPoisonedError)
        await asyncio.gather(getting, return_exceptions=True)
        await generation(device, 2)
        np.testing.assert_array_equal(await device.get(kept), KEPT)
        np.testing.assert_array_equal(await device.get(await device.put(large)), large)


@pytest.mark.parametrize("end", ["killed", "ended"])
async def test_an_agent_that_comes_back_serves_again_without_the_memory(end: str, plan: FaultPlan) -> None:
    with contextlib.ExitStack() as agents:
        agent = agents.enter_context(running_agent("127.0.0.4"))
        async with accel.System() as system, proxy_to(agent.address) as proxy:
            node, restart = accel.Node(proxy.address, TOKEN), accel.RestartStrategy(max_restarts=1)
            device = await system.open_device("cpu", node=node, faults=plan, restart=restart)
            kept = await device.put(KEPT, durable=True)
            waiter, children, connections = await waiting(device), agent.children(), proxy.connections
            if end == "killed":
                agent.kill()
            else:
                agent.close()
            error = await failure(waiter, accel.ContextPoisonedError)
            assert ("connection to node" if end == "killed" else "SIGKILL") in str(error.__cause__)
            await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), "its children have ended with it")
            await until(lambda: proxy.connections > connections + 5, "the device has tried to get a child more than once")
            agents.enter_context(running_agent(agent.address))
            await generation(device, 2)
            np.testing.assert_array_equal(await device.get(await device.put(KEPT)), KEPT)
            assert (await failure(device.get(kept), accel.StaleRefError)).reason == "torn"


async def test_a_node_that_does_not_come_back_is_lost_and_the_pool_goes_on(agent: AgentProcess) -> None:
    async with accel.System() as system:
        with running_agent("127.0.0.3", "--keep", "0.3") as lost:
            pool = await system.open_pool("cpu", nodes=[lost.node, agent.node])
            lost.kill()
            await until(lambda: pool[0].state is accel.DeviceState.LOST, "the device is lost")
            assert "is not back after 0.3 s" in pool[0].health().reason
            await failure(pool[0].zeros(4), accel.DeviceLostError)
            assert await pool.run(lambda device: _name(device)) == pool[1].name
        with running_agent(lost.address):
            await pool[0].reopen()
            assert await pool[0].get(await pool[0].full((), 3.0)) == 3.0


async def _name(device: accel.Device) -> str:
    await device.zeros(1)
    return device.name


async def test_memory_is_kept_no_longer_than_promised() -> None:
    async with accel.System() as system:
        with running_agent("127.0.0.4", "--keep", "0.2") as agent:
            async with proxy_to(agent.address) as proxy:
                device = await system.open_device("cpu", node=accel.Node(proxy.address, TOKEN))
                await device.put(KEPT, durable=True)
                assert memfds(agent) > 0
                proxy.refuses = True
                proxy.cut()
                await until(lambda: device.state is accel.DeviceState.LOST, "the device is lost")
                await until(lambda: not agent.children() and not memfds(agent), "the agent has forgotten the device")


async def test_a_child_ends_by_itself_when_its_device_is_closed_and_is_ended_with_its_agent() -> None:
    async with accel.System() as system:
        with running_agent("127.0.0.4", "--keep", "0.1") as agent:
            closed, device = await asyncio.gather(*[system.open_device("cpu", node=agent.node) for _ in range(2)])
            pids = agent.children()
            await closed.zeros(4)
            await closed.aclose()
            await until(lambda: agent.children() == [device.info().pid], "the child of the closed device has ended")
            log = agent.close()
            assert "ended with exit code 0" in log, log
            assert agent.process.returncode == 0
            assert len(pids) == 2
            assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
            await until(lambda: device.state is accel.DeviceState.LOST, "the device is lost")


async def test_a_quarantine_of_a_device_on_a_node_is_there_too(agent: AgentProcess) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", node=agent.node)
        async with device.quarantine() as other:
            await until(lambda: {device.info().pid, other.info().pid} == set(agent.children()), "both children, and no others")
            assert await other.get(await other.full((), 2.0)) == 2.0


def test_a_fork_holds_no_connection() -> None:
    run("leaves_the_connections_of_a_node")
