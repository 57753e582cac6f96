"""``accel bench`` on a GPU, and the ops that it measures with."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import pytest

from accel import System
from accel.cli.main import main
from accel_cuda.kernels.bench import EmptyKernel, SpinKernel

if TYPE_CHECKING:
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


@pytest.mark.timeout(120)
def test_the_command_measures_both_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["bench", "--backend", "cuda", "--quick", "--only", "P1,P3,P4", "--json", str(target)]) == 0
    document = json.loads(target.read_text(encoding="utf-8"))
    names = {"P1", "P3", "P4", "P4-cpu-1ms", "P4-cpu-5ms"}
    assert set(document["ratios"]) == names | {f"{name}-uvloop" for name in names}
    assert document["machine"]["loop"] == "asyncio, uvloop"
    assert document["machine"]["cuda-bindings"]
    assert all(ratio["value"] > 0 for ratio in document["ratios"].values())
    raw = [row for row in document["rows"] if row["subject"].startswith("raw launch")]
    assert raw
    assert all(row["p50_us"] > 0 for row in raw)
