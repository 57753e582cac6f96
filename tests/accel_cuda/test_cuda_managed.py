"""Managed memory on the GPU: any dtype, moved and advised as asked for. Small on purpose: a GPU whose managed memory is oversubscribed may hang."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import accel
from accel_cuda.core.driver import load_driver

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

DTYPES = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "bool", "complex128"]


def asked(ref: accel.AccelRef, name: str) -> int:
    """Return what the driver knows of a range."""
    driver = load_driver()
    context: Any = ref.owner.sharing._context
    address = context.buffers.blocks[ref.buffer].address + ref.offset
    attribute = getattr(driver.CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
    with context.device.section:
        value = driver.call("cuMemRangeGetAttribute", 4, attribute, address, ref.nbytes)
    return int.from_bytes(value, "little", signed=True) if isinstance(value, bytes | bytearray) else int(value)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_any_dtype(device: accel.Device, dtype: str, rng: np.random.Generator) -> None:
    source = (rng.standard_normal((33, 65)) * 3).astype(accel.DType.of(dtype).numpy)
    ref = await device.managed((33, 65), dtype)
    assert (ref.shape, ref.dtype.value, ref.is_managed, ref.is_foreign) == ((33, 65), dtype, True, False)
    assert await device.put(source, out=ref) is ref
    for to in ("host", "device"):
        await device.prefetch(ref, to)
        assert (await device.get(ref)).tobytes() == source.tobytes()
    assert (await device.get(ref[3:5])).tobytes() == source[3:5].tobytes()
    if dtype in ("float32", "float16", "bfloat16", "float64"):
        found = await device.get(await device.elementwise.binary("add", ref, ref))
        np.testing.assert_allclose(found.astype(np.float64), 2 * source.astype(np.float64))


async def test_pages_go_where_they_are_sent(device: accel.Device) -> None:
    ref = await device.managed(4 << 20, "uint8")
    await device.run(accel.ops.Fill((4 << 20,), accel.DType.UINT8, 5, out=ref))
    await device.prefetch(ref, "host")
    assert asked(ref, "LAST_PREFETCH_LOCATION") == -1
    await device.prefetch(ref[: 2 << 20])
    assert asked(ref[: 2 << 20], "LAST_PREFETCH_LOCATION") == device.info().index
    assert np.array_equal(await device.get(ref), np.full(4 << 20, 5, np.uint8))


async def test_advice_is_taken_and_taken_back(device: accel.Device) -> None:
    ref = await device.managed(1 << 20, "uint8")
    await device.advise(ref, "read_mostly")
    assert asked(ref, "READ_MOSTLY") == 1
    await device.advise(ref, "read_mostly", undo=True)
    assert asked(ref, "READ_MOSTLY") == 0
    await device.advise(ref, "preferred_host")
    assert asked(ref, "PREFERRED_LOCATION") == -1
    await device.advise(ref, "preferred_device")
    assert asked(ref, "PREFERRED_LOCATION") == device.info().index
    await device.advise(ref, "preferred_device", undo=True)
    assert asked(ref, "PREFERRED_LOCATION") == -2
    for advice in ("accessed_by_device", "accessed_by_host"):
        await device.advise(ref, advice)
        await device.advise(ref, advice, undo=True)
    for call in (device.advise(ref, "often"), device.prefetch(ref, "elsewhere")):  # type: ignore[arg-type]
        with pytest.raises(accel.InvalidArgumentError):
            await call


async def test_memory_comes_back(device: accel.Device) -> None:
    def is_given_back() -> bool:
        sharing: Any = device._host.context.sharing
        releases = sharing._releases
        return not (sharing._external_blocks or releases._waiting or releases._marked or releases._closing.left)

    refs = [await device.managed(1 << 20, "float32") for _ in range(4)]
    out = await device.zeros(1 << 20)
    for ref in refs:
        await device.run(accel.ops.Fill((1 << 20,), accel.DType.FLOAT32, 1.0, out=ref))
    work = [asyncio.ensure_future(device.elementwise.binary("add", out, ref, out=out)) for ref in refs]
    await asyncio.sleep(0)
    del refs, ref
    device.info()
    await asyncio.gather(*work)
    del work
    device.info()
    async with asyncio.timeout(10):
        while not is_given_back():
            device.info()  # a worker thread that has just loaded a kernel may hold its op, and so the refs, for some moments more
            await asyncio.sleep(0)
    assert np.array_equal(await device.get(out), np.full(1 << 20, 4.0, np.float32))
    await device.free(await device.managed(0, "float32"))
