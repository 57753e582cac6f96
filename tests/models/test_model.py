"""Models on a device: loading, calling, buckets, faults, swaps, and serving them to many tasks."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, task, used
from tests.model_support import HANG, KILL, NAN, RAISE, SEQUENCES, Affine, Mean, Replaying, Turning, X, affine, expected

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

HOSTS = ["inline", "process"]


async def loaded(device: accel.Device, weights: Any, model: Any = Affine, **options: Any) -> accel.Model:
    return await device.load_model(model, **{"weights": weights, "inputs": X, "buckets": {"batch": (1, 4, 8)}, **options})


def check_close(actual: Any, desired: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(actual, desired, rtol=2e-6, atol=2e-6)


def rows(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal((n, 5), np.float32)


async def test_a_model_answers_batches_of_any_size(hosted: accel.Device, rng: np.random.Generator) -> None:
    weights = affine(rng)
    before = used(hosted)
    told: list[tuple[str, int, int]] = []
    model = await loaded(hosted, weights, on_progress=lambda *progress: told.append(progress))
    nbytes = sum(each.nbytes for each in weights.values())
    assert (told[0], told[-3]) == (("weights", 0, nbytes), ("weights", nbytes, nbytes))
    buckets = len(model.buckets.all())
    assert told[-2:] == [("buckets", 0, buckets), ("buckets", buckets, buckets)]
    assert model.outputs.shapes == (("batch", 3), ("batch",), ("batch",))
    assert all(ref.durable for ref in model.weights.values())
    for n in (1, 3, 8, 9, 21):
        x = rows(rng, n)
        answer = await model.numpy(x)
        check_close(answer["y"], expected(weights, x))
        np.testing.assert_allclose(answer["total"], expected(weights, x).sum(axis=1), rtol=2e-5, atol=2e-5)
        refs = await model(x=await hosted.put(x))
        assert refs["y"].shape == (n, 3)
        np.testing.assert_array_equal(await hosted.get(refs["y"]), answer["y"])
        del refs
    assert (await model.numpy(x=[[1, 2, 3, 4, 5]]))["y"].dtype == np.float32
    assert model.version == 1
    await model.aclose()
    await model.aclose()
    assert used(hosted) == before
    with pytest.raises(accel.ClosedError):
        await model(rows(rng, 1))


async def test_outputs_that_change_their_order_are_not_mistaken_for_each_other(hosted: accel.Device) -> None:
    model = await hosted.load_model(Turning, inputs=X, buckets={"batch": (1, 4)})
    x = np.ones((2, 5), np.float32)
    np.testing.assert_array_equal((await model.numpy(x))["half"], x / 2)
    with pytest.raises(accel.LibraryError, match="order"):
        await model.numpy(-x)
    np.testing.assert_array_equal((await model.numpy(x))["double"], x * 2)


@pytest.mark.parametrize(("made", "is_captured"), [(Affine, False), (Replaying, True)])
async def test_replays_are_counted_and_the_largest_bucket_is_warmed_first(made: Any, is_captured: bool, rng: np.random.Generator) -> None:
    weights = affine(rng, 7)
    async with accel.System() as system:
        model = await loaded(await system.open_device("cpu"), weights, model=made)
        assert model.outputs.is_captured is is_captured
        assert model.replays == 0
        answer = await model.numpy(rows(rng, 21))
        assert set(answer["version"]) == {1 if is_captured else 7}
        async with accel.serve(model) as service:
            await service.submit(rows(rng, 1)[0])
        assert model.forwards == {(8,): 3, (1,): 1}
        assert model.replays == (4 if is_captured else 0)


async def test_lengths_are_padded_and_cut(hosted: accel.Device, rng: np.random.Generator) -> None:
    model = await hosted.load_model(Mean, inputs=SEQUENCES, buckets={"batch": (4,), "length": (6, 8)})
    assert model.outputs.shapes == (("batch",), ("batch", "length"))
    ids = rng.integers(0, 1000, (3, 7))
    mean, doubled = await model.numpy(ids, mask=np.ones((3, 7)))
    np.testing.assert_allclose(mean, ids.mean(axis=1))
    np.testing.assert_array_equal(doubled, 2 * ids)
    refs = await model(await hosted.put(ids), mask=np.ones((3, 7)))
    np.testing.assert_array_equal(await hosted.get(refs[1]), 2 * ids)
    async with accel.serve(model) as service:
        items = [rng.integers(0, 1000, n) for n in (1, 8, 5, 3, 7, 2)]
        answers = await bounded(asyncio.gather(*[service.submit({"ids": each, "mask": np.ones(len(each))}) for each in items]))
        for item, (mean, doubled) in zip(items, answers, strict=True):
            np.testing.assert_allclose(mean, item.mean())
            np.testing.assert_array_equal(doubled, 2 * item)
        error = await failure(service.submit({"ids": np.ones(9, int), "mask": np.ones(9)}), accel.InvalidArgumentError)
        assert error.argument == "ids"
        error = await failure(service.submit({"ids": np.ones(3, int), "mask": np.ones(4)}), accel.InvalidArgumentError)
        assert error.argument == "mask"
        assert service.statistics().submitted == len(items)


async def test_what_does_not_fit_is_refused_before_anything_is_sent(device: accel.Device, rng: np.random.Generator) -> None:
    for wrong in ({"inputs": None}, {"buckets": {"length": (3,)}}, {"graphs": "often"}):
        before = used(device)
        await failure(loaded(device, affine(rng), **wrong), accel.InvalidArgumentError)
        assert used(device) == before
    await failure(loaded(device, {"w": [1, "a"]}), accel.InvalidArgumentError)
    model = await loaded(device, affine(rng))
    for given, argument in (({}, "x"), ({"x": rows(rng, 2), "z": 1}, "z"), ({"x": rows(rng, 2)[:, :4]}, "x"), ({"x": "text"}, "x")):
        error = await failure(model(**given), accel.InvalidArgumentError)
        assert error.argument == argument
    await failure(model(rows(rng, 2), x=rows(rng, 2)), accel.InvalidArgumentError)
    await failure(model(rows(rng, 2), rows(rng, 2)), accel.InvalidArgumentError)
    await failure(model(await device.put(rng.standard_normal((2, 5)))), accel.InvalidArgumentError)
    wrong_options: list[dict[str, Any]] = [{"max_items": 9}, {"max_items": 0}, {"max_delay": -1}]
    for options in wrong_options:
        with pytest.raises(accel.InvalidArgumentError):
            accel.serve(model, **options)


@pytest.mark.parametrize("host", HOSTS)
async def test_a_model_is_there_again_when_the_device_is(
    host: Any, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing read again, and before the generation is announced."""
    log = tmp_path / "opens"
    monkeypatch.setenv("ACCEL_TEST_OPENS", str(log))
    weights, source = affine(rng), tmp_path / "w.npz"
    plan = FaultPlan().poison_at(6, op="forward")  # four are of the loading
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host, faults=plan)
        model = await loaded(device, weights)
        x = rows(rng, 3)
        await model.numpy(x)
        await failure(model.numpy(x), accel.ContextPoisonedError)
        generations = device.generations()
        async for generation in generations:
            if generation == 2:
                assert len(log.read_text().split()) == 2
                break
        check_close((await bounded(model.numpy(x)))["y"], expected(weights, x))
        assert not source.exists()
        if host == "process":
            pid = device.info().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            async for generation in generations:
                if generation == 3:
                    break
            check_close((await bounded(model.numpy(x)))["y"], expected(weights, x))
            assert len(log.read_text().split()) == 3


POISONS = [
    pytest.param(HANG, accel.PoisonedInputError, id="hung"),
    pytest.param(NAN, accel.NonFiniteError, id="not finite"),
    pytest.param(RAISE, accel.LibraryError, id="raised"),
]


@pytest.mark.parametrize(("value", "kind"), POISONS)
@pytest.mark.timeout(120)
async def test_one_poisonous_request_is_named_and_the_others_are_answered(rng: np.random.Generator, value: float, kind: type) -> None:
    weights, x = affine(rng), rows(rng, 8)
    x[3, 2] = value
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=1.0)
        model = await loaded(device, weights)
        async with accel.serve(model, check_finite=True) as service:
            answers: list[Any] = await asyncio.gather(*[service.submit(each) for each in x], return_exceptions=True)
            assert type(answers.pop(3)) is kind
            check_close([each["y"] for each in answers], expected(weights, np.delete(x, 3, axis=0)))


@pytest.mark.timeout(120)
async def test_a_request_that_kills_is_named_by_a_quarantine_that_loads_each_version_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins: list[accel.Model] = []
    make = accel.Model.on

    async def counted(self: accel.Model, device: Any) -> accel.Model:
        twins.append(await make(self, device))
        return twins[-1]

    monkeypatch.setattr(accel.Model, "on", counted)
    weights, x = {number: affine(rng, number) for number in (1, 2)}, rows(rng, 4)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        model = await loaded(device, weights[1])
        async with accel.serve(model, quarantine_idle=60.0) as service:
            for number in (1, 2):
                x[2, 1] = KILL + number / 16  # another poison
                async with asyncio.timeout(60):
                    answers: list[Any] = await asyncio.gather(*map(service.submit, x), return_exceptions=True)
                assert type(answers.pop(2)) is accel.PoisonedInputError
                check_close([each["y"] for each in answers], expected(weights[number], np.delete(x, 2, axis=0)))
                assert {int(each["version"]) for each in answers} == {number}, "not what served before"
                if number == 1:
                    await model.swap(weights[2])
        assert len(twins) == 2


async def test_weights_are_swapped_while_clients_ask(hosted: accel.Device, rng: np.random.Generator) -> None:
    """No request fails, and no answer is of two versions."""
    versions = {number: affine(rng, number) for number in range(1, 5)}
    model = await loaded(hosted, versions[1])
    before = used(hosted)
    async with accel.serve(model) as service:
        seen: set[int] = set()
        is_over = False

        async def client() -> None:
            while not is_over:
                x = rows(rng, 1)
                answer = await service.submit(x[0])
                version = int(answer["version"])
                check_close(answer["y"], expected(versions[version], x)[0])
                np.testing.assert_allclose(answer["total"], answer["y"].sum(), rtol=2e-5, atol=2e-5)
                seen.add(version)

        clients = [task(client()) for _ in range(256)]
        for number in (2, 3, 4):
            canary = rows(rng, 1)
            compared: list[Any] = []

            async def compare(old: Any, new: Any, compared: list[Any] = compared) -> bool:
                compared += [old, new]
                return True

            assert await model.swap(versions[number], canaries=[canary[0]], compare=compare) == number
            for answer, version in zip(compared, (number - 1, number), strict=True):
                check_close(answer["y"], expected(versions[version], canary)[0])
            while number not in seen:
                await asyncio.sleep(0)
        await model.release()
        is_over = True
        await bounded(asyncio.gather(*clients))
        assert service.statistics().failed == 0
    assert seen == {1, 2, 3, 4}
    assert used(hosted) == before


async def test_a_service_is_called_after_its_model_and_no_device(device: accel.Device, rng: np.random.Generator) -> None:
    model = await loaded(device, affine(rng))
    async with accel.serve(model) as service:
        assert service.service.name == model.name
    assert device.name not in model.name


async def test_a_swap_that_goes_wrong_changes_nothing(device: accel.Device, rng: np.random.Generator) -> None:
    weights, x = affine(rng), rows(rng, 1)
    model = await loaded(device, weights)
    before = used(device)
    good = affine(rng, 2)
    bad = {**good, "b": np.full(3, np.nan, np.float32)}
    error: accel.AccelError = await failure(model.swap(bad, canaries=[x[0]]), accel.NonFiniteError)
    assert "of version 2 of the model has NaNs or infinities for canary 0" in str(error)
    assert "serves its old ones" in str(error)
    await failure(model.swap(good, canaries=[x[0]], compare=lambda old, new: False), accel.LibraryError)
    await failure(model.swap({"w": good["w"]}), accel.LibraryError)
    error = await failure(model.swap({**good, "w": np.zeros((4, 3), np.float32)}), accel.LibraryError)
    assert "Look at the weights; the model serves its old ones." in str(error)
    await failure(model.swap(good, canaries=[x]), accel.InvalidArgumentError)
    await failure(model.rollback(), accel.InvalidArgumentError)
    assert (model.version, used(device)) == (1, before)
    check_close((await model.numpy(x))["y"], expected(weights, x))
    assert await model.swap(good) == 2
    assert await model.rollback() == 1
    assert await model.swap(good) == 3, "2 were other weights, perhaps"
    assert await model.rollback() == 1
    assert used(device) == before
    check_close((await model.numpy(x))["y"], expected(weights, x))


async def test_rows_say_which_version_answered(device: accel.Device, rng: np.random.Generator) -> None:
    model = await loaded(device, affine(rng))
    left: list[tuple[int, Any]] = []
    model.on_rollback = lambda version, error: left.append((version, error))
    items = model.canaries(rows(rng, 3))
    assert (await bounded(model.rows(items))).version == 1
    await model.swap({**affine(rng, 2), "b": np.full(3, np.nan, np.float32)})
    raw = await bounded(model.rows(items))
    assert (raw.version, int(raw[0]["version"])) == (2, 2)
    instead = await bounded(model.rows(items, check_finite=True))
    assert (instead.version, [int(each["version"]) for each in instead]) == (1, [1, 1, 1])
    assert [(version, type(error)) for version, error in left] == [(2, accel.NonFiniteError)]
    assert (model.version, model.latest_version) == (1, 2)
    await model.swap(affine(rng, 3))
    await model.rollback()
    assert left[1:] == [(3, None)]


async def test_models_of_several_devices_agree_on_the_version_of_their_weights(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        devices = [await system.open_device("cpu", host="inline") for _ in range(3)]
        first, behind, ahead = [await loaded(device, affine(rng)) for device in devices]
        weights = affine(rng, 7)
        assert await first.swap(await first.collected(weights), version=7) == 7
        assert not first.leave(6), "it does not serve"
        await ahead.swap(affine(rng, 9), version=9)
        x = rows(rng, 2)
        for model in (behind, ahead):
            await bounded(model.follow(first))
            await bounded(model.follow(first))
            assert (model.version, (await model.numpy(x))["version"].tolist()) == (7, [7, 7])
            check_close((await model.numpy(x))["y"], expected(weights, x))
        assert (await bounded(first.on(devices[1]))).version == 7
        assert await ahead.swap(affine(rng, 10)) == 10
        assert await behind.swap(affine(rng, 8)) == 8
        assert (await failure(behind.swap(affine(rng, 8), version=8), accel.InvalidArgumentError)).argument == "version"
        await failure(behind.swap(affine(rng, 8), version=0), accel.InvalidArgumentError)
        assert behind.leave(8)
        assert not behind.leave(8)
        assert behind.version == 7


async def test_a_swap_without_room_is_refused_before_anything_is_read(rng: np.random.Generator) -> None:
    large = {"spare": np.zeros(5 << 20, np.uint8)}
    async with accel.System() as system:
        device = await system.open_device("cpu", memory_limit=8 << 20)
        model = await loaded(device, affine(rng) | large)
        told: list[int] = []
        error = await failure(
            model.swap(affine(rng, 2) | large, on_progress=lambda _stage, done, _total: told.append(done)), accel.OutOfMemoryError
        )
        assert (told, error.limit, model.version) == ([], 8 << 20, 1)
        await model.numpy(rows(rng, 2))


async def test_weights_that_fail_in_service_are_rolled_back(device: accel.Device, rng: np.random.Generator) -> None:
    weights, x = affine(rng), rows(rng, 4)
    model = await loaded(device, weights)
    async with accel.serve(model, check_finite=True) as service:
        await model.swap({**affine(rng, 2), "b": np.full(3, np.nan, np.float32)})
        assert model.version == 2
        answers = await bounded(asyncio.gather(*[service.submit(each) for each in x]))
        check_close([each["y"] for each in answers], expected(weights, x))
        assert model.version == 1
        poison = rows(rng, 1)[0]
        poison[0] = NAN
        await failure(service.submit(poison), accel.NonFiniteError)
        assert model.version == 1


async def test_a_model_of_a_lost_device_closes(rng: np.random.Generator) -> None:
    plan = FaultPlan().poison_at(5, op="forward")  # four are of the loading
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=plan, restart=accel.RestartStrategy(max_restarts=0))
        model = await loaded(device, affine(rng))
        await failure(model.numpy(rows(rng, 1)), accel.ContextPoisonedError)
        assert device.state is accel.DeviceState.LOST
        await failure(model.numpy(rows(rng, 1)), accel.DeviceLostError)
        await bounded(model.aclose())
