"""Registered libraries that hold durable buffers: the same memory in every generation, opened ahead if they say so, until they are unregistered."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.affine_support import Affine, Apply, Eager, Spread, Weights, pids, read
from tests.device_support import bounded, cancelled, child_pid, failure, generation, in_flight, opened, task, until, used

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

HOSTS = pytest.mark.parametrize("host", ["inline", "process"])


async def faults(device: accel.Device, host: str) -> None:
    """Take the context away, and wait for the next one."""
    before = device.generation
    if host == "process":
        os.kill(child_pid(device), signal.SIGKILL)
    else:
        await failure(device.zeros(1), accel.ContextPoisonedError)
    await generation(device, before + 1)


def plan(host: str) -> FaultPlan | None:
    return None if host == "process" else FaultPlan().poison_at(1, op="fill")


@pytest.mark.parametrize(("host", "library"), [("inline", Affine), ("inline", Spread), ("process", Eager)])
async def test_a_library_computes_with_its_weights_in_every_generation(
    host: Any, library: type[Affine], rng: np.random.Generator, tmp_path: Path
) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with opened(plan(host), host=host) as device:
        await device.register(library, str(journal), await weights.put(device), (1, [2, {"three": 3}]))
        await weights.holds(device)
        assert used(device) > 0, "the registration alone keeps the memory"
        assert read(journal) == ["open"]
        await faults(device, host)
        assert read(journal) == ["open"] * (2 if library.eager else 1), "an eager library is open before the generation begins"
        await weights.holds(device)
        assert read(journal) == ["open", "open"]
        assert device.info().restarts == 1
        await bounded(device.unregister("affine"))
        assert read(journal) == ["open", "open", "close"]
        assert (pids(journal)[-1] == os.getpid()) is (host == "inline")
        await until(lambda: used(device) == 0, "its memory is free")
        await failure(device.run(Apply(await device.put(np.ones((1, 6))))), accel.UnsupportedError)
        await failure(device.unregister("affine"), accel.InvalidArgumentError)
        again = Weights(rng)
        await device.register(library, str(journal), await again.put(device))
        await again.holds(device)
    assert read(journal) == ["open", "open", "close", "open", "close"]


async def test_refs_that_are_not_there_for_as_long_are_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), str(tmp_path / "journal")
    async with opened() as device:
        good = await weights.put(device)
        plain = await device.put(weights.w)
        error = await failure(device.register(Affine, journal, {"w": plain, "b": good["b"]}), accel.InvalidArgumentError)
        assert "argument 2['w']" in error.message
        assert repr(plain) in error.message
        error = await failure(device.register(Affine, journal, {"w": good["w"].T, "b": good["b"]}), accel.InvalidArgumentError)
        assert "strided" in error.message
        freed = await device.put(weights.w, durable=True)
        await device.free(freed)
        stale = await failure(device.register(Affine, journal, {}, more=[freed]), accel.StaleRefError)
        assert stale.reason == "freed"
        async with opened() as other:
            foreign = await other.put(weights.w, durable=True)
            await failure(device.register(Affine, journal, {"w": foreign}), accel.InvalidArgumentError)
        await device.register(Affine, journal, good, more=good["w"].token())
        refused = await failure(device.free(good["w"]), accel.InvalidArgumentError)
        assert "'affine'" in refused.message
        await weights.holds(device)


@HOSTS
async def test_what_was_sent_before_runs_and_what_is_sent_after_does_not(host: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with opened(host=host, max_in_flight=2) as device:
        await device.register(Affine, str(journal), await weights.put(device))
        x = rng.standard_normal((3, 6))
        ref = await device.put(x)
        async with device.graph() as graph:
            graph.run(Apply(ref))
        batch = device.batch()
        await batch.__aenter__()
        h = batch.run(Apply(ref))
        sent = [task(device.run(Apply(ref, 0.01))) for _ in range(8)]
        await until(lambda: device.info().queued > 0, "some wait in the queue")
        leaving = task(device.unregister("affine"))
        for each in await bounded(asyncio.gather(*sent)):
            np.testing.assert_allclose(await device.get(each), x @ weights.w + weights.b)
        await bounded(leaving)
        assert read(journal) == ["open", "close"]
        await failure(graph.replay(), accel.UnsupportedError)
        await failure(batch.__aexit__(None, None, None), accel.UnsupportedError)
        assert h.is_stale
        assert device.generation == 1


@pytest.mark.parametrize("streams", [1, 8, 2])
async def test_streams_are_used_again(streams: int, rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with opened(host="inline", streams=streams) as device:
        refs = await weights.put(device)
        lanes = 0
        for turn in range(4):
            await device.register(Affine, str(journal), refs)
            await weights.holds(device)
            await bounded(device.unregister("affine"))
            if turn == 1:
                lanes = len(device._host.context.lanes.all)
        assert len(device._host.context.lanes.all) == lanes
    assert read(journal) == ["open", "close"] * 4


@HOSTS
async def test_a_library_whose_weights_are_torn_is_refused_until_they_are_rewritten(
    host: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    faulty = FaultPlan().poison_at(1, op="copy")
    async with opened(faulty, host=host) as device:
        refs = await weights.put(device)
        await device.register(Eager, str(journal), refs)
        other = await device.put(weights.w)
        await failure(device.copy(other, refs["w"]), accel.ContextPoisonedError)
        await generation(device, 2)
        assert read(journal) == ["open"], "nothing is computed from what is torn"
        x = await device.put(np.ones((2, 6)))
        torn = await failure(device.run(Apply(x)), accel.StaleRefError)
        assert torn.reason == "torn"
        weights.w = rng.standard_normal((6, 6))
        await device.put(weights.w, out=refs["w"])
        await weights.holds(device)


async def test_a_generation_begins_without_what_cannot_be_opened(
    rng: np.random.Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with opened(plan("inline"), host="inline") as device:
        await device.register(Eager, str(journal), await weights.put(device), way="fails later")
        await faults(device, "inline")
        assert caplog.text.count("library_not_opened") == 1
        error = await failure(device.run(Apply(await device.put(np.ones((1, 6))))), accel.LibraryError)
        assert "not a second time" in str(error)
        assert (device.generation, device.state) == (2, accel.DeviceState.READY)
        await bounded(device.unregister("affine"))
        await device.register(Eager, str(tmp_path / "other"), await weights.put(device))
        await weights.holds(device)


@HOSTS
async def test_a_cancelled_unregistration_in_its_turn_ends_the_library_all_the_same(
    host: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    hang = FaultPlan().hang_at(1, op="apply")
    async with opened(hang, host=host) as device:
        await device.register(Affine, str(journal), await weights.put(device))
        x = await device.put(np.ones((1, 6)))
        hung = task(device.run(Apply(x)))
        await in_flight(device, 1)
        leaving = task(device.unregister("affine"))
        await in_flight(device, 2)
        await cancelled(leaving)
        await failure(device.unregister("affine"), accel.InvalidArgumentError)
        again = task(device.register(Affine, str(tmp_path / "other"), await weights.put(device)))
        hang.release()
        await bounded(hung)
        await bounded(again)
        assert read(journal) == ["open", "close"]
        await weights.holds(device)


async def test_a_hang_does_not_keep_an_unregistration_beyond_the_devices_end(rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    hang = FaultPlan().hang_at(1, op="apply")
    async with opened(hang, host="inline") as device:
        await device.register(Affine, str(journal), await weights.put(device))
        hung = task(device.run(Apply(await device.put(np.ones((1, 6))))))
        await in_flight(device, 1)
        leaving = task(device.unregister("affine"))
        await in_flight(device, 2)
        await bounded(device.aclose(timeout=0.05))
        await failure(leaving, accel.ClosedError)
        await failure(hung, accel.ClosedError)
    assert read(journal) == ["open"], "what may run is not closed under it"


@HOSTS
async def test_a_fault_takes_what_is_unregistered_with_it(host: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    hang = FaultPlan().hang_at(1, op="apply").poison_at(1, op="fill")
    async with opened(hang, host=host) as device:
        await device.register(Eager, str(journal), await weights.put(device))
        hung = task(device.run(Apply(await device.put(np.ones((1, 6))))))
        await in_flight(device, 1)
        leaving = task(device.unregister("affine"))
        await in_flight(device, 2)
        await failure(device.zeros(1), accel.ContextPoisonedError)
        await failure(hung, accel.ContextPoisonedError)
        await bounded(leaving)
        await bounded(generation(device, 2))
        assert read(journal) == ["open"], "it is not opened again"
        await until(lambda: used(device) == 0, "its memory is free")
        hang.release()


async def test_a_library_unregistered_during_a_rebuild_is_not_opened_ahead(rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with opened(FaultPlan().poison_at(1, op="fill"), host="inline") as device:
        await device.register(Eager, str(journal), await weights.put(device))
        await failure(device.zeros(1), accel.ContextPoisonedError)
        assert device.state is accel.DeviceState.REBUILDING
        await bounded(device.unregister("affine"))
        assert (device.generation, read(journal)) == (2, ["open"])
        await until(lambda: used(device) == 0, "its memory is free")


@pytest.mark.parametrize("kept", [0, 1])
async def test_of_two_unregistrations_during_a_rebuild_one_that_is_cancelled_does_not_undo_the_other(
    kept: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with opened(FaultPlan().poison_at(1, op="fill"), host="inline") as device:
        await device.register(Eager, str(journal), await weights.put(device))
        await failure(device.zeros(1), accel.ContextPoisonedError)
        leaving = [task(device.unregister("affine")) for _ in range(2)]
        await asyncio.sleep(0)
        assert device.state is accel.DeviceState.REBUILDING
        await cancelled(leaving[1 - kept])
        await bounded(leaving[kept])
        assert (device.generation, read(journal)) == (2, ["open"])


async def test_a_cancelled_unregistration_during_a_rebuild_leaves_the_library(rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with opened(FaultPlan().poison_at(1, op="fill"), host="inline") as device:
        await device.register(Eager, str(journal), await weights.put(device))
        await failure(device.zeros(1), accel.ContextPoisonedError)
        leaving = task(device.unregister("affine"))
        await asyncio.sleep(0)
        await cancelled(leaving)
        await generation(device, 2)
        assert read(journal) == ["open", "open"], "in each generation"
        await weights.holds(device)


@HOSTS
async def test_a_cancelled_registration_gives_its_memory_back(host: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    weights, journal = Weights(rng), tmp_path / "journal"
    async with opened(host=host) as device:
        registering = task(device.register(Affine, str(journal), await weights.put(device), way="slow"))
        await until(lambda: "affine" in device._core.registrations)
        for _ in range(20):
            await asyncio.sleep(0)
        await cancelled(registering)
        await device.register(Affine, str(tmp_path / "other"), await weights.put(device))
        await weights.holds(device)
        await bounded(device.unregister("affine"))
        await until(lambda: used(device) == 0, "its memory is free")
        assert read(journal) in ([], ["open", "close"])


async def test_a_quarantine_has_no_library_with_memory_of_another_device(rng: np.random.Generator, tmp_path: Path) -> None:
    weights = Weights(rng)
    async with opened() as device:
        await device.register(Affine, str(tmp_path / "journal"), await weights.put(device))
        async with device.quarantine() as other:
            await failure(other.run(Apply(await other.put(np.ones((1, 6))))), accel.UnsupportedError)
            await other.register(Affine, str(tmp_path / "journal"), await weights.put(other))
            await weights.holds(other)
