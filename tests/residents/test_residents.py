"""Named values that a device keeps: one load for all who ask, another one after a rebuild, none for what is durable."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import failure, until
from tests.durable_support import HERE_AND_KILLED, Way, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", host="inline")


class Loader:
    """Loads two arrays, and counts how often."""

    def __init__(self, *, durable: bool = False) -> None:
        self.count = 0
        self.durable = durable
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, device: accel.Device) -> dict[str, accel.AccelRef]:
        self.count += 1
        await self.go.wait()
        w = await device.put(np.full(8, float(self.count)), durable=self.durable)
        return {"w": w, "b": await device.zeros(8, "float64", durable=self.durable)}


async def test_a_value_is_loaded_once_for_all_who_ask(device: accel.Device) -> None:
    loader = Loader()
    loader.go.clear()
    asked = [asyncio.ensure_future(device.resident("weights", loader)) for _ in range(10)]
    await until(lambda: loader.count)
    loader.go.set()
    values = await asyncio.gather(*asked)
    assert all(value is values[0] for value in values)
    assert await device.resident("weights", loader) is values[0]
    assert loader.count == 1
    assert await device.resident("others", loader) is not values[0]
    assert loader.count == 2


@HERE_AND_KILLED
async def test_it_is_loaded_again_after_a_rebuild_when_somebody_asks(way: Way) -> None:
    async with opened(way) as patient:
        device, loader = patient.device, Loader()
        first = await device.resident("weights", loader)
        await patient.fault()
        assert loader.count == 1
        second, third = await asyncio.gather(device.resident("weights", loader), device.resident("weights", loader))
        assert loader.count == 2
        assert second is third
        assert second is not first
        np.testing.assert_array_equal(await device.get(second["w"]), np.full(8, 2.0))
        assert first["w"].is_stale


@HERE_AND_KILLED
async def test_a_durable_one_is_not(way: Way) -> None:
    async with opened(way) as patient:
        device, loader = patient.device, Loader(durable=True)
        first = await device.resident("weights", loader, durable=True)
        await patient.fault()
        assert await device.resident("weights", loader, durable=True) is first
        assert loader.count == 1
        np.testing.assert_array_equal(await device.get(first["w"]), np.ones(8))


async def test_a_durable_one_is_loaded_again_when_it_is_torn() -> None:
    async with opened("process") as patient:
        device, loader = patient.device, Loader(durable=True)
        first = await device.resident("weights", loader, durable=True)
        await patient.poison("scal", device.blas.scal(first["b"], 2.0))
        second = await asyncio.wait_for(device.resident("weights", loader, durable=True), 30)
        assert second is not first
        assert loader.count == 2
        np.testing.assert_array_equal(await device.get(second["b"]), np.zeros(8))
        del first, second
        assert device.info().memory.durable == 512
        assert device.evict("weights")
        assert device.info().memory.durable == 0


async def test_who_asks_while_rebuilding_waits() -> None:
    async with opened("inline") as patient:
        device, loader = patient.device, Loader()
        await device.resident("weights", loader)
        await patient.poison("unary", device.elementwise.unary("neg", await device.zeros(3)))
        assert device.state is accel.DeviceState.REBUILDING
        value = await asyncio.wait_for(device.resident("weights", loader), 30)
        assert device.generation == 2
        np.testing.assert_array_equal(await device.get(value["w"]), np.full(8, 2.0))


async def test_cancelling_one_or_all_who_ask_does_not_end_the_load(device: accel.Device) -> None:
    loader = Loader()
    loader.go.clear()
    first, second = (asyncio.ensure_future(device.resident("weights", loader)) for _ in range(2))
    await until(lambda: loader.count)
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    assert not second.done()
    second.cancel()
    await asyncio.wait({second})
    loader.go.set()
    value = await device.resident("weights", loader)
    assert loader.count == 1
    np.testing.assert_array_equal(await device.get(value["w"]), np.ones(8))


async def test_a_failure_is_told_to_all_and_the_next_who_asks_tries_again(device: accel.Device) -> None:
    go, count = asyncio.Event(), 0

    async def loader(device: accel.Device) -> accel.AccelRef:
        nonlocal count
        count += 1
        await go.wait()
        if count == 1:
            raise accel.LibraryError("no weights", code=7)
        if count == 2:
            raise LookupError("none either")
        return await device.zeros(3)

    asked = [asyncio.ensure_future(device.resident("weights", loader)) for _ in range(3)]
    await until(lambda: count)
    go.set()
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in errors] == [accel.LibraryError] * 3
    assert len({id(error) for error in errors}) == 3
    await failure(device.resident("weights", loader), LookupError)
    assert (await device.get(await device.resident("weights", loader)) == 0).all()
    assert count == 3


@dataclass
class Layer:
    """A place for refs."""

    parts: list[Any]


async def test_what_is_not_durable_in_a_durable_one_is_named(device: accel.Device) -> None:
    async def loader(device: accel.Device) -> Any:
        good, bad = await device.zeros(3, durable=True), await device.zeros(3)
        return {"a": good, "layers": [Layer([good]), Layer([good, (bad, good)])], "text": "x", "b": bad}

    error = await failure(device.resident("weights", loader, durable=True), accel.InvalidArgumentError)
    assert "['layers'][1].parts[1][0] is not durable" in str(error)
    assert await device.resident("others", loader)


async def test_a_freed_ref_has_the_value_loaded_again(device: accel.Device) -> None:
    loader = Loader()
    await device.free((await device.resident("weights", loader))["b"])
    assert not (await device.resident("weights", loader))["b"].is_stale
    assert loader.count == 2


async def test_evicting(device: accel.Device) -> None:
    loader = Loader()
    assert not device.evict("weights")
    await device.resident("weights", loader)
    assert device.info().memory.used
    assert device.evict("weights")
    await until(lambda: not device.info().memory.used)  # the loop holds a result to the end of the turn that gives it
    await device.resident("weights", loader)
    assert loader.count == 2


async def test_wrong_arguments(device: accel.Device) -> None:
    loader = Loader()
    await failure(device.resident(3, loader), accel.InvalidArgumentError)  # type: ignore[arg-type]
    await failure(device.resident("weights", None), accel.InvalidArgumentError)  # type: ignore[arg-type]
    await device.resident("weights", loader)
    await failure(device.resident("weights", loader, durable=True), accel.InvalidArgumentError)


async def test_loaders_may_ask_for_others_but_not_in_a_circle(device: accel.Device) -> None:
    async def base(device: accel.Device) -> accel.AccelRef:
        return await device.zeros(3)

    async def outer(device: accel.Device) -> list[accel.AccelRef]:
        return [await device.resident("base", base)]

    async def first(device: accel.Device) -> object:
        return await device.resident("second", second)

    async def second(device: accel.Device) -> object:
        return await device.resident("first", first)

    assert (await device.resident("outer", outer))[0] is await device.resident("base", base)
    error = await failure(device.resident("first", first), accel.InvalidArgumentError)
    assert "waits for" in str(error)


@pytest.mark.parametrize("count", [2, 3])
async def test_a_circle_over_several_tasks_is_told_by_name(device: accel.Device, count: int) -> None:
    all_run = asyncio.Barrier(count)

    def loader_of(number: int) -> Any:
        async def loader(device: accel.Device) -> object:
            await all_run.wait()  # each load has begun by itself: no loader was called by another
            following = (number + 1) % count
            return await device.resident(f"part {following}", loader_of(following))

        return loader

    asked = [device.resident(f"part {number}", loader_of(number)) for number in range(count)]
    errors = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
    assert [type(error) for error in errors] == [accel.InvalidArgumentError] * count
    for error in errors:
        assert all(f"'part {number}'" in str(error) for number in range(count)), error
    assert await device.resident("part 0", Loader()), "who asks next is not refused for what was"


async def test_a_circle_over_two_devices_names_both() -> None:
    async with accel.System() as system:
        first, second = [await system.open_device("cpu", host=host) for host in ("inline", "process")]
        both = asyncio.Barrier(2)

        def loader_that_asks(other: accel.Device) -> Any:
            async def loader(device: accel.Device) -> object:
                await both.wait()
                return await other.resident("weights", loader_that_asks(device))

            return loader

        asked = first.resident("weights", loader_that_asks(second)), second.resident("weights", loader_that_asks(first))
        for error in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30):
            assert isinstance(error, accel.InvalidArgumentError), error


async def test_who_has_stopped_waiting_is_in_no_circle(device: accel.Device) -> None:
    first_waits = asyncio.Event()

    async def first(device: accel.Device) -> str:
        waiting = asyncio.ensure_future(device.resident("second", second))
        await first_waits.wait()
        waiting.cancel()
        await asyncio.wait({waiting})
        return "first"

    async def second(device: accel.Device) -> tuple[str, object]:
        first_waits.set()
        await asyncio.sleep(0)
        await until(lambda: done.done())
        return "second", await device.resident("first", first)

    done = asyncio.ensure_future(device.resident("first", first))
    assert await asyncio.wait_for(done, 30) == "first"
    assert await asyncio.wait_for(device.resident("second", second), 30) == ("second", "first")


async def test_closing_ends_a_load(device: accel.Device) -> None:
    loader = Loader()
    loader.go.clear()
    asked = asyncio.ensure_future(device.resident("weights", loader))
    await until(lambda: loader.count)
    await device.aclose()
    await failure(asked, accel.ClosedError)
    await failure(device.resident("weights", loader), accel.ClosedError)


async def test_a_load_that_a_rebuild_came_between_begins_anew() -> None:
    async with opened("inline") as patient:
        device, loader, half, go = patient.device, Loader(), asyncio.Event(), asyncio.Event()

        async def slow(device: accel.Device) -> list[accel.AccelRef]:
            loader.count += 1
            ref = await device.zeros(3)
            half.set()
            await go.wait()
            return [ref, await device.elementwise.unary("neg", ref)]

        asked = asyncio.ensure_future(device.resident("weights", slow))
        await half.wait()
        await patient.fault()
        go.set()
        value = await asyncio.wait_for(asked, 30)
        assert loader.count == 2
        assert not any(ref.is_stale for ref in value)


async def test_a_load_whose_own_op_faulted_is_not_tried_again_unasked() -> None:
    plan = FaultPlan().poison_at(1, op="unary")
    count = 0
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", faults=plan)

        async def loader(device: accel.Device) -> accel.AccelRef:
            nonlocal count
            count += 1
            return await device.elementwise.unary("neg", await device.zeros(3))

        await failure(device.resident("weights", loader), accel.ContextPoisonedError)
        assert count == 1
        await device.resident("weights", loader)
        assert count == 2


async def test_a_lost_device_says_so() -> None:
    async with accel.System() as system:
        once = accel.RestartStrategy(max_restarts=0)
        device = await system.open_device("cpu", host="inline", faults=FaultPlan().poison_at(1, op="unary"), restart=once)
        loader = Loader(durable=True)
        await device.resident("weights", loader, durable=True)
        await failure(device.elementwise.unary("neg", await device.zeros(3)), accel.ContextPoisonedError)
        await failure(device.resident("weights", loader, durable=True), accel.DeviceLostError)
        assert device.info().memory.durable > 0


async def test_a_device_that_closes_before_a_load_has_begun_tells_who_waits() -> None:
    async def load(device: accel.Device) -> None:
        await asyncio.Event().wait()

    async with accel.System() as system:
        device = await system.open_device("cpu")
        waiting = asyncio.ensure_future(device.resident("weights", load))
        closing = asyncio.ensure_future(device.aclose())
        with pytest.raises(accel.ClosedError):
            await asyncio.wait_for(waiting, 30)
        await closing
