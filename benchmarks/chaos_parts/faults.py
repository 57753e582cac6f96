"""Who brings the faults about: by signals, by kernels that fault, by what ends a child, and by fault plans."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING

import accel
from benchmarks.chaos_parts.nodes import NODE_FAULTS
from benchmarks.chaos_parts.processes import send_signal, workers
from benchmarks.chaos_parts.wrecks import Wreck

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.chaos_parts.nodes import Noded
    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.schedule import Fault, Options, Schedule
    from benchmarks.chaos_parts.subject import Subject
    from benchmarks.chaos_parts.worlds import Ranked

__all__ = ["Saboteur"]

_LOST = {"illegal": 700, "trap": 719, "assert": 710}
_NEED_CHILD = ("hang", "kill", "planned_kill", "stop", "rebuild", "stuck", "exit", "cut")
"""What cannot be done to a device whose context is in this process."""
_MOST_PAUSE = 3.0
"""Seconds after which the next fault comes although few requests are answered."""
_HUNG = 2.0
"""Seconds that a request may wait where a kernel hangs, beyond what the device's own deadlines take: then the child is killed, as an operator would."""


class Saboteur:
    """Sends faults, one after the other as the schedule says, without waiting for the recovery from the last.

    Parameters
    ----------
    options, schedule
        What comes when.
    ledger
        Counts the answers by which time goes.
    subjects
        What faults are sent to.
    doomed
        The device whose budget is spent.
    all_subjects
        Returns all devices that there are now.
    visit
        Opens a device, and closes it while its child is killed; given the fault's luck.
    worlds
        The worlds whose ranks are harmed.

    Attributes
    ----------
    done, skipped : Counter
        Faults by kind that were sent, and that had no meaning when their time had come.
    spares : int
        Signals sent to children that served no device yet.
    ended : Counter
        Hangs that were ended from outside, by device.
    """

    def __init__(
        self,
        options: Options,
        schedule: Schedule,
        ledger: Ledger,
        subjects: Sequence[Subject],
        doomed: Subject,
        all_subjects: Callable[[], Sequence[Subject]],
        visit: Callable[[float], Awaitable[None]],
        worlds: Sequence[Ranked],
        nodes: Sequence[Noded],
    ) -> None:
        self.ended: Counter[Subject] = Counter()
        self._hangs: Counter[Subject] = Counter()
        self.done: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._options = options
        self._schedule = schedule
        self._ledger = ledger
        self._subjects = subjects
        self._doomed = doomed
        self._all_subjects = all_subjects
        self._visit = visit
        self._worlds = worlds
        self._nodes = nodes
        self.spares = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ways = {
            "poison": self._poison, "hang": self._hang, "oom": self._oom, "fail": self._fail, "kill": self._kill, "planned_kill": self._planned_kill,
            "stop": self._stop, "spare": self._spare, "rebuild": self._rebuild, "stuck": self._stuck, "exit": self._wreck, "cut": self._wreck,
        }  # fmt: skip

    async def run(self, until: float) -> None:
        """Send faults until the clock says ``until``; then see to the end what was begun."""
        answered = asyncio.Event()
        self._ledger.on_answer = answered.set
        try:
            while time.perf_counter() < until:
                fault = self._schedule.next()
                if fault is None:
                    await asyncio.sleep(max(0.0, until - time.perf_counter()))
                    break
                await self._due(self._ledger.answered + fault.gap, answered, until)
                if time.perf_counter() < until:
                    self._send(fault)
        finally:
            self._ledger.on_answer = lambda: None
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _due(self, count: int, answered: asyncio.Event, until: float) -> None:
        limit = min(until, time.perf_counter() + _MOST_PAUSE)
        while self._ledger.answered < count and (left := limit - time.perf_counter()) > 0:
            answered.clear()
            try:
                async with asyncio.timeout(left):
                    await answered.wait()
            except TimeoutError:
                return

    def _send(self, fault: Fault) -> None:
        subject = self._subjects[fault.target]
        if fault.kind in _NEED_CHILD and _is_inline(subject):
            subject = next((each for each in self._subjects if not _is_inline(each)), subject)
        if fault.kind == "visit":
            work = self._visit(fault.luck)
        elif fault.kind.startswith("rank_"):
            work = self._rank(fault)
        elif fault.kind in NODE_FAULTS:
            work = self._break_node(fault)
        elif fault.kind == "budget":
            work = self._kill(self._doomed, fault)
        elif fault.kind in _LOST:
            work = self._illegal(subject, fault)
        elif fault.kind in _NEED_CHILD and _is_inline(subject):
            self.skipped[fault.kind] += 1
            return
        else:
            work = self._ways[fault.kind](subject, fault)
        self._background(self._noted(fault, work))

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _noted(self, fault: Fault, work: Awaitable[None]) -> None:
        try:
            await work
            self.done[fault.kind] += 1
        except _NotNowError:
            self.skipped[fault.kind] += 1
        except Exception as error:
            self._ledger.violation(f"fault {fault.number} ({fault.kind}) could not be sent: {error!r}")

    # -- by fault plans

    async def _poison(self, subject: Subject, fault: Fault) -> None:
        subject.faulted()
        subject.plan.poison_at(subject.plan.count + 1 + int(fault.luck * 20))

    async def _planned_kill(self, subject: Subject, fault: Fault) -> None:
        subject.faulted()
        subject.plan.kill_host_at(subject.plan.count + 1 + int(fault.luck * 20))

    async def _oom(self, subject: Subject, fault: Fault) -> None:
        subject.credit("oom")
        subject.plan.out_of_memory_at(subject.plan.count + 1 + int(fault.luck * 20))

    async def _fail(self, subject: Subject, fault: Fault) -> None:
        subject.credit("fail")
        error = accel.LibraryError("the chaos run asked for it", code=subject.failure_code, library="chaos")
        subject.plan.fail_at(subject.plan.count + 1 + int(fault.luck * 20), error)

    # -- by kernels

    async def _illegal(self, subject: Subject, fault: Fault) -> None:
        if self._options.device == "cpu" and _is_inline(subject):
            # A real one would end this process, which CUDA's do not: the plan says what the driver would.
            subject.faulted()
            error = accel.DriverError(FAULT_TEXT, code=_LOST[fault.kind], library="driver", scope=accel.FaultScope.PROCESS)
            subject.plan.poison_at(subject.plan.count + 1, error)
            return
        await self._wreck(subject, fault)

    async def _wreck(self, subject: Subject, fault: Fault, way: str = "") -> None:
        """Run a kernel that does damage. Whoever waits for it is a client too, and has to be told."""
        subject.faulted()
        entry = self._ledger.begin(f"wreck {fault.kind}", subject)
        try:
            await subject.device.run(Wreck(way or fault.kind, os.getpid()))
        except Exception as error:
            self._ledger.failed(entry, error)
        else:
            self._ledger.failed(entry, RuntimeError("a kernel that faults has ended well"))

    async def _hang(self, subject: Subject, fault: Fault) -> None:
        self._hangs[subject] += 1
        if fault.luck < 0.4:
            subject.faulted()
            subject.plan.hang_at(subject.plan.count + 1)
        else:
            await self._wreck(subject, fault, "stall" if fault.luck < 0.7 else "hang")

    async def operate(self) -> None:
        """Kill a child that was made to hang when its device has been ready for long and requests wait for longer. Goes on until it is cancelled."""
        patience = _HUNG + max(self._options.silence, 3 * (self._options.hang_timeout or 0.0))
        serving: dict[Subject, tuple[int | None, float]] = {}
        while True:
            await asyncio.sleep(0.1)
            now = time.perf_counter()
            for subject, hangs in self._hangs.items():
                info = subject.device.info()
                pid, since = serving.get(subject, (None, 0.0))
                if pid is None or info.pid != pid or info.state is not accel.DeviceState.READY:
                    serving[subject] = info.pid, now
                    continue
                waits = max((now - entry.began for entry in self._ledger.open.values() if entry.subject is subject), default=0.0)
                # What hangs besides was not sent here: it is found by its request that is never answered.
                if min(waits, now - since) > patience and self.ended[subject] < hangs:
                    self.ended[subject] += 1
                    subject.faulted()
                    serving.pop(subject)
                    send_signal(pid, signal.SIGKILL)

    async def _stuck(self, subject: Subject, fault: Fault) -> None:
        self._hangs[subject] += 1
        await self._wreck(subject, fault)

    # -- by signals

    async def _kill(self, subject: Subject, fault: Fault) -> None:
        self._signal(subject, signal.SIGKILL)

    async def _stop(self, subject: Subject, fault: Fault) -> None:
        self._signal(subject, signal.SIGSTOP)

    def _signal(self, subject: Subject, number: int) -> None:
        pid = subject.device.info().pid
        if pid is None:
            raise _NotNowError
        subject.faulted()
        if not send_signal(pid, number):
            raise _NotNowError

    async def _rank(self, fault: Fault) -> None:
        for ranked in self._worlds:
            if await ranked.harm(fault):
                return
        raise _NotNowError

    async def _spare(self, subject: Subject, fault: Fault) -> None:
        """Kill or stop a child that serves no device."""
        all_subjects = self._all_subjects()
        spare = sorted(workers() - {each.device.info().pid for each in all_subjects})
        if not spare:
            raise _NotNowError
        self._blame_all(all_subjects)
        is_stopped = fault.luck > 0.7 and self._options.standby != "none"
        if not send_signal(spare[int(fault.luck * len(spare))], signal.SIGSTOP if is_stopped else signal.SIGKILL):
            raise _NotNowError
        self.spares += 1

    def _blame_all(self, all_subjects: Sequence[Subject]) -> None:
        """Expect a fault of each device: a child that serves none yet may be the next generation of any."""
        for each in all_subjects:
            if not each.is_calm:
                each.faulted()

    async def _break_node(self, fault: Fault) -> None:
        """Cut the link to a node, or kill its agent."""
        for node in self._nodes:
            if fault.kind == "link_cut":
                await node.link_cut()
                return
            if node.is_up:
                await node.agent_kill()
                return
        raise _NotNowError

    async def _rebuild(self, subject: Subject, fault: Fault) -> None:
        """Kill the child, and the next one as soon as it is there."""
        before = workers()
        self._signal(subject, signal.SIGKILL)
        async with asyncio.timeout(10):
            while not (started := workers() - before):  # noqa: ASYNC110 - nothing tells of a process that appears
                await asyncio.sleep(0.01)
        await asyncio.sleep(fault.luck * 0.5)
        self._blame_all(self._all_subjects())
        for pid in started:
            self.spares += send_signal(pid, signal.SIGKILL)


FAULT_TEXT = "an illegal address was encountered, says the chaos run"


class _NotNowError(Exception):
    """The fault cannot be sent to this device as it is now."""


def _is_inline(subject: Subject) -> bool:
    return subject.device.info().host == "inline"
