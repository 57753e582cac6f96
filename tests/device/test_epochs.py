"""The controller of a world against ranks that are lost, stopped and healed at any time: a property test, without devices."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

import accel
from accel import DeviceState
from accel.device import epochs
from accel.device.epochs import Epochs, Place
from accel.telemetry.probe import Probes

if TYPE_CHECKING:
    from collections.abc import Callable


SIZE = 3


class Communicator:
    """What joined, and what it did."""

    def __init__(self) -> None:
        self.joined: dict[int, Context] = {}
        self.is_revoked = False
        self.arrived: dict[int, set[int]] = {}  # number of a collective -> ranks
        self.in_doubt: set[int] = set()  # numbers that were under way when it was revoked: a stream passes them all the same
        self.changed = asyncio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, context: Context, condition: Callable[[], bool]) -> None:
        while not condition():
            context.check()
            if self.is_revoked:
                return
            changed = asyncio.ensure_future(self.changed.wait())
            await asyncio.wait((changed, context.died), return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()


class Network:
    def __init__(self) -> None:
        self.communicators: dict[int, Communicator] = {}

    def at(self, number: int) -> Communicator:
        return self.communicators.setdefault(number, Communicator())


class Context:
    """One generation of a rank; see :class:`accel.device.epochs.Membership`."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.runs = asyncio.Event()  # cleared while it is stopped
        self.runs.set()
        self.reached = 0
        self.fails = False

    def check(self) -> None:
        if self.died.done():
            raise accel.ContextPoisonedError("dead")

    async def step(self) -> None:
        """Go on, unless this is stopped or dead."""
        runs = asyncio.ensure_future(self.runs.wait())
        try:
            await asyncio.wait((runs, self.died), return_when=asyncio.FIRST_COMPLETED)
        finally:
            runs.cancel()
        self.check()

    async def unique_id(self) -> str:
        await self.step()
        return "id"

    async def join(self, world: int, epoch: int, unique_id: str, rank: int, size: int, seconds: float) -> None:
        await self.step()
        communicator = self.network.at(epoch)
        assert not communicator.is_revoked, "a communicator is joined that was revoked"
        communicator.joined[rank] = self
        communicator.wake()
        async with asyncio.timeout(seconds):
            await communicator.until(self, lambda: len(communicator.joined) == size)
        await self.step()
        if communicator.is_revoked:
            raise accel.WorldChangedError("joining was given up", scope=accel.FaultScope.OP)

    async def revoke(self, world: int, epoch: int) -> int:
        await self.step()
        communicator = self.network.at(epoch)
        communicator.is_revoked = True
        communicator.in_doubt.update(number for number, ranks in communicator.arrived.items() if len(ranks) < len(communicator.joined))
        communicator.wake()
        return self.reached

    async def collective(self, place: Place, rank: int) -> int:
        await self.step()
        if self.fails:
            self.fails = False
            raise accel.LibraryError("it fails")
        communicator = self.network.at(place.epoch)
        assert communicator.joined[rank] is self, "a collective came to a context that is not of its epoch"
        self.reached = place.number
        communicator.arrived.setdefault(place.number, set()).add(rank)
        communicator.wake()
        await communicator.until(self, lambda: len(communicator.arrived[place.number]) == place.size)
        return place.number


class FakeRank:
    """A device; see :class:`accel.device.epochs.Rank`."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.network = network
        self.state = DeviceState.READY
        self.fault: accel.AccelError | None = None
        self.listeners: list[Callable[[], object]] = []
        self.context = Context(network)
        self.changed = asyncio.Event()

    @property
    def members(self) -> Context:
        return self.context

    def enter(self, state: DeviceState) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()
        for listener in tuple(self.listeners):
            listener()

    def lose(self) -> None:
        if self.state is DeviceState.READY:
            self.enter(DeviceState.REBUILDING)
            self.context.died.set_result(None)

    def heal(self) -> None:
        if self.state is DeviceState.REBUILDING:
            self.context = Context(self.network)
            self.enter(DeviceState.READY)

    def kill(self, why: str) -> None:
        self.lose()

    def die(self) -> None:
        self.lose()
        self.enter(DeviceState.LOST)

    async def wait_ready(self) -> None:
        while self.state is not DeviceState.READY:
            if self.state is DeviceState.LOST:
                raise accel.DeviceLostError("dead for good")
            await self.changed.wait()


ranks_of = st.integers(0, SIZE)  # the last one is the extra device
actions = st.one_of(
    st.tuples(st.sampled_from(["lose", "heal"]), ranks_of),
    st.tuples(st.just("renew"), ranks_of),
    st.tuples(st.sampled_from(["lose", "heal", "stop", "fail", "die"]), ranks_of),
    st.tuples(st.sampled_from(["send", "cancel", "late"]), st.just(0)),
    st.tuples(st.just("turn"), st.integers(1, 12)),
)


class Played:
    """A world of fake ranks, and the clients' collectives."""

    def __init__(self, hang_timeout: float | None) -> None:
        self.network = Network()
        self.ranks = [FakeRank(f"fake:{number}", self.network) for number in range(SIZE + 1)]
        self.world: Any = Epochs(
            1, self.ranks[:SIZE], Probes(), hang_timeout=hang_timeout, join_timeout=0.02, limit=4, extras=self.ranks[SIZE:]
        )
        self.world.takeovers.append(self.take_over)
        self.taken: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def take_over(self, index: int) -> None:
        await asyncio.sleep(0)
        self.taken.append(index)

    async def send(self, timeout: float | None = None) -> None:
        """Send a collective, and check that it ran on all ranks of one epoch."""
        places: list[Place] = []

        def start(place: Place) -> list[Any]:
            assert self.world.lifecycle.state is DeviceState.READY
            communicator = self.network.at(place.epoch)
            assert not communicator.is_revoked
            assert [communicator.joined[rank] for rank in range(SIZE)] == [rank.context for rank in self.world.ranks]
            places.append(place)
            return [rank.context.collective(place, number) for number, rank in enumerate(self.world.ranks)]

        results = await self.world.run("sum", start, timeout)
        (place,) = places
        assert results == [place.number] * SIZE
        communicator = self.network.at(place.epoch)
        assert communicator.arrived[place.number] == set(range(SIZE)), "it did not run on all ranks"
        assert place.number not in communicator.in_doubt, "it ended well after the epoch was revoked"

    async def step(self, action: str, number: int) -> None:
        if action == "turn":
            for _ in range(number):
                await asyncio.sleep(0)
        elif action == "lose":
            self.ranks[number].lose()
        elif action == "heal":
            self.ranks[number].heal()
        elif action == "die":
            if all(rank.state is not DeviceState.LOST for rank in self.ranks):  # one has an extra device
                self.ranks[number].die()
        elif action == "renew":
            self.ranks[number].lose()
            self.ranks[number].heal()
        elif action == "stop":
            self.ranks[number].context.runs.clear()
        elif action == "fail":
            self.ranks[number].context.fails = True
        elif action == "cancel":
            for task in self.tasks[-1:]:
                task.cancel()
        else:
            self.tasks.append(asyncio.ensure_future(self.send(0.005 if action == "late" else None)))

    async def heal_all(self) -> None:
        while True:
            for rank in self.ranks:
                rank.heal()
                if not rank.context.runs.is_set() and rank.state is DeviceState.READY:
                    rank.lose()
            await asyncio.sleep(0.001)

    async def end(self) -> None:
        """Heal all ranks: then every await ends, and the world works."""
        healing = asyncio.ensure_future(self.heal_all())
        expected = (
            accel.WorldChangedError,
            accel.LibraryError,
            accel.DeadlineExceededError,
            accel.MailboxFullError,
            asyncio.CancelledError,
        )
        async with asyncio.timeout(30):
            for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
                assert outcome is None or isinstance(outcome, expected), outcome
            while True:  # a rank that was to fail may do so now
                try:
                    await self.send()
                    break
                except (accel.WorldChangedError, accel.LibraryError):
                    continue
        healing.cancel()
        lost = [number for number, rank in enumerate(self.ranks[:SIZE]) if rank.state is DeviceState.LOST]
        assert self.taken == lost
        assert self.world.ranks == [self.ranks[SIZE if number in lost else number] for number in range(SIZE)]
        await self.world.aclose()
        for communicator in self.network.communicators.values():
            assert communicator.is_revoked or all(context.died.done() for context in communicator.joined.values())
        assert not any(rank.listeners for rank in self.ranks)


async def play(steps: list[tuple[str, int]], hang_timeout: float | None) -> None:
    played = Played(hang_timeout)
    await played.world.open()
    seen: list[int] = [1]
    for action, number in steps:
        await played.step(action, number)
        seen.append(played.world.lifecycle.generation)
    assert seen == sorted(seen), "epochs only rise"
    await played.end()


async def close_while_it_opens(turns: int) -> BaseException | None:
    """Close a world some turns of the loop after it began to open, and return the outcome of that."""
    played = Played(None)
    opening = asyncio.ensure_future(played.world.open())
    for _ in range(turns):
        await asyncio.sleep(0)
    await played.world.aclose()
    outcome: BaseException | None = (await asyncio.gather(opening, return_exceptions=True))[0]
    assert played.world.lifecycle.state is DeviceState.CLOSED
    assert all(communicator.is_revoked for communicator in played.network.communicators.values())
    return outcome


def test_a_world_that_is_closed_while_it_opens_stays_closed() -> None:
    outcomes = [asyncio.run(close_while_it_opens(turns)) for turns in range(1, 30)]
    assert isinstance(outcomes[0], accel.ClosedError)
    assert outcomes[-1] is None, "it was open"
    assert {type(outcome) for outcome in outcomes} == {accel.ClosedError, type(None)}


@settings(max_examples=300, deadline=None)
@given(st.lists(actions, min_size=10, max_size=40), st.sampled_from([None, 0.01]))
def test_every_await_ends_and_ok_means_that_all_ranks_ran_it(steps: list[tuple[str, int]], hang_timeout: float | None) -> None:
    before, epochs._REVOKE_TIMEOUT = epochs._REVOKE_TIMEOUT, 0.02
    try:
        asyncio.run(play(steps, hang_timeout))
    finally:
        epochs._REVOKE_TIMEOUT = before
