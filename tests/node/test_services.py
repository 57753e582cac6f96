"""A service over a device of this machine and one on a node fails no request, whatever happens to the node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
from safetensors.numpy import save_file

import accel
from tests.device_support import bounded, failure, task, until
from tests.model_support import HANG, Affine, affine, expected
from tests.node_support import AgentProcess, running_agent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

X = {"x": accel.TensorSpec(("batch", 5), "float32")}
ITEM = np.linspace(-1.0, 1.0, 5, dtype=np.float32)
QUICK = accel.ProcessHost(heartbeat_interval=0.1, heartbeat_timeout=0.5)


class Clients:
    """Ask for the answer to one item until the block ends; all have the same, and none may fail or wait long."""

    def __init__(self, service: Any, right: Any, patience: float = 10.0) -> None:
        self._service = service
        self._right = right
        self._patience = patience
        self._is_over = False
        self.answers: dict[str, int] = {}

    async def _ask(self) -> None:
        while not self._is_over:
            answer, receipt = await self._service.timed(ITEM, timeout=self._patience)
            np.testing.assert_allclose(answer["y"], self._right, rtol=2e-6, atol=2e-6)
            self.answers[receipt.device] = self.answers.get(receipt.device, 0) + 1

    async def until_answered(self, *names: str) -> None:
        """Wait until each of these devices has answered anew."""
        before = dict(self.answers)
        await until(lambda: all(self.answers.get(name, 0) >= before.get(name, 0) + 20 for name in names), f"answers of {names}")

    async def __aenter__(self) -> Self:
        self._tasks = [task(self._ask()) for _ in range(4)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await bounded(asyncio.gather(*self._tasks))
        assert self._service.statistics().failed == 0


@contextlib.asynccontextmanager
async def served(agent: AgentProcess, weights: Any, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Serve a model on a device of the agent and on one here."""
    async with accel.System() as system:
        pool = await system.open_pool("cpu", nodes=[agent.node], host=QUICK, **options)
        await pool.add("cpu")
        models = await pool.load_model(Affine, weights=weights, inputs=X, buckets={"batch": (1, 8)})
        async with accel.serve(models, max_items=1, max_in_flight=1) as service:
            yield pool, service


async def test_a_node_that_stops_answering_is_no_evidence_against_inputs(rng: np.random.Generator) -> None:
    weights = affine(rng)
    with running_agent("127.0.0.5") as agent:
        async with served(agent, weights) as (pool, service):
            there, here = pool
            async with Clients(service, expected(weights, ITEM[None])[0], patience=5.0) as clients:
                await clients.until_answered(there.name, here.name)
                stopped = [agent.process.pid, *agent.children()]
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                await until(lambda: there.state is accel.DeviceState.REBUILDING, "the loss is seen")
                await clients.until_answered(here.name)
                statistics = service.statistics()
                assert (statistics.isolated, statistics.isolating) == (0, 0)
                for pid in stopped:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                await clients.until_answered(there.name)


async def test_an_input_that_hangs_on_a_node_which_answers_is_poison() -> None:
    weights = affine(np.random.default_rng(1))
    with running_agent("127.0.0.5") as agent:
        async with accel.System() as system:
            device = await system.open_device("cpu", node=agent.node, hang_timeout=1.0, host=QUICK)
            model = await device.load_model(Affine, weights=weights, inputs=X, buckets={"batch": (1, 8)})
            async with accel.serve(model) as service:
                error = await failure(service.submit(np.full(5, HANG, np.float32)), accel.PoisonedInputError)
                assert error.kind == "hang"


@pytest.mark.parametrize("kind", ["arrays", "file"])
async def test_a_replica_whose_agent_was_restarted_gets_its_weights_again(kind: str, rng: np.random.Generator, tmp_path: Path) -> None:
    weights = affine(rng)
    given = weights if kind == "arrays" else stored(weights, tmp_path)
    with running_agent("127.0.0.5") as agent:
        async with served(agent, given) as (pool, service):
            there, here = pool
            async with Clients(service, expected(weights, ITEM[None])[0]) as clients:
                await clients.until_answered(there.name, here.name)
                agent.kill()
                await until(lambda: there.state is accel.DeviceState.REBUILDING, "the loss is seen")
                with running_agent(agent.address):
                    await clients.until_answered(here.name, there.name)
                    assert [replica.state for replica in service.statistics().replicas] == ["ready", "ready"]
                    assert pool.health("all").is_ready


@pytest.mark.parametrize("kind", ["arrays", "file"])
async def test_a_service_on_a_node_alone_reads_files_again_and_says_that_arrays_are_gone(
    kind: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    weights = affine(rng)
    with running_agent("127.0.0.5") as agent:
        async with accel.System() as system:
            device = await system.open_device("cpu", node=agent.node, host=QUICK)
            given = weights if kind == "arrays" else stored(weights, tmp_path)
            model = await device.load_model(Affine, weights=given, inputs=X, buckets={"batch": (1, 8)})
            async with accel.serve(model) as service:
                right = (await service.submit(ITEM))["y"]
                agent.kill()
                waiting = task(service.submit(ITEM))
                await until(lambda: device.state is accel.DeviceState.REBUILDING, "the loss is seen")
                with running_agent(agent.address):
                    if kind == "arrays":
                        error = await failure(waiting, accel.StaleRefError)
                        assert error.reason == "torn"
                        assert "service.swap(weights)" in str(error)
                        assert [replica.state for replica in service.statistics().replicas] == ["lost"]
                        health = device.health()
                        assert (health.is_ready, health.is_live, health.error) == (False, True, "StaleRefError torn")
                        await service.swap(weights, canaries=[ITEM])
                    else:
                        np.testing.assert_array_equal((await bounded(waiting))["y"], right)
                    np.testing.assert_array_equal((await service.submit(ITEM))["y"], right)
                    await until(lambda: device.health().is_ready, "the torn weights have gone")


def stored(weights: dict[str, Any], folder: Path) -> Path:
    """Return a file with these weights."""
    path = folder / "weights.safetensors"
    save_file(weights, path)
    return path
