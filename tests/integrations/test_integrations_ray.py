"""Nodes in a Ray cluster: a cluster of three Ray nodes, all of this machine, is started once. ``nox -s ray`` has what this needs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import ssl
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.integrations import ray as integration
from accel.integrations.ray import nodes
from tests.model_support import Moody, X, expected, moody
from tests.node_support import AgentProcess, running_agent, tls_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from accel.integrations.ray import RayNodes

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]  # Ray's own are many

PATIENCE = 120.0
PART: dict[str, Any] = {"cpus": 0, "resources": {"accel": 1}}
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


# -- without Ray


async def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(accel.BackendUnavailableError, match="Ray is not installed") as caught:
        async with nodes(count=1):
            pass
    assert "pip install '.[ray]'" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count"),
        ({"count": True}, "count"),
        ({"count": 1, "placement": "SPREAD"}, "placement"),
        ({"count": 1, "timeout": float("nan")}, "timeout"),
        ({"count": 1, "keep": -1.0}, "keep"),
        ({"count": 1, "cpus": -1}, "-1 is no amount of CPU"),
        ({"count": 1, "gpus": "1"}, "'1' is no amount of GPU"),
        ({"count": 1, "resources": {"tpu": float("inf")}}, "inf is no amount of tpu"),
        ({"count": 1, "cpus": 0}, "nothing is reserved"),
        ({"count": 1, "tls_cert": "node.pem"}, "one end alone"),
        ({"count": 1, "tls_key": "node.key"}, "one end alone"),
        ({"count": 1, "tls": ssl.create_default_context()}, "one end alone"),
        ({"count": 1, "tls": "node.pem", "tls_cert": "node.pem"}, "tls is 'node.pem'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_refused_before_ray_is_imported(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(accel.InvalidArgumentError, match=message):
        async with nodes(**arguments):
            pass


async def test_a_device_on_a_node_is_added_to_a_pool() -> None:
    with running_agent() as agent:
        async with accel.System() as system:
            pool = await system.open_pool("cpu", restart=accel.RestartStrategy(max_restarts=7))
            added = await pool.add("cpu", node=agent.node)
            assert added.info().node == agent.address
            assert list(pool)[1] is added
            with pytest.raises(accel.InvalidArgumentError, match="stays where it is"):
                await pool.add(await system.open_device("cpu"), node=agent.node)


class AgentsHere:
    """Starts agents on this machine, as Ray does on others."""

    def __init__(self, thread: object) -> None:
        self.agents: list[AgentProcess] = []

    def reserve(self, address: str | None, bundles: list[Any], strategy: str, token: str, arguments: list[str]) -> None:
        self.agents = [AgentProcess("127.0.0.2", *arguments, token=token) for _ in bundles]

    async def address(self, number: int) -> str:
        return self.agents[number].address

    async def end(self, number: int) -> None:
        await asyncio.Event().wait()

    def release(self) -> None:
        for agent in self.agents:
            agent.close()


class StuckCluster(AgentsHere):
    """A cluster that cannot be connected to, for a long time."""

    stuck, released = threading.Event(), threading.Event()

    def reserve(self, *arguments: Any) -> None:
        assert self.stuck.wait(PATIENCE)

    def release(self) -> None:
        self.released.set()


@pytest.mark.parametrize("way", ["timeout", "cancel"])
async def test_a_connection_that_hangs_is_not_waited_for(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_Cluster", StuckCluster)
    StuckCluster.stuck.clear()
    StuckCluster.released.clear()

    async def enter() -> None:
        async with nodes(count=1, timeout=0.05 if way == "timeout" else PATIENCE):
            pass

    entering = asyncio.ensure_future(enter())
    await asyncio.wait({entering}, timeout=0.02)
    if way == "cancel":
        entering.cancel()
    try:
        await asyncio.wait({entering}, timeout=10.0)
        assert entering.done()
        assert not StuckCluster.released.is_set()
    finally:
        StuckCluster.stuck.set()
    assert await asyncio.to_thread(StuckCluster.released.wait, PATIENCE), "what was reserved meanwhile is released"
    with pytest.raises(asyncio.CancelledError if way == "cancel" else accel.BackendUnavailableError):
        await entering


class LossyCluster:
    """A cluster with one agent, which Ray does not reach for a while, or which is started again elsewhere."""

    def __init__(self, address: str) -> None:
        self.ends: asyncio.Queue[None] = asyncio.Queue()
        self.addresses: asyncio.Queue[str] = asyncio.Queue()
        self.addresses.put_nowait(address)

    async def address(self, number: int) -> str:
        return await self.addresses.get()

    async def end(self, number: int) -> None:
        await self.ends.get()


class SomePool(list[Any]):
    """A pool whose devices are names; adding one fails as often as it is told."""

    failures = 0

    async def add(self, spec: str, *, node: accel.Node) -> Any:
        if self.failures:
            self.failures -= 1
            raise accel.BackendUnavailableError("not now", retryable=True)
        self.append(SimpleNamespace(name=f"{spec}@{node.address}", info=lambda: SimpleNamespace(node=node.address), aclose=self.closed))
        return self[-1]

    async def drain(self, device: Any) -> None:
        self.remove(device)

    async def closed(self, timeout: float) -> None:
        pass

    def names(self) -> list[str]:
        return [device.name for device in self]


@contextlib.asynccontextmanager
async def following(keep: float) -> AsyncIterator[tuple[LossyCluster, SomePool]]:
    """Have a pool with one device follow a cluster with one node."""
    cluster: Any = LossyCluster("127.0.0.1:1")
    pool: Any = SomePool()
    machines = integration.RayNodes(cluster, [accel.Node(await cluster.address(0), "x" * 32)], keep)
    await pool.add("cpu:0", node=machines[0])
    machines.follow(pool)
    watching = asyncio.ensure_future(machines.watch(0))
    try:
        yield cluster, pool
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_node_that_was_not_reached_for_long_is_added_again() -> None:
    async with following(keep=0.01) as (cluster, pool):
        cluster.ends.put_nowait(None)
        await until(lambda: not pool.names())
        cluster.addresses.put_nowait("127.0.0.1:1")
        await until(lambda: pool.names() == ["cpu:0@127.0.0.1:1"])
        cluster.ends.put_nowait(None)
        await until(lambda: not pool.names())


async def test_a_device_that_could_not_be_opened_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_PAUSE", 0.01)
    async with following(keep=PATIENCE) as (cluster, pool):
        pool.failures = 3
        cluster.addresses.put_nowait("127.0.0.2:1")
        cluster.ends.put_nowait(None)
        await until(lambda: pool.names() == ["cpu:0@127.0.0.2:1"])
        pool.failures = 1000
        cluster.addresses.put_nowait("127.0.0.2:2")
        cluster.ends.put_nowait(None)
        await until(lambda: pool.failures < 998)
        cluster.addresses.put_nowait("127.0.0.2:3")
        cluster.ends.put_nowait(None)
        pool.failures = 0
        await until(lambda: pool.names() == ["cpu:0@127.0.0.2:3"])


async def is_encrypted(machines: RayNodes) -> None:
    """Check that devices on nodes work, and that the agents talk to nothing that does not verify their certificate."""
    node = machines[0]
    async with accel.System() as system:
        pool = await system.open_pool("cpu", nodes=machines)
        array = np.arange(1 << 18, dtype=np.float64)
        np.testing.assert_array_equal(await pool[-1].get(await pool[-1].put(array)), array)
        with pytest.raises(accel.BackendUnavailableError, match="certificate"):
            await system.open_device("cpu", node=replace(node, tls=ssl.create_default_context()))
        with pytest.raises(accel.BackendUnavailableError):
            await system.open_device("cpu", node=replace(node, tls=False))


async def test_agents_and_pools_are_given_what_tls_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_Cluster", AgentsHere)
    certificate, key, trusted = tls_files(tmp_path, "127.0.0.2")
    async with nodes(count=2, tls=trusted, tls_cert=certificate, tls_key=key) as machines:
        await is_encrypted(machines)
    async with nodes(count=1, tls=trusted, tls_cert=certificate) as machines:  # the key is in the same file
        await is_encrypted(machines)


# -- with it

JOB = """
import asyncio

import numpy as np

import accel
from accel.integrations.ray import nodes

async def main():
    async with nodes(count=2, cpus=0, resources={"accel": 1}) as machines, accel.System() as system:
        pool = await system.open_pool("cpu", nodes=machines)
        arrays = [(await device.get(await device.put(np.arange(3.0)))).tolist() for device in pool]
        print("SERVES", machines[0].token, arrays, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def free_port() -> int:
    """Return a port at which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head, which takes jobs and has no room for agents, and two nodes with room for one each."""
    pytest.importorskip("ray", reason="nox -s ray has it")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"USAGE_STATS_ENABLED": "0", "LOG_TO_DRIVER": "0"}.items():
            patch.setenv(f"RAY_{name}", value)
        import ray
        from ray.cluster_utils import Cluster

        # Nodes are added on threads, where there are no handlers of signals.
        patch.setattr(ray._private.utils, "set_sigterm_handler", lambda handler: None)
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": True, "dashboard_port": free_port()})
        try:
            for _ in range(2):
                cluster.add_node(**NODE, resources={"accel": 1})
            yield cluster
        finally:
            cluster.shutdown()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.05)


def processes_with(token: str) -> dict[int, str]:
    """Return the command lines of the agents that have this token, and of their children."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment, open(f"/proc/{pid}/cmdline", "rb") as line:
            if f"ACCEL_TOKEN={token}".encode() in environment.read().split(b"\0"):
                found[int(pid)] = line.read().decode()
    return found


def token_of(machines: RayNodes) -> str:
    token = machines[0].token
    assert token
    return token


async def gone(machines: RayNodes) -> None:
    """Wait until there are no agents, and Ray has its resources back."""
    await until(lambda: not processes_with(token_of(machines)))


async def leave(machines: RayNodes) -> None:
    pass


async def fail(machines: RayNodes) -> None:
    raise ZeroDivisionError


async def be_cancelled(machines: RayNodes) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(PATIENCE)


@pytest.mark.parametrize("way", [leave, fail, be_cancelled])
async def test_agents_are_where_ray_has_placed_them_and_gone_after_the_block(
    way: Callable[[RayNodes], Awaitable[None]], cluster: Any
) -> None:
    left: list[RayNodes] = []

    async def block() -> None:
        async with nodes(count=2, placement="strict_spread", address=cluster.address, **PART) as machines:
            left.append(machines)
            assert len({node.address for node in machines}) == 2
            lines = processes_with(token_of(machines))
            assert sum(" node" in line.replace("\0", " ") for line in lines.values()) >= 2, lines
            assert not any(token_of(machines) in line for line in lines.values())
            async with accel.System() as system:
                pool = await system.open_pool("cpu", nodes=machines)
                assert [device.info().node for device in pool] == [node.address for node in machines]
                ref = await pool[1].put(np.arange(4.0))
                np.testing.assert_array_equal(await pool[1].get(ref), np.arange(4.0))
            await way(machines)

    task = asyncio.ensure_future(block())
    await asyncio.wait({task})
    assert task.cancelled() if way is be_cancelled else type(task.exception()) is (ZeroDivisionError if way is fail else type(None))
    await gone(left[0])
    import ray

    assert not ray.is_initialized()


async def test_an_agent_says_where_it_listens_while_its_end_is_waited_for(cluster: Any) -> None:
    async with nodes(count=1, address=cluster.address, **PART) as machines:
        assert await asyncio.wait_for(machines._cluster.address(0), 10.0) == machines[0].address


async def test_without_room_nothing_is_left_reserved(cluster: Any) -> None:
    import ray

    ray.init(address=cluster.address)
    try:
        with pytest.raises(accel.InvalidArgumentError, match="connected to a Ray cluster"):
            async with nodes(count=1, address=cluster.address, **PART):
                pass
        with pytest.raises(accel.BackendUnavailableError, match="Ray had not started 3 agents") as caught:
            async with nodes(count=3, timeout=2.0, **PART):
                pass
        assert caught.value.retryable
        entering = asyncio.ensure_future(nodes(count=2, **PART).__aenter__())
        await asyncio.sleep(0.5)
        entering.cancel()
        await asyncio.wait({entering})
        assert entering.cancelled()
        assert ray.is_initialized(), "it was not its own"
        await until(lambda: ray.available_resources().get("accel") == 2.0)
    finally:
        ray.shutdown()


async def test_a_job_has_nodes_until_it_is_stopped(cluster: Any, tmp_path: Path) -> None:
    from ray.job_submission import JobSubmissionClient

    (tmp_path / "service.py").write_text(JOB)
    client = await asyncio.to_thread(JobSubmissionClient, f"http://{cluster.webui_url}")
    job = await asyncio.to_thread(lambda: client.submit_job(entrypoint=shlex.join([sys.executable, str(tmp_path / "service.py")])))
    async with asyncio.timeout(PATIENCE):
        while "SERVES" not in (log := await asyncio.to_thread(client.get_job_logs, job)):
            assert not (await asyncio.to_thread(client.get_job_status, job)).is_terminal(), log
            await asyncio.sleep(0.2)
    _, token, arrays = log[log.index("SERVES") :].splitlines()[0].split(" ", 2)
    assert arrays == "[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]"
    assert processes_with(token)
    assert await asyncio.to_thread(client.stop_job, job)
    await until(lambda: not processes_with(token))


async def test_gpus_are_reserved_and_the_agent_is_told_which(cluster: Any) -> None:
    import ray
    from ray.util import placement_group_table

    added = await asyncio.to_thread(lambda: cluster.add_node(**NODE, num_gpus=2))
    try:
        async with nodes(count=1, gpus=1, address=cluster.address) as machines:
            (group,) = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
            assert list(group["bundles"].values()) == [{"CPU": 1.0, "GPU": 1.0}]
            await until(lambda: ray.available_resources().get("GPU") == 1.0)
            (pid,) = [pid for pid, line in processes_with(token_of(machines)).items() if "--listen" in line]
            with open(f"/proc/{pid}/environ", "rb") as environment:
                assert environment.read().split(b"\0").count(b"CUDA_VISIBLE_DEVICES=0") == 1
        with pytest.raises(accel.BackendUnavailableError, match=r"3 agents, each with .*'GPU': 1"):
            async with nodes(count=3, gpus=1, cpus=0, address=cluster.address, timeout=3.0):
                pass
    finally:
        await asyncio.to_thread(cluster.remove_node, added)


async def test_connections_to_agents_in_a_cluster_are_encrypted(cluster: Any, tmp_path: Path) -> None:
    certificate, key, trusted = tls_files(tmp_path, cluster.head_node.node_ip_address)
    async with nodes(count=2, address=cluster.address, tls=trusted, tls_cert=certificate, tls_key=key, **PART) as machines:
        await is_encrypted(machines)
    with pytest.raises(accel.BackendUnavailableError, match="Ray has started no agent"):
        async with nodes(count=1, address=cluster.address, tls=trusted, tls_cert=str(tmp_path / "none.pem"), **PART):
            pass


async def test_a_service_goes_on_while_nodes_and_agents_come_and_go(cluster: Any, rng: np.random.Generator) -> None:
    weights = moody(rng)
    options: dict[str, Any] = {"weights": weights, "inputs": X, "buckets": {"batch": (1, 8)}}
    async with nodes(count=2, address=cluster.address, keep=0.5, **PART) as machines, accel.System() as system:
        pool = await system.open_pool("cpu", nodes=machines)
        async with accel.serve(await pool.load_model(Moody, **options)) as service:

            async def on_added(device: accel.Device) -> None:
                await service.add(await device.load_model(Moody, **options))

            machines.follow(pool, on_added=on_added, on_lost=service.drain)
            over, answers = asyncio.Event(), [0]

            async def ask(number: int) -> None:
                x = np.full(5, number / 8, np.float32)
                while not over.is_set():
                    answer = await service.submit(x)
                    np.testing.assert_allclose(answer["y"], expected(weights, x[None])[0], rtol=2e-6, atol=2e-6)
                    answers[0] += 1

            asking = [asyncio.ensure_future(ask(number)) for number in range(8)]
            before = list(machines)

            removed = min(cluster.worker_nodes, key=lambda node: node.unique_id)
            await asyncio.to_thread(cluster.remove_node, removed)
            await until(lambda: len(pool) == 1 and len(service.statistics().replicas) == 1)
            stayed = pool[0]
            await asyncio.to_thread(lambda: cluster.add_node(**NODE, resources={"accel": 1}))
            await until(lambda: len(pool) == 2 and len(service.statistics().replicas) == 2)
            assert pool[0] is stayed
            assert len({node.address for node in [*machines, *before]}) == 3

            agents = [pid for pid, line in processes_with(token_of(machines)).items() if "--listen" in line]
            os.kill(agents[0], signal.SIGKILL)
            await until(lambda: len({node.address for node in [*machines, *before]}) == 4 and len(service.statistics().replicas) == 2)
            await until(lambda: all(device.state is accel.DeviceState.READY for device in pool))

            counted = answers[0]
            await until(lambda: answers[0] > counted + 100)
            over.set()
            await asyncio.gather(*asking)
            assert service.statistics().failed == 0
    await gone(machines)
