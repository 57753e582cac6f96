"""Several devices that take batches from one queue: which one gets the next, and what becomes of what one of them had."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from tests.batcher_support import settled, turns
from tests.device_support import bounded
from tests.model_support import affine, expected
from tests.quarantine_support import FINE, POISON, Serving, answers, killed, kinds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Device:
    """A device whose handler takes as long as the test says, one batch after the other."""

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.name = name
        self.seconds = seconds
        self.state = accel.DeviceState.READY
        self.is_stalled = False
        self.batches: list[list[int]] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    def become(self, state: accel.DeviceState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def health(self) -> Device:
        return self

    async def generations(self) -> AsyncIterator[int]:
        while self.state is not accel.DeviceState.READY:
            if self.state is accel.DeviceState.LOST:
                raise accel.DeviceLostError("lost")
            await self._changed.wait()
        yield 1

    async def __call__(self, items: list[int]) -> list[int | Exception]:
        self.batches.append(items)
        async with self._turn:
            await self.gate.wait()
            await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        if self.state is accel.DeviceState.LOST:
            raise accel.DeviceLostError("lost")
        return [2 * item for item in items]


class OfOneTenant(DynamicBatcher[int, int]):
    """A batcher with shares, all of whose items are of one tenant."""

    async def submit(self, item: int, **options: Any) -> int:
        return await super().submit(item, tenant="one", **options)


with_and_without_shares = pytest.mark.parametrize("shares", [None, {"one": 1.0, "other": 1.0}], ids=["plain", "shares"])


def served_by(devices: list[Device], shares: dict[str, float] | None = None, **options: Any) -> DynamicBatcher[int, int]:
    first, *others = devices
    kind = DynamicBatcher[int, int] if shares is None else OfOneTenant
    batcher = kind(first, device=first, idempotent=True, shares=shares, **options)
    for device in others:
        batcher.add_handler(device, device=device)
    return batcher


def key_of(batcher: DynamicBatcher[int, int], device: Device) -> int:
    """Return a key whose items this device takes."""
    return next(key for key in range(1000) if getattr(batcher._takers.home(key), "device", None) is device)


async def test_devices_that_are_idle_take_a_batch_each_and_a_third_one_waits_for_the_first_that_ends() -> None:
    devices = [Device("a"), Device("b")]
    for device in devices:
        device.gate.clear()
    async with served_by(devices, max_items=2, max_in_flight=1) as batcher:
        asked = [asyncio.ensure_future(batcher.submit(n)) for n in range(6)]
        await turns()
        assert [device.batches for device in devices] == [[[0, 1]], [[2, 3]]]
        devices[1].gate.set()
        await asked[3]
        await turns()
        assert devices[1].batches == [[2, 3], [4, 5]]
        devices[0].gate.set()
        assert await asyncio.gather(*asked) == [0, 2, 4, 6, 8, 10]
        assert [(each.device, each.batches, each.items) for each in batcher.statistics().replicas] == [("a", 1, 2), ("b", 2, 4)]
    assert settled(batcher.statistics())


async def test_of_devices_that_end_at_about_the_same_time_the_first_takes_all_while_it_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.patterns.takers._SAME", 60.0)
    devices = [Device("a", 0.002), Device("b")]
    async with served_by(devices, max_items=1, max_in_flight=2) as batcher:
        for n in range(20):
            await batcher.submit(n)
        assert [len(device.batches) for device in devices] == [20, 0]
        assert await asyncio.gather(*[batcher.submit(n) for n in range(3)]) == [0, 2, 4]
        assert [len(device.batches) for device in devices] == [22, 1], "an idle one comes before a busy one"


async def test_a_slow_device_takes_only_what_it_would_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Device("fast", 0.002), Device("slow", 0.2)
    async with served_by([slow, fast], max_items=1) as batcher:
        await batcher.submit(0)  # taken by the first, of which nothing is known
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            await batcher.submit(1)
        assert len(slow.batches) == 1
        assert len(fast.batches) > 20
        monkeypatch.setattr("accel.patterns.takers._KNOWN", 0.0)
        slow.seconds = fast.seconds
        for _ in range(20):
            await batcher.submit(1)
        assert len(slow.batches) > 1, "it may have become faster"


async def test_what_waits_for_a_fast_device_that_is_late_is_taken_by_a_slow_one() -> None:
    fast, slow = Device("fast", 0.001), Device("slow", 0.05)
    async with served_by([slow, fast], max_items=1, max_in_flight=1) as batcher:
        for n in range(4):
            await batcher.submit(n)
        fast.gate.clear()
        asked = [asyncio.ensure_future(batcher.submit(n)) for n in range(2)]
        await turns()
        assert batcher.statistics().queued == 1, "the fast one would end it first"
        assert await bounded(asked[1]) == 2
        fast.gate.set()
        await asked[0]


async def test_batches_of_a_device_that_overlap_count_once_in_how_long_it_takes() -> None:
    devices = [Device("a", 0.02), Device("b", 0.02)]
    async with served_by(devices, max_items=1, max_in_flight=4) as batcher:
        await asyncio.gather(*map(batcher.submit, range(40)))
        for replica in batcher.statistics().replicas:
            assert replica.batches > 10
            assert 0.015 < replica.seconds < 0.04


async def test_a_device_that_is_draining_takes_nothing_although_it_has_room() -> None:
    devices = [Device("fast", 0.001), Device("slow", 0.02)]
    async with served_by(devices, max_items=1, max_in_flight=3) as batcher:
        for n in range(4):
            await batcher.submit(n)
        devices[1].seconds = 0.0
        for device in devices:
            device.batches.clear()
            device.gate.clear()
        asked = [asyncio.ensure_future(batcher.submit(n)) for n in range(2)]
        await turns()
        assert len(devices[0].batches) == 2
        devices[1].gate.set()
        drain = asyncio.ensure_future(batcher.drain(devices[0]))
        asked += [asyncio.ensure_future(batcher.submit(n)) for n in range(2, 5)]
        await turns()
        assert await bounded(asyncio.gather(*asked[2:])) == [4, 6, 8]
        devices[0].gate.set()
        assert await asyncio.gather(*asked, drain) == [0, 2, 4, 6, 8, None]
        assert [len(device.batches) for device in devices] == [2, 3]


async def test_a_device_answers_for_a_service_once(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        inputs = {"x": accel.TensorSpec(("batch", 5), "float32")}
        models = [await device.load_model("tests.model_support:Affine", weights=affine(rng), inputs=inputs) for _ in range(2)]
        with pytest.raises(accel.InvalidArgumentError, match="takes batches already"):
            accel.serve(models)
        with pytest.raises(accel.InvalidArgumentError, match="takes batches already"):
            await accel.serve(models[0]).add(models[1])
        other = await (await system.open_device("cpu")).load_model(
            "tests.model_support:Affine", weights=affine(rng), inputs={"x": accel.TensorSpec(("batch", 5), "float64")}
        )
        with pytest.raises(accel.InvalidArgumentError, match="other inputs"):
            accel.serve([models[0], other])
        for wrong in ([], [1], "model", None):
            with pytest.raises(accel.InvalidArgumentError, match="not a Model"):
                accel.serve(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [accel.DeviceState.LOST, accel.DeviceState.REBUILDING, accel.DeviceState.CLOSED, "stalled"])
async def test_a_device_that_is_not_ready_takes_nothing(state: accel.DeviceState | str) -> None:
    away, there = Device("away"), Device("there")
    if isinstance(state, str):
        away.is_stalled = True
    else:
        away.state = state
    async with served_by([away, there], max_items=1) as batcher:
        assert await asyncio.gather(*map(batcher.submit, range(8))) == [2 * n for n in range(8)]
        assert (len(away.batches), len(there.batches)) == (0, 8)


async def test_items_wait_while_all_devices_are_rebuilt_and_go_to_the_one_that_is_ready_first() -> None:
    devices = [Device("a"), Device("b")]
    for device in devices:
        device.state = accel.DeviceState.REBUILDING
    async with served_by(devices) as batcher:
        asked = [asyncio.ensure_future(batcher.submit(n)) for n in range(3)]
        await turns()
        assert batcher.statistics().queued == 3
        devices[1].become(accel.DeviceState.READY)
        assert await bounded(asyncio.gather(*asked)) == [0, 2, 4]
        assert [device.batches for device in devices] == [[], [[0, 1, 2]]]
        devices[0].become(accel.DeviceState.LOST)


async def test_where_all_devices_are_lost_each_item_is_told_so() -> None:
    devices = [Device("a"), Device("b")]
    for device in devices:
        device.state = accel.DeviceState.LOST
    async with served_by(devices) as batcher:
        with pytest.raises(accel.DeviceLostError):
            await bounded(batcher.submit(1))


@with_and_without_shares
async def test_what_a_death_interrupts_is_taken_first_by_another_device(shares: dict[str, float] | None) -> None:
    dying, other = Device("dying"), Device("other")
    dying.gate.clear()
    other.gate.clear()
    async with served_by([dying, other], shares, max_items=2, max_in_flight=1) as batcher:
        asked = [asyncio.ensure_future(batcher.submit(n)) for n in range(6)]
        await turns()
        dying.error = killed()
        dying.state = accel.DeviceState.REBUILDING
        dying.gate.set()
        await turns()
        assert batcher.statistics().queued == 4
        other.gate.set()
        assert await bounded(asyncio.gather(*asked)) == [0, 2, 4, 6, 8, 10]
        assert other.batches == [[2, 3], [0, 1], [4, 5]]
        statistics = batcher.statistics()
        assert (statistics.retried, statistics.failed) == (2, 0)
        dying.become(accel.DeviceState.LOST)


@with_and_without_shares
async def test_a_device_that_faults_between_its_choice_and_its_call_gets_no_batch(shares: dict[str, float] | None) -> None:
    dying, other = Device("dying"), Device("other")
    async with served_by([dying, other], shares, max_items=1) as batcher:
        asked = asyncio.ensure_future(batcher.submit(1))
        await asyncio.sleep(0)  # the batch is launched at the end of this iteration
        asyncio.get_running_loop().call_soon(dying.become, accel.DeviceState.REBUILDING)
        assert await bounded(asked) == 2
        assert (dying.batches, other.batches) == ([], [[1]])
        statistics = batcher.statistics()
        assert (statistics.retried, statistics.failed) == (0, 0)
        dying.become(accel.DeviceState.LOST)


@with_and_without_shares
async def test_a_keyed_item_waits_for_its_device_that_faults_between_its_choice_and_its_call(shares: dict[str, float] | None) -> None:
    home, other = Device("home"), Device("other")
    async with served_by([home, other], shares, max_items=1) as batcher:
        asked = asyncio.ensure_future(batcher.submit(1, idempotent=False, key=key_of(batcher, home)))
        await asyncio.sleep(0)  # the batch is launched at the end of this iteration
        asyncio.get_running_loop().call_soon(home.become, accel.DeviceState.REBUILDING)
        await turns()
        assert await asyncio.gather(*map(batcher.submit, range(2, 6))) == [4, 6, 8, 10]
        assert (home.batches, asked.done(), batcher.statistics().queued) == ([], False, 1)
        home.become(accel.DeviceState.READY)
        assert await bounded(asked) == 2
        assert home.batches == [[1]]
    assert settled(batcher.statistics())


@pytest.mark.parametrize("is_idempotent", [True, False])
async def test_what_a_device_had_that_is_lost_is_taken_by_another_one_if_it_may_run_twice(is_idempotent: bool) -> None:
    dying, other = Device("dying"), Device("other")
    dying.gate.clear()
    async with served_by([dying, other], max_items=1) as batcher:
        asked = asyncio.ensure_future(batcher.submit(1, idempotent=is_idempotent, key=key_of(batcher, dying)))
        await turns()
        dying.error, dying.state = accel.ContextPoisonedError("the fault that lost it", retryable=False), accel.DeviceState.LOST
        dying.gate.set()
        if is_idempotent:
            assert await bounded(asked) == 2
            assert other.batches == [[1]]
        else:
            with pytest.raises(accel.ContextPoisonedError):
                await bounded(asked)
        assert batcher.statistics().retried == int(is_idempotent)
    assert settled(batcher.statistics())


async def test_an_item_that_loses_two_devices_gets_no_third() -> None:
    devices = [Device(name) for name in "abc"]
    async with served_by(devices, max_items=1) as batcher:
        for device in devices:
            device.gate.clear()
        asked = asyncio.ensure_future(batcher.submit(1))
        for device in devices[:2]:
            await turns()
            assert device.batches == [[1]]
            device.error, device.state = accel.ContextPoisonedError("the fault that lost it", retryable=False), accel.DeviceState.LOST
            device.gate.set()
        with pytest.raises(accel.ContextPoisonedError):
            await bounded(asked)
        assert devices[2].batches == []


@with_and_without_shares
async def test_an_interrupted_item_that_waits_again_may_be_cancelled_or_expire(shares: dict[str, float] | None) -> None:
    dying, other = Device("dying"), Device("other")
    dying.gate.clear()
    other.gate.clear()
    async with served_by([dying, other], shares, max_items=1, max_in_flight=1) as batcher:
        asked = [asyncio.ensure_future(batcher.submit(0, timeout=0.05)), *(asyncio.ensure_future(batcher.submit(n)) for n in (1, 2))]
        await turns()
        dying.error, dying.state = killed(), accel.DeviceState.LOST
        dying.gate.set()
        await turns()
        assert batcher.statistics().queued == 2
        with pytest.raises(accel.DeadlineExceededError):
            await asked[0]
        asked[2].cancel()
        await turns()
        assert batcher.statistics().queued == 0
        other.gate.set()
        assert await asked[1] == 2
        assert other.batches == [[1]]
    assert settled(batcher.statistics())


async def test_a_drained_device_answers_what_it_has_and_takes_no_more() -> None:
    devices = [Device("a"), Device("b")]
    devices[0].gate.clear()
    async with served_by(devices, max_items=1, max_in_flight=1) as batcher:
        asked = [asyncio.ensure_future(batcher.submit(n)) for n in range(2)]
        await asked[1]
        with pytest.raises(accel.DeadlineExceededError, match="a has 1 batches"):
            await batcher.drain(devices[0], timeout=0.01)
        drain = asyncio.ensure_future(batcher.drain(devices[0]))
        assert await asyncio.gather(*map(batcher.submit, range(4))) == [0, 2, 4, 6]
        assert not drain.done()
        devices[0].gate.set()
        await bounded(drain)
        assert asked[0].result() == 0
        assert (len(devices[0].batches), [each.device for each in batcher.statistics().replicas]) == (1, ["b"])
        assert batcher.statistics().answered == 6
        with pytest.raises(accel.InvalidArgumentError, match="takes no batches here"):
            await batcher.drain(devices[0])
        with pytest.raises(accel.InvalidArgumentError, match="only one"):
            await batcher.drain(devices[1])
        batcher.add_handler(devices[0], device=devices[0])
        devices[1].state = accel.DeviceState.LOST
        assert await batcher.submit(21) == 42
    with pytest.raises(accel.ClosedError):
        batcher.add_handler(devices[0], device=Device("c"))


async def test_a_paused_device_takes_batches_only_while_no_other_one_answers() -> None:
    paused, other = Device("paused"), Device("other")
    async with served_by([paused, other], max_items=1) as batcher:
        batcher._takers.all[0].is_paused = True
        await asyncio.gather(*map(batcher.submit, range(8)))
        assert (len(paused.batches), len(other.batches)) == (0, 8)
        other.is_stalled = True
        await asyncio.gather(*map(batcher.submit, range(4)))
        other.state = accel.DeviceState.LOST
        await asyncio.gather(*map(batcher.submit, range(4)))
        assert (len(paused.batches), len(other.batches)) == (8, 8)


async def test_a_device_that_is_added_takes_what_waits() -> None:
    first, second = Device("first"), Device("second")
    first.gate.clear()
    async with served_by([first], max_items=1, max_in_flight=1) as batcher:
        asked = [asyncio.ensure_future(batcher.submit(n)) for n in range(2)]
        await turns()
        with pytest.raises(accel.InvalidArgumentError, match="already"):
            batcher.add_handler(second, device=first)
        batcher.add_handler(second, device=second)
        assert await asked[1] == 2
        first.gate.set()
        assert await asked[0] == 0


async def test_suspects_of_a_device_are_tried_in_its_own_quarantine_and_equal_items_wait_for_what_is_found() -> None:
    devices = [Serving(), Serving()]
    first, second = devices
    async with DynamicBatcher(first.handler, device=first, quarantine=first.make, idempotent=True, max_items=4) as batcher:
        batcher.add_handler(second.handler, device=second, quarantine=second.make)
        first.gate.clear()
        asked = [asyncio.ensure_future(batcher.submit(item)) for item in (POISON, FINE)]
        while not batcher.statistics().isolating:
            await asyncio.sleep(0.001)
        again = asyncio.ensure_future(batcher.submit(POISON))
        assert await answers(batcher, [("fine", n) for n in (5, 6, 7)]) == [5, 6, 7]
        first.gate.set()
        assert kinds(await bounded(asyncio.gather(*asked, again, return_exceptions=True))) == [
            accel.PoisonedInputError,
            1,
            accel.PoisonedInputError,
        ]
        assert (POISON in first.tried, second.tried) == (True, [])
        assert sum(served.count(POISON) for served in first.served + second.served) == 1
        await bounded(batcher.drain(first))
        assert first.twins[-1].state is accel.DeviceState.CLOSED


@pytest.mark.timeout(120)
async def test_a_replica_that_is_killed_under_load_costs_no_request_and_no_pause() -> None:
    rng = np.random.default_rng()
    weights = affine(rng)
    inputs = {"x": accel.TensorSpec(("batch", 5), "float32")}
    async with accel.System() as system:
        devices = [await system.open_device("cpu", host="process") for _ in range(2)]
        load: dict[str, Any] = {"weights": weights, "inputs": inputs, "buckets": {"batch": (1, 8)}}
        models = [await device.load_model("tests.model_support:Affine", **load) for device in devices]
        async with accel.serve(models, quarantine=False) as service:
            answered = 0

            async def client() -> None:
                nonlocal answered
                while devices[0].generation < 2:
                    x = rng.standard_normal(5, np.float32)
                    answer = await service.submit(x)
                    answered += 1
                    np.testing.assert_allclose(answer["y"], expected(weights, x[None])[0], rtol=1e-4, atol=1e-5)

            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(client())
                while answered < 200:
                    await asyncio.sleep(0.005)
                pid = devices[0].info().pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                before = answered
            statistics = service.statistics()
            assert (statistics.answered, statistics.failed) == (answered, 0)
            assert answered > before + 10, "the other one has answered meanwhile"
            await bounded(service.drain(models[1]))
            assert service.models == (models[0],)
            await bounded(service.submit(rng.standard_normal(5, np.float32)))


@with_and_without_shares
async def test_items_of_one_key_go_to_one_device_for_as_long_as_it_is_there(shares: dict[str, float] | None) -> None:
    devices = [Device(name) for name in "abc"]
    async with served_by(devices, shares, max_items=4) as batcher:
        homes = []
        for key in range(60):
            before = [len(device.batches) for device in devices]
            for _ in range(3):
                await batcher.submit(key, key=f"user-{key}")
            took = [len(device.batches) - count for device, count in zip(devices, before, strict=True)]
            assert sorted(took) == [0, 0, 3]
            homes.append(took.index(3))
        assert set(homes) == {0, 1, 2}
        await batcher.drain(devices[0])
        devices[1].state = accel.DeviceState.REBUILDING
        asked = [asyncio.ensure_future(batcher.submit(key, key=f"user-{key}")) for key in range(60)]
        await turns()
        await asyncio.wait([task for task, home in zip(asked, homes, strict=True) if home == 2])
        waiting = [key for key, task in enumerate(asked) if not task.done()]
        assert {key for key, home in enumerate(homes) if home == 1} <= set(waiting)
        assert all(homes[key] != 2 for key in waiting)
        devices[1].become(accel.DeviceState.LOST)
        assert await bounded(asyncio.gather(*asked)) == [2 * key for key in range(60)]
        with pytest.raises(accel.InvalidArgumentError, match="key is"):
            await batcher.submit(1, key=[1])  # type: ignore[arg-type]
    assert settled(batcher.statistics())


@with_and_without_shares
async def test_keyed_items_of_a_device_that_is_drained_go_to_others_while_it_is_busy(shares: dict[str, float] | None) -> None:
    devices = [Device("a"), Device("b")]
    devices[0].gate.clear()
    async with served_by(devices, shares, max_items=1, max_in_flight=1) as batcher:
        keys = [key for key in range(20) if batcher._takers.home(key) is batcher._takers.first]
        asked = [asyncio.ensure_future(batcher.submit(key, key=key)) for key in keys]
        await turns()
        assert len(devices[0].batches) == 1
        drain = asyncio.ensure_future(batcher.drain(devices[0]))
        await bounded(asyncio.gather(*asked[1:]))
        assert not drain.done()
        devices[0].gate.set()
        await bounded(drain)
        assert await asked[0] == 2 * keys[0]


async def test_keyed_items_that_wait_for_a_device_that_is_rebuilt_go_to_others_when_it_is_drained() -> None:
    devices = [Device("a"), Device("b")]
    async with served_by(devices, max_items=1) as batcher:
        devices[1].state = accel.DeviceState.REBUILDING
        asked = asyncio.ensure_future(batcher.submit(5, key=key_of(batcher, devices[1])))
        await turns()
        assert batcher.statistics().queued == 1
        await bounded(batcher.drain(devices[1]))
        assert await bounded(asked) == 10
        assert await bounded(batcher.submit(1)) == 2
        devices[1].become(accel.DeviceState.READY)


async def test_keyed_items_that_wait_for_room_go_to_others_when_their_device_is_drained() -> None:
    devices = [Device(name) for name in "abc"]
    for device in devices:
        device.gate.clear()
    async with served_by(devices, max_items=1, max_in_flight=1, max_pending=2) as batcher:
        asked = [asyncio.ensure_future(batcher.submit(n, key=key_of(batcher, devices[0]))) for n in range(3)]
        await turns()
        asked.append(asyncio.ensure_future(batcher.submit(3, key=key_of(batcher, devices[1]))))
        await turns()
        assert (batcher.statistics().queued, batcher.statistics().waiting) == (2, 1)
        await bounded(batcher.drain(devices[1]))
        for device in devices:
            device.gate.set()
        assert await bounded(asyncio.gather(*asked)) == [0, 2, 4, 6]
    assert settled(batcher.statistics())


async def test_keyed_items_of_a_slow_device_do_not_wait_for_a_fast_one_that_is_busy() -> None:
    fast, slow = Device("fast", 0.001), Device("slow", 0.1)
    async with served_by([fast, slow], max_items=1, max_in_flight=1) as batcher:
        await asyncio.gather(*(batcher.submit(1, key=key_of(batcher, device)) for device in (fast, slow)))
        slow.batches.clear()
        fast.gate.clear()
        asked = [asyncio.ensure_future(batcher.submit(1, key=key_of(batcher, fast)))]
        await turns()
        asked.append(asyncio.ensure_future(batcher.submit(2, key=key_of(batcher, slow))))
        asked += [asyncio.ensure_future(batcher.submit(3)) for _ in range(3)]
        await turns()
        assert slow.batches == [[2]], "although the fast one would end the next batch first"
        fast.gate.set()
        await bounded(asyncio.gather(*asked))


@pytest.mark.parametrize("has_served", [False, True])
async def test_a_device_that_fails_whatever_it_is_given_draws_no_items_from_one_that_answers(has_served: bool) -> None:
    good, bad = Device("good", 0.005), Device("bad")
    async with served_by([bad, good], max_items=1) as batcher:
        if has_served:
            await asyncio.gather(*map(batcher.submit, range(20)))
        bad.error = ValueError("of this device")
        results: list[int | BaseException] = []

        async def client() -> None:
            for n in range(20):
                results.extend(await asyncio.gather(batcher.submit(n), return_exceptions=True))

        await bounded(asyncio.gather(*(client() for _ in range(4))))
        assert 5 <= sum(isinstance(result, ValueError) for result in results) <= 8, "five, and what it had in flight then"
        bad.error = None
        good.state = accel.DeviceState.LOST
        assert await batcher.submit(1) == 2
        good.state = accel.DeviceState.READY


async def test_wrong_items_among_others_are_no_proof_against_a_device() -> None:
    devices = [Device("a"), Device("b")]
    async with served_by(devices, max_items=1) as batcher:
        for n in range(20):
            devices[0].error = devices[1].error = ValueError("of this item") if n % 4 else None
            await asyncio.gather(batcher.submit(n), return_exceptions=True)
        assert not any(taker.is_failing(time.perf_counter()) for taker in batcher._takers.all)


async def test_a_batcher_whose_devices_are_all_busy_hardly_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Device("a", 0.001), Device("b", 0.001)]
    async with served_by(devices, max_items=1, max_in_flight=1) as batcher:
        await asyncio.gather(*map(batcher.submit, range(20)))
        for device in devices:
            device.gate.clear()
        asked = [asyncio.ensure_future(batcher.submit(n)) for n in range(4)]
        await turns()
        looks = 0
        following = batcher._takers.next

        def counted(root: Any) -> Any:
            nonlocal looks
            looks += 1
            return following(root)

        monkeypatch.setattr(batcher._takers, "next", counted)
        await asyncio.sleep(0.3)
        assert looks <= 10
        for device in devices:
            device.gate.set()
        await bounded(asyncio.gather(*asked))
