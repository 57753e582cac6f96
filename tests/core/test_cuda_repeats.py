"""Which calls of a library become graphs, without a GPU: on a stream that takes down what it is given."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from accel import DriverError
from accel_cuda import repeats
from accel_cuda.repeats import Repeats

OFTEN = repeats._OFTEN


class Graph:
    def __init__(self, call: Any) -> None:
        self.call = self.pointer = call
        self.is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class World:
    """A stream with its driver, and a library whose calls ``repeats`` sees."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self._wishes: list[None] = []
        self.log_of_waits: list[int] = []
        self.status = 0
        self.is_capturing = False
        self.graphs: list[Graph] = []
        self.is_refusing = False
        self.repeats = Repeats(self, self._wish)  # type: ignore[arg-type]

    def launch_graph(self, graph: Any) -> None:
        self.log.append(("graph", graph))
        if self.status:
            raise DriverError("cuGraphLaunch", code=self.status)

    def _wish(self) -> None:
        self._wishes.append(None)

    def wishes(self) -> int:
        return len(self._wishes)

    def synchronize(self) -> None:
        self.log_of_waits.append(len(self.log))

    def call(self, *call: Any) -> None:
        if not self.repeats.launch(call):
            self.log.append(("library", call))

    def make(self) -> None:
        for call in self.repeats.take_wished():
            if self.is_refusing:
                self.repeats.refuse(call)
            else:
                self.graphs.append(Graph(call))
                self.repeats.add(call, self.graphs[-1])  # type: ignore[arg-type]

    def often(self, *call: Any) -> None:
        """Make a call until it wishes for a graph, and make that."""
        wishes = self.wishes()
        for _ in range(OFTEN):
            self.call(*call)
        assert self.wishes() == wishes + 1
        self.make()


@pytest.fixture
def world() -> World:
    return World()


def test_a_call_that_has_come_often_is_launched_as_a_graph(world: World) -> None:
    for _ in range(OFTEN - 1):
        world.call(1, 2.0)
    assert not world.wishes()
    world.call(1, 2.0)
    assert world.wishes() == 1
    assert world.repeats.wished == {(1, 2.0): None}
    world.call(1, 2.0)  # it goes on as before until somebody has made it
    assert world.log == [("library", (1, 2.0))] * (OFTEN + 1)
    world.make()
    assert not world.repeats.wished
    world.log.clear()
    for _ in range(3):
        world.call(1, 2.0)
        world.call(1, 3.0)
    assert world.log == [("graph", (1, 2.0)), ("library", (1, 3.0))] * 3
    assert len(world.repeats) == 1


def test_nothing_is_counted_or_launched_while_the_stream_is_captured(world: World) -> None:
    world.often(1)
    world.is_capturing = True
    for _ in range(3 * OFTEN):
        world.call(1)
        world.call(2)
    assert ("graph", (1,)) not in world.log
    assert world.wishes() == 1


def test_what_cannot_be_captured_stays_as_it_is(world: World) -> None:
    world.is_refusing = True
    world.often(1)
    for _ in range(3 * OFTEN):
        world.call(1)
    assert world.wishes() == 1
    assert {kind for kind, _ in world.log} == {"library"}
    world.is_refusing = False
    world.often(2)
    world.call(2)
    assert world.log[-1] == ("graph", (2,))


def test_a_launch_that_fails_is_told(world: World) -> None:
    world.often(1)
    world.status = 700
    with pytest.raises(DriverError) as raised:
        world.call(1)
    assert raised.value.code == 700


def test_there_are_so_many_and_the_one_that_was_not_used_for_long_makes_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_KEPT", 3)
    monkeypatch.setattr(repeats, "_UNUSED", 3 * OFTEN)
    for call in range(3):
        world.often(call)
    world.often(3)
    assert len(world.repeats) == 3, "all are in use"
    assert not world.log_of_waits
    for _ in range(2 * OFTEN):  # of no graph, but calls of others all the same
        world.call(0)
        world.call(2)
    world.often(4)
    assert [graph.is_closed for graph in world.graphs] == [False, True, False, False]
    assert len(world.log_of_waits) == 1, "before it is given back"
    world.log.clear()
    for call in range(5):
        world.call(call)
    assert world.log == [("graph", (0,)), ("library", (1,)), ("graph", (2,)), ("library", (3,)), ("graph", (4,))]


def test_graphs_of_a_phase_that_is_over_make_room_for_those_of_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_KEPT", 4)
    monkeypatch.setattr(repeats, "_UNUSED", 50)
    for call in range(4):
        world.often("first", call)
    for _ in range(60):
        for call in range(4):
            world.call("second", call)
        world.make()
    world.log.clear()
    for call in range(4):
        world.call("second", call)
    assert {kind for kind, _ in world.log} == {"graph"}


def test_what_finds_no_room_does_not_ask_again_and_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_KEPT", 2)
    for call in range(2):
        world.often(call)
    for _ in range(3000):
        for call in range(4):
            world.call(call)
        world.make()
    assert world.wishes() == 4


def test_calls_that_never_come_again_take_no_memory(world: World) -> None:
    rng = secrets.SystemRandom()
    for _ in range(4000):
        world.call(rng.random())
    assert len(world.repeats._seen) <= repeats._COUNTED
    for call in range(2 * repeats._KEPT):  # and nobody makes what they wish for
        for _ in range(OFTEN):
            world.call("often", call)
    assert len(world.repeats.wished) == repeats._KEPT


def test_calls_that_are_not_equal_to_themselves_are_never_graphs(world: World) -> None:
    for _ in range(5 * OFTEN):
        world.call(float("nan"))
    assert not world.wishes()


def test_closing_gives_all_back(world: World) -> None:
    world.often(1)
    world.often(2)
    world.repeats.close()
    world.repeats.close()
    assert [graph.is_closed for graph in world.graphs] == [True, True]
    world.call(1)
    assert world.log[-1] == ("library", (1,))
