"""What the device's memory and the primary context are to others: given back, and shared with torch."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
from typing import Any

import pytest

import accel
from tests.accel_cuda.cuda_programs import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def test_closed_devices_leave_no_device_memory_behind() -> None:
    run_program("gives_memory_back")


def test_torch_in_the_same_process_goes_on() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    run_program("shares_the_context_with_torch")


async def test_memory_that_torch_has_goes_with_the_tensor_when_the_device_is_closed() -> None:
    """And not before torch's work on it is over, which a slow kernel shows: unmapped under that, it would be a fault."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    torch: Any = importlib.import_module("torch")
    n = 64 << 20
    copy = torch.zeros(n, device="cuda")
    torch.cuda.synchronize()
    async with accel.System() as system:
        device = await system.open_device("cuda")
        tensor = torch.from_dlpack(await device.full((n,), 4.0))
    assert float(tensor[:1000].sum()) == 4000.0
    stream = torch.cuda.Stream()
    before, _ = torch.cuda.mem_get_info()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        copy.copy_(tensor)
    del tensor
    gc.collect()
    assert not stream.query(), "the slow kernel was too fast to prove anything"
    async with asyncio.timeout(20):
        while torch.cuda.mem_get_info()[0] < before + 4 * n:
            await asyncio.sleep(0)
    assert stream.query()
    assert float(copy.sum()) == 4.0 * n


def test_a_context_that_somebody_destroyed_is_made_again() -> None:
    run_program("outlives_its_context")
