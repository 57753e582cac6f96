"""A random life of a model whose every await ends when the test says so: by going on, by an error, by a cancellation, or by the device's end.

The versions, their unloading and the model are the real ones; the device, and what loads and runs a version, are made of gates.
"""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from accel.errors import AccelError, ClosedError, ContextPoisonedError, DeviceLostError, LibraryError, MailboxFullError
from accel.models import Buckets, Model, TensorSpec
from accel.models import version as version_module
from accel.models.version import Version
from accel.models.versions import Versions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

LIMIT = 350
NBYTES = 100
"""Three sets of weights fit, and four do not."""

BUCKETS = Buckets({"x": TensorSpec(("batch",), "float32")}, {"batch": (1,)})
ITEM = {"x": np.zeros((), np.float32)}

pytestmark = pytest.mark.usefixtures("without_pauses")


@pytest.fixture(scope="module")
def without_pauses() -> Iterator[None]:
    """Let a device that is full or faults be asked again at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version_module, "_PAUSE", 0.0)
        yield


class World:
    """A device in which every step waits for the test; it counts what it holds."""

    name = "cpu:0"

    def __init__(self) -> None:
        self.waiting: list[tuple[str, asyncio.Future[None]]] = []
        self.end: AccelError | None = None
        self.opened: set[int] = set()  # numbers of the runners that are registered
        self.held: dict[int, int] = {}  # bytes by buffer
        self.buffers = itertools.count(1)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def step(self, what: str) -> None:
        if self.end is not None:
            raise self.end.clone()
        gate = what, asyncio.get_running_loop().create_future()
        self.waiting.append(gate)
        try:
            await gate[1]
        finally:
            self.waiting.remove(gate)

    def ends(self, error: AccelError) -> None:
        """Close or lose the device: all that waits fails, and so does what comes."""
        self.end = error
        for _, gate in self.waiting:
            if not gate.done():
                gate.set_exception(error.clone())
        self._ended.set_result(None)

    async def generations(self) -> AsyncIterator[int]:
        yield 1
        await asyncio.shield(self._ended)
        if isinstance(self.end, DeviceLostError):
            raise self.end.clone()

    def info(self) -> Any:
        return SimpleNamespace(memory=SimpleNamespace(limit=LIMIT, used=sum(self.held.values())))


class Runner:
    """Registers itself with the world in :meth:`open`; a cancelled opening may have come too late to be without effect."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number

    async def open(self) -> None:
        await self.world.step("open")
        self.world.opened.add(self.number)
        await self.world.step("opened")

    async def close(self) -> None:
        if isinstance(self.world.end, DeviceLostError):  # it forgets the library at once
            self.world.opened.discard(self.number)
            return
        if self.number in self.world.opened:
            await self.world.step("close")
            self.world.opened.discard(self.number)


class FakeVersion(Version):
    """Answers with its number."""

    outputs = cast("Any", SimpleNamespace(rows=lambda arrays, sizes: arrays, check_serves_for=lambda other: None, is_captured=False))
    world: World

    async def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        for _ in range(2):
            assert self.number in self.world.opened or self.world.end is not None, "a version that is used is open"
            await self.world.step("forward")
        assert self.number in self.world.opened or self.world.end is not None, "it is open until the call has ended"
        return [np.array(self.number)]


class Loader:
    def __init__(self, world: World) -> None:
        self.world = world
        self.numbers = itertools.count(1)

    def begin(self, number: int) -> FakeVersion:
        runner = cast("Any", Runner(self.world, next(self.numbers)))
        made = FakeVersion(cast("Any", self.world), BUCKETS, number, runner, cast("Any", None))
        made.number, made.world = runner.number, self.world
        return made

    async def collected(self, weights: int) -> Any:
        await self.world.step("collect")
        return SimpleNamespace(nbytes=weights)

    async def load(self, version: FakeVersion, collected: Any, on_progress: object = None, *, like: object = None) -> None:
        await self.world.step("put")
        buffer = next(self.world.buffers)
        self.world.held[buffer] = collected.nbytes
        version.weights = Weights(self.world, buffer)
        await cast("Any", version.runner).open()
        await self.world.step("describe")


class Weights(dict[str, Any]):
    """The weights of a version, whose memory comes back when they are let go."""

    def __init__(self, world: World, buffer: int) -> None:
        super().__init__(w=SimpleNamespace(buffer=buffer, nbytes=world.held[buffer]))
        self._world = world

    def clear(self) -> None:
        for ref in self.values():
            del self._world.held[ref.buffer]
        super().clear()


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.calls: list[tuple[str, asyncio.Task[Any]]] = []
        self.served: set[int] = set()

    @initialize()
    def load(self) -> None:
        async def loading() -> None:
            self.world = World()
            versions = Versions(cast("Any", self.world), cast("Any", Loader(self.world)), 1000.0)
            self.model = Model("fake", cast("Any", self.world), BUCKETS, versions)
            self.versions = versions
            first = self.loop.create_task(self._first())
            while not first.done():
                self.release_all()
                await asyncio.sleep(0)
            await first

        self.loop.run_until_complete(loading())
        assert self.model.version == 1

    async def _first(self) -> None:
        async with self.versions.coming(NBYTES):
            pass

    def release_all(self) -> None:
        for _, gate in self.world.waiting:
            if not gate.done():
                gate.set_result(None)

    def turns(self, count: int) -> None:
        async def turning() -> None:
            for _ in range(count):
                await asyncio.sleep(0)
                self.states_are_apart()

        if count:  # else what comes next is in the same turn
            self.loop.run_until_complete(turning())
        self.states_are_apart()
        for what, call in [each for each in self.calls if each[1].done()]:
            self.calls.remove((what, call))
            self.check(what, call)

    def check(self, what: str, call: asyncio.Task[Any]) -> None:
        """See that a call has ended as it may."""
        if call.cancelled():
            return
        error = call.exception()
        assert error is None or isinstance(error, AccelError), repr(error)
        if error is None and what == "aclose":
            assert not self.world.held, "nothing is left of a model that is closed"
        if error is None and what in ("swap", "rollback", "ask"):
            assert np.ravel(call.result())[0] in self.served, "what was returned, or has answered, had served"

    # -- what a service does

    @rule(weights=st.sampled_from([NBYTES] * 5 + [LIMIT]), canaries=st.integers(0, 1), count=st.integers(0, 6))
    def swap(self, weights: int, canaries: int, count: int) -> None:
        async def compare(old: Any, new: Any) -> bool:
            await self.world.step("compare")
            return True

        self.start("swap", self.model.swap(weights, canaries=[ITEM] * canaries, compare=compare), count)

    @rule(count=st.integers(0, 6))
    def ask(self, count: int) -> None:
        self.start("ask", self.model.rows([ITEM]), count)

    @rule(count=st.integers(0, 6))
    def release(self, count: int) -> None:
        self.start("release", self.model.release(), count)

    @rule(count=st.integers(0, 6))
    def rollback(self, count: int) -> None:
        self.start("rollback", self.model.rollback(), count)

    @rule(count=st.integers(0, 6), luck=st.integers(0, 5))
    def aclose(self, count: int, luck: int) -> None:
        if not luck:
            self.start("aclose", self.model.aclose(), count)

    def start(self, what: str, call: Any, count: int) -> None:
        self.calls.append((what, self.loop.create_task(call)))
        self.turns(count)

    # -- what becomes of it

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data(), count=st.integers(0, 6))
    def go_on(self, data: st.DataObject, count: int) -> None:
        _, gate = data.draw(st.sampled_from(self.world.waiting))
        if not gate.done():
            gate.set_result(None)
        self.turns(count)

    @precondition(lambda self: self.world.waiting)
    @rule(times=st.integers(1, 6), count=st.integers(0, 4))
    def all_go_on(self, times: int, count: int) -> None:
        for _ in range(times):
            self.release_all()
            self.turns(count)

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data(), count=st.integers(0, 6), kind=st.sampled_from([LibraryError, ContextPoisonedError, MailboxFullError]))
    def fail(self, data: st.DataObject, count: int, kind: type[AccelError]) -> None:
        what, gate = data.draw(st.sampled_from(self.world.waiting))
        if not gate.done():
            gate.set_exception((MailboxFullError if what == "close" and kind is LibraryError else kind)("the test said so"))
        self.turns(count)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), count=st.integers(0, 6))
    def cancel(self, data: st.DataObject, count: int) -> None:
        _, call = data.draw(st.sampled_from(self.calls))
        call.cancel()
        self.turns(count)

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        self.turns(count)

    @precondition(lambda self: self.world.end is None)
    @rule(luck=st.integers(0, 9), kind=st.sampled_from([ClosedError, DeviceLostError]), count=st.integers(0, 6))
    def end_device(self, luck: int, kind: type[AccelError], count: int) -> None:
        if not luck:
            self.world.ends(kind("the device has ended"))
            self.turns(count)

    # -- what holds

    @invariant()
    def states_are_apart(self) -> None:
        """In every turn of the loop."""
        versions = self.versions
        serving, kept = versions._serving, versions.kept
        assert (serving is None) == versions.is_closed
        assert serving is not kept or serving is None
        if serving is not None:
            self.served.add(serving.number)
        for each in (serving, kept):
            if each is not None:
                assert each not in versions._leaving
                assert each.weights, "what may answer has its weights"
                assert self.world.end is not None or each.number in self.world.opened

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            self.loop.close()
            return
        try:
            self.settled()
            versions = self.versions
            left = {each.number for each in (versions._serving, versions.kept) if each is not None}
            if self.world.end is None:
                assert self.world.opened == left
            assert len(self.world.held) == len(left)
            self.start("aclose", self.model.aclose(), 1)
            self.settled()
            assert not self.world.held
            assert self.world.end is not None or not self.world.opened
            assert not asyncio.all_tasks(self.loop)
        finally:
            self.loop.close()

    def settled(self) -> None:
        """Let everything go on until nothing waits any more."""
        for _ in range(1000):
            self.release_all()
            self.turns(3)
            if not self.calls and not self.world.waiting and not self.versions._leaving:
                return
        raise AssertionError(f"never settled: {self.calls} {self.world.waiting} {self.versions._leaving}")


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("ender", ["rollback", "aclose"])
def test_what_ends_a_swap_in_the_turn_of_its_last_wait_comes_before_it(ender: str) -> None:
    life = Life()
    life.load()
    life.swap(NBYTES, 0, 6)
    for _ in range(4):  # up to where it is described
        life.all_go_on(1, 6)
    ((what, gate),) = life.world.waiting
    assert what == "describe"
    life.start(ender, getattr(life.model, ender)(), 0)
    gate.set_result(None)
    life.turns(6)
    assert life.served == {1}
    life.teardown()
