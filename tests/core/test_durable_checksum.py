"""Checksums of durable buffers: what changed behind the device's back between two generations is found."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuDevice
from accel.testing import FaultPlan
from tests.device_support import bounded, cancelled, failure, task, until
from tests.durable_support import WAYS, Array, Patient, Way, conv, opened, seeded, wild_write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")
EVERYWHERE = pytest.mark.parametrize("way", WAYS)


@EVERYWHERE
async def test_a_wild_write_is_found_at_the_rebuild(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    rng, seed = seeded()
    first, second, third = rng.integers(0, 100, (3, 5000), np.uint8)
    async with opened(way) as patient:
        device = patient.device
        hit = await device.put(first, durable=True, checksum=True)
        missed = await device.put(second, durable=True, checksum=True)
        unchecked = await device.put(third, durable=True)
        wild_write(first, 200)
        wild_write(third, 200)
        with caplog.at_level(logging.ERROR):
            await patient.fault()
        assert "durable_checksum_differs" in caplog.text
        error = await failure(device.get(hit), accel.StaleRefError)
        assert error.reason == "torn"
        assert "checksum" in str(error)
        np.testing.assert_array_equal(await device.get(missed), second, seed)
        assert (await device.get(unchecked) == 200).sum() == 1
        await device.put(first, out=hit)
        await patient.fault()
        np.testing.assert_array_equal(await device.get(hit), first, seed)


@EVERYWHERE
async def test_a_checksum_is_kept_of_a_buffer_that_was_filled_in_parts(way: Way) -> None:
    rng, seed = seeded()
    first, second = rng.integers(0, 100, (2, 5000), np.uint8)
    async with opened(way) as patient:
        device = patient.device
        hit, missed = await device.empty(5000, "uint8", durable=True), await device.empty(5000, "uint8", durable=True)
        for ref, values in ((hit, first), (missed, second)):
            for start in (0, 3000):
                await device.put(values[start : start + 3000], out=ref[start : start + 3000])
            await device.keep_checksum(ref[:10])
        wild_write(first, 200)
        await patient.fault()
        assert (await failure(device.get(hit), accel.StaleRefError)).reason == "torn"
        np.testing.assert_array_equal(await device.get(missed), second, seed)
        await failure(device.keep_checksum(hit), accel.StaleRefError)
        await failure(device.keep_checksum(await device.zeros(3)), accel.InvalidArgumentError)


@EVERYWHERE
async def test_a_checksum_tells_whether_something_else_has_written(way: Way) -> None:
    rng, _ = seeded()
    values = rng.integers(0, 100, 5000, np.uint8)
    async with opened(way) as patient:
        device = patient.device
        ref, unchecked = await device.put(values, durable=True, checksum=True), await device.put(values[::-1].copy(), durable=True)
        assert await device.verify_checksum(ref)
        wild_write(values, 200)
        assert not await device.verify_checksum(ref[:10])
        assert await device.verify_checksum(unchecked)
        await device.put(values, out=ref)
        assert await device.verify_checksum(ref)
        await failure(device.verify_checksum(await device.zeros(3)), accel.InvalidArgumentError)


@EVERYWHERE
async def test_ops_that_write_keep_the_checksum_right(way: Way) -> None:
    rng, seed = seeded()
    x, y = rng.standard_normal((2, 400))
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(x, durable=True, checksum=True)
        zeros = await device.zeros(7, durable=True, checksum=True)
        empty = await device.empty(0, durable=True, checksum=True)
        other = await device.put(y, durable=True)
        await device.blas.axpy(other, ref)
        await asyncio.gather(*(device.put(x[n : n + 1], out=ref[n : n + 1]) for n in range(20)))
        async with device.batch() as batch:
            batch.blas.scal(ref, 2.0)
        expected = x + y
        expected[:20] = x[:20]
        for _ in range(2):
            await patient.fault()
            np.testing.assert_allclose(await device.get(ref), 2 * expected, rtol=1e-14, err_msg=seed)
            assert (await device.get(zeros) == 0).all()
            assert (await device.get(empty)).shape == (0,)
        wild_write(np.asarray(await device.get(ref)))
        await patient.fault()
        await failure(device.get(ref), accel.StaleRefError)


@EVERYWHERE
async def test_a_buffer_whose_writer_did_not_end_is_torn_and_not_compared(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    if way == "killed":
        pytest.skip("what is in flight then is not for the test to say")
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(np.arange(5.0), durable=True, checksum=True)
        await patient.poison("scal", device.blas.scal(ref, 2.0))
        await patient.until(2)
        assert "durable_checksum_differs" not in caplog.text
        assert (await failure(device.get(ref), accel.StaleRefError)).reason == "torn"
        await device.put(np.arange(5.0), out=ref)
        await patient.fault()
        np.testing.assert_array_equal(await device.get(ref), np.arange(5.0))


async def hidden(patient: Patient, write: Callable[[], Awaitable[object]]) -> None:
    """Send a write while the device has no room for it, and cancel it there."""
    hang = patient.faults.hang("conv2d")
    busy = task(conv(patient.device))
    try:
        await until(lambda: patient.device.info().in_flight == 1 and patient.faults.armed is None)
        writing = task(write())
        await until(lambda: patient.device.info().queued)
        await cancelled(writing)
    finally:
        hang.release()
    await busy


@EVERYWHERE
async def test_a_write_that_is_cancelled_before_its_launch_leaves_the_checksum(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    rng, seed = seeded()
    first, second = rng.integers(0, 100, (2, 5000), np.uint8)
    async with opened(way, max_in_flight=1) as patient:
        device = patient.device
        hit = await device.put(first, durable=True, checksum=True)
        sound = await device.put(second, durable=True, checksum=True)

        async def batch() -> None:
            async with device.batch() as batch:
                batch.copy(sound, hit)

        for write in (lambda: device.put(second, out=hit), lambda: device.put(first[:7], out=hit[:7]), batch):
            await hidden(patient, write)
        wild_write(first, 200)
        await patient.fault()
        assert (await failure(device.get(hit), accel.StaleRefError)).reason == "torn", seed
        assert caplog.text.count("durable_checksum_differs") == 1
        np.testing.assert_array_equal(await device.get(sound), second, seed)


@EVERYWHERE
async def test_a_write_that_waits_while_the_device_is_rebuilt_does_not_make_the_checksum_wrong(way: Way) -> None:
    if way == "killed":
        pytest.skip("what is in flight then is not for the test to say")
    rng, seed = seeded()
    first, second = rng.integers(0, 100, (2, 5000), np.uint8)
    async with opened(way, max_in_flight=1) as patient:
        device = patient.device
        ref, other = await device.put(first, durable=True, checksum=True), await device.zeros(3)
        hang = patient.faults.hang("conv2d")
        busy = task(conv(device))
        await until(lambda: device.info().in_flight == 1 and patient.faults.armed is None)
        patient.faults.armed = "unary"
        faulting = task(device.elementwise.unary("neg", other))
        writing = task(device.put(second, out=ref))
        await until(lambda: device.info().queued == 2)
        hang.release()
        await busy
        await failure(faulting, accel.ContextPoisonedError)
        await bounded(writing)
        assert device.generation == 2
        for _ in range(2):
            np.testing.assert_array_equal(await device.get(ref), second, seed)
            await patient.fault()


async def test_fault_plans_do_not_count_checksums() -> None:
    plan = FaultPlan().fail_at(3, accel.LibraryError("third"))
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", faults=plan)
        ref = await device.put(np.arange(5.0), durable=True, checksum=True)
        await device.put(np.arange(5.0), out=ref)
        assert plan.count == 2
        with pytest.raises(accel.LibraryError, match="third"):
            await device.get(ref)


async def test_a_deadline_covers_the_checksum() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        ref = await device.zeros(64 << 20, "uint8", durable=True, checksum=True, timeout=30)
        await device.put(np.ones(64 << 20, np.uint8), out=ref, timeout=30)
        assert (await device.get(ref)).min() == 1


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 1000])
async def test_the_checksum_is_of_every_byte(nbytes: int) -> None:
    rng, seed = seeded()
    array = rng.integers(0, 255, nbytes, np.uint8)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")

        async def checksum(values: Array) -> int:
            return int((await device.get(await device.run(accel.ops.Checksum(await device.put(values)))))[0])

        first = await checksum(array)
        assert await checksum(array) == first, seed
        seen = {first}
        for at in range(0, nbytes, max(1, nbytes // 9)):
            changed = array.copy()
            changed[at] ^= 1
            seen.add(await checksum(changed))
        assert len(seen) == 1 + len(range(0, nbytes, max(1, nbytes // 9))), seed


async def test_a_backend_without_checksums_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "kernels", lambda self, library: {})
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", faults=FaultPlan().poison_at(1, op="unary"))
        error = await failure(device.zeros(3, durable=True, checksum=True), accel.UnsupportedError)
        assert "checksum" in str(error)
        ref = await device.zeros(3, durable=True)
        await failure(device.elementwise.unary("neg", await device.zeros(3)), accel.ContextPoisonedError)
        assert (await device.get(ref) == 0).all()


async def test_a_checksum_that_cannot_be_made_is_no_fault_of_the_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def checksum_op(*_: object) -> None:
        raise accel.LibraryError("not today")

    async with accel.System() as system:
        device = await system.open_device("cpu")
        monkeypatch.setattr("accel.engine.sender.checksum_op", checksum_op)
        ref = await device.put(np.arange(5.0), durable=True, checksum=True)
        np.testing.assert_array_equal(await device.get(ref), np.arange(5.0))
    assert "checksum_not_made" in caplog.text
