"""A model's life: swaps, releases, rollbacks and closes are made or not made, whatever is cancelled, hangs, or ends meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.models import model as model_module
from accel.models import runner, versions
from accel.models.library import ModelLibrary
from accel.testing import FaultPlan
from tests.device_support import PATIENCE, bounded, cancelled, failure, generation, task, turns, until, used
from tests.model_support import Affine, Scribbling, X, affine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


async def loaded(device: accel.Device, rng: np.random.Generator, number: int = 1, target: Any = Affine, **options: Any) -> accel.Model:
    return await device.load_model(target, **{"weights": affine(rng, number), "inputs": X, "buckets": {"batch": (1, 4)}, **options})


async def serving(model: accel.Model) -> int:
    """Return the version of the weights that answer, as they tell themselves."""
    answer = await bounded(model.numpy(np.ones((1, 5), np.float32)))
    return int(answer["version"][0])


async def given_back(device: accel.Device, before: int, what: str = "the end") -> None:
    """Wait until the memory of a model has been given back. Some of it is looked at when the next op ends."""
    async with asyncio.timeout(PATIENCE):
        while used(device) != before:
            await device.get(await device.zeros(1))
            assert used(device) >= before, what


WIDE = {"x": accel.TensorSpec(("batch", 8), "float32")}


def streams_of_the_cpu() -> int:
    return sum(thread.name.startswith("accel-cpu") for thread in threading.enumerate())


class Unopened(ModelLibrary):
    """A library that cannot be opened."""

    def __init__(self) -> None:
        """Has no model."""

    def open(self, stream: Any) -> None:
        raise RuntimeError("it has nothing to open")


class SlowToOpen(Unopened):
    """A library whose opening lasts as long as a file is there, which it makes."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def open(self, stream: Any) -> None:
        self._path.touch()
        while self._path.exists():
            time.sleep(0.005)


async def never(*_: object) -> bool:
    await asyncio.Event().wait()
    return True


CALLS: dict[str, Callable[[accel.Model, dict[str, Any]], Awaitable[object]]] = {
    "release": lambda model, _: model.release(),
    "rollback": lambda model, _: model.rollback(),
    "swap": lambda model, weights: model.swap(weights, canaries=[np.ones(5)]),
    "aclose": lambda model, _: model.aclose(),
}


@pytest.mark.parametrize("what", CALLS)
async def test_a_call_that_is_cancelled_in_any_turn_is_made_or_not(what: str, rng: np.random.Generator) -> None:
    """After any number of turns: the model swaps, releases and closes as if nothing had been, and its memory comes back."""
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        before = used(device)
        for count in (*range(8), *rng.integers(8, 200, 6).tolist()):
            model = await loaded(device, rng)
            await model.swap(affine(rng, 2))
            call = task(CALLS[what](model, affine(rng, 3)))
            await turns(count)
            call.cancel()
            await asyncio.wait([call])
            was_cancelled = call.cancelled()
            del call  # its traceback keeps frames
            if what == "aclose" and count:
                await failure(model(np.ones((1, 5))), accel.ClosedError)
                await bounded(model.release())
            else:
                done = {"release": {2}, "rollback": {1}, "swap": {3}, "aclose": {2}}[what]
                assert await serving(model) in (done | {2} if was_cancelled else done), f"{count} turns"
                await bounded(model.release())
                assert await bounded(model.swap(affine(rng, 4))) == model.version
                assert await serving(model) == 4
            await bounded(model.aclose())
            await bounded(model.aclose())
            await given_back(device, before, f"{what} after {count} turns")


@pytest.mark.parametrize("stuck", ["compare", "file"])
@pytest.mark.parametrize("closer", ["aclose", "release", "rollback", "device"])
async def test_nothing_waits_for_a_swap_that_does_not_return(
    closer: str, stuck: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def sticks(*_: object) -> Any:
        begun.set()
        return await never()

    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        model = await loaded(device, rng)
        before = used(device)
        if stuck == "file":
            monkeypatch.setattr(versions, "collect", sticks)
        swap = task(model.swap(affine(rng, 2), canaries=[np.ones(5)], compare=sticks))
        await bounded(begun.wait())
        if closer == "device":
            await bounded(device.aclose())
            await failure(swap, accel.ClosedError)
        elif closer == "aclose":
            await bounded(model.aclose())
            await failure(swap, accel.ClosedError)
            assert used(device) < before
        elif closer == "rollback":
            assert await bounded(model.rollback()) == 1
            error = await failure(swap, accel.LibraryError)
            assert error.op == "swap"
            assert (await serving(model), used(device)) == (1, before)
        else:
            await bounded(model.release())
            assert not swap.done(), "it holds no weights that a release is of"
            await cancelled(swap)
            assert await serving(model) == 1


async def test_a_call_that_does_not_end_bounds_no_close(rng: np.random.Generator) -> None:
    async def hangs(device: accel.Device, *, x: accel.AccelRef, weights: Any) -> accel.AccelRef:
        if is_stuck.is_set():
            await never()
        return x

    is_stuck = asyncio.Event()
    async with accel.System(close_timeout=0.05) as system:
        device = await system.open_device("cpu")
        model = await device.load_model(hangs, weights={"w": rng.standard_normal(3)}, inputs=X, buckets={"batch": (1,)})
        is_stuck.set()
        call = task(model.numpy(np.ones((1, 5))))
        await turns()
        await bounded(model.aclose())
        await cancelled(call)
        await given_back(device, 0)


async def test_a_swap_that_is_refused_leaves_the_weights_to_go_back_to(rng: np.random.Generator) -> None:
    def large(number: int) -> dict[str, Any]:
        return affine(rng, number) | {"large": np.zeros(5 << 20, np.uint8)}

    async with accel.System() as system:
        device = await system.open_device("cpu", memory_limit=8 << 20)
        model = await loaded(device, rng)
        await model.swap(affine(rng, 2))
        taken = await device.empty(4 << 20, "uint8")
        await failure(model.swap(large(3)), accel.OutOfMemoryError)
        await failure(model.swap("no/such/file.safetensors"), accel.InvalidArgumentError)
        await failure(model.swap({"w": [1, "a"]}), accel.InvalidArgumentError)
        assert await model.rollback() == 1
        assert await serving(model) == 1
        await device.free(taken)
        await model.swap(large(3))
        assert await model.swap(affine(rng, 4)) == 4


async def test_a_load_that_is_cancelled_in_any_turn_leaves_nothing(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        before = used(device)
        for count in (*range(8), *rng.integers(8, 200, 12).tolist()):
            load = task(loaded(device, rng))
            await turns(count)
            load.cancel()
            await asyncio.wait([load])
            if not load.cancelled():
                await load.result().aclose()
            del load  # its traceback keeps frames
            await given_back(device, before, f"a load after {count} turns")


@pytest.mark.parametrize("streams", [8, 1, 2])
async def test_failed_and_cancelled_loads_leave_no_streams(streams: Any, rng: np.random.Generator) -> None:
    """A service that looks for new weights again and again does not run out of threads, or of a GPU's streams."""

    async def cancelled_load(number: int) -> None:
        load = task(loaded(device, rng))
        await turns(5 * number)
        load.cancel()
        await asyncio.wait([load])
        if not load.cancelled():
            await load.result().aclose()

    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", streams=streams)
        model = await loaded(device, rng)
        failing: dict[str, Callable[[int], Awaitable[object]]] = {
            "no module": lambda _: failure(device.load_model("no_such_module:Model", inputs=X), accel.InvalidArgumentError),
            "open raises": lambda _: failure(loaded(device, rng, weights={}, buckets={}), accel.LibraryError),
            "warming up raises": lambda _: failure(model.swap({**affine(rng), "w": np.ones((9, 2))}), accel.LibraryError),
            "no such library": lambda _: failure(device.register_as("mine", Unopened), accel.LibraryError),
            "cancelled": cancelled_load,
        }
        for what, fails in failing.items():
            for number in range(3):
                await fails(number)
            before = streams_of_the_cpu()
            for number in range(12):
                await fails(number)
            # What was cancelled leaves beside the next load: a few have a stream at a time, and not all.
            assert streams_of_the_cpu() <= before + 3, what
        assert await serving(model) == 1


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_closing_while_a_library_opens_is_no_fault(host: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    async with accel.System(close_timeout=0.2) as system:
        device = await system.open_device("cpu", host=host)
        opening = task(device.register_as("slow", SlowToOpen, str(begun)))
        while not begun.exists():
            await asyncio.sleep(0.01)
        closing = task(device.aclose())
        error = await failure(opening, accel.ClosedError)
        assert "fault" not in str(error)
        begun.unlink()  # ends the call
        await bounded(closing)


@pytest.mark.parametrize("module", [runner, model_module])
async def test_closing_the_device_ends_a_load(
    device: accel.Device, module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def sticks(*_: object, **__: object) -> Any:
        begun.set()
        return await never()

    monkeypatch.setattr(module, "load_weights" if module is runner else "collect", sticks)
    load = task(loaded(device, rng))
    await bounded(begun.wait())
    await bounded(device.aclose())
    await failure(load, accel.ClosedError)


async def test_a_model_that_was_closed_while_its_device_was_lost_is_not_opened_again(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "opens"
    monkeypatch.setenv("ACCEL_TEST_OPENS", str(log))
    plan = FaultPlan().poison_at(1, op="unary")
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=plan, restart=accel.RestartStrategy(max_restarts=0))
        closed, kept = await loaded(device, rng), await loaded(device, rng, 2)
        await failure(device.elementwise.unary("relu", await device.zeros(3)), accel.ContextPoisonedError)
        await failure(closed.swap(affine(rng, 3)), accel.DeviceLostError)
        await bounded(closed.aclose())
        opens = len(log.read_text().split())
        await bounded(device.reopen())
        await generation(device, 2)
        assert len(log.read_text().split()) == opens + 1
        assert await serving(kept) == 2


@pytest.mark.parametrize("made", ["WritesUnseen", "WritesByNumpy", "WritesParameter"])
async def test_a_module_that_changes_its_weights_is_refused(made: str) -> None:
    pytest.importorskip("torch")
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        before = used(device)
        error = await failure(device.load_model(f"tests.model_zoo:{made}", inputs=WIDE, buckets={"batch": (1,)}), accel.UnsupportedError)
        assert "'scale'" in str(error)
        await given_back(device, before)


async def test_a_swap_to_a_model_that_changes_its_weights_is_refused(hosted: accel.Device, rng: np.random.Generator) -> None:
    before = used(hosted)
    written = {**affine(rng), "w": np.full((5, 3), 0x01010101, np.int32).view(np.float32)}  # what it writes is there already
    model = await loaded(hosted, rng, weights=written, target=Scribbling)
    error = await failure(model.swap(affine(rng, 2)), accel.UnsupportedError)
    assert "'w'" in str(error)
    assert await serving(model) == 1
    await model.aclose()
    await given_back(hosted, before)


async def test_weights_that_a_model_changes_in_its_third_call_are_found_while_it_serves(
    hosted: accel.Device, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    model = await hosted.load_model("tests.model_zoo:WritesLater", inputs=WIDE, buckets={"batch": (1,)})
    before = {name: await hosted.get(ref) for name, ref in model.weights.items()}
    ones, large = np.ones((1, 8), np.float32), np.full((1, 8), 1000, np.float32)
    for x in (ones, ones):
        np.testing.assert_array_equal(await model.numpy(x), x)
    np.testing.assert_array_equal(await model.numpy(large), 2 * large)
    with pytest.raises(accel.StaleRefError) as caught:
        for _ in range(20):
            await bounded(model.numpy(ones))
            await turns(50)
    assert caught.value.reason == "torn"
    assert "model_weight_changed" in caplog.text
    assert "'scale'" in caplog.text
    await model.swap(before)
    np.testing.assert_array_equal(await bounded(model.numpy(ones)), ones)
    assert hosted.generation == 1


async def test_weights_are_compared_once_in_a_while_if_there_were_calls(
    device: accel.Device, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(versions, "_FIRST_CALLS", ())
    monkeypatch.setattr(versions, "_INTERVAL", 0.01)
    model = await loaded(device, rng)
    verified: list[accel.AccelRef] = []
    verify = type(device).verify_checksum

    async def spied(self: accel.Device, ref: accel.AccelRef, **options: Any) -> bool:
        verified.append(ref)
        return await verify(self, ref, **options)

    monkeypatch.setattr(type(device), "verify_checksum", spied)
    for _ in range(2):
        await asyncio.sleep(0.05)
        assert not verified, "there were no more calls"
        await model.numpy(np.ones((1, 5), np.float32))
        await until(lambda: len(verified) == len(model.weights))
        verified.clear()


async def test_weights_that_a_model_changes_later_are_not_used_after_a_rebuild(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch")
    async with accel.System() as system:
        plan = FaultPlan().poison_at(1, op="unary")
        device = await system.open_device("cpu", host="inline", faults=plan)
        model = await device.load_model("tests.model_zoo:WritesLater", inputs=WIDE, buckets={"batch": (1,)})
        before = {name: await device.get(ref) for name, ref in model.weights.items()}
        ones, large = np.ones((1, 8), np.float32), np.full((1, 8), 1000, np.float32)
        np.testing.assert_array_equal(await model.numpy(ones), ones)
        np.testing.assert_array_equal(await model.numpy(large), 2 * large)
        await failure(device.elementwise.unary("relu", await device.zeros(3)), accel.ContextPoisonedError)
        await generation(device, 2)
        assert "durable_checksum_differs" in caplog.text
        assert (await failure(model.numpy(ones), accel.StaleRefError)).reason == "torn"
        await model.swap(before)
        np.testing.assert_array_equal(await bounded(model.numpy(ones)), ones)
