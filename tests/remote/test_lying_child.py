"""A child that lies, or says nothing: what it is asked for ends, and the next child has the durable data."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel.ops import Plan, Spec
from accel.remote import link
from tests import lying_child
from tests.device_support import generation

pytestmark = pytest.mark.usefixtures("nothing_left")


PATIENCE = 20.0
"""Seconds for what takes a second, on a machine that has much else to do."""


@pytest.mark.parametrize("lie", ["busy", "toggling"])
async def test_what_a_child_says_of_being_busy_puts_a_hang_off_only_so_long(
    lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host=accel.ProcessHost(busy_timeout=0.5), hang_timeout=0.3)
        began = time.monotonic()
        with pytest.raises(accel.ContextPoisonedError, match="hung"):
            await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert time.monotonic() - began >= 0.5, "being busy counts for nothing"
        await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


@pytest.mark.parametrize("lie", ["deaf", "deaf to ops"])
async def test_a_successor_that_does_not_take_durable_memory_over_is_replaced(
    lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host=accel.ProcessHost(busy_timeout=1.0))
        kept = await device.put(np.arange(8.0), durable=True, checksum=True)
        lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
        pid = device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await generation(device, 2)
        assert (tmp_path / "told").exists(), "no child has lied"
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(kept), PATIENCE), np.arange(8.0))


@dataclass(frozen=True, eq=False, slots=True)
class Noop(accel.KernelOp):
    """Does nothing."""

    library: ClassVar[str] = "idle"
    kind: ClassVar[str] = "noop"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Idle(accel.KernelLibrary):
    """A library that does nothing."""

    name = "idle"

    @accel.kernel(Noop)
    def noop(self, op: Noop, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        pass


@pytest.mark.parametrize("step", ["register", "compile"])
async def test_a_step_that_is_never_answered_ends(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, "deaf", once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host=accel.ProcessHost(busy_timeout=0.5))
        asked = device.register(Idle) if step == "register" else device.compiler.compile("void nothing() {}", "nothing", parameters=())
        with pytest.raises(accel.ContextPoisonedError, match="hung"):
            await asyncio.wait_for(asked, PATIENCE)
        await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


@pytest.mark.parametrize("what", ["a layout that is deeply nested", "no layout"])
async def test_a_child_that_lies_about_a_kernel_is_replaced(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, what, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host="process")
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(device.compiler.compile("void nothing() {}", "nothing", parameters=()), PATIENCE)
        await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "soon"])
def test_a_bound_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="busy_timeout"):
        accel.ProcessHost(busy_timeout=seconds)


GAP = 2.5
"""Seconds for which no other callback of the loop may run, on such a machine. The socket lingers for five."""


async def worst_gap(done: asyncio.Event) -> float:
    """Return the longest time between two turns of the loop until ``done``."""
    worst, last = 0.0, time.monotonic()
    while not done.is_set():
        await asyncio.sleep(0)
        now = time.monotonic()
        worst, last = max(worst, now - last), now
    return worst


@pytest.mark.parametrize(
    "lie",
    [
        "a connection that lingers, many times",
        "a connection that lingers, announced by nothing",
        "a connection that lingers, after nonsense",
    ],
)
async def test_a_descriptor_that_nobody_asked_for_ends_the_child_and_blocks_nothing(
    lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host="process")
        done = asyncio.Event()
        gap = asyncio.ensure_future(worst_gap(done))
        try:
            await asyncio.wait_for(asyncio.gather(device.zeros(4), return_exceptions=True), PATIENCE)
            await generation(device, 2)
            await asyncio.wait_for(device.zeros(4), PATIENCE)
        finally:
            done.set()
            worst = await gap
        assert worst < GAP
        assert device.state is accel.DeviceState.READY


def run_program(name: str, descriptors: int) -> None:
    """Run a function of this file in a process with a limit of descriptors."""
    code = f"import asyncio; from {__name__} import {name} as program; asyncio.run(program())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]


def open_descriptors() -> int:
    """Count them."""
    return len(os.listdir("/proc/self/fd"))


async def flooded() -> None:
    """Have a child announce more memory than there may be descriptors."""
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        name = lying_child.install(monkeypatch, Path(folder))
        lying_child.lie(monkeypatch, "memory without end", once=Path(folder) / "told")
        async with accel.System(close_timeout=1.0) as system:
            device = await system.open_device(name, host="process")
            before = most = open_descriptors()
            asked = asyncio.gather(device.zeros(4), return_exceptions=True)
            async with asyncio.timeout(PATIENCE):
                while not asked.done():
                    await asyncio.sleep(0)
                    most = max(most, open_descriptors())
            (error,) = await asked
            assert isinstance(error, accel.ContextPoisonedError), repr(error)
            assert most <= before + 256 // 2 + 64, f"{most} descriptors, {before} before"
            await generation(device, 2)
            await asyncio.wait_for(device.zeros(4), PATIENCE)
            async with asyncio.timeout(PATIENCE):
                while open_descriptors() > before + 16:
                    await asyncio.sleep(0)


def test_a_child_cannot_fill_the_table_of_descriptors() -> None:
    run_program("flooded", 256)


async def many_slabs() -> None:
    """Make more durable slabs than there may be, in a child that may have any number of descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 1024))
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        for pid in (device.info().pid, os.getpid()):
            assert pid is not None
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, 1024))
        refs = [await device.empty((60 << 20,), "int8", durable=True) for _ in range(24)]
        with pytest.raises(accel.DriverError, match="ulimit -n") as caught:
            await device.empty((60 << 20,), "int8", durable=True)
        assert (caught.value.code, caught.value.retryable) == ("EMFILE", True)
        del refs[-3:]
        refs.append(await asyncio.wait_for(device.empty((60 << 20,), "int8", durable=True), PATIENCE))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)


def test_an_honest_child_is_told_how_many_slabs_there_may_be() -> None:
    run_program("many_slabs", 1024)


SOME = accel.RestartStrategy(max_restarts=4, within=600.0, backoff=(0.01, 0.02))


def kill(device: accel.Device) -> None:
    """Kill the child of the day."""
    pid = device.info().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def open_with_a_liar(
    system: accel.System, lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[accel.Device, accel.AccelRef]:
    """Open a device, put something durable there, and replace its child by one that lies. The one after it will not."""
    name = lying_child.install(monkeypatch, tmp_path)
    device = await system.open_device(name, host="process", restart=SOME)
    kept = await device.put(np.arange(1000.0), durable=True)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    kill(device)
    await generation(device, 2)
    assert (tmp_path / "told").exists(), "no child has lied"
    return device, kept


@pytest.mark.parametrize(
    "lie",
    [
        "overlapping buffers",
        "nested buffers",
        "a buffer at an odd place",
        "the same memory twice",
        "more memory than there is",
        "memory that can shrink",
    ],
)
async def test_what_can_be_seen_to_be_wrong_ends_the_child(lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with accel.System(close_timeout=1.0) as system:
        device, kept = await open_with_a_liar(system, lie, monkeypatch, tmp_path)
        with pytest.raises(accel.ContextPoisonedError) as caught:
            _ = [await asyncio.wait_for(device.zeros(8, durable=True), PATIENCE) for _ in range(3)]
        cause = caught.value.__cause__
        assert isinstance(cause, accel.HostDiedError)
        assert (cause.exit_code, cause.signal) == (None, None), "the child has ended by itself"
        await generation(device, 3)
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(kept), PATIENCE), np.arange(1000.0))
        await asyncio.wait_for(device.put(np.arange(5.0), durable=True), PATIENCE)


@pytest.mark.parametrize("lie", ["no memory", "no memory, and a lot of it"])
async def test_what_only_the_next_child_can_see_costs_those_buffers(lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with accel.System(close_timeout=1.0) as system:
        device, kept = await open_with_a_liar(system, lie, monkeypatch, tmp_path)
        before = device.info().memory.durable
        refs = [await asyncio.wait_for(device.zeros(8, durable=True), PATIENCE) for _ in range(2)]
        kill(device)
        await generation(device, 3)
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(kept), PATIENCE), np.arange(1000.0))
        for ref in refs:
            assert ref.is_stale
            with pytest.raises(accel.StaleRefError) as caught:
                await asyncio.wait_for(device.get(ref), PATIENCE)
            assert caught.value.reason == "torn"
            with pytest.raises(accel.StaleRefError) as caught:
                await asyncio.wait_for(device.put(np.zeros(8, np.float32), out=ref), PATIENCE)
            assert caught.value.reason == "torn"
            assert "drop it" in caught.value.remedy.lower()
        assert device.info().memory.durable == before
        del ref, refs
        again = await asyncio.wait_for(device.put(np.arange(5.0), durable=True), PATIENCE)
        assert device.info().memory.durable > before
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(again), PATIENCE), np.arange(5.0))


CHARACTERS = 1 << 17
"""Of one error, all its texts and its causes together."""


def characters(error: BaseException | None) -> int:
    """Return how long the texts of an error, its notes and its causes are."""
    count, seen = 0, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        count += len(repr(error.args)) + len(repr(error.__dict__))
        error = error.__cause__
    return count


@pytest.mark.parametrize("lie", ["errors of a megabyte", "errors of many megabytes"])
async def test_errors_of_a_lying_child_are_short(lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host="process")
        found = await asyncio.wait_for(asyncio.gather(*(device.zeros(4) for _ in range(20)), return_exceptions=True), PATIENCE)
        errors = [each for each in found if isinstance(each, accel.ContextPoisonedError)]
        assert len(errors) == len(found)
        assert max(map(characters, errors)) < CHARACTERS
        is_killed = lie == "errors of many megabytes"  # no honest child says as much
        if is_killed:
            await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2 if is_killed else 1)


@dataclass(frozen=True, eq=False, slots=True)
class Complain(accel.KernelOp):
    """Fails at length."""

    library: ClassVar[str] = "complains"
    kind: ClassVar[str] = "complain"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Complains(accel.KernelLibrary):
    """A library whose errors show the data."""

    name = "complains"

    @accel.kernel(Complain)
    def complain(self, op: Complain, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        raise accel.LibraryError("the data is wrong: " + "0.0, " * 1_000_000, remedy="Give other data. " + "Not this. " * 100_000)


async def test_errors_of_an_honest_child_are_short_and_say_that_they_were_cut() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Complains)
        x = await device.zeros(4)
        found = await asyncio.wait_for(asyncio.gather(*(device.run(Complain(x)) for _ in range(20)), return_exceptions=True), PATIENCE)
        for error in found:
            assert isinstance(error, accel.LibraryError)
            assert characters(error) < CHARACTERS
            assert error.message.startswith("the data is wrong: 0.0, 0.0")
            assert error.message.endswith("more characters)")
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)


ONCE = accel.RestartStrategy(max_restarts=0)


@pytest.mark.parametrize("child", ["noise", "no_json", "no_error"])
async def test_nonsense_at_the_beginning_is_an_error_of_the_opening(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TARGET", f"tests.hostile_children:{child}")
    async with accel.System() as system:
        with pytest.raises(accel.HostDiedError):
            await asyncio.wait_for(system.open_device("cpu", host="process", restart=ONCE), 20)
        cpu = await system.open_device("cpu", host="inline")
        await cpu.zeros(4)


@pytest.mark.parametrize("child", ["answers_unasked", "times_unasked", "cut_numbers", "slab_without_memory", "half_a_place"])
async def test_nonsense_later_on_loses_the_child(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TARGET", f"tests.hostile_children:{child}")
    async with accel.System() as system:
        device = await asyncio.wait_for(system.open_device("cpu", host="process", restart=ONCE), 20)
        with pytest.raises(accel.AccelError):
            await asyncio.wait_for(device.zeros(4), 20)
        async with asyncio.timeout(20):
            while device.state is not accel.DeviceState.LOST:
                await asyncio.sleep(0)
        with pytest.raises(accel.DeviceLostError):
            await device.zeros(4)


async def test_an_event_of_the_log_is_refused_or_taken_and_is_no_error_of_the_parent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
    async with accel.System() as system:
        monkeypatch.setattr(link, "TARGET", "tests.hostile_children:log_that_is_too_deep")
        with pytest.raises(accel.HostDiedError):
            await asyncio.wait_for(system.open_device("cpu", host="process", restart=ONCE), 20)
        monkeypatch.setattr(link, "TARGET", "tests.hostile_children:log_with_odd_keys")
        device = await asyncio.wait_for(system.open_device("cpu", host="process", restart=ONCE), 20)
        assert device.state is accel.DeviceState.READY
        assert caplog.text.count(" odd ") == 12
        kill(device)  # it would not hear that it is to end
    assert not raised
