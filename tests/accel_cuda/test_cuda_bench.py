"""``accel bench`` on a GPU, and the ops that it measures with."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel import DType, System
from accel.cli.main import main
from accel_cuda.families.kernels.bench import EmptyKernel, SpinKernel
from benchmarks import run
from benchmarks.cuda_cases.raw import Raw
from benchmarks.cuda_cases.raw_blas import RawBlas

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.gpu


async def test_a_spinning_kernel_takes_its_time_and_holds_its_buffer() -> None:
    async with System() as system:
        device = await system.open_device("cuda")
        out, other = await device.full(4, 7), await device.zeros(4)
        await device.run(EmptyKernel(out))
        for milliseconds in (1, 20):
            began = time.perf_counter()
            assert await device.run(SpinKernel(out, milliseconds * 1_000_000)) is out
            assert time.perf_counter() - began >= milliseconds / 1e3
        spinning = asyncio.ensure_future(device.run(SpinKernel(out, 50_000_000)))
        await asyncio.sleep(0)
        assert (await device.get(other)).tolist() == [0, 0, 0, 0]
        assert not spinning.done(), "another buffer is read meanwhile"
        assert (await device.get(out)).tolist() == [7, 7, 7, 7]
        assert spinning.done(), "its own is read after it"
        await spinning


@pytest.fixture
def raw() -> Iterator[Raw]:
    made = Raw(0)
    yield made
    made.close()


def test_raw_kernels_take_their_time(raw: Raw) -> None:
    for call, least in ((raw.blocking(), 0.0), (raw.blocking(2_000_000, launches=3), 0.006), (raw.graph(64), 0.0)):
        call()
        began = time.perf_counter()
        call()
        assert least <= time.perf_counter() - began < least + 0.005
    launch, wait = raw.launcher(20_000_000), raw.waiter()
    wait()
    began = time.perf_counter()
    launch()
    assert time.perf_counter() - began < 0.01, "a launch does not wait"
    wait()
    assert time.perf_counter() - began >= 0.02


def test_raw_copies_move_the_bytes(raw: Raw) -> None:
    source = np.random.default_rng().integers(0, 256, 1 << 20, np.uint8)
    slab = raw.context.create_slab(source.nbytes)
    for copies in (raw.pageable_copies, raw.pinned_copies):
        target = np.full_like(source, 255)
        (put, _), (_, get) = copies(slab.address, source), copies(slab.address, target)
        put()
        get()
        assert np.array_equal(source, target)
    slab.close()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_raw_products_are_right(name: str, raw: Raw) -> None:
    seed = np.random.SeedSequence().entropy
    n, dtype = 96, DType.of(name)
    values = np.random.default_rng(seed).standard_normal((3, n, n)).astype(dtype.numpy)
    slab = raw.context.create_slab(values.nbytes)
    put, get = raw.pageable_copies(slab.address, values.view(np.uint8))
    put()
    blas = RawBlas(raw)
    size = values[0].nbytes
    blas.blocking(blas.gemm(n, dtype, slab.address, slab.address + size, slab.address + 2 * size), 2)()
    a, b = values[:2].astype(np.float64)
    get()
    blas.close()
    slab.close()
    assert np.allclose(values[2].astype(np.float64), a @ b, rtol=2e-2, atol=0.1), f"seed {seed}"


@pytest.mark.timeout(120)
def test_the_command_measures_both_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["bench", "--backend", "cuda", "--quick", "--only", "P1,P3,P4", "--json", str(target)], run.COMMANDS) == 0
    document = json.loads(target.read_text(encoding="utf-8"))
    names = {"P1", "P3", "P4", "P4-cpu"}
    assert set(document["ratios"]) == names | {f"{name}-uvloop" for name in names}
    assert document["machine"]["loop"] == "asyncio, uvloop"
    assert document["machine"]["cuda-bindings"]
    assert all(ratio["value"] > 0 for ratio in document["ratios"].values())
    raw = [row for row in document["rows"] if row["subject"].startswith("raw launch")]
    assert raw
    assert all(row["p50_us"] > 0 for row in raw)
