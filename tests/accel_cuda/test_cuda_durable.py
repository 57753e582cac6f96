"""Device memory that outlives the fault of its context: inline devices in processes of their own, children here."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from accel_cuda import CudaBackend
from tests.accel_cuda.cuda_programs import failure, run_program
from tests.device_support import child_pid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_cuda.device import CudaDevice

pytestmark = pytest.mark.gpu

PATIENCE = 30.0
GIBIBYTE = 1 << 30


@pytest.fixture
def here() -> Iterator[CudaDevice]:
    """A context of this process's, to ask how much memory is free."""
    device = CudaBackend().open(0)
    yield device
    device.close()


def free_memory(here: CudaDevice) -> int:
    with here.section:
        return int(here.driver.call("cuMemGetInfo")[0])


@pytest.mark.parametrize("program", ["torn", "wild_write"])
def test_an_inline_device(program: str) -> None:
    run_program(program, module="tests.accel_cuda.durable_programs")


@pytest.mark.parametrize("mebibytes", ["64", "1024"])
def test_data_of_an_inline_device_is_intact_in_the_child(mebibytes: str) -> None:
    run_program("intact", mebibytes, module="tests.accel_cuda.durable_programs")


def test_beside_torch() -> None:
    pytest.importorskip("torch")
    run_program("with_torch", module="tests.accel_cuda.durable_programs")


async def test_a_gibibyte_outlives_faults_and_kills_of_children(here: CudaDevice) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    array = np.random.default_rng(seed).integers(0, 1 << 62, GIBIBYTE // 8, np.int64)
    before = free_memory(here)
    plan = FaultPlan().poison_at(1, op="unary").poison_at(2, op="unary")
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process", faults=plan)
        ref = await device.put(array, durable=True, checksum=True)
        assert device.info().memory.durable >= GIBIBYTE
        held = []
        for way in ("fault", "fault", "kill"):
            generation = device.generation
            x = await device.zeros(4)
            began = time.perf_counter()
            if way == "fault":
                error = await failure(device.elementwise.unary("neg", x), accel.ContextPoisonedError)
                assert error.code == 700
            else:
                os.kill(child_pid(device), signal.SIGKILL)
                async with asyncio.timeout(PATIENCE):
                    while device.generation == generation:
                        await asyncio.sleep(0)
            part = await asyncio.wait_for(device.get(ref[:1000]), PATIENCE)
            print(f"{way}: a part of 1 GiB durable data read {time.perf_counter() - began:.3f} s after it, checksum compared")
            assert np.array_equal(part, array[:1000])
            assert np.array_equal(await device.get(ref), array), f"seed {seed}"
            held.append(free_memory(here))
        assert max(held) - min(held) < 64 << 20, f"free after each rebuild, in MiB: {[each >> 20 for each in held]}"
        assert before - held[-1] >= GIBIBYTE
        del ref
        async with asyncio.timeout(PATIENCE):
            while device.info().memory.reserved >= GIBIBYTE:
                await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            while free_memory(here) - held[-1] < GIBIBYTE:  # the child tells before it has unmapped
                await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        while before - free_memory(here) > 16 << 20:
            await asyncio.sleep(0)


async def test_many_buffers_in_a_child() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    async with accel.System() as system:
        device = await system.open_device("cuda", host="process", faults=FaultPlan().poison_at(1, op="unary"))
        kept = {}
        for count in range(300):
            array = rng.integers(0, 255, int(rng.integers(1, 300_000)), np.uint8)
            ref = await device.put(array, durable=True)
            if count % 3:
                kept[ref] = array
        del ref
        await failure(device.elementwise.unary("neg", await device.zeros(4)), accel.ContextPoisonedError)
        for ref, array in kept.items():
            assert np.array_equal(await asyncio.wait_for(device.get(ref), PATIENCE), array), f"seed {seed}"


async def test_the_checksum_is_of_every_byte() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    async with accel.System() as system:
        device = await system.open_device("cuda", host="inline")

        async def checksum(ref: accel.AccelRef) -> int:
            return int((await device.run(accel.ops.Checksum(ref)))[0])

        for nbytes in (0, 1, 7, 8, 9, 1000, 1 << 20, (1 << 20) + 3):
            array = rng.integers(0, 255, nbytes, np.uint8)
            ref = await device.put(array)
            first = await checksum(ref)
            assert await checksum(ref) == first == reference(array), f"seed {seed}, {nbytes} bytes"
            if nbytes > 9:
                assert await checksum(ref[3:]) == reference(array[3:]), f"seed {seed}, {nbytes} bytes from the fourth on"
            seen = {first}
            places: list[int] = rng.integers(0, nbytes, 20).tolist() if nbytes else []
            for at in places:
                changed = array.copy()
                changed[at] ^= 1
                await device.put(changed, out=ref)
                seen.add(await checksum(ref))
            assert len(seen) == 1 + len(set(places)), f"seed {seed}"


def reference(array: np.ndarray) -> int:
    """Return the checksum that the kernel makes, by numpy."""
    words = np.zeros(-(-array.size // 8) * 8, np.uint8)
    words[: array.size] = array
    place = np.arange(1, words.size // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        total = mixed(words.view(np.uint64) + place).sum(dtype=np.uint64) + mixed(np.array([array.size], np.uint64))[0]
    return int(total)


def mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = z ^ (z >> np.uint64(31))
    return result
