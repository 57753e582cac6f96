"""Several devices as one: which of them works, what happens when one goes, and how they come and go."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import accel
from accel.backend import KnowsPeers
from accel.device.pool import all_or_nothing
from accel.testing import FaultPlan
from tests.child_support import children, no_child_left, until_so
from tests.device_support import bounded, child_pid, failure, generation, task, turns, until, used
from tests.model_support import affine, expected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["no_child_left"]  # a fixture

INPUTS = {"x": accel.TensorSpec(("batch", 5), "float32")}
OUTSIDE = "tests.model_support:Affine"


@pytest.fixture
async def pool(nothing_left: None) -> AsyncIterator[accel.Pool]:
    """Three CPU devices in this process."""
    async with accel.System() as system:
        yield await system.open_pool("cpu", count=3)


async def with_faults(pool: accel.Pool, system: accel.System, plan: FaultPlan, **options: Any) -> accel.Device:
    return await pool.add(await system.open_device("cpu", faults=plan, **options))


async def double(device: accel.Device) -> str:
    """Compute something, and return where."""
    x = await device.put(np.ones(4))
    await device.elementwise.binary("add", x, x)
    return device.name


# -- names


async def test_devices_of_one_hardware_have_names_of_their_own() -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", count=3)
        assert [device.name for device in pool] == ["cpu:0", "cpu:0#2", "cpu:0#3"]
        assert {device["name"] for device in system.snapshot()["devices"]} == {"cpu:0", "cpu:0#2", "cpu:0#3"}
        assert (await failure(pool[1].get(await pool[2].put(np.ones(1))), accel.InvalidArgumentError)).device == "cpu:0#2"
        await pool[1].aclose()
        assert (await system.open_device("cpu")).name == "cpu:0#2"  # its name is free again


async def test_a_fault_names_the_device_and_not_the_hardware() -> None:
    async with accel.System() as system:
        await system.open_device("cpu")
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(2))
        error = await failure(double(device), accel.ContextPoisonedError)
        cause = cast("accel.AccelError", error.__cause__)
        assert (error.device, cause.device) == ("cpu:0#2", "cpu:0#2")


# -- opening


async def test_a_pool_is_a_sequence_of_devices(pool: accel.Pool) -> None:
    assert (len(pool), pool[0], pool["cpu:0#3"], pool[1:]) == (3, pool[-3], pool[2], (pool[1], pool[2]))
    assert pool[1] in pool
    with pytest.raises(accel.InvalidArgumentError, match=r"'cuda:9' is not in the pool. It has cpu:0, cpu:0#2, cpu:0#3."):
        pool["cuda:9"]
    with pytest.raises(accel.InvalidArgumentError, match="False is not in the pool"):
        await pool.drain(False)
    with pytest.raises(IndexError):
        pool[3]
    with pytest.raises(TypeError, match=r"await pool.aclose\(\)"):
        async with pool:  # type: ignore[attr-defined]
            pass
    await pool.aclose()
    assert {device.state.value for device in pool} == {"closed"}
    with pytest.raises(accel.ClosedError):
        pool.pick()


@pytest.mark.parametrize(
    ("specs", "count", "kind"),
    [
        ([], None, accel.InvalidArgumentError),
        (["cpu"], 2, accel.InvalidArgumentError),
        (7, None, accel.InvalidArgumentError),
        ("cpu", 0, accel.InvalidArgumentError),
        ("cpu", True, accel.InvalidArgumentError),
        (["cpu", 3], None, accel.InvalidArgumentError),
        ("cpu:9", 2, accel.BackendUnavailableError),
    ],
)
async def test_what_names_no_devices_is_refused(specs: Any, count: Any, kind: type[accel.AccelError]) -> None:
    async with accel.System() as system:
        await failure(system.open_pool(specs, count=count), kind)
        assert system.devices == ()


@pytest.mark.parametrize("nodes", [[], (), iter([]), "127.0.0.2:7420", accel.Node("127.0.0.2:7420"), 7])
async def test_nodes_that_are_no_list_of_addresses_open_nothing_here(nodes: Any) -> None:
    async with accel.System() as system:
        assert (await failure(system.open_pool("cpu", nodes=nodes), accel.InvalidArgumentError)).message.startswith("nodes ")
        assert system.devices == ()


async def test_more_devices_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.cpu.backend import CpuBackend

    described = CpuBackend().devices()[0]
    second = accel.DeviceDescription("cpu", 1, described.name, "CPU-1")
    monkeypatch.setattr(CpuBackend, "devices", lambda _: (described, second))
    monkeypatch.setattr(CpuBackend, "can_access_peer", lambda _, index, other: index > other, raising=False)
    assert isinstance(CpuBackend(), KnowsPeers)
    async with accel.System() as system:
        error = await failure(system.open_pool("cpu", count=3), accel.BackendUnavailableError)
        assert "3 devices were asked for, and 'cpu' names 2" in str(error)
        pool = await system.open_pool("cpu")
        assert [device.name for device in pool] == ["cpu:0", "cpu:1"]
        links = await pool.links()
        assert [(link.source, link.target, link.way, link.peer) for link in links] == [
            ("cpu:0", "cpu:1", "mapped", True),
            ("cpu:1", "cpu:0", "host", False),
        ]


async def test_links_of_one_hardware_have_no_peers(pool: accel.Pool) -> None:
    assert {(link.way, link.peer) for link in await pool.links()} == {("mapped", None)}
    assert len(await pool.links()) == 6


@pytest.mark.usefixtures("nothing_left", "no_child_left")
async def test_a_pool_opens_as_a_whole_or_not_at_all() -> None:
    async with accel.System() as system:
        opened = system.open_device

        async def planted(spec: str, **options: Any) -> accel.Device:
            if spec == "cpu:0":
                return await opened(spec, **options)
            await until_so(lambda: system.devices, "the other device")
            raise accel.BackendUnavailableError("planted")

        system.open_device = planted  # type: ignore[method-assign,assignment]
        error = await failure(system.open_pool(["cpu:0", "planted", "cpu:0"], host="process"), accel.BackendUnavailableError)
        assert error.message == "planted"
        assert system.devices == ()


@pytest.mark.usefixtures("nothing_left", "no_child_left")
async def test_cancelling_while_calls_are_undone_undoes_all_of_them() -> None:
    undone: list[str] = []
    is_ending = asyncio.Event()

    async def opens() -> str:
        return "opened"

    async def fails() -> str:
        raise ValueError("no")

    async def opens_late() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_ending.set()
            await turns()
        return "opened late"

    async def undo(opened: str) -> None:
        await turns()
        undone.append(opened)

    called = task(all_or_nothing([opens(), fails(), opens_late()], undo))
    await is_ending.wait()
    for _ in range(12):
        called.cancel()
        await turns(1)
    await failure(called, asyncio.CancelledError)
    assert sorted(undone) == ["opened", "opened late"]


async def test_cancelling_while_a_pool_opens_leaves_no_child() -> None:
    async with accel.System() as system:
        before = children()
        opening = task(system.open_pool("cpu", count=2, host="process"))
        await until_so(lambda: children() - before, "a child")
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert system.devices == ()
        await until_so(lambda: children() == before, "no child is left")


# -- the choice


async def test_a_key_is_text_bytes_or_an_int(pool: accel.Pool) -> None:
    for key in (1.5, True, ("a",)):
        with pytest.raises(accel.InvalidArgumentError, match="key is"):
            pool.pick(cast("Any", key))
    assert pool.pick("a") is pool.pick("a")


async def test_without_a_key_the_least_loaded_device_is_picked_in_turn(pool: accel.Pool) -> None:
    assert {pool.pick() for _ in range(3)} == {*pool}
    release = asyncio.Event()
    on: list[str] = []

    async def work(device: accel.Device) -> None:
        on.append(device.name)
        await release.wait()

    running = [task(pool.run(work)) for _ in range(4)]
    await until(lambda: len(on) == 4)
    assert sorted(on[:3]) == [device.name for device in pool]
    assert pool.pick().name != on[3] != pool.pick().name
    release.set()
    await asyncio.gather(*running)


async def test_calls_that_are_awaited_are_load() -> None:
    plan = FaultPlan().hang_at(1)
    async with accel.System() as system:
        pool = await system.open_pool("cpu")
        slow = await with_faults(pool, system, plan)
        putting = task(slow.put(np.ones(4)))
        await until(lambda: slow.pending)
        assert {pool.pick() for _ in range(4)} == {pool[0]}
        plan.release()
        await putting
        assert slow.pending == 0


# -- running work


async def test_work_goes_on_with_the_next_device_if_one_is_lost() -> None:
    plan = FaultPlan().poison_at(2)
    async with accel.System() as system:
        pool = await system.open_pool("cpu")
        lost = await with_faults(pool, system, plan, restart=accel.RestartStrategy(max_restarts=0))
        await failure(double(lost), accel.ContextPoisonedError)
        assert lost.state is accel.DeviceState.LOST
        seen: list[accel.Device] = []

        async def work(device: accel.Device) -> str:
            seen.append(device)
            await lost.put(np.ones(1))  # the way in which a device that is lost meanwhile shows
            return device.name

        await failure(pool.run(work), accel.DeviceLostError)
        assert seen == [pool[0]]  # what is lost gets nothing
        assert await pool.run(double) == "cpu:0"
        assert (pool.health().is_ready, pool.health("all").is_ready, pool.health("all").is_live) == (True, False, False)
        await pool.drain("cpu:0")
        error = await failure(pool.run(double), accel.DeviceLostError)
        assert "no device of the pool serves: cpu:0#2 lost" in str(error)
        assert not pool.health().is_live
        await lost.reopen()
        assert await pool.run(double) == "cpu:0#2"


async def test_a_device_that_is_lost_in_the_work_is_followed_by_the_next() -> None:
    plan = FaultPlan().poison_at(1)
    async with accel.System() as system:
        pool = await system.open_pool("cpu", faults=plan, restart=accel.RestartStrategy(max_restarts=0))
        await pool.add(await system.open_device("cpu"))

        async def work(device: accel.Device) -> str:
            if device is pool[0]:
                await failure(device.put(np.ones(1)), accel.ContextPoisonedError)
            return await double(device)

        assert await pool.run(work) == "cpu:0#2"  # not idempotent: it is LOST


@pytest.mark.parametrize("is_idempotent", [False, True])
async def test_work_in_which_a_device_faulted_is_run_again_only_if_it_may(is_idempotent: bool) -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", faults=FaultPlan().poison_at(2))
        await pool.add(await system.open_device("cpu"))
        running = pool.run(double, idempotent=is_idempotent, timeout=10)
        if is_idempotent:
            assert await running == "cpu:0#2"
        else:
            await failure(running, accel.ContextPoisonedError)
        await generation(pool[0], 2)


async def test_a_ref_that_a_fault_took_within_the_work_counts_as_the_fault() -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", faults=FaultPlan().poison_at(2))
        await pool.add(await system.open_device("cpu"))

        async def work(device: accel.Device) -> str:
            x = await device.put(np.ones(1))
            try:
                await device.elementwise.unary("neg", x)
            except accel.ContextPoisonedError:
                async for _ in device.generations():
                    break
            await device.get(x)
            return device.name

        assert await pool.run(work, idempotent=True) == "cpu:0#2"


async def test_work_that_faults_two_devices_gets_no_third(pool: accel.Pool) -> None:
    seen: list[str] = []

    async def work(device: accel.Device) -> None:
        seen.append(device.name)
        raise accel.ContextPoisonedError("it faults all", device=device.name)

    await failure(pool.run(work, idempotent=True), accel.ContextPoisonedError)
    assert len(set(seen)) == len(seen) == 2


async def test_an_error_of_the_work_itself_is_raised(pool: accel.Pool) -> None:
    async def work(device: accel.Device) -> None:
        seen.append(device)
        raise error

    for error in (ZeroDivisionError(), TimeoutError(), accel.StaleRefError(), accel.DeadlineExceededError(), accel.OutOfMemoryError()):
        seen: list[accel.Device] = []
        assert await failure(pool.run(work, idempotent=True, timeout=9), type(error)) is error
        assert len(seen) == 1


async def test_one_deadline_counts_for_all_attempts() -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", count=2)
        seen: list[accel.Device] = []

        async def work(device: accel.Device) -> None:
            seen.append(device)
            await asyncio.sleep(0.06)
            raise accel.DeviceLostError

        began = time.monotonic()
        await failure(pool.run(work, timeout=0.1), accel.DeadlineExceededError)
        assert len(seen) == 2
        assert time.monotonic() - began < 5
        seen.clear()
        await failure(pool.run(work, timeout=0.0), accel.DeadlineExceededError)
        assert not seen
        for wrong in ("1", float("nan"), True):
            await failure(pool.run(work, timeout=cast("Any", wrong)), accel.InvalidArgumentError)


async def test_while_all_are_rebuilt_picking_raises_and_running_waits() -> None:
    plan = FaultPlan().poison_at(2)
    async with accel.System() as system:
        pool = await system.open_pool("cpu", faults=plan)
        await failure(double(pool[0]), accel.ContextPoisonedError)
        with pytest.raises(accel.ContextPoisonedError, match="no device of the pool serves: cpu:0 rebuilding") as caught:
            pool.pick()
        assert (caught.value.executed, caught.value.retryable) == ("no", True)
        assert (pool.health().is_ready, pool.health().is_live) == (False, True)
        assert await pool.run(double) == "cpu:0"


# -- coming and going


async def test_a_drained_device_ends_its_work_and_leaves() -> None:
    plan = FaultPlan().hang_at(2)
    async with accel.System() as system:
        pool = await system.open_pool("cpu", faults=plan)
        other = await pool.add(await system.open_device("cpu"))
        key = next(key for key in range(99) if pool.pick(key) is pool[0])
        work = task(pool.run(double, key=key))
        await until(lambda: pool[0].info().in_flight)
        draining = task(pool.drain(pool[0]))
        await turns()
        await failure(pool.drain("cpu:0"), accel.InvalidArgumentError)
        assert not draining.done()
        assert {pool.pick(key=key), *(pool.pick() for _ in range(4))} == {other}
        assert (pool.health("all").is_ready, pool.health(2).is_ready) == (True, False)
        plan.release()
        device = await draining
        assert (work.done(), await work, device.state.value, len(pool)) == (True, "cpu:0", "ready", 1)
        assert pool.pick(key=key) is other
        await failure(pool.drain(device), accel.InvalidArgumentError)
        assert await pool.add(device) is device
        assert pool.pick(key=key) is device
        await failure(pool.add(device), accel.InvalidArgumentError)


async def test_a_place_that_is_not_in_the_pool_is_not_drained(pool: accel.Pool) -> None:
    for place in (3, -4):
        assert "has cpu:0, cpu:0#2" in str(await failure(pool.drain(place), accel.InvalidArgumentError))
    last = pool[-1]
    assert await pool.drain(-1) is last


async def test_a_drain_that_does_not_end_changes_nothing() -> None:
    plan = FaultPlan().hang_at(1)
    async with accel.System() as system:
        pool = await system.open_pool("cpu", faults=plan)
        putting = task(pool[0].put(np.ones(1)))
        await until(lambda: pool[0].info().in_flight)
        await failure(pool.drain(0, timeout=0.02), accel.DeadlineExceededError)
        assert pool.pick() is pool[0]
        draining = task(pool.drain(0))
        await turns()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        assert pool.pick() is pool[0]
        draining = task(pool.drain(0))
        await turns()
        putting.cancel()  # no caller is left: what is in flight is waited for
        await turns()
        assert not draining.done()
        plan.release()
        assert (await draining).state.value == "ready"
        await failure(pool.run(double), accel.DeviceLostError)
        assert not pool.health("all").is_ready


async def test_a_device_is_added_by_its_spec_with_the_options_of_the_pool() -> None:
    async with accel.System() as system, accel.System() as elsewhere:
        pool = await system.open_pool("cpu", memory_limit=1 << 24)
        device = await pool.add("cpu")
        assert (device.name, device.info().memory.limit, len(pool)) == ("cpu:0#2", 1 << 24, 2)
        await failure(pool.add(await elsewhere.open_device("cpu")), accel.InvalidArgumentError)
        await failure(pool.add(cast("Any", 3)), accel.InvalidArgumentError)


async def test_a_device_takes_the_place_of_a_closed_one_whose_name_it_has() -> None:
    ending = asyncio.Event()
    async with accel.System() as system:
        pool = await system.open_pool("cpu", count=2)
        closed = pool[0]
        await closed.aclose()
        device = await pool.add("cpu:0")
        assert device.name == closed.name
        health = pool.health(2)
        assert (health.ready, len(health.devices)) == (2, 2)
        assert (pool[closed.name], len(pool)) == (device, 2)
        # One that is closed while it is being drained.
        working = task(pool.run(lambda _: ending.wait(), key=1))
        busy = pool.pick(1)
        await turns()
        draining = task(pool.drain(busy))
        await turns()
        await busy.aclose()
        following = await pool.add("cpu:0")
        assert following.name == busy.name
        ending.set()
        await bounded(asyncio.gather(working, draining))
        assert following in pool
        assert (busy in pool, len(pool)) == (False, 2)


async def test_libraries_may_be_given_by_an_iterator() -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", count=2, libraries=iter(["blas", "fft"]))
        await pool.add("cpu")
        assert [device._core.options.libraries for device in pool] == [("blas", "fft")] * 3


async def test_health_counts_as_many_as_are_asked_for(pool: accel.Pool) -> None:
    health = pool.health(3)
    assert (health.is_ready, health.ready, [*health.devices]) == (True, 3, ["cpu:0", "cpu:0#2", "cpu:0#3"])
    assert not pool.health(4).is_ready
    for wrong in ("some", 0, 1.5, True):
        with pytest.raises(accel.InvalidArgumentError, match="ready is"):
            pool.health(cast("Any", wrong))


# -- models


async def test_a_model_is_loaded_on_all_devices(pool: accel.Pool) -> None:
    weights = affine(np.random.default_rng(1))
    told: list[tuple[str, int, int]] = []
    models = await pool.load_model(OUTSIDE, weights=weights, inputs=INPUTS, on_progress=lambda *counts: told.append(counts))
    assert [model.device for model in models] == [*pool]
    x = np.ones((2, 5), np.float32)
    for model in models:
        np.testing.assert_allclose((await model.numpy(x))["y"], expected(weights, x), rtol=1e-5)
    nbytes = sum(each.nbytes for each in weights.values())
    assert [counts for counts in told if counts[0] == "weights"][-1] == ("weights", 3 * nbytes, 3 * nbytes)


async def test_a_model_is_loaded_on_all_devices_or_on_none(pool: accel.Pool) -> None:
    async with accel.System() as system:
        pool = await system.open_pool("cpu", count=2)
        await pool.add(await system.open_device("cpu", memory_limit=1 << 16))
        weights = {**affine(np.random.default_rng(1)), "large": np.zeros(1 << 16)}
        await failure(pool.load_model(OUTSIDE, weights=weights, inputs=INPUTS), accel.OutOfMemoryError)
        await until(lambda: not any(map(used, pool)), "no memory in use")
        await failure(pool.load_model(OUTSIDE, weights=weights, inputs=INPUTS, on_progress=cast("Any", 3)), accel.InvalidArgumentError)


# -- processes that end, stop and come back


async def test_members_in_processes_are_killed_stopped_drained_and_added_under_load() -> None:
    async with accel.System() as system:
        host = accel.ProcessHost(heartbeat_interval=0.2)
        pool = await system.open_pool("cpu", count=3, host=host)
        ended: list[str] = []
        stop = asyncio.Event()

        async def client(number: int) -> None:
            while not stop.is_set():
                ended.append(await pool.run(double, key=number if number % 2 else None, idempotent=True, timeout=20))

        async def settled(names: set[str]) -> None:
            """Let work run until it ran on just these, among the last."""
            await until_so(lambda: set(ended[-60:]) == names, f"work on {names}, not on {set(ended[-60:])}")

        clients = [task(client(number)) for number in range(8)]
        await settled({"cpu:0", "cpu:0#2", "cpu:0#3"})
        os.kill(child_pid(pool[1]), signal.SIGKILL)
        await until_so(lambda: pool[1].generation == 2, "the next generation")
        await settled({"cpu:0", "cpu:0#2", "cpu:0#3"})
        assert not any(each.done() for each in clients)

        pid = child_pid(pool[2])
        os.kill(pid, signal.SIGSTOP)
        try:
            await until_so(lambda: pool.health().ready == 2, "the pool knows of the stopped device")
            assert pool.pick() is not pool[2]
        finally:
            os.kill(pid, signal.SIGCONT)
        await until_so(lambda: pool.health("all").is_ready, "all are back")
        await settled({"cpu:0", "cpu:0#2", "cpu:0#3"})

        drained = await pool.drain("cpu:0")
        await settled({"cpu:0#2", "cpu:0#3"})
        await drained.aclose()
        assert (await pool.add("cpu")).name == "cpu:0"
        await settled({"cpu:0", "cpu:0#2", "cpu:0#3"})
        stop.set()
        await asyncio.gather(*clients)
