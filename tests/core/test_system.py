"""The system: entering and leaving, closing in bounded time, where it may be used, loops of all kinds, its portal and its threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import uvloop

from accel.actors import Actor, ActorContext, ActorRef, ActorSystem, ActorTree, Portal, RestartStrategy
from accel.errors import ActorStoppedError, ClosedError, InvalidArgumentError, MailboxFullError, NotInitializedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

user = contextvars.ContextVar("user", default="nobody")


class Echo(Actor[Any, Any]):
    async def receive(self, message: Any, context: ActorContext) -> Any:
        if isinstance(message, BaseException):
            raise message
        return message


class Waits(Actor[asyncio.Event, str]):
    async def receive(self, message: asyncio.Event, context: ActorContext) -> str:
        await message.wait()
        return "opened"


class Never(Actor[Any, None]):
    """Ignores all cancellation, until its gate is opened."""

    async def receive(self, message: asyncio.Event, context: ActorContext) -> None:
        while not message.is_set():
            try:
                await message.wait()
            except asyncio.CancelledError:
                continue


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def accel_tasks() -> list[str]:
    return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("accel-"))


def accel_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("accel-"))


# -- loops


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


class Starts(Echo):
    def __init__(self, error: Exception | None = None, gate: asyncio.Event | None = None) -> None:
        self.error = error
        self.gate = gate

    async def started(self, context: ActorContext) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error


# -- entering and leaving


async def test_enter_and_exit_may_run_in_different_tasks() -> None:
    system = ActorSystem()
    await asyncio.create_task(system.__aenter__())
    ref = await asyncio.create_task(system.spawn(Echo))
    assert await ref.ask(1) == 1

    await asyncio.create_task(system.__aexit__(None, None, None))

    assert system.state == "closed"
    assert accel_tasks() == []


async def test_exit_drains_what_is_queued() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)
        answers = [asyncio.create_task(ref.ask(number)) for number in range(200)]
        await asyncio.sleep(0)

    assert await asyncio.gather(*answers) == list(range(200))


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


async def test_exit_also_cancels_hooks_that_hang() -> None:
    class Lingers(Echo):
        async def stopped(self, context: ActorContext) -> None:
            await asyncio.Event().wait()

    async with ActorSystem(close_timeout=0.001) as system:
        ref = await system.spawn(Lingers)

    assert await ref.wait_stopped() is None
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


async def test_cancelling_the_close_ends_its_patience() -> None:
    system = await ActorSystem(close_timeout=1000).__aenter__()
    ref = await system.spawn(Waits)
    asking = asyncio.create_task(ref.ask(asyncio.Event()))
    await turns()
    closing = asyncio.create_task(system.aclose())
    await turns()

    closing.cancel()
    await asyncio.wait({closing})

    assert closing.cancelled()
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


def test_asyncio_run_ending_with_an_open_system_leaves_nothing() -> None:
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

    system = asyncio.run(main())

    assert system.state == "closed"
    assert stopped == ["stopped"]
    assert accel_threads() == []


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


# -- spawning


async def test_names_are_unique_among_the_living() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo, name="one")
        for name in ("one", "", "a/b"):
            with pytest.raises(InvalidArgumentError):
                await system.spawn(Echo, name=name)
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


async def test_several_systems_live_side_by_side() -> None:
    async with ActorSystem("one") as one, ActorSystem("two") as two:
        first, second = await one.spawn(Echo, name="echo"), await two.spawn(Echo, name="echo")
        await first.stop()

        assert await second.ask(2) == 2


# -- the wrong place


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a fresh thread; return what it returned, or the exception."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        return future.exception() or future.result()


async def uses(system: ActorSystem, ref: ActorRef[Any, Any]) -> list[BaseException | None]:
    async def of(use: Coroutine[Any, Any, Any]) -> BaseException | None:
        try:
            await use
        except ClosedError as error:
            return error
        return None

    outcomes = [
        await of(use) for use in (ref.ask(1), ref.send(1), ref.stop(), system.spawn(Echo), system.aclose(), system.run_blocking(int))
    ]
    for plain in (lambda: ref.tell(1), lambda: ref.fail(ValueError()), system.tree):
        try:
            plain()
        except ClosedError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
    return outcomes


async def test_use_from_another_thread_and_loop_is_refused() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)

        told = in_thread(lambda: ref.tell(1))
        outcomes = in_thread(lambda: asyncio.run(uses(system, ref)))

        assert isinstance(told, ClosedError)
        assert "another thread" in str(told)
        assert "portal" in str(told)
        assert all(isinstance(outcome, ClosedError) and "another thread" in str(outcome) for outcome in outcomes), outcomes
        assert await ref.ask("unharmed") == "unharmed"


def test_use_from_another_loop_of_the_same_thread_is_refused() -> None:
    with asyncio.Runner() as one, asyncio.Runner() as two:
        system = one.run(ActorSystem().__aenter__())
        ref = one.run(system.spawn(Echo))

        outcomes = two.run(uses(system, ref))

        assert all(isinstance(outcome, ClosedError) and "another event loop" in str(outcome) for outcome in outcomes), outcomes
        one.run(system.aclose())


def test_use_in_a_forked_process_is_refused() -> None:
    program = """
        import asyncio, os, warnings
        from accel.actors import Actor, ActorSystem
        from accel.errors import ClosedError
        warnings.simplefilter("ignore")

        class Echo(Actor):
            async def receive(self, message, context):
                return message

        async def main():
            async with ActorSystem() as system:
                ref = await system.spawn(Echo)
                await system.run_blocking(int)
                pid = os.fork()
                if pid == 0:
                    said = []
                    for use in (lambda: ref.tell(1), system.tree, lambda: system.portal.call_soon(int)):
                        try:
                            use()
                        except ClosedError as error:
                            said.append("forked" in str(error))
                    os._exit(0 if said == [True] * 3 else 1)
                print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), await ref.ask("parent"))

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30, check=False)

    assert (done.returncode, done.stdout.strip()) == (0, "0 parent"), done.stderr


# -- the portal


async def test_other_threads_ask_through_the_portal_with_their_own_context() -> None:
    class Who(Actor[None, str]):
        async def receive(self, message: None, context: ActorContext) -> str:
            return user.get()

    async with ActorSystem() as system:
        ref = await system.spawn(Who)

        def handler() -> str:
            user.set("thread")
            answer: str = system.portal.run(ref.ask, None)
            return answer

        assert await system.run_blocking(handler) == "thread"
        assert system.portal.in_flight == 0


async def test_the_portal_raises_what_the_coroutine_raised() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)

        with pytest.raises(ValueError, match="boom"):
            await system.run_blocking(system.portal.run, ref.ask, ValueError("boom"))


async def test_the_portal_runs_plain_functions_and_logs_their_errors(caplog: pytest.LogCaptureFixture) -> None:
    async with ActorSystem() as system:
        called = asyncio.Event()

        def breaks() -> None:
            raise ValueError("in a callback")

        await system.run_blocking(system.portal.call_soon, breaks)
        await system.run_blocking(system.portal.call_soon, called.set)
        await asyncio.wait_for(called.wait(), 5)

    assert "portal_call_failed" in caplog.text


async def test_the_portal_refuses_the_thread_of_the_loop() -> None:
    async with ActorSystem() as system:
        with pytest.raises(ClosedError, match="other threads"):
            system.portal.run(asyncio.sleep, 0)
        with pytest.raises(ClosedError, match="other threads"):
            system.portal.call_soon(int)


async def test_giving_up_on_a_call_through_the_portal_cancels_it() -> None:
    async with ActorSystem() as system:
        ended = asyncio.Event()

        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        with pytest.raises(TimeoutError):
            await system.run_blocking(lambda: system.portal.run(forever, timeout=0.001))
        await asyncio.wait_for(ended.wait(), 5)
        future = await system.run_blocking(system.portal.start, forever)
        assert future.cancel()
        await turns(20)
        assert "accel-portal-call" not in accel_tasks()


async def test_the_portal_is_bounded_and_closes_with_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ActorSystem(close_timeout=0) as system:
        monkeypatch.setattr(system.portal, "_limit", 2)
        futures = [await system.run_blocking(system.portal.start, asyncio.Event().wait) for _ in range(2)]

        with pytest.raises(MailboxFullError):
            await system.run_blocking(system.portal.call_soon, int)

    for future in futures:
        assert isinstance(future.exception(0), ClosedError)
    assert isinstance(in_thread(lambda: system.portal.call_soon(int)), ClosedError)
    assert accel_tasks() == []


async def test_a_coroutine_cancelled_on_the_loop_ends_the_call() -> None:
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    async with ActorSystem() as system:
        future = await system.run_blocking(system.portal.start, cancels_itself)
        await turns()

        assert future.cancelled()


async def test_a_call_through_the_portal_cancelled_before_it_began_never_does() -> None:
    ran: list[bool] = []

    async def runs() -> None:
        ran.append(True)

    async with ActorSystem() as system:
        # The loop cannot take a turn while this waits for the thread.
        assert in_thread(lambda: system.portal.start(runs).cancel()) is True
        await turns()

        assert ran == []
        assert system.portal.in_flight == 0


def test_a_portal_to_a_loop_that_was_closed_says_so() -> None:
    async def make() -> Portal:
        return Portal(asyncio.get_running_loop(), asyncio.TaskGroup())

    portal = asyncio.run(make())

    error = in_thread(lambda: portal.call_soon(int))
    assert isinstance(error, ClosedError)
    assert "loop" in str(error)


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_portal_admits_at_least_one_call(limit: int) -> None:
    with pytest.raises(InvalidArgumentError):
        Portal(asyncio.get_running_loop(), asyncio.TaskGroup(), limit)


def test_a_call_through_the_portal_that_ends_the_program_ends_it() -> None:
    async def exits() -> None:
        raise SystemExit(3)

    async def main() -> None:
        async with ActorSystem() as system:
            await system.run_blocking(lambda: futures.append(system.portal.start(exits)))
            await asyncio.Event().wait()

    futures: list[concurrent.futures.Future[None]] = []
    with pytest.raises(SystemExit):
        asyncio.run(main())
    assert isinstance(futures[0].exception(0), SystemExit)


async def test_a_bug_in_the_package_itself_closes_the_system_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def bug() -> None:
        raise ZeroDivisionError

    async with ActorSystem() as system:
        ref = await system.spawn(Echo)
        assert system._group is not None
        system._group.create_task(bug())
        assert await ref.wait_stopped() is None

    assert system.state == "closed"
    assert "system_failed" in caplog.text


# -- threads


async def test_blocking_work_runs_on_named_threads_in_the_callers_context() -> None:
    async with ActorSystem(workers=2) as system:
        user.set("caller")
        gate = threading.Barrier(2)

        def work() -> tuple[str, str]:
            gate.wait(5)
            return threading.current_thread().name, user.get()

        results = await asyncio.gather(system.run_blocking(work), system.run_blocking(work))

        assert sorted(results) == [("accel-worker-0", "caller"), ("accel-worker-1", "caller")]
    assert accel_threads() == []


async def test_blocking_work_raises_what_it_raised() -> None:
    async with ActorSystem() as system:
        with pytest.raises(ValueError, match="invalid literal"):
            await system.run_blocking(int, "x")


async def test_cancelled_blocking_work_that_did_not_start_never_does() -> None:
    async with ActorSystem(workers=1) as system:
        gate, ran = threading.Event(), list[str]()
        first = asyncio.create_task(system.run_blocking(gate.wait, 5))
        second = asyncio.create_task(system.run_blocking(ran.append, "second"))
        third = asyncio.create_task(system.run_blocking(ran.append, "third"))
        await turns()
        second.cancel()
        await asyncio.wait({second})
        gate.set()
        await asyncio.gather(first, third)

        assert second.cancelled()
        assert ran == ["third"]


async def test_a_thread_that_hangs_is_left_behind_and_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.actors.system._GRACE", 0.01)
    gate = threading.Event()
    async with ActorSystem(close_timeout=0, workers=1) as system:
        started = asyncio.Event()

        def hang() -> bool:
            system.loop.call_soon_threadsafe(started.set)
            return gate.wait(10)

        running = asyncio.create_task(system.run_blocking(hang))
        queued = asyncio.create_task(system.run_blocking(int))
        await started.wait()

    assert "threads_left_behind" in caplog.text
    assert "accel-worker-0" in caplog.text
    assert isinstance((await asyncio.gather(queued, return_exceptions=True))[0], ClosedError)
    gate.set()
    assert await running
    while accel_threads():
        await asyncio.sleep(0)


@pytest.mark.parametrize("workers", [0, -1])
def test_a_system_needs_a_thread(workers: int) -> None:
    with pytest.raises(InvalidArgumentError):
        ActorSystem(workers=workers)


async def test_nothing_is_written_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo, restart=RestartStrategy(max_restarts=0))
        ref.tell(ValueError("boom"))
        await ref.wait_stopped()

    assert capsys.readouterr().out == ""
