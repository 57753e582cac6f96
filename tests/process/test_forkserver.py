"""Children that are forked of a forkserver: they are what started ones are, they outlive it and not this process, and what cannot be forked is started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import random
import re
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.actors import ActorSystem
from accel.cpu.backend import CpuBackend
from accel.process.child import ChildProcess
from accel.process.exit_status import ExitStatus
from accel.process.forkserver_client import ForkserverClient
from accel.remote.preloading import Preload, preload
from accel.testing import FaultPlan
from tests.child_support import OURS, ROOT, descriptors, ended, forkservers, limit_for, links_of, no_child_left, received, until_so, workers
from tests.device_support import child_pid
from tests.fork_support import Double, Quiet, Threaded, close_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["no_child_left"]

pytestmark = pytest.mark.usefixtures("nothing_left", "no_child_left")

OFTEN = accel.RestartStrategy(max_restarts=20, backoff=(0.0, 0.0))
PREPARE = "tests.fork_support:prepare"


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    found = [getattr(record, "accel", {}) for record in caplog.records]
    return [each for each in found if each.get("event") == name]


@contextlib.asynccontextmanager
async def forks(system: ActorSystem, *imports: str, seen: list[ExitStatus] | None = None) -> AsyncIterator[ForkserverClient]:
    """Start a forkserver, and have it import modules."""
    found = await ForkserverClient.start(system, PREPARE, (seen if seen is not None else []).append, close_all)
    try:
        for each in imports or ("sys",):  # a fork is waited for as long as one takes, and no start of Python
            await found.prepare(each.encode(), 60.0)
        yield found
    finally:
        await found.aclose()


async def forked(found: ForkserverClient, target: str, *, uvloop: bool = False, seen: list[ExitStatus] | None = None) -> ChildProcess:
    child = await found.fork(f"{OURS}{target}", uvloop=uvloop, on_exit=(seen if seen is not None else []).append)
    assert child is not None
    return child


async def about(child: ChildProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await received(child))
    assert (await child.aclose(grace=20.0)) == ExitStatus(0, None, "")
    return found


# -- what a fork is


@pytest.mark.parametrize("uvloop", [False, True])
async def test_a_fork_holds_and_knows_what_a_started_child_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, uvloop: bool) -> None:
    ends = os.pipe()
    try:
        for end in ends:
            os.set_inheritable(end, True)
        async with ActorSystem() as system, forks(system, "numpy.random", "tests.child_programs", "uvloop") as found:
            other = await forked(found, "until_end")
            # All of it changes after the forkserver was started.
            monkeypatch.setenv("PYTHONPATH", "/only/of/the/parent")
            monkeypatch.setenv("ACCEL_TEST", "\udcff=1")
            monkeypatch.delenv("HOME", raising=False)
            monkeypatch.syspath_prepend(tmp_path / "added")
            started = await about(await ChildProcess.start(system, f"{OURS}describes_itself", uvloop=uvloop))
            child = await forked(found, "describes_itself", uvloop=uvloop)
            mine = await about(child)
            assert await other.aclose() == ExitStatus(0, None, "")
    finally:
        for end in ends:
            os.close(end)
    assert mine["sid"] == mine["pid"] == child.pid
    for key in ("env", "path", "cwd", "umask", "signals", "blocked", "loop", "inheritable", "sigint"):
        assert mine[key] == started[key], key
    assert mine["env"]["ACCEL_TEST"] == "\udcff=1"
    assert "HOME" not in mine["env"]

    def kinds(told: dict[str, Any]) -> list[str]:
        return sorted(target.partition("[")[0] for target in told["fds"].values())

    # Besides what a started child has, a fork has its lifeline.
    assert kinds(mine) == sorted([*kinds(started), "socket:"])
    assert mine["fds"]["0"] == "/dev/null"
    assert mine["fds"]["1"] == mine["fds"]["2"]
    assert "numpy" in mine["modules"]
    assert "numpy" not in started["modules"]


async def test_imports_are_done_once_and_random_numbers_differ() -> None:
    async with ActorSystem() as system, forks(system, "numpy.random", "tests.fork_support") as found:
        told = [await about(await forked(found, "draws")) for _ in range(3)]
    assert len({each["imported_by"] for each in told}) == 1
    assert told[0]["imported_by"] == found.child.pid
    assert len({each["random"] for each in told}) == len({each["numpy"] for each in told}) == 3
    assert {each["random"] for each in told}.isdisjoint({random.random()})


async def test_blas_has_its_threads_again_and_computes_the_same(rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 30))
    async with ActorSystem() as system, forks(system, "numpy") as found:
        started = await about(await multiplied(await ChildProcess.start(system, f"{OURS}multiplies"), seed))
        mine = await about(await multiplied(await forked(found, "multiplies"), seed))
    a = np.random.default_rng(seed).standard_normal((700, 700))
    np.testing.assert_allclose(float(mine["sum"]), np.abs(a @ a).sum(), rtol=1e-12)
    assert mine["threads"] == started["threads"]


async def multiplied(child: ChildProcess, seed: int) -> ChildProcess:
    child.sock.send(f"{seed}\n".encode())
    return child


# -- how it ends


async def test_how_a_fork_ends_is_known_at_once() -> None:
    async with ActorSystem() as system, forks(system, "tests.child_programs") as found:
        for target, status in (
            ("returns", (0, None)),
            ("exits", (17, None)),
            ("raises", (1, None)),
            ("sends_and_dies", (None, signal.SIGKILL)),
            ("faults", (None, signal.SIGSEGV)),
        ):
            seen: list[ExitStatus] = []
            child = await forked(found, target, seen=seen)
            got = await ended(child)
            assert await child.aclose() is got
            assert (got.code, got.signal) == status, target
            assert seen == [got], target
            if target == "faults":
                assert "child_programs.py" in got.stderr
            if target == "raises":
                assert "LookupError: no such thing" in got.stderr


async def test_killing_a_fork_tells_the_signal_also_while_the_forkserver_imports() -> None:
    async with ActorSystem() as system, forks(system, "tests.child_programs") as found:
        children = [await forked(found, "ignores_socket") for _ in range(2)]
        for child in children:
            assert await received(child) == b"ready\n"
        children[0].kill()
        assert (await ended(children[0])).signal == signal.SIGKILL
        importing = asyncio.create_task(found.prepare(b"import time; end = time.monotonic() + 3\nwhile time.monotonic() < end: pass", 60.0))
        await asyncio.sleep(0)
        children[1].kill()
        assert (await ended(children[1], 2.0)).signal == signal.SIGKILL
        assert not found.is_ready
        assert not importing.done()
        for child in children:
            await child.aclose()
        importing.cancel()
        await asyncio.wait({importing})


async def test_forks_outlive_the_forkserver_and_their_end_is_seen_without_a_status() -> None:
    gone: list[ExitStatus] = []
    async with ActorSystem() as system, forks(system, seen=gone) as found:
        child = await forked(found, "echo")
        os.kill(found.child.pid, signal.SIGKILL)
        assert (await ended(found.child)).signal == signal.SIGKILL
        assert len(gone) == 1
        assert not found.is_ready
        assert await found.fork(f"{OURS}echo", uvloop=False, on_exit=gone.append) is None
        child.sock.send(b"still here\n")
        assert await received(child) == b"still here\n"
        child.kill()
        status = await ended(child)
        await child.aclose()
    assert (status.code, status.signal) == (None, None)
    assert "forkserver" in status.describe()


@pytest.mark.parametrize(("target", "order"), [("ignores_socket", "with"), ("spins_in_c", "after"), ("sleeps_in_c", "with")])
def test_nothing_is_left_of_a_process_that_is_killed(target: str, order: str) -> None:
    command = [sys.executable, "-m", "tests.fork_support", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdout is not None
        pids = [int(each) for each in program.stdout.readline().split()]
        handles = [os.pidfd_open(pid) for pid in pids]
        try:
            if order == "after":  # the forkserver first
                os.kill(pids[0], signal.SIGKILL)
            program.kill()
            for handle in handles:
                assert gone_within(handle, 2.0)
        finally:
            for handle in handles:
                os.close(handle)


def gone_within(handle: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def _kinds_of_descriptors(pid: int) -> list[str]:
    """Return the sorted kinds of what a process holds, such as ``"socket:"``, less what it closes meanwhile."""
    return sorted(link.partition("[")[0] for link in links_of(pid).values())


async def test_the_forkserver_holds_nothing_of_this_process_and_the_fork_nothing_of_it() -> None:
    async with ActorSystem() as system, forks(system, "numpy") as found:
        children = [await forked(found, "ignores_socket") for _ in range(3)]
        for child in children:
            assert await received(child) == b"ready\n"
        # Its own socket, and the lifelines of its children. What it has sent is closed after the child has begun.
        expected = sorted(["/dev/null", "pipe:", "pipe:", *["socket:"] * 4])
        await until_so(lambda: _kinds_of_descriptors(found.child.pid) == expected, f"{expected} are what it holds")
        for child in children:
            child.kill()
            await ended(child)
            await child.aclose()
        await until_so(lambda: len(os.listdir(f"/proc/{found.child.pid}/fd")) == len(expected) - 3, "the end of the lifelines")
        assert len(os.listdir(f"/proc/{found.child.pid}/task")) == 1


# -- what cannot be forked


async def test_a_thread_of_an_import_is_found_and_nothing_is_forked() -> None:
    async with ActorSystem() as system, forks(system, "numpy", "tests.fork_thread") as found:
        assert re.fullmatch(r"threads run besides its own: .+", found.refusal)
        assert not found.is_ready
        assert await found.fork(f"{OURS}echo", uvloop=False, on_exit=lambda status: None) is None


def thread_names(pid: int) -> set[str]:
    """Return the names of a process's threads, as the kernel has them."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # it has ended
            found.add(Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip())
    return found


async def test_the_thread_of_pyarrows_jemalloc_does_not_keep_it_from_forking(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ActorSystem() as system, forks(system, "tests.fork_jemalloc") as found:
        assert found.refusal == "threads run besides its own: jemalloc_bg_thd"
    monkeypatch.setenv("TESTS_PYARROW", "1")
    async with ActorSystem() as system, forks(system, "tests.fork_jemalloc") as found:
        assert "jemalloc_bg_thd" in thread_names(found.child.pid)
        child = await forked(found, "echo")
        names = thread_names(child.pid)  # it starts one of its own
        child.kill()
        await ended(child)
        await child.aclose()
        assert names
        assert "jemalloc_bg_thd" not in names
        assert not found.refusal
    async with ActorSystem() as system, forks(system, "tests.fork_jemalloc", "tests.fork_thread") as found:
        assert found.refusal
        assert "jemalloc" not in found.refusal


async def test_what_an_import_raises_is_told_and_is_no_reason_not_to_fork() -> None:
    async with ActorSystem() as system, forks(system) as found:
        for code, error in ((b"no_such_module_at_all", "ModuleNotFoundError"), (b"import sys; sys.exit(3)", "SystemExit")):
            assert error in await found.prepare(code, 60.0)
            assert not found.refusal
        child = await forked(found, "until_end")  # one that returns at once may have ended before it is known
        assert (await child.aclose(grace=20.0)).code == 0


async def test_a_forkserver_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.process.forkserver_client._FORK_TIMEOUT", 0.3)
    async with ActorSystem() as system, forks(system, "numpy") as found:
        os.kill(found.child.pid, signal.SIGSTOP)
        assert await found.fork(f"{OURS}echo", uvloop=False, on_exit=lambda status: None) is None
        assert (await ended(found.child)).signal == signal.SIGKILL


async def test_a_fork_that_runs_out_of_descriptors_leaves_nothing_and_the_next_one_is_answered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    errors: list[accel.AccelError] = []
    async with ActorSystem() as system, forks(system, "tests.child_programs") as found:
        await (await forked(found, "until_end")).aclose(grace=20.0)
        before = descriptors()
        for free in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(free), hard))
            try:
                child = await forked(found, "until_end")
            except (accel.BackendUnavailableError, accel.OutOfMemoryError) as error:
                errors.append(error)
            else:
                await child.aclose(grace=20.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert descriptors() == before, f"{free} descriptors free"
            await (await forked(found, "until_end")).aclose(grace=20.0)
    assert {error.code for error in errors} == {"EMFILE"}
    assert {type(error) for error in errors} == {accel.BackendUnavailableError, accel.OutOfMemoryError}


# -- a device


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        device = await system.open_device("cpu", **{"host": "process", "standby": "context", "restart": OFTEN, **options})
        assert await device.spare_ready()
        yield device


async def kill_and_recover(device: accel.Device) -> None:
    generation = device.generation
    os.kill(child_pid(device), signal.SIGKILL)
    await until_so(lambda: device.generation == generation + 1, "the next generation")
    x = await asyncio.wait_for(device.put(np.arange(4.0)), 20)
    np.testing.assert_array_equal(await device.get(x), np.arange(4.0))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_spares_are_forked_and_a_killed_forkserver_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="accel")
    async with opened() as device:
        (first,) = forkservers()
        assert {parent(pid) for pid in workers()} == {first}
        for _ in range(3):
            await kill_and_recover(device)
            assert await device.spare_ready()
        assert {parent(pid) for pid in workers()} == {first}
        os.kill(first, signal.SIGKILL)
        await until_so(lambda: events(caplog, "forkserver_lost"), "the log")
        await kill_and_recover(device)
        await until_so(lambda: forkservers() and len(events(caplog, "forkserver_ready")) == 2, "another forkserver")
        await kill_and_recover(device)
        assert await device.spare_ready()
        (second,) = forkservers()
        assert second != first
        assert second in {parent(pid) for pid in workers()}
    assert not workers()
    assert not forkservers()


async def test_a_quarantine_has_the_forkserver_of_its_device() -> None:
    async with opened() as device, device.quarantine() as other:
        assert await other.spare_ready()
        assert len(forkservers()) == 1
        await kill_and_recover(other)
        assert {parent(pid) for pid in workers() - {child_pid(device)}} == forkservers()


async def test_a_library_that_starts_a_thread_has_the_children_started(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="accel")
    async with opened(standby="model") as device:
        await asyncio.gather(device.register(Threaded), device.register(Quiet))
        await until_so(lambda: events(caplog, "forkserver_given_up") and not forkservers(), "its end")
        (told,) = events(caplog, "forkserver_given_up")
        assert told["library"] == "threaded"
        assert "threads" in told["reason"]
        assert "import" in told["remedy"]
        for _ in range(2):
            assert await device.spare_ready()
            await kill_and_recover(device)
            x = await device.put(np.arange(4.0))
            np.testing.assert_array_equal(await device.get(await device.run(Double(x))), 2 * np.arange(4.0))
        assert not events(caplog, "forkserver_lost")


async def test_a_backend_that_starts_a_thread_has_its_children_started(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel.remote.forkserver.TARGET", "tests.fork_thread:serve")
    async with opened() as device:
        (told,) = events(caplog, "forkserver_given_up")
        await until_so(lambda: not forkservers(), "its end")
        assert "threads" in told["reason"]
        for _ in range(2):
            await kill_and_recover(device)
            assert await device.spare_ready()
        assert {parent(pid) for pid in workers()} == {os.getpid()}
        assert len(events(caplog, "forkserver_given_up")) == 1


def test_a_driver_that_was_initialized_is_found(tmp_path: Path) -> None:
    class Driven(CpuBackend):
        device_files = (str(tmp_path / "driver"),)

    data = pickle.dumps(Preload("accel.cpu.backend:CpuBackend"))
    assert preload(data) == ""
    file = tmp_path / "driver0"
    file.touch()
    with pytest.MonkeyPatch.context() as patch, file.open():
        patch.setattr("accel.cpu.backend.CpuBackend", Driven)
        assert str(file) in preload(data)


async def test_without_a_spare_the_forkserver_imports_what_is_built_in() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        (forkserver,) = forkservers()
        model = await device.load_model(
            "tests.fork_support:Importing", inputs={"x": accel.TensorSpec(("batch",), "float32")}, buckets={"batch": (1,)}
        )
        for _ in range(2):
            assert [parent(pid) for pid in workers()] == [forkserver]
            assert (await model.numpy(np.zeros(1, np.float32))).tolist() == [child_pid(device)], "where the model's module was imported"
            await kill_and_recover(device)
    assert not forkservers()


async def test_a_device_that_moves_to_a_child_has_no_forkserver_without_a_spare() -> None:
    lost = accel.DriverError("illegal address", code=700, scope=accel.FaultScope.PROCESS)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="auto", faults=FaultPlan().poison_at(1, lost))
        with pytest.raises(accel.ContextPoisonedError):
            await device.put(np.arange(4.0))
        await asyncio.wait_for(device.zeros(4), 20)
        assert device.info().host == "process"
        assert not forkservers()


@pytest.mark.parametrize("is_told", [True, False])
async def test_forks_need_not_import_what_a_model_says(is_told: bool) -> None:
    async with opened(standby="model") as device:
        imports = ("tests.late_import",) if is_told else ()
        inputs = {"x": accel.TensorSpec(("batch",), "float32")}
        model = await device.load_model("tests.fork_support:Importing", inputs=inputs, buckets={"batch": (1,)}, imports=imports)
        x = np.zeros(1, np.float32)
        assert (await model.numpy(x)).tolist() == [child_pid(device)]
        for _ in range(2):  # the first spare was forked before there was the model
            assert await device.spare_ready()
            await kill_and_recover(device)
        (forkserver,) = forkservers()
        assert (await model.numpy(x)).tolist() == [forkserver if is_told else child_pid(device)]
