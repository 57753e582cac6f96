"""Ranks that fail, fault, hang, are stopped or killed in each phase of an epoch: every await ends, and the next epoch works."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import pytest_asyncio

import accel
from accel.cpu.group import CpuGroup, Rendezvous
from accel.testing import FaultPlan
from tests.device.test_world import check_works, kill, ones
from tests.device_support import SharedFaults, bounded, failure, task, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OFTEN = accel.RestartStrategy(max_restarts=1000, backoff=(0.0, 0.0))
ONCE = accel.RestartStrategy(max_restarts=0)
HOSTS: tuple[Literal["process", "inline"], ...] = ("process", "inline")
Outcome = tuple[accel.AccelRef, ...] | BaseException


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def system(module_leaves_nothing: None, nothing_left: None) -> AsyncIterator[accel.System]:
    async with accel.System() as system:
        yield system


class Ranks:
    """Three devices in children and three in this process: opening those takes longer than most tests.

    What a test kills is rebuilt. So generations count on from test to test.
    """

    def __init__(self, system: accel.System) -> None:
        self._system = system
        self._devices: dict[str, list[accel.Device]] = {}
        self._faults = SharedFaults()

    async def open(self) -> None:
        for host in HOSTS:
            opening = [
                self._system.open_device("cpu", host=host, faults=self._faults if rank == 1 else None, restart=OFTEN) for rank in range(3)
            ]
            self._devices[host] = await asyncio.gather(*opening)

    @contextlib.asynccontextmanager
    async def world(self, plan: FaultPlan | None = None, host: str = "process", **options: Any) -> AsyncIterator[accel.World]:
        """Open a world of one host's devices, whose rank 1 follows a plan."""
        await until(lambda: all(device.state is accel.DeviceState.READY for device in self._devices[host]))
        with self._faults.planned(plan):
            world = await self._system.open_world(self._devices[host], **options)
            try:
                yield world
            finally:
                await world.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(module_leaves_nothing: None) -> AsyncIterator[Ranks]:
    async with accel.System() as system:
        ranks = Ranks(system)
        await ranks.open()
        yield ranks


def generations(world: accel.World) -> list[int]:
    return [device.generation for device in world.devices]


async def lose(device: accel.Device) -> None:
    """Kill a rank, and wait until that is seen."""
    generation = device.generation
    kill(device)
    await until(lambda: device.state is not accel.DeviceState.READY or device.generation > generation)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("what", ["fails", "finds no memory", "faults", "is killed"])
async def test_one_rank_ends_the_epoch_for_all(ranks: Ranks, host: str, what: str) -> None:
    plan = FaultPlan()
    error = accel.LibraryError("it fails")
    {
        "fails": lambda: plan.fail_at(2, error, op="all_reduce"),
        "finds no memory": lambda: plan.out_of_memory_at(2, op="all_reduce"),
        "faults": lambda: plan.poison_at(2, op="all_reduce"),
        "is killed": lambda: plan.kill_host_at(2, op="all_reduce"),
    }[what]()
    async with ranks.world(plan, host) as world:
        before, x = generations(world), await ones(world)
        outcomes = await bounded(asyncio.gather(*(world.all_reduce(x) for _ in range(3)), return_exceptions=True))
        for outcome in outcomes[1:]:
            assert isinstance(outcome, accel.WorldChangedError), outcome
            assert (outcome.ranks, outcome.epoch) == ((1,), 1)
        if not isinstance(outcomes[0], BaseException):  # else it had not ended everywhere
            assert (await world.devices[0].get(outcomes[0][0])).tolist() == [6.0] * 4
        await check_works(world)
        is_fault = what == "faults" or (what == "is killed" and host == "process")
        assert (world.epoch, generations(world)) == (2, [before[0], before[1] + is_fault, before[2]])


@pytest.mark.parametrize("where", ["in a collective", "in work before one"])
async def test_a_rank_that_hangs_is_named_and_replaced(ranks: Ranks, where: str) -> None:
    plan = FaultPlan().hang_at(1, op="all_reduce" if where == "in a collective" else "unary")
    async with ranks.world(plan, hang_timeout=2.0) as world:
        before, x = generations(world), await ones(world)
        if where != "in a collective":
            hung = task(world.devices[1].elementwise.unary("relu", x[1], out=x[1]))
            await asyncio.sleep(0)
        error = await failure(world.all_reduce(x), accel.WorldChangedError)
        assert error.ranks == (1,)
        assert f"rank 1 ({world.devices[1].name}) did not reach all_reduce 1; 0, 2 waited" in error.message
        await check_works(world)
        assert (world.epoch, generations(world)) == (2, [before[0], before[1] + 1, before[2]])
        if where != "in a collective":
            await failure(hung, accel.ContextPoisonedError)


async def test_a_rank_that_hangs_after_a_graph_of_many_collectives_is_named(ranks: Ranks) -> None:
    async with ranks.world(FaultPlan().hang_at(1, op="all_reduce"), hang_timeout=2.0) as world:
        x = await ones(world)
        async with world.graph() as graph:
            for _ in range(20):
                graph.barrier()
        await graph.replay()
        error = await failure(world.all_reduce(x), accel.WorldChangedError)
        assert error.ranks == (1,), error
        await graph.aclose()
        await check_works(world)


async def test_a_stopped_rank_is_named_and_replaced(ranks: Ranks) -> None:
    async with ranks.world(hang_timeout=2.0) as world:
        before, x = generations(world), await ones(world)
        kill(world.devices[2], signal.SIGSTOP)
        error = await failure(world.all_reduce(x), accel.WorldChangedError)
        assert error.ranks == (2,)
        await check_works(world)
        assert generations(world) == [before[0], before[1], before[2] + 1]


async def test_ranks_lost_while_the_others_join_begin_the_epoch_again(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=3, restart=OFTEN, standby="context", spares=2)
    for first, second in ((0, 1), (1, 2), (2, 0), (1, 1)):
        await lose(world.devices[first])
        await until(lambda first=first: world.devices[first].state is accel.DeviceState.READY)  # type: ignore[misc]
        if world.state is accel.DeviceState.REBUILDING:  # it joins now
            await lose(world.devices[second])
        await check_works(world)


async def test_two_ranks_lost_at_once_and_all_of_them(ranks: Ranks) -> None:
    async with ranks.world() as world:
        for lost in ((0, 2), (0, 1, 2)):
            waiting = task(world.all_reduce(await ones(world)))
            await asyncio.gather(*(lose(world.devices[rank]) for rank in lost))
            outcome: Any = (await asyncio.gather(waiting, return_exceptions=True))[0]
            assert isinstance(outcome, (accel.WorldChangedError, tuple)), outcome
            await check_works(world)


async def test_a_world_whose_device_is_lost_is_lost(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, restart=ONCE)
    generations = world.generations()
    assert await anext(generations) == 1
    kill(world.devices[0])
    with pytest.raises(accel.DeviceLostError, match="world 1 is lost"):
        await bounded(anext(generations))
    await failure(world.barrier(), accel.DeviceLostError)


async def test_an_extra_device_takes_the_rank_of_one_that_is_lost_once(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=3, extra="cpu", restart=ONCE)
    (first, lost, last), (extra,) = world.devices, world.extras
    kept = await first.put(np.ones(2))
    waiting = task(world.all_reduce(await ones(world)))
    kill(lost)
    outcome: Any = (await asyncio.gather(waiting, return_exceptions=True))[0]
    assert isinstance(outcome, (accel.WorldChangedError, tuple)), outcome
    await until(lambda: world.epoch == 2)
    assert (world.devices, world.extras, lost.state) == ((first, extra, last), (), accel.DeviceState.LOST)
    await check_works(world)
    assert (await first.get(kept)).tolist() == [1.0, 1.0]
    kill(extra)
    await failure(wait_lost(world), accel.DeviceLostError)
    await world.aclose()
    assert system.devices == ()


async def test_extra_devices_that_were_open_take_ranks_one_after_the_other(system: accel.System) -> None:
    devices = [await system.open_device("cpu", host="process", restart=ONCE) for _ in range(4)]
    world = await system.open_world(devices[:2], extra=devices[2:])
    for number in range(2):
        kill(world.devices[0])
        await until(lambda number=number: world.epoch == number + 2)  # type: ignore[misc]
        await check_works(world)
        assert (world.devices, list(world.extras)) == ((devices[number + 2], devices[1]), devices[number + 3 :])
    await world.aclose()
    assert devices[1].state is devices[3].state is accel.DeviceState.READY
    assert not any(device._core.worlds for device in devices)


async def test_a_world_whose_extra_device_is_lost_too_is_lost(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, extra="cpu", restart=ONCE)
    (extra,) = world.extras
    kill(extra)
    await until(lambda: extra.state is accel.DeviceState.LOST)
    await check_works(world)
    assert world.epoch == 1
    kill(world.devices[0])
    await failure(wait_lost(world), accel.DeviceLostError)


async def test_an_extra_device_that_is_lost_itself_is_passed_over(system: accel.System) -> None:
    devices = [await system.open_device("cpu", host="process", restart=ONCE) for _ in range(5)]
    world = await system.open_world(devices[:2], extra=devices[2:])
    kill(devices[2])
    await until(lambda: devices[2].state is accel.DeviceState.LOST)
    await devices[3].aclose()
    kill(devices[0])
    await until(lambda: world.epoch == 2)
    assert (world.devices, world.extras) == ((devices[4], devices[1]), ())
    await check_works(world)


async def test_an_extra_device_that_is_lost_while_it_takes_a_rank_is_passed_over(system: accel.System) -> None:
    devices = [await system.open_device("cpu", host="process", restart=ONCE) for _ in range(4)]
    world = await system.open_world(devices[:2], extra=devices[2:])
    taking: list[accel.Device] = []

    async def take_over(rank: int) -> None:
        taking.append(world.extras[0])
        if world.extras[0] is devices[2]:
            kill(devices[2])
            await until(lambda: devices[2].state is accel.DeviceState.LOST)
            await devices[2].put(np.ones(1))

    world.takeovers.append(take_over)
    kill(devices[0])
    await until(lambda: world.epoch == 2)
    assert (world.devices, world.extras, taking) == ((devices[3], devices[1]), (), devices[2:])
    await check_works(world)


async def wait_lost(world: accel.World) -> None:
    async for _ in world.generations():
        pass


async def test_cancelled_and_late_collectives_run_on_all_ranks_or_on_none(system: accel.System, rng: np.random.Generator) -> None:
    world = await system.open_world("cpu", ranks=3, pending_limit=4)
    x = await ones(world)
    tasks = [task(world.all_reduce(x, timeout=float(rng.uniform(0.0, 0.02)) if number % 3 == 0 else None)) for number in range(60)]
    for number, waiting in enumerate(tasks):
        if number % 3 == 1:
            waiting.cancel()
            await asyncio.sleep(0)
    for outcome in await bounded(asyncio.gather(*tasks, return_exceptions=True)):
        assert isinstance(outcome, (tuple, asyncio.CancelledError, accel.DeadlineExceededError)), outcome
    await check_works(world)
    assert world.epoch == 1


async def test_a_full_world_rejects_where_it_shall(system: accel.System) -> None:
    world = await system.open_world("cpu", ranks=2, pending_limit=2, overload="reject")
    x = await ones(world)
    outcomes = await bounded(asyncio.gather(*(world.all_reduce(x) for _ in range(5)), return_exceptions=True))
    full = [outcome for outcome in outcomes if isinstance(outcome, accel.MailboxFullError)]
    assert len(full) == 3
    assert full[0].retry_after is not None
    await check_works(world)


async def test_ranks_join_the_next_epoch_while_they_leave_the_last_one(system: accel.System, monkeypatch: pytest.MonkeyPatch) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline", restart=OFTEN)
    revoke, join = CpuGroup.revoke, Rendezvous.join
    left = list[int]()

    def slow_revoke(self: CpuGroup) -> None:
        if self.rank == 0:  # the other one has died
            time.sleep(0.5)
            left.append(self.rank)
        revoke(self)

    def slow_join(*arguments: Any) -> CpuGroup:
        time.sleep(0.5)
        return join(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CpuGroup, "revoke", slow_revoke)
        patch.setattr(Rendezvous, "join", slow_join)
        began = time.monotonic()
        fault(world.devices[1])
        async for epoch in world.generations():
            if epoch == 2:
                break
        seconds = time.monotonic() - began
    assert left == [0], "the survivor has left the last epoch when the next one is READY"
    assert 0.5 < seconds < 0.9
    await check_works(world)


async def test_a_context_that_is_closed_at_once_leaves_its_epoch_on_another_thread(
    system: accel.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await system.open_world("cpu", ranks=2, host="inline")
    revoke, threads = CpuGroup.revoke, list[threading.Thread]()

    def slow_revoke(self: CpuGroup) -> None:
        threads.append(threading.current_thread())
        time.sleep(0.5)
        revoke(self)

    monkeypatch.setattr(CpuGroup, "revoke", slow_revoke)
    for device in world.devices:
        context = device._host.context
        closing = task(context.close(abandon=False))
        await asyncio.sleep(0)
        began = time.monotonic()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert time.monotonic() - began < 0.2, "the loop was blocked"
    await until(lambda: len(threads) == 2)
    assert threading.main_thread() not in threads


def fault(device: accel.Device) -> None:
    device._host.context.report_fault(accel.DriverError("broken", scope=accel.FaultScope.CONTEXT))


async def test_two_worlds_on_the_same_devices(system: accel.System) -> None:
    devices = await asyncio.gather(*[system.open_device("cpu", host="process", restart=OFTEN) for _ in range(3)])
    forward, backward = await system.open_world(devices), await system.open_world(devices[::-1])
    for _ in range(3):
        x, y = await ones(forward), await ones(backward)
        sums = await bounded(asyncio.gather(*(world.all_reduce(refs) for _ in range(10) for world, refs in ((forward, x), (backward, y)))))
        assert [(await devices[1].get(refs[1])).tolist() for refs in sums] == [[6.0] * 4] * 20
        await lose(devices[0])
        await check_works(forward)
        await check_works(backward)
    await forward.aclose()
    await check_works(backward)
    assert all(device.state is accel.DeviceState.READY for device in devices)
    with pytest.raises(accel.InvalidArgumentError):
        await system.open_world([devices[0], devices[0]])


async def put_number(numbers: list[int], device: accel.Device, rank: int) -> accel.AccelRef:
    return await device.put(np.full(4, numbers[rank], np.float32))


@pytest.mark.slow
async def test_a_world_under_load_survives_what_befalls_its_ranks(system: accel.System) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    world = await system.open_world("cpu", ranks=3, restart=OFTEN, standby="context", hang_timeout=1.0)
    is_over = False
    answered = changed = 0

    async def client() -> None:
        nonlocal answered, changed
        while not is_over:
            try:
                numbers = [chance.randrange(100) for _ in range(3)]
                x = await world.each(partial(put_number, numbers))
                async with world.batch(timeout=30.0) as batch:
                    total = batch.all_reduce(x)
                    largest = batch.all_reduce(x, "max")
                again = await world.all_reduce(total, "max", timeout=30.0)
                seen = await world.devices[0].get(again[0]), await world.devices[0].get(largest[0])
            except (accel.WorldChangedError, accel.StaleRefError, accel.ContextPoisonedError):
                changed += 1
                continue
            assert (seen[0].tolist(), seen[1].tolist()) == ([sum(numbers)] * 4, [max(numbers)] * 4)
            answered += 1

    clients = [task(client()) for _ in range(6)]
    losses = 0
    while losses < 25 or world.epoch <= 3:  # losses while ranks join end no epoch
        await asyncio.sleep(chance.uniform(0.0, 0.6))
        for device in chance.sample(world.devices, chance.choice([1, 1, 1, 2])):
            if device.info().pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    kill(device, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP]))
                losses += 1
    is_over = True
    async with asyncio.timeout(60.0):
        await asyncio.gather(*clients)
    print(f"{answered} answered, {changed} changed, {losses} losses, epoch {world.epoch}")
    async with asyncio.timeout(60.0):
        while True:  # a rank that was stopped last may not have been found yet
            try:
                await check_works(world)
            except (accel.WorldChangedError, accel.StaleRefError, accel.ContextPoisonedError):
                continue
            break
    assert min(answered, changed) > 0
    assert world.epoch > 3
