"""Models over the ranks of a world: they answer as the whole model does, also when a rank is lost, and are swapped as any other."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import accel
from tests import sharded_models, sharded_torch
from tests.device_support import bounded, child_pid, failure, until
from tests.sharded_models import HANG, KILL, ONE, RAISE, answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

Array = np.ndarray[Any, Any]

X = {"x": accel.TensorSpec(("batch", 5), "float64")}
BUCKETS = {"batch": (1, 2, 4, 8)}
OFTEN = accel.RestartStrategy(max_restarts=50, backoff=(0.0, 0.05))


@asynccontextmanager
async def world_of(ranks: int = 2, **options: Any) -> AsyncIterator[accel.World]:
    async with worlds_of(1, ranks, **options) as (world,):
        yield world


@asynccontextmanager
async def worlds_of(count: int, ranks: int = 2, **options: Any) -> AsyncIterator[list[accel.World]]:
    """Open a world, and others of the same devices."""
    async with accel.System() as system:
        first = await system.open_world("cpu", ranks=ranks, **{"restart": OFTEN, **options})
        yield [first, *[await system.open_world(first.devices) for _ in range(count - 1)]]


async def loaded(world: accel.World, version: int = 1, target: str = "Mlp", **options: Any) -> accel.Model:
    given: dict[str, Any] = {"weights": sharded_models.weights(version), "inputs": X, "buckets": BUCKETS, "split": sharded_models.SPLIT}
    return await world.load_model(f"tests.sharded_models:{target}", **(given | options))


def check(found: dict[str, Array], x: Array, version: int = 1) -> None:
    np.testing.assert_allclose(found["y"], answer(x, version), rtol=0, atol=1e-13)
    assert (np.asarray(found["version"]) == version).all()


def kill(device: accel.Device) -> None:
    os.kill(child_pid(device), signal.SIGKILL)


async def reached(world: accel.World, epoch: int) -> None:
    await until(lambda: world.epoch >= epoch and world.state is accel.DeviceState.READY)


@pytest.mark.parametrize("ranks", [2, 4])
async def test_torch_modules_answer_as_the_whole_one(ranks: int, rng: np.random.Generator, tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = sharded_torch.Mlp()
    safetensors.torch.save_file(whole.state_dict(), tmp_path / "w.safetensors")
    async with world_of(ranks) as world:
        model = await world.load_model(
            "tests.sharded_torch:Mlp", weights=tmp_path / "w.safetensors", inputs=X, buckets=BUCKETS, split=sharded_torch.SPLIT
        )
        assert model.device is world
        assert [ref.shape for ref in model.weights["up.weight"]] == [(16 // ranks, 5)] * ranks
        assert [ref.shape for ref in model.weights["scale"]] == [(3,)] * ranks
        x = rng.standard_normal((20, 5))
        with torch.inference_mode():
            wanted = whole(torch.from_numpy(x)).numpy()
        for rows in (1, 3, 8, 20):
            np.testing.assert_allclose(await model.numpy(x[:rows]), wanted[:rows], rtol=0, atol=1e-14)


async def test_refs_are_of_the_first_rank(rng: np.random.Generator) -> None:
    async with world_of(3) as world:
        model = await loaded(world, split={})
        x, first = rng.standard_normal((3, 5)), world.devices[0]
        made = await model(await first.put(x))
        assert {name: ref.shape for name, ref in made.items()} == {"y": (3, 3), "version": (3,)}
        np.testing.assert_array_equal(await first.get(made["y"]), (await model.numpy(x))["y"])
        np.testing.assert_allclose(await first.get(made["y"]), 3 * answer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("victim", [0, 1])
async def test_the_loss_of_a_rank_fails_no_request_and_changes_no_bit(victim: int, rng: np.random.Generator) -> None:
    async with world_of() as world:
        model, items = await loaded(world), list(rng.standard_normal((16, 5)))
        async with accel.serve(model, max_items=1) as service:
            before = [(await service.submit(item))["y"] for item in items]
            stop = False

            async def client(number: int) -> int:
                done = 0
                while not stop:
                    np.testing.assert_array_equal((await service.submit(items[number]))["y"], before[number])
                    done += 1
                return done

            clients = [asyncio.create_task(client(number)) for number in range(16)]
            await until(lambda: service.statistics().answered > 100)
            kill(world.devices[victim])
            await reached(world, 2)
            answered = service.statistics().answered
            await until(lambda: service.statistics().answered > answered + 100)
            stop = True
            assert all(await bounded(asyncio.gather(*clients)))
            assert service.statistics().failed == 0
            assert service.statistics().poisoned == 0
        assert [device.generation for device in world.devices] == [1 + (rank == victim) for rank in range(2)]


@pytest.mark.parametrize("victim", [0, 1])
async def test_an_extra_device_reads_the_weights_of_the_rank_that_it_takes(victim: int, rng: np.random.Generator, tmp_path: Path) -> None:
    files = [tmp_path / f"{version}.safetensors" for version in (1, 2)]
    for version, file in enumerate(files, 1):
        safetensors.numpy.save_file(sharded_models.weights(version), file)
    async with world_of(extra="cpu", restart=accel.RestartStrategy(max_restarts=0)) as world:
        model, items = await loaded(world, weights=files[0]), list(rng.standard_normal((8, 5)))
        await model.swap(files[1])
        closed = await loaded(world)
        await closed.aclose()
        async with accel.serve(model, max_items=1) as service:
            before = [(await service.submit(item))["y"] for item in items]
            kill(world.devices[victim])
            await until(lambda: world.state is accel.DeviceState.REBUILDING)  # no item is suspected of it
            for item, answer in zip(items, before, strict=True):
                np.testing.assert_array_equal((await bounded(service.submit(item)))["y"], answer)
            assert (world.epoch, world.extras, service.statistics().failed) == (2, (), 0)
            assert await model.rollback() == 1
            check(await service.submit(items[0]), items[0])
            check(await model.numpy(np.stack(items[:3])), np.stack(items[:3]))
            await service.swap(sharded_models.weights(3), canaries=items[:2])
            check(await service.submit(items[0]), items[0], 3)
        await model.aclose()
        await until(lambda: [device.info().memory.durable for device in world.devices] == [0, 0])


async def test_an_extra_device_does_not_serve_other_weights_than_the_rank_had() -> None:
    weights = sharded_models.weights()
    async with world_of(extra="cpu", restart=accel.RestartStrategy(max_restarts=0)) as world:
        model = await loaded(world, weights=weights)
        weights["down"] += 1.0
        kill(world.devices[1])
        await until(lambda: world.state is accel.DeviceState.LOST)
        error = await failure(model.numpy(np.zeros((1, 5))), accel.DeviceLostError)
        assert "the weights of rank 1 are others" in str(error.__cause__)


async def test_a_call_says_that_the_world_has_changed() -> None:
    async with world_of() as world:
        model = await loaded(world)
        os.kill(child_pid(world.devices[1]), signal.SIGSTOP)
        calling = asyncio.create_task(model.numpy(np.zeros((1, 5))))
        await until(lambda: world.devices[1].pending > 0)
        kill(world.devices[1])
        error = await failure(calling, accel.WorldChangedError)
        assert (error.ranks, error.retryable) == ((1,), True)
        check(await bounded(model.numpy(np.zeros((1, 5)))), np.zeros((1, 5)))


async def test_poison_is_found_in_a_world_of_its_own(rng: np.random.Generator) -> None:
    """A rank that ends its process, one that hangs, and one that raises alone: the item is named, and all others are answered."""
    async with world_of(hang_timeout=1.0) as world:
        model, items = await loaded(world), list(rng.standard_normal((4, 5)))
        async with accel.serve(model, max_delay=0.05) as service:
            for value, kind in ((KILL, accel.PoisonedInputError), (RAISE, accel.LibraryError), (ONE, accel.LibraryError)):
                bad = np.full(5, value)
                outcomes = await bounded(asyncio.gather(*map(service.submit, [*items, bad]), return_exceptions=True))
                assert isinstance(outcomes.pop(), kind)
                for item, outcome in zip(items, outcomes, strict=True):
                    assert isinstance(outcome, dict), outcome
                    check(outcome, item)


async def test_a_rank_that_hangs_in_a_forward_is_replaced(rng: np.random.Generator) -> None:
    async with world_of(hang_timeout=2.0) as world:
        model, x = await loaded(world), rng.standard_normal((2, 5))
        error = await failure(model.numpy(np.full((1, 5), HANG)), accel.WorldChangedError)
        assert error.ranks == (1,)
        assert "rank 1 (cpu:0#2) did not reach forward" in error.message
        check(await bounded(model.numpy(x)), x)
        assert [device.generation for device in world.devices] == [1, 2]


async def test_a_forward_that_was_left_in_a_queue_does_not_run_in_the_next_epoch(rng: np.random.Generator) -> None:
    """The others do not run it, and would answer with what it gives them."""
    async with world_of() as world:
        model, x = await loaded(world), rng.standard_normal((1, 5))
        check(await model.numpy(x), x)
        kill(world.devices[1])
        await reached(world, 2)
        runner: Any = model._versions.serving.runner
        for device, rank in zip(world.devices, runner._ranks, strict=True):

            async def left(device: accel.Device = device, rank: Any = rank) -> None:
                async with device.batch() as batch:
                    rank.record(batch, [x], model.outputs.specs({"batch": 1}), (1, 9))

            error = await failure(left(), accel.WorldChangedError)
            assert "no rank of epoch 1" in error.message
        check(await model.numpy(x), x)
        assert world.epoch == 2


async def test_making_an_epoch_ready_is_no_hang(rng: np.random.Generator) -> None:
    """It takes several times the hang_timeout, and what waits behind it has that time too."""
    async with world_of(hang_timeout=0.8) as world:
        model, x = await loaded(world, target="Slow"), rng.standard_normal((2, 5))
        for epoch in (1, 2):
            for found in await bounded(asyncio.gather(*(model.numpy(x) for _ in range(3)))):
                check(found, x)
            assert world.epoch == epoch
            if epoch == 1:
                kill(world.devices[1])
                await reached(world, 2)


async def test_weights_are_swapped_and_rolled_back(rng: np.random.Generator) -> None:
    async with world_of() as world:
        model, x = await loaded(world), rng.standard_normal((3, 5))
        async with accel.serve(model) as service:
            rollout = await service.swap(sharded_models.weights(2), canaries=list(x))
            assert (rollout.version, model.version) == (2, 2)
            check(await model.numpy(x), x, 2)
            kill(world.devices[1])
            await reached(world, 2)
            check(await model.numpy(x), x, 2)
            assert await model.rollback() == 1
            check(await service.submit(x[0]), x[0])
        with pytest.raises(accel.InvalidArgumentError, match="weight 'down' of shape"):
            await model.swap(sharded_models.weights(2) | {"down": np.zeros((15, 3))})
        check(await model.numpy(x), x)
        await model.aclose()
        await until(lambda: [device.info().memory.durable for device in world.devices] == [0, 0])


async def test_worlds_are_replicas_of_one_service(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        worlds = [await system.open_world("cpu", ranks=2, restart=OFTEN) for _ in range(2)]
        first = await loaded(worlds[0], 3)
        models = [first, await first.on(worlds[1])]
        assert [model.version for model in models] == [1, 1]
        async with accel.serve(models, max_items=1) as service:
            items = list(rng.standard_normal((40, 5)))
            for epoch in (1, 2):
                for item, outcome in zip(items, await bounded(asyncio.gather(*map(service.submit, items))), strict=True):
                    check(outcome, item, 3)
                if epoch == 1:
                    kill(worlds[1].devices[0])
            taken = {replica.device: replica.answered for replica in service.statistics().replicas}
            assert taken.keys() == {"world:1", "world:2"}
            assert all(taken.values())
            assert service.statistics().failed == 0
            await service.drain(worlds[0])
            check(await service.submit(items[0]), items[0], 3)
            await service.add(first)
            assert len(service.models) == 2


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"split": {"nothing.*": 0}}, accel.InvalidArgumentError, r"'nothing\.\*' of split matches no weight"),
        ({"split": {"up": 0}}, accel.InvalidArgumentError, r"weight 'up' of shape \(5, 16\) cannot be divided among 2 ranks"),
        ({"target": "tests.model_support:Affine"}, accel.InvalidArgumentError, "cannot be made"),
    ],
)
async def test_what_no_world_can_load_is_refused(options: Any, kind: Any, said: str) -> None:
    async with world_of() as world:
        target = options.pop("target", "tests.sharded_models:Mlp")
        with pytest.raises(kind, match=said):
            await world.load_model(target, **({"weights": sharded_models.weights(), "inputs": X, "split": {}} | options))
        await until(lambda: [device.info().memory.durable for device in world.devices] == [0, 0])
        check(await (await loaded(world)).numpy(np.zeros((1, 5))), np.zeros((1, 5)))


async def test_a_world_that_shrinks_loads_no_model() -> None:
    async with world_of(on_loss="shrink") as world:
        with pytest.raises(accel.UnsupportedError, match="shrinks"):
            await loaded(world)


async def test_a_model_stays_on_its_kind_of_place() -> None:
    async with accel.System() as system:
        worlds = [await system.open_world("cpu", ranks=ranks) for ranks in (2, 4)]
        device = await system.open_device("cpu")
        model = await loaded(worlds[0])
        with pytest.raises(accel.InvalidArgumentError, match="world"):
            await model.on(device)
        with pytest.raises(accel.InvalidArgumentError, match="2 ranks, and here are 4"):
            await model.on(worlds[1])


async def test_two_models_on_the_same_devices_answer_right_through_deadlines_cancellations_and_a_loss(rng: np.random.Generator) -> None:
    async with worlds_of(2) as (world, other):
        models = [await loaded(world), await loaded(other, 2)]
        x, outcomes = rng.standard_normal((1, 5)), list[str]()

        async def call(number: int) -> None:
            which, timeout = number % 2, float(rng.choice([0.002, 0.02, 5.0]))
            calling = asyncio.create_task(models[which].numpy(x, timeout=timeout))
            if number % 5 == 0:
                await asyncio.sleep(0.002)
                calling.cancel()
            outcome: Any = (await asyncio.gather(calling, return_exceptions=True))[0]
            if isinstance(outcome, dict):
                check(outcome, x, which + 1)
            else:
                assert isinstance(outcome, (accel.DeadlineExceededError, accel.WorldChangedError, asyncio.CancelledError)), outcome
            outcomes.append(type(outcome).__name__)

        for is_lost in (False, True):
            calls = [asyncio.create_task(call(number)) for number in range(150)]
            await until(lambda calls=calls: any(each.done() for each in calls))  # type: ignore[misc]
            if is_lost:
                kill(world.devices[1])
            await bounded(asyncio.gather(*calls))
        assert {"dict", "DeadlineExceededError", "CancelledError"} <= set(outcomes)
        for version, model in enumerate(models, 1):
            check(await bounded(model.numpy(x)), x, version)
            await model.aclose()
        await until(lambda: [device.info().memory.used for device in world.devices] == [0, 0])
