"""Where a system may be used, its portal for other threads, and its own threads."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import pytest

from accel.actors import Actor, ActorContext, ActorRef, ActorSystem, Portal
from accel.actors.home import Home
from accel.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, MailboxFullError

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Coroutine

from tests.actor_support import Echo, accel_tasks, accel_threads, in_thread, turns

user = contextvars.ContextVar("user", default="nobody")


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


async def test_a_portal_takes_a_function_and_its_arguments() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(Echo)
        portal = system.portal

        def wrong() -> list[BaseException]:
            calls: list[tuple[Any, ...]] = [(portal.run, ref.ask(6)), (portal.start, 3), (portal.run, len, "ab")]
            errors: list[BaseException] = []
            for call, *args in calls:
                try:
                    call(*args)
                except InvalidArgumentError as error:
                    errors.append(error)
            return errors

        errors = await asyncio.to_thread(wrong)

        assert len(errors) == 3
        assert all("portal.run(ref.ask, message)" in str(error) for error in errors[:2])
        assert "len returned a int" in str(errors[2])
        assert "call_soon" in str(errors[2])
        assert await asyncio.to_thread(portal.run, ref.ask, 6) == 6
        assert portal.in_flight == 0


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
        await asyncio.wait_for(called.wait(), 30)

    assert "portal_call_failed" in caplog.text


@pytest.mark.parametrize("function", [asyncio.sleep, "no function", None])
async def test_a_callback_is_a_plain_function(function: Any) -> None:
    async with ActorSystem() as system:
        with pytest.raises(InvalidArgumentError, match="plain function"):
            await system.run_blocking(system.portal.call_soon, function)
        assert system.portal.in_flight == 0


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

        with pytest.raises(DeadlineExceededError, match="forever"):
            await system.run_blocking(lambda: system.portal.run(forever, timeout=0.001))
        await asyncio.wait_for(ended.wait(), 30)
        future = await system.run_blocking(system.portal.start, forever)
        assert future.cancel()
        await turns(20)
        assert "accel-portal-call" not in accel_tasks()


async def test_a_timeout_of_the_coroutine_itself_is_raised_as_it_is() -> None:
    own = TimeoutError("its own")

    async def times_out() -> None:
        raise own

    async with ActorSystem() as system:
        with pytest.raises(TimeoutError, match="its own") as caught:
            await system.run_blocking(lambda: system.portal.run(times_out, timeout=30))

    assert caught.value is own


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
        return Portal(Home("a test"), asyncio.TaskGroup())

    portal = asyncio.run(make())

    error = in_thread(lambda: portal.call_soon(int))
    assert isinstance(error, ClosedError)
    assert "loop" in str(error)


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
