"""Worlds: what is refused, how collectives wait, and what follows the loss of a rank."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests.device_support import bounded, failure, task, turns, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine


@pytest.fixture
async def system(nothing_left: None) -> AsyncIterator[accel.System]:
    async with accel.System() as system:
        yield system


def kill(device: accel.Device, sent: signal.Signals = signal.SIGKILL) -> None:
    pid = device.info().pid
    assert pid is not None
    os.kill(pid, sent)


async def ones(world: accel.World, shape: tuple[int, ...] = (4,), *, durable: bool = False) -> tuple[accel.AccelRef, ...]:
    return await world.each(lambda device, rank: device.put(np.full(shape, rank + 1, np.float32), durable=durable))


async def check_works(world: accel.World) -> None:
    """Check that a sum over all ranks is right on each of them."""
    total = await bounded(world.all_reduce(await bounded(ones(world))))
    for device, ref in zip(world.devices, total, strict=True):
        assert (await device.get(ref)).tolist() == [sum(range(world.size + 1))] * 4


async def test_a_killed_rank_is_replaced_and_the_others_keep_their_refs(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=3, standby="context")
    kept = await ones(world, durable=True)
    kill(world.devices[1])
    await until(lambda: world.devices[1].state is not accel.DeviceState.READY)
    assert world.state is accel.DeviceState.REBUILDING
    await check_works(world)
    assert (world.epoch, [device.generation for device in world.devices]) == (2, [1, 2, 1])
    total = await world.all_reduce(kept)  # the durable ref of the killed rank too
    assert (await world.devices[1].get(total[1])).tolist() == [6.0] * 4


async def test_a_collective_whose_rank_is_killed_raises_and_the_next_one_runs(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=3)
    x = await ones(world)
    kill(world.devices[2], signal.SIGSTOP)  # it reaches no collective
    waiting = [task(world.all_reduce(x)) for _ in range(5)]
    await asyncio.sleep(0.05)
    kill(world.devices[2])
    for error in await bounded(asyncio.gather(*waiting, return_exceptions=True)):
        assert isinstance(error, accel.WorldChangedError)
        assert (error.ranks, error.epoch, error.executed, error.retryable, error.scope) == (
            (2,),
            1,
            "unknown",
            True,
            accel.FaultScope.CONTEXT,
        )
    assert len({id(error) for error in await asyncio.gather(*waiting, return_exceptions=True)}) == 5
    await check_works(world)
    assert (world.epoch, [device.generation for device in world.devices]) == (2, [1, 1, 2])


async def test_a_world_shrinks_where_it_shall(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=3, on_loss="shrink")
    first, _, last = world.devices
    kill(world.devices[1])
    await until(lambda: world.epoch == 2)
    assert world.devices == (first, last)
    await check_works(world)


async def test_wrong_worlds_and_operands_are_refused(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline")
    x = await ones(world)
    with pytest.raises(accel.InvalidArgumentError, match="not a sequence of 2 refs"):
        await world.all_reduce(x[:1])
    with pytest.raises(accel.InvalidArgumentError, match=r"source\[1\] is"):
        await world.all_reduce((x[0], await world.devices[1].zeros((5,))))
    with pytest.raises(accel.InvalidArgumentError):
        await world.all_reduce((x[1], x[0]))  # each on the other's device
    with pytest.raises(accel.InvalidArgumentError, match="root is 2"):
        await world.reduce(x, root=2)
    await check_works(world)
    assert world.epoch == 1
    wrong: list[dict[str, Any]] = [
        {"on_loss": "wait"},
        {"pending_limit": 0},
        {"join_timeout": -1},
        {"overload": "drop"},
        {"libraries": "nosuch"},
    ]
    for options in wrong:
        with pytest.raises(accel.InvalidArgumentError):
            await system.open_world("cpu", ranks=2, **options)
    await world.aclose()
    await world.aclose()
    await failure(world.barrier(), accel.ClosedError)
    assert system.devices == ()


async def test_ranks_of_one_process_form_a_world_too(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=3, host="inline", libraries="blas")
    await check_works(world)


async def test_what_a_lost_collective_was_to_write_is_torn(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2)
    x = await ones(world)
    out = await world.each(lambda device, _: device.zeros((4,), durable=True))
    kill(world.devices[1], signal.SIGSTOP)
    waiting = task(world.all_reduce(x, out=out))
    await until(lambda: world.devices[0].pending)
    kill(world.devices[1])
    await failure(waiting, accel.WorldChangedError)
    assert (await failure(world.devices[0].get(out[0]), accel.StaleRefError)).reason == "torn"
    assert await bounded(world.all_reduce(await ones(world), out=out)) == out
    assert (await world.devices[0].get(out[0])).tolist() == [3.0] * 4


async def test_a_batch_of_an_epoch_that_is_over_sends_nothing(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline")
    x = await ones(world)
    with pytest.raises(accel.WorldChangedError) as caught:
        async with world.batch() as batch:
            total = batch.all_reduce(x)
            world.devices[0]._host.context.report_fault(accel.DriverError("broken", scope=accel.FaultScope.CONTEXT))
    assert caught.value.executed == "no"
    with pytest.raises(accel.StaleRefError):
        await world.devices[1].get(total[1])
    with pytest.raises(RuntimeError, match="body"):
        async with world.batch() as batch:
            batch.barrier()
            raise RuntimeError("body")
    with pytest.raises(accel.NotInitializedError):
        batch.barrier()
    await check_works(world)


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_copies_between_ranks_and_collectives_do_not_wait_in_a_circle(system: accel.System, host: Any) -> None:
    world = await system.open_world("cpu", ranks=2, host=host)
    x = await ones(world, (1 << 16,))
    for steps in range(1, 10, 2):
        copy = task(world.devices[1].put(x[0], out=x[1]))
        await turns(steps)
        await bounded(world.all_reduce(x, out=x))
        assert await bounded(copy) is x[1]
    await world.leave()
    assert not any(device._core.worlds for device in world.devices)


def test_worlds_work_on_every_loop(run_checked: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
    async def main() -> None:
        async with accel.System() as system:
            world = await system.open_world("cpu", ranks=2)
            await check_works(world)
            x = await ones(world)
            kill(world.devices[1], signal.SIGSTOP)
            waiting = [task(world.all_reduce(x)) for _ in range(3)]
            waiting[1].cancel()
            await until(lambda: world.devices[0].pending)
            kill(world.devices[1])
            outcomes = await bounded(asyncio.gather(*waiting, return_exceptions=True))
            assert [type(outcome) for outcome in outcomes] == [accel.WorldChangedError, asyncio.CancelledError, accel.WorldChangedError]
            await check_works(world)

    run_checked(main)


async def test_the_first_error_of_work_on_all_ranks_is_raised_when_the_others_have_ended(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=3, host="inline")
    waiting: list[int] = []
    ended: list[int] = []

    async def work(device: accel.Device, rank: int) -> None:
        await device.zeros(1)
        if rank == 1:
            await until(lambda: len(waiting) == 2, "the others wait")
            raise ArithmeticError("of the work")
        waiting.append(rank)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(rank)

    await failure(world.each(work), ArithmeticError)
    assert sorted(ended) == [0, 2]
