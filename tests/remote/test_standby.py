"""Spare children: they are ready before a fault, take over after it, are replaced, and are never the device's concern."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import accel
from accel.engine.host import Host
from accel.remote import actor, helper_process, standby
from accel.remote.link import Link
from accel.remote.messages import Kind
from accel.testing import FaultPlan
from tests.child_support import until_so, workers
from tests.device_support import child_pid, failure, generation, turns

pytestmark = pytest.mark.usefixtures("nothing_left")


LOST = accel.DriverError("illegal address", code=700, scope=accel.FaultScope.PROCESS)


async def spare_ready(device: accel.Device) -> None:
    assert await asyncio.wait_for(device.spare_ready(), 20)


def spare_of(device: accel.Device) -> int:
    """Return the process that is the device's spare child; the only other one that there is."""
    (pid,) = workers() - {device.info().pid}
    return pid


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    found = [getattr(record, "accel", {}) for record in caplog.records]
    return [each for each in found if each.get("event") == name]


async def fault(device: accel.Device) -> None:
    with pytest.raises(accel.ContextPoisonedError):
        await asyncio.wait_for(device.zeros(4), 20)


@pytest.mark.parametrize(("host", "ahead"), [("process", "imports"), ("process", "context"), ("auto", "context")])
async def test_the_spare_is_promoted_and_replaced(
    host: Literal["process", "auto"], ahead: Literal["imports", "context"], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="accel")
    async with accel.System() as system:
        plan = FaultPlan().poison_at(2, LOST)
        device = await system.open_device("cpu", host=host, standby=ahead, libraries=("blas",), faults=plan)
        pinned = await device.pinned(1000, "float64")
        pinned[:] = np.random.default_rng(1).standard_normal(1000)
        await device.put(pinned)
        await spare_ready(device)
        spare = spare_of(device)
        await fault(device)
        x = await asyncio.wait_for(device.put(pinned), 20)
        info = device.info()
        assert (info.host, info.pid, info.generation, info.restarts) == ("process", spare, 2, 1)
        np.testing.assert_array_equal(await device.get(x), pinned)
        (ready,) = (each for each in events(caplog, "context_ready") if each["generation"] == 2)
        assert (ready["promoted"], ready["pid"]) == (ahead, spare)
        await spare_ready(device)
        assert spare_of(device) != spare
    assert not workers()


async def test_the_first_generation_waits_for_no_spare_and_says_how_it_is() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        assert device.info().standby in ("none", "starting")
        await until_so(lambda: device.info().standby == "starting" or device.info().standby == "ready")
        assert device.info().generation == 1
        await spare_ready(device)
        without = await system.open_device("cpu")
        assert without.info().standby == "none"


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_spare_that_is_killed_is_replaced_and_the_device_goes_on(
    is_ready: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_process, "_BUDGET", accel.RestartStrategy(backoff=(1.0, 1.0)))  # there is none for as long
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        x = await device.put(np.arange(4.0))
        if is_ready:
            await spare_ready(device)
        await until_so(lambda: len(workers()) == 2)
        first = spare_of(device)
        os.kill(first, signal.SIGKILL)
        await until_so(lambda: events(caplog, "standby_lost"))
        assert device.info().standby == "none"
        await until_so(lambda: device.info().standby == "ready" and spare_of(device) != first)
        np.testing.assert_array_equal(await device.get(x), np.arange(4.0))
        assert (device.generation, device.info().restarts) == (1, 0)


async def test_of_two_spares_one_is_ready_for_the_next_fault(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="accel")
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context", spares=2)
        await until_so(lambda: len(events(caplog, "standby_ready")) == 2)
        ready = {each["pid"] for each in events(caplog, "standby_ready")}
        assert workers() == {*ready, device.info().pid}
        for number in (2, 3):
            os.kill(child_pid(device), signal.SIGKILL)
            await generation(device, number)
            (event,) = (each for each in events(caplog, "context_ready") if each["generation"] == number)
            assert event["promoted"] == "context"
            ready.remove(event["pid"])
        assert not ready
        await until_so(lambda: len(events(caplog, "standby_ready")) == 4)
        newest = [each["pid"] for each in events(caplog, "standby_ready")][2:]
        os.kill(newest[0], signal.SIGKILL)
        await until_so(lambda: events(caplog, "standby_lost"))
        info = device.info()
        assert info.spare is not None
        assert (info.standby, info.spare.pid) == ("ready", newest[1])
    assert not workers()


async def test_a_spare_that_dies_with_the_context_is_no_loss() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        await spare_ready(device)
        here, spare = child_pid(device), spare_of(device)
        os.kill(here, signal.SIGKILL)
        os.kill(spare, signal.SIGKILL)
        await generation(device, 2)
        x = await asyncio.wait_for(device.put(np.arange(4.0)), 20)
        np.testing.assert_array_equal(await device.get(x), np.arange(4.0))
        assert device.info().pid not in (here, spare)


@pytest.mark.parametrize("spares", [1, 2])
async def test_a_spare_that_is_stopped_is_given_up_when_it_is_needed(
    spares: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="accel")
    monkeypatch.setattr(actor, "_PROMOTION_TIMEOUT", 2.0)
    async with accel.System() as system:
        plan = FaultPlan().poison_at(1, LOST)
        device = await system.open_device("cpu", host="process", standby="context", spares=spares, faults=plan)
        await until_so(lambda: len(events(caplog, "standby_ready")) == spares)
        info = device.info()
        assert info.spare is not None
        spare, others = info.spare.pid, workers() - {info.pid, info.spare.pid}
        os.kill(spare, signal.SIGSTOP)
        await fault(device)
        await asyncio.wait_for(device.zeros(4), 20)
        assert device.generation == 2
        assert device.info().pid != spare
        assert (device.info().pid in others) == (spares == 2), "the other one is used"
        await until_so(lambda: spare not in workers(), "the end of the stopped one")


async def test_a_spare_that_is_stopped_is_found_out() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host=accel.ProcessHost(heartbeat_interval=0.05, heartbeat_timeout=2.0), standby="context")
        await spare_ready(device)
        await until_so(lambda: len(workers()) == 2)
        first = spare_of(device)
        os.kill(first, signal.SIGSTOP)
        await until_so(lambda: device.info().standby == "ready" and spare_of(device) != first)
        assert device.generation == 1


async def test_spares_that_keep_dying_are_tried_again_with_the_next_generation_and_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helper_process, "_BUDGET", accel.RestartStrategy(max_restarts=2, within=60.0, backoff=(0.01, 0.01)))
    passed = 0.0
    async with accel.System(clock=lambda: time.monotonic() + passed) as system:
        device = await system.open_device("cpu", host="process", standby="imports", faults=FaultPlan().poison_at(1, LOST))
        seen: set[int] = set()
        async with asyncio.timeout(30):
            while device.info().standby != "failed":
                for pid in workers() - {device.info().pid} - seen:
                    seen.add(pid)
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.002)
        # A spare may be two processes for a moment, while it starts: what the log counts are spares.
        assert len(seen) >= 3
        assert (len(events(caplog, "standby_lost")), len(events(caplog, "standby_failed"))) == (2, 1)
        assert device.state is accel.DeviceState.READY
        passed = 61.0  # the window of the budget
        await turns()
        assert device.info().standby == "failed"
        assert not await device.spare_ready()
        await fault(device)
        await asyncio.wait_for(device.zeros(4), 20)
        await spare_ready(device)
        monkeypatch.setattr(helper_process, "_BUDGET", accel.RestartStrategy(max_restarts=0))
        monkeypatch.setattr(helper_process, "_PAUSE", 0.01)
        spare = device.info().spare
        assert spare is not None
        os.kill(spare.pid, signal.SIGKILL)
        await until_so(lambda: device.info().standby == "ready" and device.info().spare != spare)


async def test_a_spare_is_ready_without_the_blocks_that_there_was_no_descriptor_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        pinned = await device.pinned(1000, "float64")
        pinned[:] = np.arange(1000.0)
        await spare_ready(device)
        blocks = {block.fd for block in device._core.pinned.arena.blocks()}
        duplicate, refused = os.dup, []

        def dup(fd: int) -> int:
            if fd in blocks:
                refused.append(fd)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return duplicate(fd)

        monkeypatch.setattr(os, "dup", dup)
        first = spare_of(device)
        os.kill(first, signal.SIGKILL)
        await until_so(lambda: device.info().standby != "ready")
        await spare_ready(device)
        assert refused
        spare = spare_of(device)
        monkeypatch.undo()
        os.kill(child_pid(device), signal.SIGKILL)
        await generation(device, 2)
        assert child_pid(device) == spare
        np.testing.assert_array_equal(await device.get(await device.put(pinned)), pinned)


async def test_waiting_for_a_spare_ends_where_none_comes() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        assert not await device.spare_ready()
        other = await system.open_device("cpu", host="process", standby="context")
        waiting = asyncio.ensure_future(other.spare_ready())
        left = asyncio.ensure_future(other.spare_ready())
        await turns()
        assert not waiting.done()
        left.cancel()
        await other.aclose()
        assert not await asyncio.wait_for(waiting, 20)
        assert left.cancelled()
        assert not await other.spare_ready()


async def test_waiting_for_a_spare_ends_as_closing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = asyncio.Event()

    async def wait_idle(host: Host) -> None:
        await idle.wait()

    monkeypatch.setattr(Host, "wait_idle", wait_idle)
    monkeypatch.setattr(standby.StandbyActor, "_set_ready", lambda *_: None)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="imports")
        waiting = asyncio.ensure_future(device.spare_ready())
        await turns()
        assert not waiting.done()
        closing = asyncio.ensure_future(device.aclose())
        await turns()
        assert waiting.done(), "it waits for the work in flight too"
        assert not await waiting
        assert not closing.done()
        idle.set()
        await asyncio.wait_for(closing, 20)


async def test_waiting_for_a_spare_ends_when_what_keeps_it_has_failed_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*arguments: object) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(standby.StandbyActor, "receive", failing)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        assert not await asyncio.wait_for(device.spare_ready(), 20)
        await device.zeros(3)


async def test_a_fault_while_the_spare_starts() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context", faults=FaultPlan().poison_at(1, LOST))
        await until_so(lambda: len(workers()) == 2)
        spare = spare_of(device)
        os.kill(spare, signal.SIGSTOP)  # a forked child is soon ready
        await fault(device)
        os.kill(spare, signal.SIGCONT)
        await asyncio.wait_for(device.zeros(4), 20)
        assert device.info().pid == spare, "what had begun to start is used"
        await spare_ready(device)


async def test_faults_one_after_the_other() -> None:
    async with accel.System() as system:
        plan = FaultPlan()
        for n in range(1, 4):
            plan.poison_at(n, LOST)
        restart = accel.RestartStrategy(max_restarts=9, backoff=(0.0, 0.0))
        device = await system.open_device("cpu", host="process", standby="context", faults=plan, restart=restart)
        for _ in range(3):
            await fault(device)
        await asyncio.wait_for(device.zeros(4), 30)
        assert device.generation == 4
        await spare_ready(device)
        assert len(workers()) == 2


@pytest.mark.parametrize("turns", [0, 3, 30])
async def test_close_while_the_spare_starts(turns: int) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        for _ in range(turns):
            await asyncio.sleep(0.001)
        began = time.perf_counter()
        await device.aclose()
        assert time.perf_counter() - began < 3
        assert not workers()


async def test_a_check_that_comes_while_the_device_closes_is_no_lost_message(caplog: pytest.LogCaptureFixture) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        for check in [*device._core.registration_listeners, *device._core.lifecycle.listeners]:
            check()  # while the spare starts
        await device.aclose()
    assert "actor_messages_lost" not in caplog.text


async def test_a_device_that_is_lost_has_no_spare() -> None:
    async with accel.System() as system:
        once = accel.RestartStrategy(max_restarts=0)
        device = await system.open_device("cpu", host="process", standby="context", restart=once, faults=FaultPlan().poison_at(1, LOST))
        await spare_ready(device)
        await fault(device)
        await until_so(lambda: not workers())
        assert (device.state, device.info().standby) == (accel.DeviceState.LOST, "none")


async def test_options_that_do_not_fit_are_refused() -> None:
    async with accel.System() as system:
        with pytest.raises(accel.UnsupportedError):
            await system.open_device("cpu", host="inline", standby="context")
        with pytest.raises(accel.InvalidArgumentError):
            await system.open_device("cpu", standby="warm")  # type: ignore[arg-type]


def anonymous(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


async def test_the_spare_and_its_memory_are_known() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        assert await device.spare_ready()
        first = device.info().spare
        assert first is not None
        assert first.pid != child_pid(device)
        assert first.pid in workers()
        # The kernel counts pages in batches.
        np.testing.assert_allclose(first.host_nbytes, anonymous(first.pid), atol=4 << 20)
        assert first.host_nbytes > 4 << 20
        os.kill(child_pid(device), signal.SIGKILL)
        await generation(device, 2)
        assert child_pid(device) == first.pid
        assert await device.spare_ready()
        second = device.info().spare
        assert second is not None
        assert second.pid != first.pid
    assert device.info().spare is None


async def test_a_device_without_a_spare_says_so() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        assert device.info().spare is None


_STALL = 1.5


class Stalls:
    """Holds the loop up when a generation begins in a spare child: before that hears of it, or together with the child, which has heard of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        self.armed = False
        self.count = 0
        tell = Link.tell

        def told(link: Link, kind: Kind, *rest: Any, **more: Any) -> None:
            # The first word to it in its new office; what is said there leaves at the end of the turn.
            is_it = self.armed and kind == Kind.PING and isinstance(link.listener, actor.RemoteContextActor) and link.watchdog.is_starting
            if is_it:
                self.armed = False
                self.count += 1
                asyncio.get_running_loop().call_soon(self._stall, link.pid if what == "both" else None)
            tell(link, kind, *rest, **more)

        monkeypatch.setattr(Link, "tell", told)

    def _stall(self, pid: int | None) -> None:
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(_STALL)
        if pid is not None:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("what", ["parent", "both"])
async def test_a_spare_is_promoted_although_the_loop_was_held_up(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(actor, "_PROMOTION_TIMEOUT", 1.0)
    stalls = Stalls(monkeypatch, what)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context", faults=FaultPlan().poison_at(1, op="unary"))
        x = await device.zeros(3)
        await spare_ready(device)
        spare = spare_of(device)
        stalls.armed = True
        await failure(device.elementwise.unary("neg", x), accel.ContextPoisonedError)
        assert (await asyncio.wait_for(device.get(await device.put(np.arange(3.0))), 30)).sum() == 3
        assert stalls.count == 1, "the spare was thrown away"
        assert (device.info().pid, device.generation) == (spare, 2)
