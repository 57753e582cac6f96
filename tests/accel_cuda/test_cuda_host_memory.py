"""Host memory on a GPU: pinned arrays, staged copies of all sizes, cancelling, closing, and what is left afterwards."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import run_program

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZES = (1, 4096, 4097, 65537, 256 << 10, (256 << 10) + 1, MIB - 1, 3 * MIB + 5, 64 * MIB, 67 * MIB + 3, 200 * MIB + 1)
PATIENCE = 30.0


def fresh(nbytes: int) -> tuple[np.ndarray[Any, Any], int]:
    seed = int(np.random.default_rng().integers(1 << 31))
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8), seed


@pytest.mark.parametrize("nbytes", SIZES)
async def test_every_size_goes_there_and_back(device: accel.Device, nbytes: int) -> None:
    array, seed = fresh(nbytes)
    ref = await device.put(array)
    back = np.full_like(array, 0xA5)
    assert await device.get(ref, out=back) is back
    assert np.array_equal(back, array), seed
    assert np.array_equal(await device.get(ref), array), seed
    pinned = await device.pinned(nbytes, "uint8")
    pinned[:] = 0x5A
    await device.get(ref, out=pinned)
    assert np.array_equal(pinned, array), seed
    pinned[:] = pinned[::-1].copy()
    await device.put(pinned, out=ref)
    assert np.array_equal(await device.get(ref), array[::-1]), seed


async def test_many_copies_at_once_do_not_mix(device: accel.Device) -> None:
    arrays = [fresh(int(n))[0] for n in np.random.default_rng().integers(1, 12 * MIB, 24)]
    refs = await asyncio.gather(*(device.put(array) for array in arrays))
    backs = await asyncio.gather(*(device.get(ref) for ref in refs))
    for array, back in zip(arrays, backs, strict=True):
        assert np.array_equal(array, back)


async def test_a_batch_with_more_small_copies_than_are_kept_ready(device: accel.Device) -> None:
    arrays = [fresh(256 << 10)[0] for _ in range(200)]
    refs = await asyncio.gather(*(device.put(array) for array in arrays))
    for array, back in zip(arrays, await asyncio.gather(*(device.get(ref) for ref in refs)), strict=True):
        assert np.array_equal(array, back)


async def test_a_pinned_array_is_registered_and_moved_as_it_is(device: accel.Device) -> None:
    array = await device.pinned((MIB,), "float32")
    info = device.info().pinned
    assert info.used >= array.nbytes
    context: Any = device._host.context.device
    assert context.pinned.covers(array.ctypes.data, array.nbytes)
    assert context.pinned.covers(array[1000:].ctypes.data, array[1000:].nbytes)
    assert not context.pinned.covers(np.ones(MIB).ctypes.data, MIB)
    ordinary = np.ones(2 * MIB, np.uint8)
    lane = device._host.context.lanes.all[0]
    assert not context.may_block(lane, accel.ops.Put(array))
    assert context.may_block(lane, accel.ops.Put(ordinary))


async def test_memory_that_torch_has_pinned_is_known_by_its_ends(device: accel.Device) -> None:
    torch = pytest.importorskip("torch")
    context: Any = device._host.context.device
    tensor = torch.empty(MIB, dtype=torch.uint8).pin_memory()
    array = tensor.numpy()
    array[:] = fresh(MIB)[0]
    assert context.pinned.covers(array.ctypes.data, array.nbytes)
    assert not context.pinned.covers(array.ctypes.data, 1 << 34)
    assert np.array_equal(await device.get(await device.put(array)), array)


async def test_a_pinned_array_outlives_its_device() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda")
        array = await device.pinned(MIB, "uint8")
        expected, seed = fresh(MIB)
        await device.get(await device.put(expected), out=array)
    assert np.array_equal(array, expected), seed
    array[:] = 1
    assert array.sum() == MIB


@pytest.mark.parametrize("way", ["put", "get"])
async def test_a_copy_that_is_cancelled_in_the_middle_reads_and_writes_on_and_gives_all_back(device: accel.Device, way: str) -> None:
    array, seed = fresh(256 * MIB)
    ref = await device.put(array)
    for turns in (1, 2, 5, 50):
        target = np.zeros_like(array)
        call = device.put(array, out=ref) if way == "put" else device.get(ref, out=target)
        task = asyncio.ensure_future(call)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del target
    del task, call
    assert np.array_equal(await device.get(ref), array), seed
    context: Any = device._host.context.device
    await device.put(np.ones(1))
    gc.collect()
    # What the streams keep for themselves at most.
    assert context.staging.statistics().used <= 8 * 3 * MIB


async def test_closing_while_a_stream_hangs_gives_the_staging_memory_back() -> None:
    plan = FaultPlan().hang_at(3)
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device("cuda", faults=plan, streams=1)  # or the put would overlap the hung copy
        context: Any = device._host.context.device
        array, _ = fresh(128 * MIB)
        ref, other = await device.put(array[:MIB].copy()), await device.put(array[:MIB].copy())
        hung = asyncio.ensure_future(device.copy(ref, other))
        put = asyncio.ensure_future(device.put(array))
        for _ in range(100):
            await asyncio.sleep(0)
        await device.aclose(timeout=0.5)
        for task in (hung, put):
            with pytest.raises(accel.AccelError):
                await task
        plan.release()
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while context.staging.statistics().reserved:
            assert asyncio.get_running_loop().time() < deadline, context.staging.statistics()
            await asyncio.sleep(0.01)
        again = await system.open_device("cuda")
        assert np.array_equal(await again.get(await again.put(array)), array)


def test_a_context_that_is_closed_holds_no_host_memory() -> None:
    context = CudaBackend().open(0)
    stream = context.create_stream()
    array, seed = fresh(64 * MIB)
    slab = context.create_slab(array.nbytes)
    pointer = slab.address
    stream.copy_htod(pointer, array.data)
    back = np.zeros_like(array)
    stream.copy_dtoh(back.data, pointer)
    stream.synchronize()
    assert np.array_equal(back, array), seed
    slab.close()
    assert context.staging.statistics().reserved
    context.close()
    assert context.staging.statistics().reserved == 0
    assert context.staging.statistics().used == 0


@pytest.mark.parametrize("way", ["put", "get"])
def test_a_fault_in_the_middle_of_a_copy(way: str) -> None:
    run_program("faults_in_a_copy", way)
