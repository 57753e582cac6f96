"""The system: entering, and closing in bounded time with nothing left."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from accel.actors import Actor, ActorContext, ActorRef, ActorSystem
from accel.errors import ActorStoppedError, ClosedError, InvalidArgumentError, NotInitializedError
from tests.actor_support import Echo, Never, Waits, accel_tasks, accel_threads, turns


async def test_enter_and_exit_may_run_in_different_tasks() -> None:
    system = ActorSystem()
    await asyncio.create_task(system.__aenter__())
    ref = await asyncio.create_task(system.spawn(Echo))
    assert await ref.ask(1) == 1

    await asyncio.create_task(system.__aexit__(None, None, None))

    assert system.state == "closed"
    assert accel_tasks() == []


async def test_later_actors_can_use_earlier_ones_while_they_drain() -> None:
    class Front(Actor[int, int]):
        def __init__(self, back: ActorRef[Any, Any]) -> None:
            self.back = back

        async def receive(self, message: int, context: ActorContext) -> int:
            answer: int = await self.back.ask(message)
            return answer

    async with ActorSystem() as system:
        back = await system.spawn(Echo)
        front = await system.spawn(Front, back)
        answers = [asyncio.create_task(front.ask(number)) for number in range(20)]
        await asyncio.sleep(0)

    assert await asyncio.gather(*answers) == list(range(20))


async def test_exit_cancels_what_does_not_drain_in_time(caplog: pytest.LogCaptureFixture) -> None:
    async with ActorSystem(close_timeout=0.001) as system:
        ref = await system.spawn(Waits)
        asking = asyncio.create_task(ref.ask(asyncio.Event()))
        queued = asyncio.create_task(ref.ask(asyncio.Event()))
        await turns()

    errors = await asyncio.gather(asking, queued, return_exceptions=True)
    assert [type(error) for error in errors] == [ActorStoppedError] * 2
    assert "close_timeout" in caplog.text
    assert accel_tasks() == []


async def test_exit_also_cancels_the_hooks_of_children(caplog: pytest.LogCaptureFixture) -> None:
    class Lingers(Echo):
        async def stopped(self, context: ActorContext) -> None:
            stopping.set()
            await asyncio.Event().wait()

    class Parent(Echo):
        async def started(self, context: ActorContext) -> None:
            await context.spawn(Lingers, name="child")

    stopping = asyncio.Event()
    async with ActorSystem(close_timeout=1000) as system:
        parent = await system.spawn(Parent)
        halting = asyncio.create_task(parent.stop())
        await stopping.wait()
        system.close_timeout = 0.0

    await halting
    assert "left_behind" not in caplog.text
    assert accel_tasks() == []


async def test_exit_is_bounded_even_if_an_actor_will_not_end(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.actors.system._GRACE", 0.01)
    gate = asyncio.Event()
    async with ActorSystem("stuck", close_timeout=0) as system:
        ref = await system.spawn(Never, name="never")
        ref.tell(gate)
        await turns()

    assert "actors_left_behind" in caplog.text
    assert "never" in caplog.text
    gate.set()
    await ref.wait_stopped()
    while accel_tasks():
        await asyncio.sleep(0)


async def test_the_error_of_the_body_is_not_masked_by_failures_while_closing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ActorSystem):
        async def _close_resources(self, deadline: float) -> None:
            raise RuntimeError("while closing")

    class Fails(Echo):
        async def stopped(self, context: ActorContext) -> None:
            raise RuntimeError("in stopped")

    async def body() -> None:
        async with Broken() as system:
            await system.spawn(Fails)
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        await body()
    assert "close_failed" in caplog.text
    assert "actor_hook_failed" in caplog.text


async def test_resources_close_before_the_actors_stop() -> None:
    log: list[str] = []

    class Owner(ActorSystem):
        async def _open_resources(self) -> None:
            self.ref = await self.spawn(Echo)

        async def _close_resources(self, deadline: float) -> None:
            log.append(await self.ref.ask("still answers"))
            assert deadline > self.loop.time()

    async with Owner() as system:
        log.append(system.state)

    assert log == ["open", "still answers"]


async def test_resources_that_do_not_open_close_the_system() -> None:
    class Broken(ActorSystem):
        async def _open_resources(self) -> None:
            raise RuntimeError("no")

    system = Broken()
    with pytest.raises(RuntimeError, match="no"):
        await system.__aenter__()

    assert system.state == "closed"
    assert accel_tasks() == []


async def test_aclose_is_idempotent_and_everybody_waits_for_the_end() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Waits)
        gate = asyncio.Event()
        ref.tell(gate)
        await turns()
        closing = [asyncio.create_task(system.aclose()) for _ in range(3)]
        await turns()
        assert not any(task.done() for task in closing)
        gate.set()
        await asyncio.gather(*closing)
        await system.aclose()

    assert system.state == "closed"


async def test_cancelling_the_close_ends_its_patience(caplog: pytest.LogCaptureFixture) -> None:
    system = await ActorSystem(close_timeout=1000).__aenter__()
    ref = await system.spawn(Waits)
    asking = asyncio.create_task(ref.ask(asyncio.Event()))
    await turns()
    closing = asyncio.create_task(system.aclose())
    await turns()

    closing.cancel()
    await asyncio.wait({closing})

    assert closing.cancelled()
    assert "close_timeout" not in caplog.text, "nothing timed out"
    assert system.state == "closed"
    assert isinstance((await asyncio.gather(asking, return_exceptions=True))[0], ActorStoppedError)
    assert accel_tasks() == []


async def test_a_cancelled_body_closes_and_stays_cancelled() -> None:
    async def body() -> None:
        async with ActorSystem() as system:
            await system.spawn(Echo)
            ready.set()
            await asyncio.Event().wait()

    ready = asyncio.Event()
    task = asyncio.create_task(body())
    await ready.wait()
    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()
    assert accel_tasks() == []


async def test_closing_inside_a_cancelled_anyio_scope_drains() -> None:
    with anyio.CancelScope() as scope:
        async with ActorSystem() as system:
            ref = await system.spawn(Echo)
            answer = asyncio.create_task(ref.ask(1))
            await asyncio.sleep(0)
            scope.cancel()

    assert await answer == 1
    assert system.state == "closed"


def test_asyncio_run_ending_with_an_open_system_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[str] = []

    class Says(Waits):
        async def stopped(self, context: ActorContext) -> None:
            stopped.append("stopped")

    async def main() -> ActorSystem:
        system = await ActorSystem().__aenter__()
        ref = await system.spawn(Says)
        ref.tell(asyncio.Event())
        await turns()
        return system

    with caplog.at_level("WARNING", "accel"):
        system = asyncio.run(main())

    assert system.state == "closed"
    assert stopped == ["stopped"]
    assert accel_threads() == []
    assert "system_not_closed" in caplog.text
    assert "close_timeout" not in caplog.text


@pytest.mark.parametrize("turn", range(4))
def test_a_loop_that_ends_before_the_body_does_not_blame_it(turn: int, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with ActorSystem() as system:
            await system.spawn(Waits)
            await asyncio.Event().wait()

    async def main() -> None:
        tasks.append(asyncio.create_task(body()))
        await turns(turn)

    tasks: list[asyncio.Task[None]] = []
    with caplog.at_level("WARNING", "accel"):
        asyncio.run(main())

    assert tasks[0].cancelled()
    assert "system_not_closed" not in caplog.text
    assert "close_timeout" not in caplog.text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_actor_that_ends_the_program_ends_it(kind: type[BaseException]) -> None:
    closed: list[str] = []

    async def main() -> None:
        try:
            async with ActorSystem() as system:
                ref = await system.spawn(Echo)
                await system.spawn(Waits)
                ref.tell(kind())
                await asyncio.Event().wait()
        finally:
            closed.append(system.state)

    with pytest.raises(kind):
        asyncio.run(main())
    assert closed == ["closed"]


async def test_a_system_is_entered_once() -> None:
    async with ActorSystem() as system:
        with pytest.raises(ClosedError, match="entered once"):
            await system.__aenter__()


async def test_a_system_that_was_never_entered_says_so() -> None:
    system = ActorSystem()
    for use in (lambda: system.loop, lambda: system.portal, system.tree):
        with pytest.raises(NotInitializedError):
            use()
    with pytest.raises(NotInitializedError):
        await system.spawn(Echo)
    await system.aclose()

    assert system.state == "closed"


async def test_a_closed_system_starts_nothing() -> None:
    async with ActorSystem() as system:
        pass

    with pytest.raises(ClosedError):
        await system.spawn(Echo)
    with pytest.raises(ClosedError):
        await system.run_blocking(int)


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_close_timeout_out_of_range_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidArgumentError):
        ActorSystem(close_timeout=timeout)
