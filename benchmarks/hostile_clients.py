"""What hostile clients cost the others: a served model, 40 innocent clients, and poison, repeated or ever new, or a child that is killed.

``python benchmarks/hostile_clients.py [--device cuda] [--seconds 30] [--only killed,repeated,each,flood] [--json FILE]``. On a GPU the model is a module of
torch, and by default only the first two lines are measured: a driver stands still when contexts die ten times a second. Each line says what must hold; the exit
status is 1 if one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

CLIENTS = 40
POISON = 2e6
"""An input of this size or more ends the context: the model trusts it."""
_WIDTH = 8
_FORWARD = 0.02
"""Seconds of a forward on the CPU, whatever the batch: as of a small network."""
_PATIENCE = 60.0
_SETTLE = 5.0
"""Seconds after the attack within which the device must be READY."""
_OVERHEAD = 0.3


class Fragile:
    """The model on the CPU."""

    def open(self, weights: Any, description: Any, stream: Any) -> None:
        """Look at the weights."""
        self._weights = np.asarray(weights["w"])

    def run(self, inputs: Any) -> Any:
        """Compute it; an input that is too large makes it write where no memory is."""
        x = np.asarray(inputs["x"])
        time.sleep(_FORWARD)
        if x.max() >= POISON:
            ctypes.memset(16, 1, 1)
        return x * self._weights


def fragile() -> Any:
    """Return the same as a module of torch, for a GPU: the input is an index beyond a table, so that a kernel asserts."""
    import torch
    from torch import nn

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((_WIDTH,), 2.0), requires_grad=False)
            self.register_buffer("table", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            index = (x >= POISON).long()  # 0, or 1: out of range
            table: Any = self.table
            return x * self.w + table[index]

    return Module()


@dataclass
class Line:
    """What was measured of one scenario.

    Attributes
    ----------
    name
        What was done to the service.
    forward
        Seconds of one run of the model, for which an idle service's answer stands.
    answered, failed
        Requests of the innocent clients, by how they ended.
    longest
        Seconds of the longest of them.
    share
        Their rate during the attack, as a part of the rate before it.
    faults
        Contexts that died.
    found
        Poison that quarantine has found.
    was_lost
        Whether the device was LOST at any time.
    seconds_to_ready
        Seconds after the attack until the device was READY; none if it was not within the time that is looked.
    violated
        What must hold and does not.
    """

    name: str
    forward: float
    answered: int = 0
    failed: int = 0
    longest: float = 0.0
    share: float = 0.0
    faults: int = 0
    found: int = 0
    was_lost: bool = False
    seconds_to_ready: float | None = None
    violated: list[str] = field(default_factory=list)

    def must(self, holds: bool, what: str) -> None:
        """Take what must hold."""
        if not holds:
            self.violated.append(what)

    def __str__(self) -> str:
        ready = "never" if self.seconds_to_ready is None else f"{self.seconds_to_ready:.2f} s"
        return (
            f"{self.name:<28} answered {self.answered:6}  failed {self.failed:3}  longest {self.longest:6.3f} s = {self.longest / self.forward:5.1f} forwards  "
            f"rate {100 * self.share:4.0f} %  contexts {self.faults:3}  found {self.found:3}  READY after {ready}  "
            + ("ok" if not self.violated else "VIOLATED: " + "; ".join(self.violated))
        )


class Clients:
    """The innocent ones: each asks, looks at the answer, and asks again."""

    def __init__(self, service: accel.ModelService, seed: int) -> None:
        self._service = service
        self._rng = np.random.default_rng(seed)
        self.seconds: list[tuple[float, float]] = []  # when it ended, and how long it took
        self.errors: list[str] = []

    @contextlib.asynccontextmanager
    async def asking(self, count: int) -> AsyncIterator[None]:
        """Keep ``count`` clients asking during the block; what they have asked is answered before it ends."""
        is_over = False

        async def client() -> None:
            while not is_over:
                await self._ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(client())
            try:
                yield
            finally:
                is_over = True

    async def _ask(self) -> None:
        x = self._rng.standard_normal(_WIDTH).astype(np.float32)
        began = time.perf_counter()
        try:
            answer = await self._service.submit(x, timeout=_PATIENCE)
            if not np.allclose(answer, 2 * x, rtol=1e-3):
                self.errors.append("a wrong answer")
        except accel.AccelError as error:
            self.errors.append(repr(error))
            await asyncio.sleep(0.05)
        now = time.perf_counter()
        self.seconds.append((now, now - began))

    def rate(self, since: float, until: float) -> float:
        """Return answers a second."""
        return sum(since <= when < until for when, _ in self.seconds) / (until - since)


class Attack:
    """Sends poison, and waits for no answer."""

    def __init__(self, service: accel.ModelService) -> None:
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: list[str] = []
        self._sent = 0

    def send(self, number: int, timeout: float = 1.0) -> None:
        """Send one: the same for the same number."""
        task = asyncio.ensure_future(self._one(number, timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, number: int, timeout: float) -> None:
        x = np.full(_WIDTH, POISON * (1 + number), np.float32)
        try:
            await self._service.submit(x, timeout=timeout)
        except accel.AccelError as error:
            self.outcomes.append(type(error).__name__)
        else:
            self.outcomes.append("answered")

    async def every(self, period: float, seconds: float, *, is_new: bool) -> None:
        """Send one every ``period`` seconds."""
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            self._sent += is_new
            self.send(self._sent)
            await asyncio.sleep(max(0.0, min(period, end - now)))

    async def over(self) -> None:
        """Wait for what was sent."""
        if self._tasks:
            await asyncio.wait(self._tasks)


@contextlib.asynccontextmanager
async def served(spec: str, spares: int) -> AsyncIterator[accel.ModelService]:
    """Serve the model on a device in a child, with spares."""
    is_cuda = spec.startswith("cuda")
    weights = {"w": np.full(_WIDTH, 2.0, np.float32)} | ({"table": np.zeros(1, np.float32)} if is_cuda else {})
    async with accel.System() as system:
        # The budget is the default one: a few deaths that are charged lose the device, and are seen.
        device = await system.open_device(spec, host="process", standby="model", spares=spares)
        model = await device.load_model(
            "benchmarks.hostile_clients:" + ("fragile" if is_cuda else "Fragile"),
            weights=weights,
            inputs={"x": accel.TensorSpec(("batch", _WIDTH), "float32")},
            buckets={"batch": (1, 8, 64)},
        )
        await device.spare_ready()
        async with accel.serve(model) as service:
            yield service
        await model.aclose()


class Scenario:
    """One attack on a service of its own, and what it costs.

    Parameters
    ----------
    name
        Of the line.
    attack
        ``await attack(service, attacker)`` is the attack.
    check
        ``check(line)`` takes what must hold.
    """

    def __init__(self, name: str, attack: Callable[[accel.ModelService, Attack], Awaitable[None]], check: Callable[[Line], None]) -> None:
        self.name = name
        self._attack = attack
        self._check = check

    async def run(self, spec: str, spares: int, before: float, seed: int) -> Line:
        """Measure it."""
        async with served(spec, spares) as service:
            device, clients, attacker = service.model.device, Clients(service, seed), Attack(service)
            line = Line(self.name, await _forward(service))
            async with clients.asking(CLIENTS):
                await asyncio.sleep(before)
                generation, began = device.generation, time.perf_counter()
                states = asyncio.ensure_future(_states(device))
                await self._attack(service, attacker)
                ended = time.perf_counter()
                line.faults = device.generation - generation + (device.state is not accel.DeviceState.READY)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SETTLE):
                        await anext(device.generations())
                        line.seconds_to_ready = time.perf_counter() - ended
                until = time.perf_counter()
            await attacker.over()
            line.was_lost = await _stop(states)
            during = [seconds for when, seconds in clients.seconds if when >= began]
            line.answered, line.failed = len(during), len(clients.errors)
            line.longest = max(during, default=math.inf)
            line.share = clients.rate(began, until) / clients.rate(began - before, began)
            statistics = service.statistics()
            line.found = statistics.poisoned
            self._check(line)
            for error in sorted(set(clients.errors))[:3]:
                line.must(False, error[:200])
            for _ in range(1000):
                statistics = service.statistics()
                if not (statistics.isolating or statistics.in_flight):
                    break
                await asyncio.sleep(0.01)
            line.must(not statistics.in_flight, f"in_flight is {statistics.in_flight} afterwards")
        statistics = service.statistics()
        line.must(not (statistics.isolating or statistics.in_flight), f"isolating is {statistics.isolating} after the close")
        return line


async def _forward(service: accel.ModelService) -> float:
    """Return how long an idle service takes for an answer: the median of some."""
    taken = []
    for _ in range(9):
        began = time.perf_counter()
        await service.submit(np.zeros(_WIDTH, np.float32))
        taken.append(time.perf_counter() - began)
    return median(taken)


async def _states(device: accel.Device) -> bool:
    """Look at the device's state until cancelled; return whether it was ever LOST."""
    was_lost = False
    with contextlib.suppress(asyncio.CancelledError):
        async for _ in _ticks():
            was_lost |= device.state is accel.DeviceState.LOST
    return was_lost


async def _ticks() -> AsyncIterator[None]:
    while True:
        yield
        await asyncio.sleep(0.002)


async def _stop(task: asyncio.Future[bool]) -> bool:
    task.cancel()
    await asyncio.wait([task])
    return not task.cancelled() and task.result()


def scenarios(seconds: float, patience: float = 1.0) -> dict[str, Scenario]:
    """Return all of them, by what ``--only`` calls them.

    Parameters
    ----------
    seconds
        How long each attack lasts.
    patience
        Multiplies the limits of times, and divides those of rates: more than 1 on a machine that runs other work too.
    """

    async def killed(service: accel.ModelService, attacker: Attack) -> None:
        os.kill(service.model.device.info().pid or 0, signal.SIGKILL)
        await asyncio.sleep(min(seconds, 5.0))

    async def repeated(service: accel.ModelService, attacker: Attack) -> None:
        await attacker.every(0.3, seconds, is_new=False)

    async def each(service: accel.ModelService, attacker: Attack) -> None:
        await attacker.every(2.0, seconds, is_new=True)

    async def flood(service: accel.ModelService, attacker: Attack) -> None:
        await attacker.every(0.1, seconds, is_new=True)

    def check_killed(line: Line) -> None:
        line.must(not line.failed, f"{line.failed} failed")
        line.must(line.longest <= patience * (3 * line.forward + _OVERHEAD), f"longer than 3 forwards + {_OVERHEAD} s")
        line.must(line.faults == 1 and not line.was_lost, "more than one context died")

    def check_repeated(line: Line) -> None:
        line.must(not line.failed, f"{line.failed} failed")
        line.must(line.faults == 1 and not line.was_lost, "the device was not READY throughout after the first fault")
        line.must(line.found >= 1, "the poison was not found")

    def check_each(line: Line) -> None:
        line.must(not line.failed, f"{line.failed} failed")
        line.must(line.share >= 0.5 / patience, "less than half of the rate")
        line.must(not line.was_lost, "the device was LOST")

    def check_flood(line: Line) -> None:
        line.must(line.longest <= patience * _SETTLE, f"an answer took longer than {_SETTLE:g} s")
        line.must(line.seconds_to_ready is not None, f"not READY {_SETTLE:g} s after the end")
        line.must(not line.was_lost, "the device was LOST")

    return {
        "killed": Scenario("kill -9, with a spare", killed, check_killed),
        "repeated": Scenario("one poison, repeated", repeated, check_repeated),
        "each": Scenario("another poison each 2 s", each, check_each),
        "flood": Scenario("ten other poisons a second", flood, check_flood),
    }


def main() -> int:
    """Measure, and print a line for each scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or cuda:1 (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each attack lasts (default: %(default)s)")
    parser.add_argument("--before", type=float, default=2.0, help="seconds of the measurement before it (default: %(default)s)")
    parser.add_argument("--spares", type=int, default=1, help="spare children (default: %(default)s)")
    parser.add_argument("--only", default="", help="some of killed,repeated,each,flood (default: all; on cuda the first two)")
    parser.add_argument("--seed", type=int, default=None, help="of the requests (default: a new one)")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    parser.add_argument("--log", action="store_true", help="show what accel logs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.log else logging.CRITICAL, format="%(relativeCreated)d %(message)s")
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    chosen = arguments.only or ("killed,repeated" if arguments.device.startswith("cuda") else "killed,repeated,each,flood")
    print(f"{CLIENTS} innocent clients, {arguments.device}, seed {seed}, {arguments.seconds:g} s each", flush=True)
    lines = []
    for name in chosen.split(","):
        lines.append(asyncio.run(scenarios(arguments.seconds)[name].run(arguments.device, arguments.spares, arguments.before, seed)))
        print(lines[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"device": arguments.device, "seed": seed, "lines": [asdict(line) for line in lines]}, indent=1)
        )
    return int(any(line.violated for line in lines))


if __name__ == "__main__":
    sys.exit(main())
