"""The system: entering and leaving, spawning, its tree."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from accel.actors import Actor, ActorContext, ActorSystem, ActorTree
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

from tests.actor_support import Echo, Starts, Waits, accel_tasks, accel_threads, turns


class Given:
    """What a function on a worker thread is given."""


def eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    return loop


LOOPS = [
    pytest.param(asyncio.new_event_loop, False, id="asyncio"),
    pytest.param(asyncio.new_event_loop, True, id="debug"),
    pytest.param(uvloop.new_event_loop, False, id="uvloop"),
    pytest.param(eager_loop, False, id="eager", marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with 3.12")),
]


@pytest.mark.parametrize(("factory", "debug"), LOOPS)
def test_a_whole_life_on_every_loop(factory: Callable[[], asyncio.AbstractEventLoop], debug: bool) -> None:
    async def main() -> None:
        async with ActorSystem("all-loops") as system:
            ref = await system.spawn(Echo, name="echo")
            assert accel_tasks() == ["accel-actor-echo", "accel-system-all-loops"]
            assert await asyncio.gather(*(ref.ask(number) for number in range(50))) == list(range(50))
            with pytest.raises(ValueError, match="boom"):
                await ref.ask(ValueError("boom"))
            assert await ref.ask("back", timeout=10) == "back"
            waiting = await system.spawn(Waits)
            asking = asyncio.create_task(waiting.ask(asyncio.Event()))
            await turns()
            waiting.fail(ValueError("outside"))
            with pytest.raises(ValueError, match="outside"):
                await asking
            with pytest.raises(ValueError, match="at the start"):
                await system.spawn(Starts, ValueError("at the start"))
            assert await system.run_blocking(sum, [1, 2]) == 3
        assert accel_tasks() == []
        assert accel_threads() == []

    with asyncio.Runner(debug=debug, loop_factory=factory) as runner:
        runner.run(main())


async def test_a_worker_that_has_reported_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is held up right behind its report: what the loop counts then does not depend on when the thread goes on."""
    loop, go_on, report = asyncio.get_running_loop(), threading.Event(), asyncio.get_running_loop().call_soon_threadsafe

    def held_up(*args: Any, **kwargs: Any) -> asyncio.Handle:
        handle = report(*args, **kwargs)
        assert go_on.wait(10)
        return handle

    def work(given: list[Given], *, also: Given) -> Given:
        return Given()

    given, also = Given(), Given()
    left = weakref.WeakSet([given, also])
    async with ActorSystem() as system:
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", held_up)
            result = await system.run_blocking(partial(work, [given]), also=also)
            left.add(result)
            del given, also
            assert list(left) == [result]
            del result
            await asyncio.sleep(0)  # the event loop keeps what woke this task for the rest of its iteration
            assert not left
            go_on.set()


async def test_names_are_unique_among_the_living() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo, name="one")
        said = set()
        for name, reason in (("one", "is alive here"), ("", "not empty"), (3, "is a string"), ("a/b", "separates")):
            with pytest.raises(InvalidArgumentError, match=reason) as caught:
                await system.spawn(Echo, name=name)  # type: ignore[arg-type]
            said.add(caught.value.remedy)
        assert len(said) == 3
        await ref.stop()
        again = await system.spawn(Echo, name="one")

        assert again is not ref
        assert (await system.spawn(Echo)).name != (await system.spawn(Echo)).name


async def test_only_actors_with_a_coroutine_receive_are_spawned() -> None:
    class Plain(Actor[Any, Any]):
        def receive(self, message: Any, context: ActorContext) -> Any:
            return message

    async with ActorSystem() as system:
        for wrong in (Plain, object, Echo(), "Echo"):
            with pytest.raises(InvalidArgumentError):
                await system.spawn(wrong)  # type: ignore[arg-type]


async def test_a_function_makes_each_instance_of_an_actor() -> None:
    made: list[Echo] = []

    def make(of: type[Echo]) -> Echo:
        made.append(of())
        return made[-1]

    async with ActorSystem() as system:
        ref = await system.spawn(make, Echo, name="echo")
        ref.fail(ValueError("from outside"))
        assert await ref.ask("hello") == "hello"
        assert len(made) == 2
        with pytest.raises(InvalidArgumentError, match="Return an instance of a subclass of Actor"):
            await system.spawn(lambda: "no actor")  # type: ignore[arg-type, return-value]


async def test_a_system_that_is_pickled_says_that_it_cannot() -> None:
    async with ActorSystem("here") as system:
        for act in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"'here'.*one process"):
                act(system)


async def test_a_cancelled_spawn_stops_the_actor() -> None:
    async with ActorSystem() as system:
        spawning = asyncio.create_task(system.spawn(Starts, None, asyncio.Event(), name="slow"))
        await turns()
        assert [child.name for child in system.tree().children] == ["slow"]
        spawning.cancel()
        await asyncio.wait({spawning})
        await turns()

        assert system.tree().children == ()


async def test_the_tree_shows_what_is_there() -> None:
    class Parent(Echo):
        async def started(self, context: ActorContext) -> None:
            self.child = await context.spawn(Waits, name="child")
            self.child.tell(gate)
            self.child.tell(gate)
            self.child.tell(gate)

    gate = asyncio.Event()
    now = [10.0]
    async with ActorSystem("pictured", clock=lambda: now[0]) as system:
        await system.spawn(Parent, name="parent")
        await system.spawn(Echo, name="echo")
        await turns()
        now[0] += 2.5
        tree = system.tree()
        gate.set()

    assert [node.name for node in tree] == ["pictured", "parent", "child", "echo"]
    assert tree.children[0].children == (ActorTree("child", "running", depth=2, oldest_age=2.5),)
    assert str(tree).splitlines() == [
        "pictured [open] mailbox=0 oldest=0.000s restarts=0",
        "|- parent [running] mailbox=0 oldest=0.000s restarts=0",
        "|  `- child [running] mailbox=2 oldest=2.500s restarts=0",
        "`- echo [running] mailbox=0 oldest=0.000s restarts=0",
    ]
