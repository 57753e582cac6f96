"""Swaps over the replicas of a service: under load, with weights that are wrong, and with replicas that die or are lost meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import weakref
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

import accel
from accel.patterns.rollout import _is_worse, _Watch
from accel.testing import FaultPlan
from tests.device_support import bounded, cancelled, child_pid, failure, generation, task, turns, used
from tests.model_support import Moody, X, expected, moody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.errors import AccelError

pytestmark = pytest.mark.usefixtures("nothing_left")

Weights = dict[str, Any]


class Clients:
    """Ask a service until the block ends, and check that each answer is wholly of one version of those that there are."""

    def __init__(self, service: Any, versions: dict[int, Weights], count: int = 32) -> None:
        self._service = service
        self.versions = versions
        self._count = count
        self._is_over = False
        self.seen: set[int] = set()
        self.answers = 0

    async def _ask(self, number: int) -> None:
        rng = np.random.default_rng(number)
        while not self._is_over:
            x = rng.uniform(-1.0, 1.0, 5).astype(np.float32)
            answer = await self._service.submit(x)
            version = int(answer["version"])
            np.testing.assert_allclose(answer["y"], expected(self.versions[version], x[None])[0], rtol=2e-6, atol=2e-6)
            np.testing.assert_allclose(answer["total"], answer["y"].sum(), rtol=2e-5, atol=2e-5)
            self.seen.add(version)
            self.answers += 1

    async def __aenter__(self) -> Self:
        self._tasks = [task(self._ask(number)) for number in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await bounded(asyncio.gather(*self._tasks))
        assert self._service.statistics().failed == 0

    async def until_seen(self, version: int) -> None:
        async with asyncio.timeout(30):
            while version not in self.seen:
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def replicas(count: int, weights: Weights, *, host: Any = "inline", faults: FaultPlan | None = None) -> AsyncIterator[list[Any]]:
    async with accel.System() as system:
        models = []
        for number in range(count):
            plan: dict[str, Any] = {} if number or faults is None else {"faults": faults, "restart": accel.RestartStrategy(max_restarts=0)}
            device = await system.open_device("cpu", host="inline" if number else host, **plan)
            models.append(await device.load_model(Moody, weights=weights, inputs=X, buckets={"batch": (1, 8)}))
        yield models


def versions_of(models: list[Any]) -> set[int]:
    return {model.version for model in models}


OPS_OF_A_SWAP = 44
"""On each replica, those of a canary too."""


async def test_twenty_swaps_under_load_fail_nothing_mix_nothing_and_keep_no_memory(rng: np.random.Generator) -> None:
    versions, compared = {1: moody(rng)}, list[int]()

    def compare(old: Any, new: Any) -> bool:
        compared.append(int(new["version"]) - int(old["version"]))
        return True

    async with replicas(2, versions[1]) as models, accel.serve(models) as service:
        before = [used(model.device) for model in models]
        async with Clients(service, versions, 64) as clients:
            for number in range(2, 22):
                versions[number] = moody(rng, number)
                done = await bounded(service.swap(versions[number], canaries=iter([np.ones(5)]), compare=compare))
                assert (done.version, done.left_out, done.compared, done.held) == (number, (), 1, 0)
                assert sorted(done.replicas) == sorted(model.device.name for model in models)
                assert versions_of(models) == {number}
                await clients.until_seen(number)
        assert compared == [1] * 20, "once for each swap"
        for model in models:
            await bounded(model.release())
        assert [used(model.device) for model in models] == before


async def test_what_one_replica_rolls_back_all_do(rng: np.random.Generator) -> None:
    versions = {1: moody(rng), 2: moody(rng, 2, raises=5.0)}
    async with replicas(2, versions[1]) as models, accel.serve(models) as service:
        await service.swap(versions[2])
        async with Clients(service, versions) as clients:
            await clients.until_seen(2)
            assert int((await bounded(service.submit(np.full(5, 6.0))))["version"]) == 1
            assert versions_of(models) == {1}
        assert (await service.swap(moody(rng, 3))).version == 3
        assert await models[1].rollback() == 1
        assert versions_of(models) == {1}
        assert (await service.swap(moody(rng, 4))).version == 4
        await failure(service.swap(moody(rng, 5) | WRONG["other shapes"][0]), accel.InvalidArgumentError)
        for model in models:
            await failure(model.rollback(), accel.InvalidArgumentError)
        assert versions_of(models) == {4}, "none has weights to go back to that others do not have"


WRONG: dict[str, tuple[Any, type[AccelError]]] = {
    "non-finite": ({"b": np.full(3, np.nan, np.float32)}, accel.NonFiniteError),
    "other shapes": ({"w": np.ones((5, 4), np.float32), "b": np.ones(4, np.float32)}, accel.InvalidArgumentError),
    "they raise": ({"raises": np.array(0.5)}, accel.LibraryError),
    "wrong numbers": ({"b": np.full(3, 9, np.float32)}, accel.LibraryError),
    "nothing there": ("no/such/file.safetensors", accel.InvalidArgumentError),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_weights_change_nothing_and_no_caller_sees_them(wrong: str, rng: np.random.Generator) -> None:
    versions = {1: moody(rng)}
    change, error = WRONG[wrong]
    weights = change if isinstance(change, str) else moody(rng, 2) | change
    async with replicas(2, versions[1]) as models, accel.serve(models) as service:
        before = [used(model.device) for model in models]

        def close(old: Any, new: Any) -> bool:
            return bool(np.abs(new["y"]).max() < 0.999)

        async with Clients(service, versions) as clients:
            await failure(service.swap(weights, canaries=[np.full(5, 0.6)], compare=close), error)
            assert clients.seen <= {1}
        assert versions_of(models) == {1}
        assert [used(model.device) for model in models] == before
        assert (await service.swap(moody(rng, 2))).version == 2


async def test_a_swap_that_ends_on_the_second_replica_is_undone_on_the_first(rng: np.random.Generator) -> None:
    versions = {1: moody(rng), 2: moody(rng, 2), 3: moody(rng, 3)}
    async with replicas(3, versions[1]) as models, accel.serve(models) as service, Clients(service, versions) as clients:
        for ends in ("raises", "is cancelled"):
            on_second = asyncio.Event()
            told: list[int] = []

            def progress(
                stage: str, done: int, total: int, *, told: list[int] = told, on_second: asyncio.Event = on_second, ends: str = ends
            ) -> None:
                told.append(done)
                if (stage, done, told.count(0)) == ("weights", 0, 3):  # of weights, of buckets, of weights
                    on_second.set()
                    if ends == "raises":
                        raise ValueError("no more")

            swap = task(service.swap(versions[2], on_progress=progress))
            await bounded(on_second.wait())
            if ends == "raises":
                await failure(swap, ValueError)
            else:
                assert [model.version for model in models] == [3, 1, 1]
                await cancelled(swap)
            assert versions_of(models) == {1}, ends
            assert not any(taker.is_paused or taker.is_draining for taker in service._takers.all)
        assert (await bounded(service.swap(versions[3]))).version == 4
        await clients.until_seen(3)


async def test_a_swap_that_is_cancelled_in_any_turn_leaves_all_replicas_alike(rng: np.random.Generator) -> None:
    weights = {1: moody(rng), 2: moody(rng, 2)}
    async with replicas(2, weights[1]) as models, accel.serve(models) as service:
        for count in rng.integers(0, 300, 12):
            swap = task(service.swap(weights[2], canaries=[np.ones(5)]))
            await turns(int(count))
            swap.cancel()
            await asyncio.wait([swap])
            assert len(versions_of(models)) == 1, f"{count} turns"
            answer = await bounded(service.submit(np.ones(5)))
            assert int(answer["version"]) == (1 if swap.cancelled() else 2)
            await bounded(service.swap(weights[1]))


async def test_a_replica_that_is_killed_while_it_is_swapped_is_swapped_again(rng: np.random.Generator) -> None:
    versions = {1: moody(rng), 2: moody(rng, 2)}
    async with replicas(2, versions[1], host="process") as models, accel.serve(models) as service, Clients(service, versions) as clients:
        killed: list[int] = []

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "buckets" and not (done or killed):
                killed.append(child_pid(models[0].device))
                os.kill(killed[0], signal.SIGKILL)

        done = await bounded(service.swap(versions[2], on_progress=progress))
        assert (len(killed), done.version, done.left_out, models[0].device.generation) == (1, 2, (), 2)
        assert versions_of(models) == {2}
        await clients.until_seen(2)


async def test_a_lost_replica_is_left_out_until_it_is_added_again(rng: np.random.Generator) -> None:
    versions = {1: moody(rng), 2: moody(rng, 2), 3: moody(rng, 3)}
    async with replicas(2, versions[1], faults=FaultPlan().poison_at(1, op="unary")) as models, accel.serve(models) as service:
        lost, other = models
        await failure(lost.device.elementwise.unary("relu", await lost.device.zeros(3)), accel.ContextPoisonedError)
        done = await bounded(service.swap(versions[2]))
        assert (done.replicas, done.left_out) == ((other.device.name,), (lost.device.name,))
        assert service.models == (other,)
        await bounded(lost.device.reopen())
        await generation(lost.device, 2)
        assert lost.version == 1
        adding, swap = task(service.swap(versions[3])), task(service.add(lost))
        assert (await bounded(adding)).version == 3
        await bounded(swap)
        assert versions_of([*service.models]) == {3}
        assert int((await lost.numpy(np.ones((1, 5), np.float32)))["version"][0]) == 3


async def test_swaps_wait_for_each_other_and_versions_have_to_agree(rng: np.random.Generator) -> None:
    async with replicas(2, moody(rng)) as models:
        service = accel.serve(models)
        await failure(service.swap(moody(rng)), accel.NotInitializedError)
        async with service:
            swaps = [task(service.swap(moody(rng, number))) for number in (2, 3)]
            assert [done.version for done in await bounded(asyncio.gather(*swaps))] == [2, 3]
            hold: Any
            for hold in (-1.0, np.inf, np.nan, True, "soon"):
                await failure(service.swap({}, hold=hold), accel.InvalidArgumentError)
            await failure(service.swap({}, canaries=[np.ones(4)]), accel.InvalidArgumentError)
        await models[0].swap(moody(rng, 4))
        with pytest.raises(accel.InvalidArgumentError, match="different weights"):
            accel.serve(models)
        await failure(service.swap(moody(rng)), accel.ClosedError)


WORSE: dict[str, Weights] = {
    "non-finite": {"b": np.full(3, np.nan, np.float32)},
    "slow": {"seconds": np.array(0.02)},
    "rollback": {"raises": np.array(50.0)},
}


@pytest.mark.parametrize(("code", "count"), [("non-finite", 1), ("non-finite", 2), ("rollback", 1), ("rollback", 2), ("slow", 1)])
async def test_weights_that_are_worse_in_service_are_rolled_back(
    code: str, count: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = moody(rng)
    async with replicas(count, weights) as models, accel.serve(models) as service:
        is_over = False

        async def client() -> None:
            while not is_over:
                answer = await service.submit(rng.uniform(-100.0, 100.0, 5))
                assert code == "non-finite" or np.isfinite(answer["y"]).all()

        clients = [task(client()) for _ in range(4)]
        worse = moody(rng, 2) | WORSE[code]
        array = weakref.ref(worse["w"])
        error = await failure(service.swap(worse, hold=0.25), accel.LibraryError)
        assert (error.code, error.op) == (code, "swap"), error
        assert versions_of(models) == {1}
        del worse, error
        async with asyncio.timeout(30):
            while array() is not None:  # batches that were in flight hold what counts them
                await asyncio.sleep(0.01)
                gc.collect()
        if code != "slow":
            monkeypatch.setattr("accel.patterns.rollout._SLOWER", 1e9)  # the machine may be busy
            done = await bounded(service.swap(moody(rng, 3), hold=0.5))
            assert done.held > 0
            assert versions_of(models) == {done.version}
        is_over = True
        await bounded(asyncio.gather(*clients))
        assert service.statistics().failed == 0


async def test_a_first_replica_that_is_lost_in_service_ends_the_swap(rng: np.random.Generator) -> None:
    plan = FaultPlan().poison_at(1, op="unary")
    async with replicas(2, moody(rng), faults=plan) as models, accel.serve(models) as service:
        swap = task(service.swap(moody(rng, 2), hold=0.3))
        async with asyncio.timeout(30):
            while models[0].version == 1:
                await asyncio.sleep(0)
        await failure(models[0].device.elementwise.unary("relu", await models[0].device.zeros(3)), accel.ContextPoisonedError)
        assert (await failure(swap, accel.LibraryError)).code == "lost"
        assert versions_of(models) == {1}


class Known:
    """A model, or what runs it, of which only the version and the state matter."""

    version = 1
    state = accel.DeviceState.READY

    def checked(self, row: object) -> object:
        return row


@pytest.mark.parametrize(("faults", "is_refused"), [(1, False), (8, False), (25, True)])
async def test_a_few_faults_are_no_proof_against_weights_and_many_are(faults: int, is_refused: bool) -> None:
    model: Any = Known()
    watch = _Watch({}, 2)

    async def fails(items: list[Any]) -> Any:
        raise accel.ContextPoisonedError("faulted")

    async def answers(items: list[Any]) -> Any:
        rows = accel.models.Rows(items)
        rows.version = model.version
        return rows

    for model.version in (1, 2):
        for _ in range(100):
            await watch._answered(model, answers, [0])
    for _ in range(faults):
        await failure(watch._answered(model, fails, [0]), accel.ContextPoisonedError)
    assert watch.refused.done() == is_refused
    assert not is_refused or watch.refused.result().code == "errors"


@pytest.mark.parametrize(("slow", "is_refused"), [(0, False), (8, False), (30, True)])
async def test_weights_with_a_longer_tail_are_slow(slow: int, is_refused: bool, rng: np.random.Generator) -> None:
    watch = _Watch({}, 2)
    watch.old.seconds.extend(rng.uniform(0.9, 1.0, 500))
    watch.new.seconds.extend([*rng.uniform(0.9, 1.0, 300 - slow), *[2.0] * slow])
    taker: Any = Known()
    with pytest.raises(accel.LibraryError, match=f"{slow} of 300 batches") if is_refused else contextlib.nullcontext():
        watch.judge(taker)


def test_a_share_is_worse_only_beyond_chance(rng: np.random.Generator) -> None:
    shares = rng.uniform(0, 0.3, 200)
    assert sum(_is_worse(rng.binomial(300, share), 300, rng.binomial(500, share), 500) for share in shares) <= 2
    assert not _is_worse(4, 4, 0, 1000)
    assert _is_worse(5, 5, 0, 1000)
    assert not _is_worse(5, 5, 0, 0)
    assert not _is_worse(50, 50, 50, 50)
    assert all(_is_worse(rng.binomial(300, 0.3), 300, rng.binomial(500, 0.05), 500) for _ in range(20))


@pytest.mark.parametrize("place", [0, 1])
async def test_a_replica_that_is_drained_while_weights_are_swapped_does_not_end_the_swap(place: int, rng: np.random.Generator) -> None:
    versions = {1: moody(rng), 2: moody(rng, 2)}
    async with replicas(2, versions[1], faults=FaultPlan().poison_at(1, op="unary")) as models, accel.serve(models) as service:
        lost, other = models
        await failure(lost.device.elementwise.unary("relu", await lost.device.zeros(3)), accel.ContextPoisonedError)
        drains: list[asyncio.Future[None]] = []

        def progress(stage: str, done: int, total: int) -> None:
            if not drains:
                drains.append(task(service.drain(models[place])))

        done = await bounded(service.swap(versions[2], on_progress=progress))
        await bounded(drains[0])
        assert (done.replicas, done.left_out) == ((other.device.name,), (lost.device.name,))
        assert not any(taker.is_paused for taker in service._takers.all)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_replica_that_dies_at_any_op_of_a_swap_leaves_the_service_with_one_version(
    place: int, comes_back: bool, rng: np.random.Generator
) -> None:
    weights = moody(rng), moody(rng, 2)
    restart = accel.RestartStrategy(max_restarts=1 if comes_back else 0)
    for op in rng.choice(np.arange(1, OPS_OF_A_SWAP + 1), 4, replace=False):
        plans = FaultPlan(), FaultPlan()
        async with accel.System() as system:
            devices = [await system.open_device("cpu", host="inline", faults=plan, restart=restart) for plan in plans]
            models = [await device.load_model(Moody, weights=weights[0], inputs=X, buckets={"batch": (1, 8)}) for device in devices]
            async with accel.serve(models) as service:
                plans[place].poison_at(plans[place].count + int(op))
                swap = task(service.swap(weights[1], canaries=[np.ones(5)]))
                await bounded(asyncio.wait([swap]))
                assert swap.exception() is None or isinstance(swap.exception(), accel.AccelError), op
                expected = {1 if swap.exception() else 2}
                assert versions_of([model for model in models if model.device.state is not accel.DeviceState.LOST]) == expected, op
                assert {int((await bounded(service.submit(np.ones(5))))["version"]) for _ in range(4)} == expected, op
