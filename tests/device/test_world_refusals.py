"""Worlds: arguments and options that are refused before anything is sent, and what a world that is lost or closed leaves."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.cpu import group
from accel.ops import collective
from tests.device.test_world import check_works, ones
from tests.device_support import bounded, failure, task, turns, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def system(nothing_left: None) -> AsyncIterator[accel.System]:
    async with accel.System() as system:
        yield system


async def test_what_is_wrong_is_refused_before_anything_is_sent(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline", pending_limit=1)
    x = await ones(world)
    host = np.ones((4, 2), np.float32)
    timeouts: list[Any] = ["1", True, [], float("nan"), 10**400]
    axes: list[Any] = [True, 0.0, "x", None, 2]
    outs: list[Any] = [5, x[0], (None, None), x[:1]]
    works: list[Any] = [lambda *_: None, lambda *_: 5]
    made: list[Any] = [
        *(partial(world.scatter, host, axis=axis) for axis in axes),
        *(partial(world.scatter, host, axis=1, out=out) for out in outs),
        *(partial(world.scatter, what, axis=1) for what in ("abc", None, 5.0, np.ones((2, 3)))),
        *(partial(world.broadcast, x[0], timeout=wrong) for wrong in timeouts),
        *(partial(world.lockstep, "step", work) for work in works),
    ]
    for make in made:
        await failure(make(), accel.InvalidArgumentError)
    for wrong in timeouts:
        for recorder in (world.batch(timeout=wrong), world.graph(timeout=wrong)):
            await failure(recorder.__aenter__(), accel.InvalidArgumentError)
    async with world.graph() as graph:
        for rank in (-1, 2, True, "0", None):
            with pytest.raises(accel.InvalidArgumentError):
                graph[rank]  # type: ignore[index]
    await graph.aclose()
    with pytest.raises(accel.NotInitializedError):
        world.graph()[0]
    await failure(world.graph().replay(), accel.NotInitializedError)

    async def step() -> None: ...

    returned: Any = iter([step(), "no step"])
    error = await failure(world.lockstep("step", lambda *_: next(returned)), accel.InvalidArgumentError)
    assert "'no step'" in error.message

    def raises_at_the_second(device: accel.Device, place: Any) -> Any:
        return device.zeros(3) if device is world.devices[0] else 1 / 0

    with pytest.raises(ZeroDivisionError):
        await world.lockstep("step", raises_at_the_second)
    assert not world._epochs._flights
    assert world._epochs._room._value == 1

    async def work(device: accel.Device, place: Any) -> str:
        return device.name

    with pytest.raises(ZeroDivisionError):
        await world.lockstep("step", work, grace=lambda: 1 / 0)
    await until(lambda: not world._epochs._flights)
    assert world._epochs._room._value == 1
    await check_works(world)
    assert world.epoch == 1


async def test_the_options_of_a_world_are_checked(system: accel.System) -> None:
    options: dict[str, list[Any]] = {
        "ranks": [0, True, 2.5, "2", 10**6],
        "hang_timeout": [0, False, [], "1"],
        "join_timeout": [0],
        "spec": [None, 5, [], [None]],
        "extra": [5, [None], [[]], "no such device"],
    }
    for name, values in options.items():
        for value in values:
            given: Any = {"spec": "cpu", "ranks": 2, "host": "inline", name: value}
            await failure(system.open_world(**given), accel.InvalidArgumentError)
    devices = [await system.open_device("cpu", host="inline"), await system.open_device("cpu", host="inline", overload="reject")]
    for spec in (devices, devices[:1] * 2):
        error = await failure(system.open_world(spec), accel.InvalidArgumentError)
        assert error.remedy
    await failure(system.open_world(devices[:1], ranks=2), accel.InvalidArgumentError)
    wrong: list[Any] = [devices[0], "cpu", [devices[0], [None]]]
    for extra in wrong:
        await failure(system.open_world(devices[:1], extra=extra), accel.InvalidArgumentError)
    await failure(system.open_world("cpu", extra=devices[0]), accel.InvalidArgumentError)
    await failure(system.open_world("cpu", extra="cpu", on_loss="shrink"), accel.InvalidArgumentError)
    assert len(system.devices) == 2
    assert not system._worlds
    assert not any(device._core.worlds for device in devices)


async def test_a_device_runs_no_collective_by_hand(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline")
    barrier: Any = collective.Barrier(world.number, world.epoch, 1, 0, 2)
    for device in (world.devices[0], await system.open_device("cpu")):
        error = await failure(device.run(barrier), accel.InvalidArgumentError)
        assert "world" in str(error.remedy)
        async with device.batch() as batch, device.graph() as graph:
            for recorder in (batch, graph):
                with pytest.raises(accel.InvalidArgumentError, match="Barrier is run by all ranks"):
                    recorder.run(barrier)
        await graph.aclose()
    async with world.graph() as of_ranks:
        of_ranks.barrier()
        with pytest.raises(accel.InvalidArgumentError, match="Barrier is run by all ranks"):
            of_ranks[0].run(barrier)
    await bounded(of_ranks.replay())
    await of_ranks.aclose()
    await check_works(world)
    assert world.epoch == 1


async def test_every_collective_takes_strided_views(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline")
    host = [np.arange(24, dtype=np.float32).reshape(4, 6) + rank for rank in range(2)]
    whole = await world.each(lambda device, rank: device.put(host[rank]))
    x, (a, b) = [ref[:, ::3] for ref in whole], [array[:, ::3] for array in host]
    assert all(ref.is_strided for ref in x)

    def sent(to: Any) -> list[Any]:
        return [
            *(to.all_reduce(x), to.reduce(x, root=1), to.reduce_scatter(x), to.all_gather(x), to.gather(x, root=1)),
            *(to.all_to_all(x), to.broadcast(x[1], root=1), to.scatter(x[1], root=1), to.send(x[0], source=0, target=1)),
        ]

    wanted: list[Any] = [
        *((a + b, a + b), a + b, ((a + b)[:2], (a + b)[2:]), (np.concatenate([a, b]),) * 2, np.concatenate([a, b])),
        *((np.concatenate([a[:2], b[:2]]), np.concatenate([a[2:], b[2:]])), (b, b), (b[:2], b[2:]), a),
    ]

    async def check(results: list[Any]) -> None:
        for result, expected in zip(results, wanted, strict=True):
            if isinstance(result, tuple):
                for device, ref, array in zip(world.devices, result, expected, strict=True):
                    np.testing.assert_array_equal(await device.get(ref), array)
            else:
                np.testing.assert_array_equal(await world.devices[1].get(result), expected)

    await check([await bounded(each) for each in sent(world)])
    async with world.batch() as batch:
        results = sent(batch)
    await check(results)
    async with world.graph() as graph:
        results = sent(graph)
    await bounded(graph.replay())
    await check(results)
    await graph.aclose()
    assert world.epoch == 1


async def test_a_block_that_raises_in_a_world_that_is_lost_raises_its_own_error(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline", restart=accel.RestartStrategy(max_restarts=0))
    x = await ones(world)
    for make in (world.batch, world.graph):
        recorder: Any = make()
        with pytest.raises(RuntimeError, match="body"):
            async with recorder:
                total = recorder.all_reduce(x)
                if make == world.graph:
                    world.devices[0]._host.context.report_fault(accel.DriverError("broken", scope=accel.FaultScope.CONTEXT))
                    await until(lambda: world.state is accel.DeviceState.LOST)
                raise RuntimeError("body")
        with pytest.raises(accel.AccelError):
            await world.devices[1].get(total[1])


async def test_a_close_that_is_cancelled_goes_on(system: accel.System) -> None:
    devices = [await system.open_device("cpu", host="process") for _ in range(2)]
    for steps in range(6):
        world = await system.open_world(devices)
        closing = task(world.leave())
        await turns(steps)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await bounded(world.leave())
    for device in devices:
        with open(f"/proc/{device.info().pid}/maps", encoding="utf-8") as lines:
            assert not any("accel-group" in line for line in lines)


async def test_joins_that_are_given_up_leave_few_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_MOST_LISTENING", 3)
    rendezvous = group.Rendezvous()
    names = [rendezvous.unique_id() for _ in range(10)]
    assert list(rendezvous._listening) == names[-3:]
    rendezvous.close()


async def test_a_lost_world_loads_no_model_and_says_so_at_once(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline", restart=accel.RestartStrategy(max_restarts=0))
    world.devices[0]._host.context.report_fault(accel.DriverError("broken", scope=accel.FaultScope.CONTEXT))
    await until(lambda: world.state is accel.DeviceState.LOST)
    with pytest.raises(accel.DeviceLostError):
        async with world.quarantine():
            pass
    async with asyncio.timeout(30):
        await failure(world.load_model("json:loads", inputs={"x": accel.TensorSpec(("batch", 2))}), accel.DeviceLostError)
