"""The service under load: its devices, its clients, who watches over them, and the order in which all of it begins and ends."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel.registry import find_specs
from accel.testing import FaultPlan
from benchmarks.chaos_parts.audit import growth, living_refs, own_memory
from benchmarks.chaos_parts.clients import Client, Scoring, ask
from benchmarks.chaos_parts.durable import DurableCounter, DurableData
from benchmarks.chaos_parts.faults import Saboteur
from benchmarks.chaos_parts.models import Modelled, is_possible
from benchmarks.chaos_parts.nodes import Noded
from benchmarks.chaos_parts.processes import send_signal
from benchmarks.chaos_parts.replicas import Replicated
from benchmarks.chaos_parts.report import Figures
from benchmarks.chaos_parts.requests import check
from benchmarks.chaos_parts.schedule import Schedule
from benchmarks.chaos_parts.subject import Subject
from benchmarks.chaos_parts.suspects import CpuFragile, CudaFragile, Suspects
from benchmarks.chaos_parts.worlds import Ranked
from benchmarks.chaos_parts.wrecks import CpuWreck, CudaWreck

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.plants import Plant
    from benchmarks.chaos_parts.schedule import Options

__all__ = ["Service"]

_FOREVER = accel.RestartStrategy(max_restarts=10**6, within=2.0, backoff=(0.0, 0.1))
_BUDGET = accel.RestartStrategy(max_restarts=2, within=3600.0, backoff=(0.0, 0.1))
_MEMORY = {"cpu": 1 << 30, "cuda": 8 << 30}
_CLOSE = 20.0
_COUNTERS = 4
_POOL_CLIENTS = 8
_RECOVERS = 60.0
_PROGRESS = 5.0
_GROWTH = 64
"""MiB that this process may take from the second quarter of a run to the last."""


class Service:
    """One run, from opening the devices to closing the system.

    Parameters
    ----------
    options
        What to do.
    ledger
        Where requests are entered.
    tell
        Called with lines of progress.
    plant
        A violation that is made on purpose, or none.
    """

    def __init__(self, options: Options, ledger: Ledger, tell: Callable[[str], None], plant: Plant) -> None:
        self.subjects: list[Subject] = []
        self.saboteur: Saboteur
        self.memory: list[int] = []  # of this process, in MiB, each time that progress is told
        self._options = options
        self._ledger = ledger
        self._tell = tell
        self._plant = plant
        self._system: accel.System
        self._watches: list[asyncio.Future[None]] = []
        self._plans: list[FaultPlan] = []
        self._visits = 0
        self._nodes: list[Noded] = []
        self._hung = asyncio.Event()
        self._durable: list[DurableData] = []
        self._began = time.perf_counter()

    async def run(self) -> None:
        """Do it all."""
        options = self._options
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._ledger.loop_error)
        watchdog = asyncio.ensure_future(self._watch_over())
        late: list[asyncio.Task[bool]] = []
        try:
            async with accel.System("chaos", close_timeout=_CLOSE) as self._system:
                under_fire, calm, doomed = await self._open_all()
                services = {each.label: Scoring(self._ledger, each, options.seed) for each in self.subjects}
                suspects = await self._open_suspects()
                models = await self._open_models()
                pools = await self._open_pools()
                worlds = await self._open_worlds()
                await self._open_nodes()
                batching: list[Scoring | Suspects | Modelled | Replicated] = [*services.values(), *suspects, *models, *pools]
                for service in batching:
                    await service.batcher.__aenter__()
                self.saboteur = Saboteur(
                    options,
                    Schedule(options),
                    self._ledger,
                    under_fire,
                    doomed,
                    lambda: list(self.subjects),
                    self._visit,
                    worlds,
                    self._nodes,
                )
                self._plant.begin(self._ledger, calm)
                operator = asyncio.ensure_future(self.saboteur.operate())
                self._watches.append(operator)
                await self._serve(services, [*under_fire, calm, doomed], suspects, models, pools, worlds)
                await self._close_services(batching, worlds)
                if not self._hung.is_set():
                    await self._afterwards(
                        [
                            *under_fire,
                            *(each.subject for each in suspects),
                            *(each.subject for each in models),
                            *(each.subject for each in self._nodes),
                            *(each for pool in pools for each in pool.subjects),
                            *(each for ranked in worlds for each in ranked.subjects),
                        ],
                        calm,
                        doomed,
                    )
                operator.cancel()
                late = await self._fault_during_close([*under_fire, calm])
        finally:
            for plan in self._plans:
                plan.release()
            watchdog.cancel()
            for noded in self._nodes:
                await noded.close()
            last: set[asyncio.Future[Any]] = {watchdog, *self._watches, *late}
            await asyncio.wait(last, timeout=options.patience)
        for entry in self._ledger.open.values():
            self._ledger.violation(f"{entry} was never answered")

    async def _close_services(self, batching: list[Scoring | Suspects | Modelled | Replicated], worlds: list[Ranked]) -> None:
        """End what was on the devices."""
        for service in batching:
            await service.batcher.aclose()
            await service.forget()
        for ranked in worlds:
            await ranked.close()
        for noded in self._nodes:
            noded.forget()

    def figures(self) -> Figures:
        """Return what was counted."""
        return Figures.of(dict(self.saboteur.done), dict(self.saboteur.skipped), self.saboteur.ended.total(), self.subjects, self.memory)

    # -- devices

    async def _open(
        self,
        label: str,
        host: Any,
        restart: accel.RestartStrategy,
        standby: str = "",
        spec: str = "",
        node: accel.Node | None = None,
        **flags: bool,
    ) -> Subject:
        options, plan = self._options, FaultPlan()
        self._plans.append(plan)
        more: dict[str, Any] = {} if options.hang_timeout is None else {"hang_timeout": options.hang_timeout}
        rejects = flags.get("rejects", False)
        device = await self._system.open_device(
            spec or options.device,
            node=node,
            # Children that are stopped are found out within seconds.
            host=accel.ProcessHost(after_fault=host == "auto", heartbeat_interval=options.silence / 10, heartbeat_timeout=options.silence),
            restart=restart,
            faults=plan,
            memory_limit=_MEMORY[options.device],
            standby=standby or options.standby,  # type: ignore[arg-type]
            pending_limit=48 if rejects else 1024,
            overload="reject" if rejects else "wait",
            **more,
        )
        subject = Subject(label, device, plan, self._ledger.violation, **flags)
        self.subjects.append(subject)  # at once: it may be blamed for a fault from here on
        try:
            await device.register(CpuWreck if options.device == "cpu" else CudaWreck)
        except BaseException:
            self.subjects.remove(subject)
            await device.aclose()
            raise
        self._watches.append(asyncio.ensure_future(subject.watch()))
        return subject

    async def _open_all(self) -> tuple[list[Subject], Subject, Subject]:
        hosts = self._options.hosts
        under_fire = []
        for index, host in enumerate(hosts):
            label = host if hosts.count(host) == 1 else f"{host}{index}"
            under_fire.append(await self._open(label, host, _FOREVER, rejects=index == 1))
        calm = await self._open("calm", "process", _FOREVER, is_calm=True)
        doomed = await self._open("doomed", "process", _BUDGET, is_doomed=True)
        for index, subject in enumerate(under_fire if self._options.durable else ()):
            data = DurableData(subject, [self._options.seed, 1 << 21, index], self._plant.tamper)
            await data.put()
            self._durable.append(data)
        return under_fire, calm, doomed

    async def _open_suspects(self) -> list[Suspects]:
        options = self._options
        if not options.suspects:
            return []
        subject = await self._open("suspect", "process", _FOREVER)
        await subject.device.register(CpuFragile if options.device == "cpu" else CudaFragile)
        return [Suspects(subject, self._ledger, options.seed, options.faults)]

    async def _open_models(self) -> list[Modelled]:
        options = self._options
        if not options.models:
            return []
        if not is_possible(options.device):
            self._tell("no model is served: torch is not installed")
            return []
        subject = await self._open("model", "process", _FOREVER, standby=self._standby_of_models())
        model = Modelled(subject, self._ledger, options.seed, options.faults, hangs=options.hang_timeout is not None)
        await model.load()
        return [model]

    def _standby_of_models(self) -> str:
        """Return the standby of devices that serve a model, or nothing for the run's.

        On a GPU a cold start takes seconds, and suspects wait for one after each death: without a spare for minutes.
        """
        return "model" if self._options.standby == "context" or self._options.device == "cuda" else ""

    async def _open_pools(self) -> list[Replicated]:
        options = self._options
        if not options.replicas or not is_possible(options.device):
            return []
        visible = find_specs(options.device)
        specs = [visible[number % len(visible)] for number in range(options.replicas)]
        standby = self._standby_of_models()
        opening = [self._open(f"replica{number}", "process", _FOREVER, spec=spec, standby=standby) for number, spec in enumerate(specs)]
        subjects = await asyncio.gather(*opening)
        pool = accel.Pool(self._system, [subject.device for subject in subjects], {})
        replicated = Replicated(subjects, pool, self._ledger, options.seed, options.faults)
        await replicated.load()
        return [replicated]

    async def _open_worlds(self) -> list[Ranked]:
        """Open a world: on a GPU each rank has one of its own."""
        options = self._options
        visible = find_specs(options.device)
        if not options.ranks or (options.device != "cpu" and len(visible) < options.ranks):
            return []
        specs = [visible[number % len(visible)] for number in range(options.ranks)]
        opening = [self._open(f"rank{number}", "process", _FOREVER, spec=spec) for number, spec in enumerate(specs)]
        subjects = await asyncio.gather(*opening)
        world = await self._system.open_world([subject.device for subject in subjects], hang_timeout=options.hang_timeout)
        return [Ranked(subjects, world, self._ledger, options.seed)]

    async def _open_nodes(self) -> None:
        """Open a device on a node, which is on this machine."""
        if self._options.node and self._options.device == "cpu":
            self._nodes.append(noded := Noded(self._ledger, self._options.seed))  # at once: it is closed whatever happens
            await noded.open(lambda place: self._open("node", "process", _FOREVER, node=place))

    # -- the load

    async def _serve(
        self,
        services: dict[str, Scoring],
        subjects: list[Subject],
        suspects: list[Suspects],
        models: list[Modelled],
        pools: list[Replicated],
        worlds: list[Ranked],
    ) -> None:
        options, ledger = self._options, self._ledger
        # Most requests go where faults go.
        weights = [1.0 if each.is_calm or each.is_doomed else 2.0 for each in subjects]
        stop = asyncio.Event()
        clients = [
            Client(number, options.seed, ledger, subjects, weights, services, self._plant.tamper) for number in range(options.clients)
        ]
        tasks = [asyncio.ensure_future(client.run(stop)) for client in clients]
        tasks += [asyncio.ensure_future(each.run(number, stop)) for each in suspects for number in range(options.suspects)]
        tasks += [asyncio.ensure_future(each.run(number, stop)) for each in models for number in range(options.models)]
        tasks += [asyncio.ensure_future(each) for model in models for each in (model.change(stop), model.bad_loads.run(stop))]
        tasks += [asyncio.ensure_future(each.run(number, stop)) for each in pools for number in range(_POOL_CLIENTS)]
        tasks += [asyncio.ensure_future(each.change(stop)) for each in pools]
        tasks += [asyncio.ensure_future(each.run(number, stop)) for each in worlds for number in range(_POOL_CLIENTS)]
        tasks += [asyncio.ensure_future(each.run(number, stop)) for each in self._nodes for number in range(_POOL_CLIENTS)]
        for data in self._durable:
            counters = [DurableCounter(data.subject) for _ in range(_COUNTERS)]
            tasks += [asyncio.ensure_future(each) for each in (data.read(ledger, stop), *(one.run(ledger, stop) for one in counters))]
        self._began = time.perf_counter()
        sabotage = asyncio.ensure_future(self.saboteur.run(self._began + options.seconds))
        hung = asyncio.ensure_future(self._hung.wait())
        progress = asyncio.ensure_future(self._progress())
        await asyncio.wait({sabotage, hung}, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        ending = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait((hung, ending), return_when=asyncio.FIRST_COMPLETED)
        for task in (sabotage, hung, progress, *tasks):
            task.cancel()
        for ended in await asyncio.gather(sabotage, *tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                ledger.violation(f"a client or the saboteur failed: {ended!r}")
        await asyncio.gather(hung, progress, return_exceptions=True)
        grown = growth(self.memory)
        if grown > _GROWTH:
            ledger.violation(f"{grown} MiB of this process's memory came to it since the first quarter")

    async def _progress(self) -> None:
        before = 0
        while True:
            await asyncio.sleep(_PROGRESS)
            ledger, now = self._ledger, time.perf_counter() - self._began
            states = " ".join(
                f"{each.label}:{each.device.state.value}/g{each.device.generation}" for each in self.subjects if not each.is_closing
            )
            rate = (ledger.answered - before) / _PROGRESS
            before = ledger.answered
            self.memory.append(own_memory())
            self._tell(
                f"{now:5.0f} s {ledger.answered:8,} answers ({rate:,.0f}/s, {len(ledger.open)} open), "
                f"{self.saboteur.done.total()} faults, {ledger.violated} violations, {self.memory[-1]} MiB | {states}"
            )

    async def _watch_over(self) -> None:
        """Find requests that are never answered."""
        while True:
            await asyncio.sleep(0.25)
            overdue = self._ledger.overdue(self._options.patience)
            if overdue and not self._hung.is_set():
                for entry in overdue[:10]:
                    self._ledger.violation(f"{entry} has not been answered for {self._options.patience:g} s", entry.subject.describe())
                self._hung.set()

    # -- devices that come and go

    async def _visit(self, luck: float) -> None:
        """Open a device, send it requests, and close it while its child is killed: before, or after that has begun."""
        self._visits += 1
        host = "process" if luck < 0.5 or self._options.device == "cuda" else "auto"
        spares = self.saboteur.spares
        try:
            subject = await self._open(f"visitor{self._visits}", host, _FOREVER)
        except (accel.HostDiedError, accel.ContextPoisonedError) as error:
            died = error if isinstance(error, accel.HostDiedError) else error.__cause__
            if not isinstance(died, accel.HostDiedError) or died.exit_code is not None or self.saboteur.spares == spares:
                raise
            return  # its child was taken for a spare one, and killed or stopped before the device was listed
        device, ledger = subject.device, self._ledger
        rng = np.random.default_rng(self._visits)
        tasks = []
        for _ in range(20):
            a = rng.standard_normal((16, 16))
            tasks.append(asyncio.ensure_future(ask(ledger, ledger.begin("visit", subject), _square(device, a))))
        await asyncio.sleep(0)
        subject.is_closing = True
        closing = None
        if luck % 0.5 > 0.2:
            closing = asyncio.ensure_future(device.aclose())
            await asyncio.sleep((luck % 0.1) * 0.2)
        subject.faulted()
        if host == "auto":
            lost = accel.DriverError("lost", code=700, scope=accel.FaultScope.PROCESS)
            subject.plan.poison_at(subject.plan.count + 1, lost)
        elif (pid := device.info().pid) is not None:
            send_signal(pid, signal.SIGKILL)
        if closing is None:
            await asyncio.sleep(luck * 0.3)
        await (closing or device.aclose())
        await asyncio.wait(tasks)
        self.subjects.remove(subject)

    # -- the end

    async def _afterwards(self, under_fire: list[Subject], calm: Subject, doomed: Subject) -> None:
        """See that those who should be well are, that nothing is kept on the devices, and that the one with the small budget is lost."""
        for subject in (*under_fire, calm):
            await self._recovers(subject, partial(_square, subject.device, np.full((8, 8), 0.5)))
            for data in self._durable:
                if data.subject is subject:
                    await self._recovers(subject, data.is_intact)
            await self._is_empty(subject)
        if calm.device.generation != 1:
            self._ledger.violation("the device without faults was rebuilt", calm.describe())
        if "budget" in self._options.faults:
            await self._is_lost(doomed)

    async def _recovers(self, subject: Subject, asking: Callable[[], Awaitable[None]]) -> None:
        end = time.perf_counter() + _RECOVERS
        while time.perf_counter() < end:
            if await ask(self._ledger, self._ledger.begin("recovers", subject), asking()):
                return
            await asyncio.sleep(0.05)
        self._ledger.violation(f"{subject.label} does not answer any more", subject.describe())

    async def _is_empty(self, subject: Subject) -> None:
        end = time.perf_counter() + 10.0
        kept = sum(data.nbytes for data in self._durable if data.subject is subject)
        while time.perf_counter() < end:
            gc.collect()
            info = subject.device.info()
            used = info.memory.used - kept
            if not (used or info.pinned.used or info.in_flight or info.queued):
                return
            await asyncio.sleep(0.05)
        refs = living_refs(subject.device.name)
        self._ledger.violation(
            f"{subject.label} keeps {used} bytes, and {info.pinned.used} pinned; living refs: {refs}", subject.describe()
        )

    async def _is_lost(self, doomed: Subject) -> None:
        device, end = doomed.device, time.perf_counter() + _RECOVERS
        while device.state is not accel.DeviceState.LOST and time.perf_counter() < end:
            pid = device.info().pid
            if pid is not None:
                doomed.faulted()
                send_signal(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
        if device.state is not accel.DeviceState.LOST or device.info().restarts > (_BUDGET.max_restarts or 0):
            self._ledger.violation("the device with a small budget goes on", doomed.describe())
        entry = self._ledger.begin("lost", doomed)
        if await ask(self._ledger, entry, _square(device, np.ones((2, 2)))):
            self._ledger.violation("a lost device has answered")

    async def _fault_during_close(self, subjects: list[Subject]) -> list[asyncio.Task[bool]]:
        """Send requests, kill children, and leave the rest to the end of the system."""
        self._durable.clear()
        rng, tasks = np.random.default_rng(1), []
        for subject in subjects:
            for _ in range(30):
                a = rng.standard_normal((16, 16))
                entry = self._ledger.begin("closing", subject)
                tasks.append(asyncio.ensure_future(ask(self._ledger, entry, _square(subject.device, a))))
        await asyncio.sleep(0)  # they are sent
        for subject in subjects:
            subject.is_closing = True
        for subject in subjects[:1]:
            subject.faulted()
            if (pid := subject.device.info().pid) is not None:
                send_signal(pid, signal.SIGKILL)
        return tasks


async def _square(device: accel.Device, a: Any) -> None:
    x = await device.put(a)
    check(await device.get(await device.blas.gemm(x, x)), a @ a, "square")
