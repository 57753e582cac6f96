"""The cases of CUDA, run on the CPU backend with stand-ins for what needs a GPU: that they run and report, not what they measure."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel import AccelRef, Device, System, UnsupportedError
from accel.backend import Injection
from accel.cli.bench import cases
from accel.cli.bench.cases import CASES, LAUNCH_CASES, OURS, RAW, await_empty
from accel.cli.bench.command import suite_of
from accel.cli.bench.measure import Samples
from accel.cli.bench.report import Report
from accel.cli.bench.suite import Bench, Suite
from accel.cli.main import main
from accel.cpu.backend import CpuDevice
from accel.registry import load_backend
from accel_cuda import CudaBackend
from accel_cuda.families.kernels.bench import EmptyKernel
from benchmarks import run as program
from benchmarks.cases import mixed as any_mixed
from benchmarks.cases.suite import suite_of as all_cases_of
from benchmarks.cuda_cases import copies, empty, families, family_lines, latency, lengths, mixed, process, products
from benchmarks.cuda_cases.rig import CUPY, TORCH_QUERY, TORCH_THREAD, Rig
from benchmarks.cuda_cases.waits import Wait, as_awaitable
from benchmarks.measures import points_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from accel_cuda.families.kernels.bench import SpinKernel

PACKAGED = {"P1", "P5", "P10", "P10-standby", "P12", "P13"}
HOST_COST = {"P38", "P38-batch", "P38-products", "P38-dnn", "P38-matmul", "P38-mixed"}
ONCE = {"P10", "P10-standby", "P13", "P17"} | HOST_COST
EACH_LOOP = {"P2", "P6", "P6-rate", "P3", "P3-graph", "P4", "P4-cpu", "P7", "P7-put", "P7-get", "P8", "P8-one", "P9", "P9-rate", "P9-copy"}
MIXED = {"P14", "P14-p50", "P14-p99", "P14-small", "P14-cpu"}


KERNELS = CpuDevice.kernels


def native(self: CpuDevice, library: str) -> Mapping[str, Any]:
    """Offer the ops of the library ``bench``: one does nothing, one takes its time on the stream."""

    def empty(lane: Any, op: EmptyKernel, plan: Any, inputs: Any, outputs: Any) -> None: ...

    def spin(lane: Any, op: SpinKernel, plan: Any, inputs: Any, outputs: Any) -> None:
        self.inject(Injection("hang", release=lambda: time.sleep(op.nanoseconds / 1e9)), lane.stream)

    return {"empty_kernel": empty, "spin_kernel": spin} if library == "bench" else KERNELS(self, library)


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

    def products(self, matrices: dict[int, np.ndarray[Any, Any]], streams: int) -> Callable[[int], Awaitable[None]]:
        return lambda n: asyncio.sleep(1e-3 / streams)

    def spinning(self, raw: Any, streams: int) -> list[Callable[[int], Awaitable[None]]]:
        return [lambda nanoseconds: asyncio.sleep(nanoseconds / 1e9)] * streams

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
        return (
            SimpleNamespace(op=lambda nanoseconds: lambda: asyncio.sleep(0), empty=lambda: lambda: asyncio.sleep(0))
            if self._others
            else None
        )

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


@pytest.fixture(autouse=True)
def frozen_again() -> Iterator[None]:
    """Freeze the tests' objects again, which closing a rig unfreezes; see ``conftest.py``."""
    yield
    gc.freeze()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(Bench, "scale", lambda self, full, quick: 2)
    monkeypatch.setattr(CpuDevice, "kernels", native)
    backend = SimpleNamespace(empty_op=EmptyKernel, raw_launch=lambda index: nullcontext(FakeRaw().blocking()))
    monkeypatch.setattr(cases, "find_device", lambda spec: (backend, SimpleNamespace(index=0)))
    monkeypatch.setattr(products, "RawBlas", FakeBlas)
    monkeypatch.setattr(products, "_SIDE", 64)
    monkeypatch.setattr(products, "_SIDES", (8, 32))
    monkeypatch.setattr(products, "_DTYPES", ("float32", "float16"))
    monkeypatch.setattr(copies, "_JUDGED", {"4 KiB": 4096, "8 KiB": 8192})
    monkeypatch.setattr(copies, "_OTHERS", {"64 B": 64})
    monkeypatch.setattr(lengths, "LENGTHS", (0, 100, 1000))
    monkeypatch.setattr(mixed, "SIZES", (8, 16, 32))
    return Bench(Report({}))


def subjects(bench: Bench) -> set[str]:
    return {row.subject for row in bench.report.rows}


@pytest.mark.parametrize(
    ("run", "budgets"),
    [
        (empty.await_one, {"P1"}),
        (empty.from_tasks, {"P2"}),
        (empty.busy, {"P6", "P6-rate"}),
    ],
)
async def test_an_empty_kernel_is_measured_beside_all_others(run: Any, budgets: set[str], bench: Bench) -> None:
    await run(FakeRig(), bench)
    assert set(bench.report.ratios) == budgets
    others = {CUPY, TORCH_QUERY, TORCH_THREAD}
    assert subjects(bench) >= {OURS} | others


async def test_a_backend_without_an_empty_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the backend cpu has no empty kernel"):
        await await_empty(Bench(Report({})))


async def test_recoveries_are_held_cold_and_with_a_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples()
    samples.add(0.1)

    async def recovery(bench: Bench, standby: str, rounds: int) -> Samples:
        return samples

    monkeypatch.setattr(cases, "recovery", recovery)
    bench = Bench(Report({}))
    await cases.hold_recoveries(bench)
    assert {name: ratio.value for name, ratio in bench.report.ratios.items()} == {"P10": 0.1, "P10-standby": 0.1}


async def test_what_is_not_installed_is_left_out(bench: Bench) -> None:
    await empty.await_one(FakeRig(others=False), bench)  # type: ignore[arg-type]
    assert subjects(bench) == {OURS, RAW}
    with pytest.raises(UnsupportedError, match="pip install cupy-cuda13x torch"):
        await empty.from_tasks(FakeRig(others=False), bench)  # type: ignore[arg-type]
    assert set(bench.report.ratios) == {"P1"}


class FakeModule:
    """As much of ``torch`` as a sum of rows takes. Nothing can be captured."""

    float32 = np.float32

    def __init__(self) -> None:
        self.waits = 0
        self.cuda = SimpleNamespace(CUDAGraph=self.refuse, synchronize=self.wait)
        self.from_numpy = lambda array: SimpleNamespace(to=lambda device: array)

    def wait(self) -> None:
        self.waits += 1
        time.sleep(1e-5)

    def refuse(self) -> None:
        raise RuntimeError("no graphs")

    def randn(self, shape: tuple[int, ...], device: str) -> Any:
        return SimpleNamespace(to=lambda kind: np.zeros(shape, kind))


def line_of(what: str, sizes: tuple[tuple[int, ...], ...], ours: Callable[..., Any]) -> Any:
    return family_lines.Line("reduce", what, sizes, lambda *size: ((size, "float32"),), ours, lambda t, x: x.sum(1))  # type: ignore[arg-type]


async def test_ops_of_families_are_told_by_what_each_takes_of_the_device(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(device: Any, x: Any) -> Any:
        raise UnsupportedError("it is not there")

    sizes = ((1, 2), (3, 4), (5, 6))
    lines: tuple[Any, ...] = (line_of("sums", sizes, lambda d, x: d.reduce("sum", x, axis=1)), line_of("nothing", sizes, refused))
    lines = (*lines, lines[0]._replace(what="waits", operands=lambda *size: (np.ones(size, np.float32),), is_awaited=True))
    monkeypatch.setattr(families, "LINES", lines)
    torch = FakeModule()
    rig: Any = SimpleNamespace(torch=lambda bench: SimpleNamespace(torch=torch))
    await families.families(rig, bench)
    rows = {(row.case, row.subject) for row in bench.report.rows}
    names = {f"reduce sums {size}, {what}" for size in ("1x2", "3x4", "5x6") for what in ("device", "awaited")}
    names |= {name.replace("sums", "waits") for name in names}
    assert rows == {(name, subject) for name in names for subject in (OURS, families.TORCH)}
    assert set(bench.report.ratios["P17"].details["large"]) == {"reduce sums 5x6", "reduce waits 5x6"}
    assert torch.waits
    assert set(bench.report.skipped) == {"reduce nothing 1x2"}
    monkeypatch.setattr(families, "LINES", (line_of("wrong", sizes, lambda d, x: d.reduce("sum", x, axis=7)), *lines[:1]))
    torch.randn = lambda shape, device: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="P17 has no twin"):
        await families.families(rig, bench)
    assert set(bench.report.failures) == {f"reduce wrong {size}" for size in ("1x2", "3x4", "5x6")}
    assert "PyTorch, reduce sums 1x2" in bench.report.skipped
    monkeypatch.setattr(families, "_PATIENCE", -1.0)
    with pytest.raises(UnsupportedError, match="P17 has no twin"):
        await families.families(FakeRig(others=False), bench)  # type: ignore[arg-type]
    assert "reduce sums 3x4" in bench.report.skipped


async def test_every_line_of_the_families_runs() -> None:
    rng = np.random.default_rng()
    async with System() as system:
        device = await system.open_device("cpu")
        for line in family_lines.LINES:
            data = [families.data_of(rng, operand) for operand in line.operands(*line.sizes[0])]
            made: Any = await line.ours(device, *[await device.put(each) for each in data])
            assert made is not None, line.what
            if line.is_awaited:
                continue
            refs = [await device.put(each) for each in data]
            async with device.batch() as batch:
                batched: Any = line.ours(batch, *refs)
            for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (made, batched)), strict=True):
                np.testing.assert_array_equal(await device.get(one), await device.get(other), line.what)


async def test_batches_are_rated_by_their_kernels(bench: Bench) -> None:
    await latency.batch(FakeRig(), bench)  # type: ignore[arg-type]
    ratio = bench.report.ratios["P3"]
    rates = {row.subject: row.ops_per_s for row in bench.report.rows}
    assert ratio.value == pytest.approx(rates["batch()"] / rates["64 raw launches + synchronize"], abs=2e-3)


async def test_a_replay_is_told_by_what_it_adds(bench: Bench) -> None:
    await latency.graph(FakeRig(), bench)  # type: ignore[arg-type]
    medians = {row.subject: row.p50_us for row in bench.report.rows}
    added = medians["graph.replay()"] - medians["raw graph launch + synchronize"]
    assert bench.report.ratios["P3-graph"].value == pytest.approx(added, abs=2e-3)


async def test_the_better_of_two_is_the_twin_of_many_tasks(bench: Bench) -> None:
    await empty.from_tasks(FakeRig(), bench)  # type: ignore[arg-type]
    ratio = bench.report.ratios["P2"]
    rates = ratio.details["ops_per_s"]
    assert ratio.value == pytest.approx(rates[OURS] / max(rates[CUPY], rates[TORCH_QUERY]), rel=1e-2, abs=1e-3)


async def test_jittered_kernels_are_told_by_what_is_added(bench: Bench) -> None:
    await latency.jittered(FakeRig(), bench)  # type: ignore[arg-type]
    ratios = bench.report.ratios
    assert set(ratios) == {"P4", "P4-cpu"}
    assert 0 < ratios["P4"].value < 50_000, "the kernel's own time is not in it"
    assert set(ratios["P4-cpu"].details["cpu_percent"]) == {OURS, TORCH_QUERY}
    assert ratios["P4-cpu"].value == pytest.approx(ratios["P4-cpu"].details["cpu_percent"][OURS], abs=0.06)
    assert subjects(bench) == {OURS, TORCH_QUERY}


async def test_kernels_of_all_tasks_run_at_once_and_each_takes_off_its_own_length() -> None:
    running = 0
    seen: list[tuple[int, int]] = []

    async def spin(nanoseconds: int) -> None:
        nonlocal running
        running += 1
        await asyncio.sleep(0)
        seen.append((nanoseconds, running))
        await asyncio.sleep(0)
        running -= 1

    samples = Samples()
    lengths_in_seconds = np.array([[1, 2], [5, 7]])
    await latency._Jittered([spin, spin], lengths_in_seconds * 10**9)(samples)
    assert {at_once for _, at_once in seen} == {2}
    assert sorted(length for length, _ in seen) == [10**9, 2 * 10**9, 5 * 10**9, 7 * 10**9]
    assert sorted(round(added) for added in samples.times) == [-7, -5, -2, -1]


async def test_the_mix_is_judged_by_the_worst_host_and_number_of_tasks(bench: Bench) -> None:
    bench.seed = 7  # with which each block has a smallest product
    await mixed.mixed(FakeRig(), bench)  # type: ignore[arg-type]
    ratios = bench.report.ratios
    assert set(ratios) == MIXED
    for name, ratio in ratios.items():
        each = ratio.details["ratios"]
        assert set(each) == {f"{host}, {tasks} tasks" for host in (any_mixed.INLINE, any_mixed.PROCESS) for tasks in (8, 64)}
        assert ratio.value == (min if name == "P14" else max)(each.values())
    rows = {(row.case, row.subject): row for row in bench.report.rows}
    for tasks in (8, 64):
        case = f"products of 8 to 32 from {tasks} tasks that pause"
        ours, twin = rows[case, any_mixed.INLINE], rows[case, mixed.TORCH_POOL]
        name = f"{any_mixed.INLINE}, {tasks} tasks"
        assert ratios["P14-p50"].details["ratios"][name] == pytest.approx(ours.p50_us / twin.p50_us, rel=1e-2, abs=1e-3)
        assert ratios["P14-p99"].details["ratios"][name] == pytest.approx(ours.p99_us / twin.p99_us, rel=1e-2, abs=1e-3)
        assert ratios["P14"].details["ratios"][name] == pytest.approx(ours.ops_per_s / twin.ops_per_s, rel=1e-2, abs=1e-3)
        ours, twin = rows[f"{case}, those of 8", any_mixed.INLINE], rows[f"{case}, those of 8", mixed.TORCH_POOL]
        assert ratios["P14-small"].details["ratios"][name] == pytest.approx(ours.p50_us / twin.p50_us, rel=1e-2, abs=1e-3)
        assert (case, mixed.TORCH_ONE) in rows
    with pytest.raises(UnsupportedError, match="pip install torch"):
        await mixed.mixed(FakeRig(others=False), bench)  # type: ignore[arg-type]


async def test_blocks_of_one_seed_draw_the_same_products_and_pauses() -> None:
    asked: dict[str, list[int]] = {"one": [], "other": []}

    def product(name: str) -> Any:
        async def run(n: int) -> None:
            asked[name].append(n)

        return run

    blocks = {name: any_mixed.Block(product(name), (8, 16, 32), 3, 0.02, seed=7) for name in asked}
    rounds = [block.draws(0) for block in blocks.values()]
    assert rounds[0] == rounds[1]
    assert blocks["one"].draws(1) != rounds[0]
    sizes, pauses = zip(*rounds[0], strict=True)
    assert set(sizes) == {8, 16, 32}
    assert 0.3e-3 < sum(pauses) / len(pauses) < 0.7e-3
    firsts = [blocks["one"].draws(task)[0][0] for task in range(3)]
    samples = Samples()
    for block in blocks.values():
        await block.warm_up()
        assert block.small.ops == 0
        await block(samples)
        assert 0 < block.small.ops < samples.ops
        assert 0 <= block.percent <= 100
    assert asked["one"][:3] == asked["other"][:3] == firsts
    assert any_mixed.Block(product("one"), (8, 16, 32), 3, 0.02, seed=8).draws(0) != rounds[0]


async def test_a_wait_adds_nothing_of_the_kernel_and_counts_its_wall() -> None:
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
    await lengths.kernel_lengths(FakeRig(), bench)  # type: ignore[arg-type]
    found = {(point.line, point.kernel_us) for point in points_of(bench.report)}
    lines = {f"{OURS}, {name}" for name in ("adaptive", "polled", "host_fn", "sync")} | {RAW, CUPY, TORCH_QUERY, TORCH_THREAD}
    assert found == {(line, length) for line in lines for length in (0, 100, 1000)}
    assert len(bench.report.rows) == len(found)


async def test_copies_are_judged_by_the_worst(bench: Bench) -> None:
    await copies.copies(FakeRig(), bench)  # type: ignore[arg-type]
    ratios = bench.report.ratios
    assert set(ratios) == {"P7", "P7-put", "P7-get"}
    pinned = ratios["P7"].details["copies"]
    assert set(pinned) == {f"pinned {way} {size}" for way in ("put", "get") for size in ("4 KiB", "8 KiB")}
    assert ratios["P7"].value == min(each["ratio"] for each in pinned.values())
    assert set(ratios["P7-put"].details["copies"]) == {"pageable put 4 KiB", "pageable put 8 KiB"}
    before = len(bench.report.rows)
    await copies.copies_of_all_sizes(FakeRig(), bench)  # type: ignore[arg-type]
    assert len(bench.report.rows) == before + 12


async def test_products_are_judged_by_the_worst_dtype(bench: Bench) -> None:
    await products.products(FakeRig(), bench)  # type: ignore[arg-type]
    ratios = bench.report.ratios
    assert ratios["P8"].value == pytest.approx(min(each["ratio"] for each in ratios["P8"].details["dtypes"].values()), abs=1e-3)
    alone = ratios["P8-one"].details["dtypes"]
    assert ratios["P8-one"].value == max(each["accel"] for each in alone.values())
    assert all(set(each) == {"accel", "raw cuBLAS, event.query each turn"} for each in alone.values())
    await products.products_of_all_sizes(FakeRig(), bench)  # type: ignore[arg-type]
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


class InlineSystem(System):
    """Opens every device inline: a child of the CPU backend has no stand-ins."""

    async def open_device(self, spec: str, **options: Any) -> Device:  # type: ignore[override]
        return await super().open_device(spec, **(options | {"host": "inline"}))


async def test_a_child_is_rated_beside_the_inline_device(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "System", InlineSystem)
    await process.from_tasks(FakeRig(), bench)  # type: ignore[arg-type]
    rates = bench.report.ratios["P9-rate"].details["ops_per_s"]
    assert set(rates) == {OURS, "accel, inline"}
    assert bench.report.ratios["P9-rate"].value == pytest.approx(rates[OURS] / rates["accel, inline"], rel=1e-2, abs=1e-3)  # it is rounded


@pytest.mark.parametrize(("find", "budgets"), [(suite_of, PACKAGED), (all_cases_of, PACKAGED | EACH_LOOP | MIXED | ONCE)])
def test_the_suites_answer_the_designs_budgets_without_a_gpu(find: Callable[[Any], Suite], budgets: set[str]) -> None:
    suite = find(CudaBackend())
    assert isinstance(suite, Suite)
    answered = [name for case in suite.cases for name in case.budgets]
    assert set(answered) == budgets
    assert len(answered) == len(set(answered))
    assert len({case.name for case in suite.cases}) == len(suite.cases)
    assert suite.loops == ("asyncio", "uvloop")
    both = (EACH_LOOP | MIXED | PACKAGED) - ONCE
    assert not any(case.once for case in suite.cases if set(case.budgets) & both), "on each loop"
    assert all(case.limit <= 120 for case in suite.cases if case.name not in ("idle", "ask"))
    suite.close()
    assert suite_of(load_backend("cpu")).cases is CASES


def test_cases_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--backend", "cuda", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(case.name) for line in lines) for case in LAUNCH_CASES)
    assert "needs" not in next(line for line in lines if line.startswith("P1 "))
    assert "not among this suite's cases" in next(line for line in lines if line.startswith("P11 "))
    assert "benchmarks/run.py" in next(line for line in lines if line.startswith("P9 "))
    assert main(["bench", "--backend", "cuda", "--list"], program.COMMANDS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "needs" not in next(line for line in lines if line.startswith("P9 "))
    assert any(line.startswith("mixed ") for line in lines)


def test_without_a_gpu_the_backend_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from accel import BackendUnavailableError

    def refuse(self: CudaBackend) -> Any:
        raise BackendUnavailableError("there is no NVIDIA driver", remedy="Install the driver.")

    monkeypatch.setattr(CudaBackend, "devices", refuse)
    assert main(["bench", "--backend", "cuda", "--only", "P1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "accel: there is no NVIDIA driver. Install the driver.\n"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
async def test_lines_of_sparse_matrices_ask_both_for_the_same(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    lines = [line for line in family_lines.LINES if line.family == "sparse"]
    assert [line.what.split()[0] for line in lines] == ["spmv", "spmm", "spgemm"]
    async with System("bench") as system:
        device = await system.open_device("cpu")
        for line in lines:
            operands = line.operands(64, 4)
            arrays = [families.data_of(rng, each) for each in operands]
            made = await line.ours(device, *[await device.put(each) for each in arrays])
            ours = await device.get(made if isinstance(made, AccelRef) else await device.sparse.todense(made))
            theirs = line.theirs(torch, *[torch.from_numpy(each) for each in arrays])
            assert line.is_awaited == (line.what.split()[0] == "spgemm")
            np.testing.assert_allclose(ours, (theirs.to_dense() if theirs.is_sparse_csr else theirs).numpy(), rtol=1e-4, atol=1e-4)
