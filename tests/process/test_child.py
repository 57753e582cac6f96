"""Child processes: how they begin, what they hold, how they end, and how that is seen; nothing is left, also when that fails or is cancelled."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.actors import ActorSystem
from accel.process.child import ChildProcess
from accel.process.exit_status import ExitStatus
from tests.child_support import OURS, children, ended, held, limit_for, no_child_left, received, until_so
from tests.device_support import failure, until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


__all__ = ["no_child_left"]


pytestmark = [
    pytest.mark.usefixtures("nothing_left", "no_child_left"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),  # what waits at the gate has to be called in between
]


async def test_a_child_that_returns_exits_with_0() -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}returns")
        assert await ended(child) == ExitStatus(0, None, "")
        assert await child.aclose() == ExitStatus(0, None, "")


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        (f"{OURS}raises", 1, "LookupError: no such thing"),
        (f"{OURS}exits", 17, ""),
        (f"{OURS}no_such_function", 65, "AttributeError: module 'tests.child_programs' has no attribute 'no_such_function'"),
        ("no_such_module_at_all:main", 65, "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        (f"{OURS}PR_SET_PDEATHSIG", 65, "TypeError: tests.child_programs:PR_SET_PDEATHSIG is no function"),
        (f"{OURS}writes_much", 1, "LookupError: after much"),
    ],
)
async def test_an_end_with_an_error_says_why(target: str, code: int, said: str) -> None:
    seen: list[ExitStatus] = []
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, target, on_exit=seen.append)
        status = await ended(child)
        await child.aclose()
    assert seen == [status]
    assert (status.code, status.signal) == (code, None)
    assert said in status.describe()
    assert len(status.stderr) <= 32768
    error = status.error(device="cpu:0")
    assert isinstance(error, accel.HostDiedError)
    assert (error.exit_code, error.signal, error.device) == (code, None, "cpu:0")
    assert f"exit code {code}" in str(error)
    assert said in str(error)


async def test_a_segmentation_fault_shows_where() -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}faults")
        status = await ended(child)
        await child.aclose()
    assert (status.code, status.signal) == (None, signal.SIGSEGV)
    assert "child_programs.py" in status.stderr
    assert "SIGSEGV" in status.describe()


async def test_a_killed_child_is_seen_at_once_and_reported_once() -> None:
    seen: list[ExitStatus] = []
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}ignores_socket", on_exit=seen.append)
        assert await received(child) == b"ready\n"
        before = time.perf_counter()
        child.kill()
        child.kill()
        status = await ended(child)
        print(f"seen after {(time.perf_counter() - before) * 1e3:.1f} ms")
        child.kill()
        assert status is child.exit
        assert await child.aclose() is await child.aclose() is status
    assert seen == [status]
    assert (status.code, status.signal) == (None, signal.SIGKILL)
    assert status.error().signal == signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_sigterm_ends_it_and_sigint_does_not(number: signal.Signals) -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}echo")
        child.sock.send(b"1\n")
        assert await received(child) == b"1\n"
        os.kill(child.pid, number)
        if number == signal.SIGTERM:
            assert (await ended(child)).signal == signal.SIGTERM
        else:
            child.sock.send(b"2\n")
            assert await received(child) == b"2\n"
        await child.aclose(grace=20.0)
    assert child.exit == (ExitStatus(None, signal.SIGTERM) if number == signal.SIGTERM else ExitStatus(0, None))


async def test_what_it_sent_before_it_died_can_be_read_before_on_exit() -> None:
    got = bytearray()
    got_then: list[int] = []
    loop = asyncio.get_running_loop()
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}sends_and_dies", on_exit=lambda status: got_then.append(len(got)))
        loop.add_reader(child.sock, lambda: got.extend(child.sock.recv(1000)))
        status = await ended(child)
        await child.aclose()
    assert status.signal == signal.SIGKILL
    assert got_then == [100_000]


@pytest.mark.parametrize("refused", [1, 2])
async def test_a_process_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    loop, calls = asyncio.get_running_loop(), itertools.count(1)
    add_reader = loop.add_reader

    def refuse(fd: Any, *rest: Any) -> None:
        if next(calls) == refused:
            raise OSError(errno.ENOSPC, "planted: the selector is full")
        add_reader(fd, *rest)

    async with ActorSystem() as system:
        await system.run_blocking(int)  # what it opens itself is open
        before = children()
        monkeypatch.setattr(loop, "add_reader", refuse)
        error = await failure(ChildProcess.start(system, f"{OURS}echo"), accel.BackendUnavailableError)
        assert error.code == "ENOSPC"
        assert children() == before


async def test_on_exit_does_not_wait_for_ever_for_a_socket_that_nobody_reads() -> None:
    seen: list[ExitStatus] = []
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}sends_and_dies", on_exit=seen.append)
        assert (await ended(child)).signal == signal.SIGKILL
        assert seen == [child.exit]
        assert len(child.sock.recv(1_000_000)) > 0
        await child.aclose()


async def test_a_failing_on_exit_keeps_nobody_waiting() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    def fail(status: ExitStatus) -> None:
        raise LookupError("in on_exit")

    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}returns", on_exit=fail)
        assert (await ended(child)).code == 0
        await child.aclose()
    assert [type(context["exception"]) for context in reported] == [LookupError]


@pytest.mark.parametrize("target", ["ignores_socket", "spins_in_c", "sleeps_in_c"])
async def test_closing_ends_a_child_that_does_not_end(target: str) -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}{target}")
        assert await received(child) == b"ready\n"
        async with asyncio.timeout(30):
            status = await child.aclose(grace=0.05)
    assert status.signal == signal.SIGKILL


async def test_cancelling_the_close_kills() -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}ignores_socket")
        assert await received(child) == b"ready\n"
        closing = asyncio.create_task(child.aclose(grace=1000.0))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (await ended(child)).signal == signal.SIGKILL


async def test_the_child_dies_with_its_system() -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}ignores_socket")
        assert await received(child) == b"ready\n"
    assert (await ended(child)).signal == signal.SIGKILL
    await child.aclose()


async def test_what_a_child_holds_and_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/only/of/the/parent")
    ends = os.pipe()
    try:
        for end in ends:
            os.set_inheritable(end, True)
        async with ActorSystem() as system:
            child = await ChildProcess.start(system, f"{OURS}describes_itself", env={"ACCEL_TEST": "1"})
            about = json.loads(await received(child))
            assert not os.get_inheritable(child.sock.fileno())
            assert (await child.aclose(grace=20.0)).code == 0
    finally:
        for end in ends:
            os.close(end)
    others = {fd: target for fd, target in about["fds"].items() if int(fd) not in (0, 1, 2, about["sock"])}
    # What the loop itself needs: its set, and a socket pair.
    assert [target for target in others.values() if not target.startswith("socket:")] == ["anon_inode:[eventpoll]"]
    assert len([target for target in others.values() if target.startswith("socket:")]) == 2, others
    assert about["fds"]["0"] == "/dev/null"
    assert about["fds"]["1"] == about["fds"]["2"]
    assert about["fds"]["1"].startswith("pipe:")
    assert about["sid"] == about["pid"] == child.pid
    assert about["inheritable"] == []
    assert about["sigint"]
    assert about["env"]["ACCEL_TEST"] == "1"
    assert about["env"]["PYTHONPATH"] == "/only/of/the/parent"
    assert about["path"] == list(dict.fromkeys(path or os.getcwd() for path in sys.path))
    loaded = {name.partition(".")[0] for name in about["modules"]}
    assert not loaded & {"numpy", "uvloop", "ml_dtypes"}
    assert "accel.device" not in about["modules"]


async def test_where_memory_runs_out_the_kernel_ends_a_child_before_its_parent() -> None:
    def score(pid: int | str) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}ignores_socket")
        await until_so(lambda: score(child.pid) == min(score("self") + 300, 1000))
        await child.aclose(grace=0.0)


async def test_the_package_is_whole_in_a_child_that_uses_it() -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}uses_accel")
        got = await received(child)
        status = await child.aclose(grace=20.0)
    assert status == ExitStatus(0, None, "")
    assert json.loads(got) == [False, [], "module 'accel' has no attribute 'no_such_name'", True]


def test_both_kinds_of_loop(run_on_loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
    seen: list[ExitStatus] = []

    async def main() -> None:
        name = type(asyncio.get_running_loop()).__module__
        async with ActorSystem() as system:
            uses = name.startswith("uvloop")
            child = await ChildProcess.start(system, f"{OURS}describes_itself", uvloop=uses, on_exit=seen.append)
            about = json.loads(await received(child))
            assert about["loop"].startswith("uvloop" if uses else "asyncio")
            dying = await ChildProcess.start(system, f"{OURS}sends_and_dies", on_exit=seen.append)
            assert len(await received(dying)) == 100_000
            assert (await ended(dying)).signal == signal.SIGKILL
            await dying.aclose()
            assert (await child.aclose(grace=20.0)).code == 0

    run_on_loop(main)
    assert [(status.code, status.signal) for status in seen] == [(None, signal.SIGKILL), (0, None)]


async def test_a_stolen_exit_status_is_admitted() -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}ignores_socket")
        assert await received(child) == b"ready\n"
        child.kill()
        os.waitpid(child.pid, 0)
        status = await ended(child)
        await child.aclose()
    assert (status.code, status.signal) == (None, None)
    assert "exit status is not known" in status.describe()


def test_a_crash_is_told_by_the_first_lines_of_its_report() -> None:
    frames = [f'  File "/lib/asyncio/events.py", line {number} in _run' for number in range(200)]
    report = [
        "a warning",
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x02 (most recent call first):",
        '  File "/other.py", line 1 in wait',
        "",
        "Current thread 0x01 (most recent call first):",
        '  File "/model.py", line 7 in run',
    ]
    told = ExitStatus(None, 11, "\n".join((*report, *frames))).describe()
    assert "Fatal Python error: Segmentation fault" in told
    assert '"/model.py", line 7 in run' in told
    assert "line 199" not in told
    assert "/other.py" not in told


async def test_many_starts_and_ends_leave_nothing() -> None:
    milliseconds = []
    async with ActorSystem() as system:
        await (await ChildProcess.start(system, f"{OURS}returns")).aclose(grace=20.0)
        before = held()
        for number in range(16):
            begun = time.perf_counter()
            child = await ChildProcess.start(system, f"{OURS}{'returns' if number % 2 else 'ignores_socket'}")
            if number % 2:
                await ended(child)
                milliseconds.append((time.perf_counter() - begun) * 1e3)
            await child.aclose(grace=0.0)
        assert held() == before
    print(f"an empty target, start to end: median {statistics.median(milliseconds):.0f} ms")


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    async with ActorSystem() as system:
        await (await ChildProcess.start(system, f"{OURS}returns")).aclose(grace=20.0)
        before = held()
        for turns in range(12):
            start = asyncio.create_task(ChildProcess.start(system, f"{OURS}ignores_socket"))
            for _ in range(turns % 4):
                await asyncio.sleep(0.001 * (turns // 4))
            start.cancel()
            try:
                child = await start
            except asyncio.CancelledError:
                continue
            await child.aclose(grace=0.0)
        assert held() == before


async def test_running_out_of_descriptors_is_told_and_leaves_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    errors: list[accel.BackendUnavailableError] = []
    async with ActorSystem() as system:
        await (await ChildProcess.start(system, f"{OURS}returns")).aclose(grace=20.0)
        before = held()
        for free in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(free), hard))
            try:
                child = await ChildProcess.start(system, f"{OURS}returns")
            except accel.BackendUnavailableError as error:
                errors.append(error)
            else:
                await child.aclose(grace=20.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert held() == before, f"{free} descriptors free"
    assert 3 <= len(errors) < 12
    assert {error.code for error in errors} == {"EMFILE"}
    assert all("ulimit -n" in str(error) for error in errors)


async def test_running_out_of_processes_or_threads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit itself does not bind a privileged user, so the refusals are made up.
    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with ActorSystem() as system:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(accel.BackendUnavailableError, match="ulimit -u"):
                await ChildProcess.start(system, f"{OURS}returns")
        await (await ChildProcess.start(system, f"{OURS}returns")).aclose(grace=20.0)
        before = held()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            with pytest.raises(accel.BackendUnavailableError, match="ulimit -u") as caught:
                await ChildProcess.start(system, f"{OURS}returns")
        assert caught.value.code == "EAGAIN"
        assert held() == before
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "")
            with pytest.raises(accel.BackendUnavailableError, match=r"sys\.executable"):
                await ChildProcess.start(system, f"{OURS}returns")
        child = await ChildProcess.start(system, f"{OURS}returns")
        assert (await child.aclose(grace=20.0)).code == 0


def _wait_at(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return what new processes wait for."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=partial(_wait_at, str(path))))
    monkeypatch.setattr("accel.process.child._START_TIMEOUT", 2.0)
    return path


async def let_in(gate: Path) -> None:
    """Let the process go on that waits, or will."""

    def is_in() -> bool:
        try:
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # no reader waits yet
            return False
        return True

    await until(is_in, "a child at the gate")


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0]


def starting(system: ActorSystem) -> asyncio.Task[ChildProcess]:
    return asyncio.create_task(ChildProcess.start(system, f"{OURS}ignores_socket"))


async def test_one_that_does_not_begin_is_given_up_and_ends_if_it_ever_begins(gate: Path) -> None:
    async with ActorSystem() as system:
        began, turns = time.monotonic(), 0
        start, waiting = starting(system), starting(system)
        while not start.done():
            await asyncio.sleep(0.01)
            turns += 1
            assert time.monotonic() - began < 30
        for each in (start, waiting):
            error = await failure(each, accel.BackendUnavailableError)
            assert error.code == "ETIMEDOUT"
            assert "SIGSTOP" in str(error)
        assert turns > 20, "the loop was held up"
        assert len(children()) == 1
        await let_in(gate)
        await until(lambda: not children(), "its end")


async def test_one_that_was_stopped_and_goes_on_in_time_is_as_good_as_any(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.process.child._START_TIMEOUT", 30.0)
    async with ActorSystem() as system:
        start = starting(system)
        await until(children, "a process")
        (pid,) = children()
        await until(lambda: state(pid) == "S", "waiting at the gate")
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: state(pid) == "T", "being stopped")
        assert not start.done()
        os.kill(pid, signal.SIGCONT)
        await let_in(gate)
        child = await asyncio.wait_for(start, 20)
        assert child.pid == pid
        assert await received(child) == b"ready\n"
        await child.aclose(grace=0.0)
