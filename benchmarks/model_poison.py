"""P16: the encoder of ``model_service.py`` served to 256 clients, and requests that kill, hang or spoil it: what these cost the other clients.

``python benchmarks/model_poison.py [--backend cpu] [--only assert,hang] [--clients 256] [--seconds 1] [--json FILE]``; needs torch. Each kind of poison is sent
while the clients ask, and every answer is compared with what the module gives for the same ids alone. Then ten distinct poisons come, one a second; then the
same ones again; then one on a device without a spare child.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel
from benchmarks.model_service import BATCHES, LENGTH, VOCABULARY, build, build_half

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Ids = np.ndarray[Any, np.dtype[np.int64]]
    Vectors = np.ndarray[Any, np.dtype[np.float32]]

ASSERT = VOCABULARY
"""The first token of a request chooses what goes wrong. This one is out of range: torch's embedding asserts on a GPU."""
ILLEGAL, HANG, NAN, RAISE = range(VOCABULARY + 1, VOCABULARY + 5)
KINDS = {"assert": ASSERT, "illegal": ILLEGAL, "hang": HANG, "nan": NAN, "exception": RAISE}

_ROWS = 256
"""Distinct requests of the clients, whose answers are known beforehand."""
_TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
"""Of an element of a vector of length 1; answers to different requests differ by 0.08 in some element."""
_BUCKETS = {"cpu": BATCHES[:2], "cuda": BATCHES}
_HANG_TIMEOUT = {"cpu": 5.0, "cuda": 1.0}
_DISTINCT = 10
_BIN = 0.02
"""Seconds of one column of the timeline."""
_BEFORE = 0.5
"""Seconds of the timeline before the poison is sent."""
_TOLD = ("actor", "pid", "promoted", "serves")

_SOURCE = """
extern "C" __global__ void poison(const long long *ids, int length, long long illegal, long long hang) {
    long long first = ids[blockIdx.x * (long long)length];
    if (first == illegal) ((volatile long long *)ids)[1ll << 45] = 1;
    if (first == hang) for (volatile int go = 1; go;) __nanosleep(100000);
}
"""


# -- the model


def full() -> Any:
    """Return the encoder in float32 for the CPU, where the poison is looked for before the forward."""
    return poisonable(build(), reads=True)


def half() -> Any:
    """Return the encoder in float16 for a GPU, where kernels meet the poison; no exception depends on what a request holds."""
    return poisonable(build_half(), reads=False)


def half_raising() -> Any:
    """Return the encoder in float16 for a GPU; it looks at its input on the host, so that it can raise."""
    return poisonable(build_half(), reads=True)


def poisonable(encoder: Any, *, reads: bool) -> Any:
    """Return a module that does what the first token of a request asks for, beside what another module does with all of them.

    Parameters
    ----------
    encoder
        Takes token ids, and returns rows of float32; an id that is :data:`ASSERT` reaches it.
    reads
        Whether to look at the tokens on the host too, before the forward.
    """
    import torch
    from torch import nn

    class Poisonable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder
            self._kernel: Any = None

        def forward(self, input_ids: Any) -> Any:
            first = input_ids[:, 0]
            if reads:
                meet(set(first.tolist()), is_cpu=not input_ids.is_cuda)
            if input_ids.is_cuda:
                self._launch(input_ids)
            vectors = self.encoder(input_ids.masked_fill(input_ids > ASSERT, 0))
            return vectors.masked_fill((first == NAN)[:, None], torch.nan)

        def _launch(self, ids: Any) -> None:
            core: Any = importlib.import_module("cuda.core")
            if self._kernel is None:
                device = core.Device(ids.device.index)
                device.set_current()
                options = core.ProgramOptions(arch=f"sm_{device.arch}")
                self._kernel = core.Program(_SOURCE, "c++", options).compile("cubin").get_kernel("poison")
            stream = core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
            config = core.LaunchConfig(grid=ids.shape[0], block=1)
            given = np.int32(ids.stride(0)), np.int64(ILLEGAL), np.int64(HANG)
            core.launch(stream, config, self._kernel, ids.data_ptr(), *given)

    return Poisonable()


def meet(tokens: set[int], *, is_cpu: bool) -> None:
    """Do to this process what the first tokens of a batch ask for, as far as the host can."""
    if RAISE in tokens:
        raise ArithmeticError("the model raised this")
    if is_cpu and ASSERT in tokens:
        os.kill(os.getpid(), signal.SIGKILL)
    if is_cpu and HANG in tokens:
        ctypes.CDLL(None).sleep(3600)


def weights(backend: str) -> dict[str, Any]:
    """Return the weights of the model."""
    found: dict[str, Any] = (half() if backend == "cuda" else full()).state_dict()
    return found


def alone(backend: str, ids: Ids) -> Vectors:
    """Return what the module gives for each request alone, in float32 on the host."""
    import torch

    module = (build_half() if backend == "cuda" else build()).float().eval()
    with torch.inference_mode():
        return np.concatenate([module(torch.from_numpy(row[None])).numpy() for row in ids])


@contextlib.asynccontextmanager
async def served(device: accel.Device, given: dict[str, Any], builder: str, **options: Any) -> AsyncIterator[accel.ModelService]:
    """Serve the model on a device."""
    model = await device.load_model(
        f"benchmarks.model_poison:{builder}",
        weights=given,
        inputs={"input_ids": accel.TensorSpec(("batch", LENGTH), "int64")},
        buckets={"batch": _BUCKETS[device.name.partition(":")[0]]},
        graphs="off" if builder == "half_raising" else "auto",
    )
    try:
        async with accel.serve(model, check_finite=True, **options) as service:
            yield service
    finally:
        await model.aclose()


# -- what is seen


class Log(logging.Handler):
    """What accel logs of one device and of its quarantine, with the time of each record."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.device: accel.Device | None = None
        self.records: list[tuple[float, str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, and note of a context whether it is the one that serves, and not the quarantine's."""
        pairs: dict[str, Any] = dict(getattr(record, "accel", {}))
        if pairs.get("event") == "context_ready":
            pairs["serves"] = self.device is not None and self.device.info().pid == pairs["pid"]
        self.records.append((time.perf_counter(), str(pairs.get("event", record.getMessage())), pairs))

    def faults(self, since: float, *, apart: bool) -> list[float]:
        """Return when contexts were found to be dead, of the device or of its quarantine."""
        return [
            when
            for when, event, pairs in self.records
            if when >= since
            and event == "actor_failed"
            and str(pairs["actor"]).endswith("/context")
            and (" quarantine" in pairs["actor"]) == apart
        ]


class Clients:
    """Tasks that ask one after another, and compare what they get.

    Parameters
    ----------
    ids, expected
        Requests, and the answers to them.
    tolerance
        How far an element of an answer may be off.
    patience
        Seconds after which a request without an answer has failed.
    """

    def __init__(self, ids: Ids, expected: Vectors, tolerance: float, patience: float) -> None:
        self._ids = ids
        self._expected = expected
        self._tolerance = tolerance
        self._patience = patience
        self.answers: list[tuple[float, int, float]] = []  # when, the device's generation then, and the seconds that it took
        self.wrong = 0
        self.errors: list[str] = []

    @contextlib.asynccontextmanager
    async def asking(self, service: accel.ModelService, count: int) -> AsyncIterator[None]:
        """Keep ``count`` clients asking during the block; what they have asked is answered before it ends."""
        is_over = False

        async def client(number: int) -> None:
            rng = np.random.default_rng(number)
            while not is_over:
                await self._ask(service, int(rng.integers(len(self._ids))))

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(client(number))
            try:
                yield
            finally:
                is_over = True

    async def _ask(self, service: accel.ModelService, row: int) -> None:
        began = time.perf_counter()
        try:
            vector = await service.submit(self._ids[row], timeout=self._patience)
        except accel.AccelError as error:
            self.errors.append(repr(error))
        else:
            now = time.perf_counter()
            self.answers.append((now, service.model.device.generation, now - began))
            self.wrong += not np.abs(vector - self._expected[row]).max() <= self._tolerance


@dataclass
class Row:
    """What one poison, or a row of them, has cost. Times in seconds; ``None`` for what did not happen."""

    what: str
    sent: int = 0
    named: int = 0
    error: str = ""
    """What the sender gets; of several, the last."""
    detected_s: float | None = None
    """From sending to the fault's detection."""
    next_good_s: float | None = None
    """From the detection to the next good answer, which the next generation gave; the longest."""
    told_s: float | None = None
    """From sending to the sender's error; the longest."""
    worst_gap_s: float = 0.0
    """Between two good answers, from sending until nothing is in quarantine."""
    deaths: int = 0
    """Of children that served."""
    quarantine_deaths: int = 0
    answers: int = 0
    slowest_s: float = 0.0
    """Of those answers, the suspects' included."""
    innocents_failed: int = 0
    wrong: int = 0
    spare_s: float | None = None
    """From sending until there is a spare child again."""
    timeline: dict[str, Any] = field(default_factory=dict)

    def is_broken(self) -> bool:
        """Return whether an innocent request failed, an answer was wrong, a poison was not named, or children died in vain."""
        most = 2 * self.sent * (self.detected_s is not None)
        return bool(self.innocents_failed or self.wrong or self.named != self.sent or self.quarantine_deaths > most)

    def text(self) -> str:
        """Return a line of the table."""

        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.3f}"

        return (
            f"{self.what:22} {self.error:22} {self.named:3}/{self.sent:<3} {seconds(self.detected_s):>9} {seconds(self.next_good_s):>9} "
            f"{seconds(self.told_s):>9} {self.worst_gap_s:9.3f} {self.deaths:4}+{self.quarantine_deaths:<4} {self.answers:8} {self.slowest_s:8.3f} "
            f"{self.innocents_failed:6} {self.wrong:5} {seconds(self.spare_s):>9}"
        )


HEADER = (
    f"{'poison':22} {'its error':22} {'named':7} {'detected':>9} {'next good':>9} {'told':>9} {'worst gap':>9} {'deaths':9} {'answers':>8} {'slowest':>8} "
    f"{'failed':6} {'wrong':5} {'spare':>9}"
)


class Trial:
    """One service under load, into which poison is sent.

    Parameters
    ----------
    service, clients, log
        What is observed.
    seconds
        How long the clients ask before the poison, and after all is well again.
    patience
        Seconds that anything that is waited for may take.
    spare
        Whether there is a spare child to wait for.
    """

    def __init__(self, service: accel.ModelService, clients: Clients, log: Log, seconds: float, patience: float, *, spare: bool) -> None:
        self._service = service
        self._device: accel.Device = service.model.device
        self._clients = clients
        self._log = log
        self._seconds = seconds
        self._patience = patience
        self._spare = spare

    async def run(self, what: str, poisons: list[Ids], *, every: float = 0.0, is_refilled: bool = True) -> Row:
        """Send poisons, ``every`` seconds apart, and return what they have cost; wait for the next spare child if ``is_refilled``."""
        clients, row, told = self._clients, Row(what, sent=len(poisons)), list[float]()
        await self._until_ready()
        await asyncio.sleep(self._seconds)
        generation, failed, wrong = self._device.generation, len(clients.errors), clients.wrong
        began = time.perf_counter()

        async def send(number: int) -> None:
            await asyncio.sleep(number * every)
            sent = time.perf_counter()
            try:
                vector = await self._service.submit(poisons[number], timeout=self._patience)
            except accel.AccelError as error:
                row.error = _named(error)
                row.named += isinstance(error, _NAMED)
                told.append(time.perf_counter() - sent)
            else:
                row.error = f"an answer: {vector[:2]}"

        async with asyncio.TaskGroup() as group:
            for number in range(len(poisons)):
                group.create_task(send(number))
        await self._until(lambda: not self._service.statistics().isolating)
        over = time.perf_counter()
        if is_refilled and self._spare and self._device.generation > generation:
            await self._until_ready()
            row.spare_s = time.perf_counter() - began
        await self._until(lambda: clients.answers[-1][0] > over)
        await asyncio.sleep(self._seconds)
        row.told_s = max(told, default=None)
        good = [each for each in clients.answers if each[0] >= began]
        faults, apart = self._log.faults(began, apart=False), self._log.faults(began, apart=True)
        row.deaths, row.quarantine_deaths = len(faults), len(apart)
        row.answers, row.innocents_failed, row.wrong = len(good), len(clients.errors) - failed, clients.wrong - wrong
        row.worst_gap_s = float(np.diff([began, *(when for when, _, _ in good)]).max())
        row.slowest_s = max(took for _, _, took in good)
        if faults:
            row.detected_s = faults[0] - began
            row.next_good_s = max(
                next(when for when, of, _ in good if when >= fault and of > generation + number) - fault
                for number, fault in enumerate(faults)
            )
        row.timeline = self._timeline(began)
        print(row.text(), flush=True)
        return row

    def _timeline(self, began: float) -> dict[str, Any]:
        """Return the good answers in columns of equal length, from shortly before the sending on, and what was logged meanwhile."""
        starts = began - _BEFORE
        columns = np.bincount([int((when - starts) / _BIN) for when, _, _ in self._clients.answers if when >= starts])
        told = {"actor_failed", "context_ready", "standby_ready", "poisoned_item", "isolation_ended"}
        events = [
            {"at_s": when - began, "event": event, **{key: value for key, value in pairs.items() if key in _TOLD}}
            for when, event, pairs in self._log.records
            if when >= began and event in told
        ]
        return {"from_s": -_BEFORE, "bin_s": _BIN, "answers": columns.tolist(), "events": events}

    async def _until_ready(self) -> None:
        await self._until(lambda: self._device.state is accel.DeviceState.READY)
        async with asyncio.timeout(self._patience):
            await self._device.spare_ready()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(self._patience):
            while not is_so():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)


_NAMED = accel.PoisonedInputError | accel.NonFiniteError | accel.LibraryError


def _named(error: accel.AccelError) -> str:
    if isinstance(error, accel.PoisonedInputError):
        return " ".join(["remembered" if error.remembered else "poison", error.kind, *([str(error.code)] if error.code else [])])
    return type(error).__name__


def imports_seconds(backend: str) -> float:
    """Return how long an interpreter takes that imports what a child does, with the files in the page cache."""
    parts = ["torch", "benchmarks.model_poison", "accel.models.adapters.torch", *(["accel_cuda"] if backend == "cuda" else [])]
    command = [sys.executable, "-c", f"import {', '.join(parts)}"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH"))))
    }
    took = 0.0
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run(command, check=True, env=environment)
        took = time.perf_counter() - began
    return took


class Measurement:
    """All rows of one run.

    Parameters
    ----------
    backend, kinds, clients, seconds, hang_timeout, patience, spares
        As the program's options.
    """

    def __init__(
        self, backend: str, kinds: tuple[str, ...], clients: int, seconds: float, hang_timeout: float, patience: float, spares: int
    ) -> None:
        self._backend = backend
        self._spares = spares
        self._kinds = kinds
        self._count = clients
        self._seconds = seconds
        self._hang_timeout = hang_timeout
        self._patience = patience
        self._rng = np.random.default_rng(0)
        self._ids = self._rng.integers(0, VOCABULARY, (_ROWS, LENGTH))
        self._expected = alone(backend, self._ids)
        self._weights = weights(backend)
        self._log = Log()
        self.rows: list[Row] = []

    async def run(self) -> None:
        """Measure with a spare child, then without one."""
        logger = logging.getLogger("accel")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self._log)
        print(HEADER, flush=True)
        try:
            await self._with_spare()
            if "assert" in self._kinds:
                await self._cold()
        finally:
            logger.removeHandler(self._log)

    def _poison(self, kind: str) -> Ids:
        ids = self._rng.integers(0, VOCABULARY, LENGTH)
        ids[0] = KINDS[kind]
        return ids

    @contextlib.asynccontextmanager
    async def _opened(self, standby: Any) -> AsyncIterator[accel.Device]:
        restart = accel.RestartStrategy(max_restarts=1000, backoff=(0.0, 0.0))
        spares = 1 if standby == "none" else self._spares
        options = {"host": "process", "standby": standby, "spares": spares, "restart": restart, "hang_timeout": self._hang_timeout}
        async with accel.System() as system:
            self._log.device = device = await system.open_device(self._backend, **options)
            yield device

    @contextlib.asynccontextmanager
    async def _trial(self, device: accel.Device, builder: str, **options: Any) -> AsyncIterator[Trial]:
        async with served(device, self._weights, builder, **options) as service:
            clients = Clients(self._ids, self._expected, _TOLERANCE[self._backend], self._patience)
            async with clients.asking(service, self._count):
                yield Trial(service, clients, self._log, self._seconds, self._patience, spare=device.info().standby != "none")
            for error in clients.errors[:3]:
                print("  failed:", error)
            for pairs in [pairs for _, event, pairs in self._log.records if event == "model_not_captured"][:1]:
                print("  ran eagerly:", pairs.get("error"))

    async def _with_spare(self) -> None:
        builder = "half" if self._backend == "cuda" else "full"
        async with self._opened("model") as device:
            async with self._trial(device, builder, quarantine_idle=float("inf")) as trial:
                sent = []
                for kind in self._kinds:
                    if kind == "illegal" and self._backend == "cpu":
                        print(f"{kind:22} left out: memory of the CPU has no illegal address that torch would use; on a GPU it is measured")
                    elif kind != "exception":
                        sent.append(self._poison(kind))
                        self.rows.append(await trial.run(kind, [sent[-1]]))
                if "assert" in self._kinds:
                    ten = [self._poison("assert") for _ in range(_DISTINCT)]
                    self.rows.append(await trial.run("ten, one a second", ten, every=1.0, is_refilled=False))
                    if self.rows[-1].named == _DISTINCT:
                        self.rows.append(await trial.run("the ten again", ten))
            if "exception" in self._kinds:
                # By its own model: with graphs no Python runs for a request, and so none raises.
                async with self._trial(device, "half_raising" if self._backend == "cuda" else builder, quarantine=False) as trial:
                    self.rows.append(await trial.run("exception", [self._poison("exception")]))

    async def _cold(self) -> None:
        async with (
            self._opened("none") as device,
            self._trial(device, "half" if self._backend == "cuda" else "full") as trial,
        ):
            self.rows.append(await trial.run("assert, no spare", [self._poison("assert")]))


def main() -> int:
    """Measure, print, and return 1 if a row is broken; times that are over a budget are only told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of poison (default: all)")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.0, help="of asking before each poison, and after it")
    parser.add_argument("--hang-timeout", type=float, help="of the device, in seconds (default: 5 on the CPU, else 1)")
    parser.add_argument("--spares", type=int, default=2, help="spare children of the device (default %(default)s)")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which a request without an answer has failed")
    parser.add_argument("--json", type=Path, help="write the rows there, with the columns of their timelines")
    parser.add_argument("--log", type=Path, help="write there what accel logs, with the seconds since the epoch")
    given = parser.parse_args()
    if given.log is not None:
        handler = logging.FileHandler(given.log)
        handler.setFormatter(logging.Formatter("%(created).3f %(levelname)s %(message)s"))
        logging.getLogger("accel").addHandler(handler)
        logging.getLogger("accel").setLevel(logging.INFO)
    kinds = tuple(given.only.split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"there is no poison {sorted(unknown)}; there are {', '.join(KINDS)}")
    began = time.perf_counter()
    imports = imports_seconds(given.backend)
    measurement = Measurement(
        given.backend, kinds, given.clients, given.seconds, given.hang_timeout or _HANG_TIMEOUT[given.backend], given.patience, given.spares
    )
    asyncio.run(measurement.run())
    rows = measurement.rows
    budgets = _budgets(rows, imports)
    print(f"\nimports {imports:.2f} s; all {time.perf_counter() - began:.0f} s")
    for name, (value, must, goal) in budgets.items():
        print(
            f"{name:40} {value:8.3f}  must {must:.3f} {'ok' if value <= must else 'BROKEN'}  goal {goal:.3f} {'ok' if value <= goal else 'missed'}"
        )
    if given.json is not None:
        report = {
            "backend": given.backend,
            "clients": given.clients,
            "imports_s": imports,
            "budgets": budgets,
            "rows": [asdict(row) for row in rows],
        }
        given.json.write_text(json.dumps(report, indent=1))
    return int(any(row.is_broken() for row in rows))


def _budgets(rows: list[Row], imports: float) -> dict[str, tuple[float, float, float]]:
    """Return value, must and goal of each budget of P16 that was measured."""
    warm = [row.next_good_s for row in rows if row.next_good_s is not None and not row.what.endswith("no spare")]
    cold = [row.next_good_s for row in rows if row.next_good_s is not None and row.what.endswith("no spare")]
    ten = [row.worst_gap_s for row in rows if row.what.startswith("ten")]
    found = {"next good answer, with a spare": (warm, 1.0, 0.2), "next good answer, cold": (cold, imports + 2.0, imports + 0.5)}
    found["worst gap at ten poisons, one a second"] = (ten, 1.0, 0.2)
    return {name: (max(values), must, goal) for name, (values, must, goal) in found.items() if values}


if __name__ == "__main__":
    sys.exit(main())
