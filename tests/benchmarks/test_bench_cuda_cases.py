"""The cases of CUDA, run on the CPU backend with stand-ins for what needs a GPU: that they run and report, not what they measure."""

from __future__ import annotations

import asyncio
import gc
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
from accel.cli.bench.report import Report
from accel.cli.bench.suite import Bench, Suite
from accel.cli.main import main
from accel.cpu.backend import CpuDevice
from accel.registry import load_backend
from accel_cuda import CudaBackend
from accel_cuda.families.kernels.bench import EmptyKernel
from benchmarks import run as program
from benchmarks.cases.suite import suite_of as all_cases_of
from benchmarks.cuda_cases import copies, empty, families, family_lines, latency, lengths, mixed, process, products
from benchmarks.cuda_cases.rig import CUPY, TORCH_QUERY, TORCH_THREAD

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


@pytest.mark.parametrize(
    ("runs", "budgets"),
    [
        ([latency.batch], {"P3"}),
        ([latency.graph], {"P3-graph"}),
        ([latency.jittered], {"P4", "P4-cpu"}),
        ([mixed.mixed], MIXED),
        ([lengths.kernel_lengths], set()),
        ([copies.copies, copies.copies_of_all_sizes], {"P7", "P7-put", "P7-get"}),
        ([products.products, products.products_of_all_sizes], {"P8", "P8-one"}),
    ],
)
async def test_cases_answer_their_budgets(runs: list[Any], budgets: set[str], bench: Bench) -> None:
    bench.seed = 7  # with which each block of `mixed` has a smallest product
    for run in runs:
        await run(FakeRig(), bench)
    assert set(bench.report.ratios) == budgets
    assert bench.report.rows


async def test_a_backend_without_an_empty_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the backend cpu has no empty kernel"):
        await await_empty(Bench(Report({})))


async def test_what_is_not_installed_is_left_out(bench: Bench) -> None:
    await empty.await_one(FakeRig(others=False), bench)  # type: ignore[arg-type]
    assert subjects(bench) == {OURS, RAW}
    with pytest.raises(UnsupportedError, match="pip install cupy-cuda13x torch"):
        await empty.from_tasks(FakeRig(others=False), bench)  # type: ignore[arg-type]
    assert set(bench.report.ratios) == {"P1"}


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
