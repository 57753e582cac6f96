"""The cases of ``accel bench --backend cuda``, run on the CPU backend with stand-ins for what needs a GPU: that they run and report, not what they measure."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel import UnsupportedError
from accel.backend import Injection
from accel.cli.bench.command import CASES, suite_of
from accel.cli.bench.report import Report
from accel.cli.bench.suite import Bench, Suite
from accel.cli.main import main
from accel.cpu.backend import CpuDevice
from accel.registry import load_backend
from accel_cuda import CudaBackend
from accel_cuda.bench import bench_suite, cases_copies, cases_latency, cases_lengths, cases_products
from accel_cuda.bench.rig import CUPY, OURS, RAW, TORCH_QUERY, TORCH_THREAD, Rig
from accel_cuda.bench.waits import Wait, as_awaitable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel_cuda.families.kernels.bench import EmptyKernel, SpinKernel

DESIGN = {"P1", "P2", "P3", "P3-graph", "P4", "P4-cpu-1ms", "P4-cpu-5ms", "P5", "P6", "P6-rate", "P7", "P7-put", "P7-get", "P8", "P8-one"}
PROCESS = {"P9", "P9-rate", "P9-copy", "P10", "P10-standby"}


def native(self: CpuDevice, library: str) -> dict[str, Any]:
    """Offer the ops of the library ``bench``: one does nothing, one takes its time on the stream."""

    def empty(lane: Any, op: EmptyKernel, inputs: Any, outputs: Any) -> None: ...

    def spin(lane: Any, op: SpinKernel, inputs: Any, outputs: Any) -> None:
        self.inject(Injection("hang", release=lambda: time.sleep(op.nanoseconds / 1e9)), lane.stream)

    return {"empty_kernel": empty, "spin_kernel": spin} if library == "bench" else {}


class FakeRaw:
    """Takes as long as the kernel, and moves no data."""

    context = SimpleNamespace(create_slab=lambda nbytes: SimpleNamespace(address=4096, close=lambda: None))

    def blocking(self, nanoseconds: int = 0, *, launches: int = 1) -> Callable[[], object]:
        return lambda: time.sleep(max(nanoseconds / 1e9, 1e-6) * launches)

    def launcher(self, nanoseconds: int = 0, *, stream: int | None = None) -> Callable[[], object]:
        return lambda: None

    def turning(self, enqueue: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        async def op() -> None:
            enqueue()
            await asyncio.sleep(0)

        return op

    def graph(self, launches: int) -> Callable[[], object]:
        return lambda: time.sleep(1e-6)

    def pinned_copies(self, device: int, host: np.ndarray[Any, Any]) -> tuple[Callable[[], object], Callable[[], object]]:
        return lambda: time.sleep(1e-6), lambda: time.sleep(1e-6)

    pageable_copies = pinned_copies


class FakeTorch:
    stream = 0

    def add(self) -> Callable[[], object]:
        return lambda: None

    def matmul(self, n: int, dtype: str) -> Callable[[], object]:
        return lambda: None

    def queried(self, launch: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        async def op() -> None:
            launch()
            await asyncio.sleep(0)

        return op

    in_thread = queried

    def copies(self, host: np.ndarray[Any, Any]) -> tuple[Callable[[], object], Callable[[], object]]:
        return lambda: None, lambda: None

    def pinned(self, nbytes: int) -> np.ndarray[Any, Any]:
        return np.empty(nbytes, np.uint8)

    def release(self) -> None: ...


class FakeRig:
    """A rig with everything, or with the driver alone."""

    def __init__(self, *, others: bool = True) -> None:
        self._others = others

    def raw(self, bench: Bench) -> Any:
        return FakeRaw()

    def cupy(self, bench: Bench) -> Any:
        return SimpleNamespace(op=lambda nanoseconds=0: lambda: asyncio.sleep(0)) if self._others else None

    def torch(self, bench: Bench) -> Any:
        return FakeTorch() if self._others else None


class FakeBlas:
    def __init__(self, raw: Any) -> None:
        self.is_closed = False

    def gemm(self, *arguments: Any) -> Callable[[], object]:
        return lambda: None

    def blocking(self, enqueue: Callable[[], object], count: int = 1) -> Callable[[], object]:
        return lambda: time.sleep(1e-6)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(Bench, "scale", lambda self, full, quick: 2)
    monkeypatch.setattr(CpuDevice, "kernels", native)
    monkeypatch.setattr(cases_products, "RawBlas", FakeBlas)
    monkeypatch.setattr(cases_products, "_SIDE", 64)
    monkeypatch.setattr(cases_products, "_SIDES", (8, 32))
    monkeypatch.setattr(cases_products, "_DTYPES", ("float32", "float16"))
    monkeypatch.setattr(cases_copies, "_JUDGED", {"4 KiB": 4096, "8 KiB": 8192})
    monkeypatch.setattr(cases_copies, "_OTHERS", {"64 B": 64})
    monkeypatch.setattr(cases_lengths, "LENGTHS", (0, 100, 1000))
    return Bench(Report({}))


def subjects(bench: Bench) -> set[str]:
    return {row.subject for row in bench.report.rows}


@pytest.mark.parametrize(
    ("run", "budgets"),
    [
        (cases_latency.await_one, {"P1"}),
        (cases_latency.from_tasks, {"P2"}),
        (cases_latency.busy, {"P6", "P6-rate"}),
    ],
)
async def test_an_empty_kernel_is_measured_beside_all_others(run: Any, budgets: set[str], bench: Bench) -> None:
    await run(FakeRig(), bench)
    assert set(bench.report.ratios) == budgets
    others = {CUPY, TORCH_QUERY, TORCH_THREAD}
    assert subjects(bench) >= {OURS} | others


async def test_what_is_not_installed_is_left_out(bench: Bench) -> None:
    await cases_latency.await_one(FakeRig(others=False), bench)  # type: ignore[arg-type]
    assert subjects(bench) == {OURS, RAW}
    with pytest.raises(UnsupportedError, match="pip install cupy"):
        await cases_latency.from_tasks(FakeRig(others=False), bench)  # type: ignore[arg-type]
    assert set(bench.report.ratios) == {"P1"}


async def test_batches_are_rated_by_their_kernels(bench: Bench) -> None:
    await cases_latency.batch(FakeRig(), bench)  # type: ignore[arg-type]
    ratio = bench.report.ratios["P3"]
    rates = {row.subject: row.ops_per_s for row in bench.report.rows}
    assert ratio.value == pytest.approx(rates["batch()"] / rates["64 raw launches + synchronize"], abs=2e-3)


async def test_a_replay_is_told_by_what_it_adds(bench: Bench) -> None:
    await cases_latency.graph(FakeRig(), bench)  # type: ignore[arg-type]
    medians = {row.subject: row.p50_us for row in bench.report.rows}
    added = medians["graph.replay()"] - medians["raw graph launch + synchronize"]
    assert bench.report.ratios["P3-graph"].value == pytest.approx(added, abs=2e-3)


async def test_long_kernels_are_told_by_what_is_added(bench: Bench) -> None:
    await cases_latency.long_kernels(FakeRig(), bench)  # type: ignore[arg-type]
    ratios = bench.report.ratios
    assert set(ratios) == {"P4", "P4-cpu-1ms", "P4-cpu-5ms"}
    details = ratios["P4"].details
    assert ratios["P4"].value == max(details["1ms_p50_us"], details["5ms_p50_us"])
    assert 0 < details["1ms_p50_us"] < 50_000, "the kernel's own time is not in it"


async def test_a_wait_adds_nothing_of_the_kernel_and_counts_its_wall() -> None:
    from accel.cli.bench.measure import Samples

    samples = Samples()
    wait = Wait(as_awaitable(lambda: time.sleep(0.005)), 0.005, 4)
    await wait.warm_up(1)
    await wait(samples)
    assert samples.ops == 4
    assert min(samples.times) >= 0
    assert samples.seconds >= 0.02
    assert samples.rate <= 200
    assert 0 <= wait.percent < 100


async def test_every_length_gives_every_line_a_point(bench: Bench) -> None:
    await cases_lengths.kernel_lengths(FakeRig(), bench)  # type: ignore[arg-type]
    found = {(point.line, point.kernel_us) for point in bench.report.points}
    lines = {f"{OURS}, {name}" for name in ("adaptive", "polled", "host_fn", "sync")} | {RAW, CUPY, TORCH_QUERY, TORCH_THREAD}
    assert found == {(line, length) for line in lines for length in (0, 100, 1000)}
    assert len(bench.report.rows) == len(found)


async def test_copies_are_judged_by_the_worst(bench: Bench) -> None:
    await cases_copies.copies(FakeRig(), bench)  # type: ignore[arg-type]
    ratios = bench.report.ratios
    assert set(ratios) == {"P7", "P7-put", "P7-get"}
    pinned = ratios["P7"].details["copies"]
    assert set(pinned) == {f"pinned {way} {size}" for way in ("put", "get") for size in ("4 KiB", "8 KiB")}
    assert ratios["P7"].value == min(each["ratio"] for each in pinned.values())
    assert set(ratios["P7-put"].details["copies"]) == {"pageable put 4 KiB", "pageable put 8 KiB"}
    before = len(bench.report.rows)
    await cases_copies.copies_of_all_sizes(FakeRig(), bench)  # type: ignore[arg-type]
    assert len(bench.report.rows) == before + 12


async def test_products_are_judged_by_the_worst_dtype(bench: Bench) -> None:
    await cases_products.products(FakeRig(), bench)  # type: ignore[arg-type]
    ratios = bench.report.ratios
    assert ratios["P8"].value == pytest.approx(min(each["ratio"] for each in ratios["P8"].details["dtypes"].values()), abs=1e-3)
    alone = ratios["P8-one"].details["dtypes"]
    assert ratios["P8-one"].value == max(each["accel"] for each in alone.values())
    assert all(set(each) == {"accel", "accel, never asleep", "raw cuBLAS, event.query each turn"} for each in alone.values())
    await cases_products.products_of_all_sizes(FakeRig(), bench)  # type: ignore[arg-type]
    assert {row.case for row in bench.report.rows} >= {"gemm 8 float32", "gemm 32 float16", "gemm 64 float16, one"}


@pytest.mark.parametrize(("module", "name"), [("cupy", "CuPy"), ("torch", "PyTorch")])
def test_what_cannot_be_imported_is_said_once(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    bench, rig = Bench(Report({}), spec="cuda:0"), Rig()
    closed: list[int] = []
    rig._raw = SimpleNamespace(enter=lambda: None, close=lambda: closed.append(1))  # type: ignore[assignment]
    frozen = gc.get_freeze_count()
    find = rig.cupy if module == "cupy" else rig.torch
    assert find(bench) is None
    assert list(bench.report.skipped) == [name]
    assert gc.get_freeze_count() > frozen
    bench.report.skipped.clear()
    assert find(bench) is None
    assert bench.report.skipped == {}
    rig.close()
    assert closed == [1]
    assert gc.get_freeze_count() == 0


def test_the_suite_answers_the_designs_budgets_without_a_gpu() -> None:
    suite = suite_of(CudaBackend())
    assert isinstance(suite, Suite)
    answered = [name for case in suite.cases for name in case.budgets]
    assert set(answered) == DESIGN | PROCESS | {"P12", "P13"}
    assert len(answered) == len(set(answered))
    assert len({case.name for case in suite.cases}) == len(suite.cases)
    assert suite.loops == ("asyncio", "uvloop")
    assert not any(case.once for case in suite.cases if set(case.budgets) & DESIGN), "each of P1 to P8 on each loop"
    assert all(case.limit <= 120 for case in suite.cases if case.name not in ("idle", "ask"))
    suite.close()
    assert suite_of(load_backend("cpu")).cases is CASES


def test_cases_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--backend", "cuda", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(case.name in out for case in bench_suite().cases)
    line = next(line for line in out.splitlines() if line.startswith("P1 "))
    assert "needs" not in line
    assert "not among this backend's cases" in next(line for line in out.splitlines() if line.startswith("P11 "))
    assert "needs" not in next(line for line in out.splitlines() if line.startswith("P9 "))


def test_without_a_gpu_the_backend_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from accel import BackendUnavailableError

    def refuse(self: CudaBackend) -> Any:
        raise BackendUnavailableError("there is no NVIDIA driver", remedy="Install the driver.")

    monkeypatch.setattr(CudaBackend, "devices", refuse)
    assert main(["bench", "--backend", "cuda", "--only", "P1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "accel: there is no NVIDIA driver. Install the driver.\n"
