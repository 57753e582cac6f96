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
from tests.durable_support import EVERY_WAY, HERE_AND_KILLED, HERE_AND_THERE, Array, Way, conv, opened, seeded, wild_write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


@EVERY_WAY
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


@HERE_AND_KILLED
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


@HERE_AND_KILLED
async def test_a_checksum_tells_whether_something_else_has_written(way: Way) -> None:
    rng, _ = seeded()
    values = rng.integers(0, 100, 5000, np.uint8)
    async with opened(way) as patient:
        device = patient.device
        ref, unchecked = await device.put(values, durable=True, checksum=True), await device.put(values[::-1].copy(), durable=True)
        assert await device.verify_checksum(ref)
        wild_write(values, 200)
        assert not await device.verify_checksum(ref[:10])
        assert (await failure(device.get(ref), accel.StaleRefError)).reason == "torn"
        assert await device.verify_checksum(unchecked)
        await device.put(values, out=ref)
        assert await device.verify_checksum(ref)
        await device.put(values, out=ref)
        await failure(device.verify_checksum(await device.zeros(3)), accel.InvalidArgumentError)


@HERE_AND_KILLED
async def test_ops_that_write_a_sealed_buffer_are_refused(way: Way) -> None:
    rng, seed = seeded()
    x, y = rng.standard_normal((2, 400))
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(x, durable=True, checksum=True)
        empty = await device.put(np.zeros(0), durable=True, checksum=True)
        other = await device.put(y, durable=True)
        async with device.graph() as graph:
            graph.copy(ref, other)
        writes: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: device.put(y, out=ref),
            lambda: device.put(y[:7], out=ref[:7]),
            lambda: device.copy(other, ref),
            lambda: device.blas.axpy(other, ref),
            lambda: device.elementwise.unary("neg", other[::2], out=ref[::2]),
            lambda: device.linalg.matmul(other.reshape((20, 20)), other.reshape((20, 20)), out=ref.reshape((20, 20))),
        )
        for write in writes:
            error = await failure(write(), accel.InvalidArgumentError)
            assert "sealed" in str(error)
            assert error.remedy
        async with device.batch() as batch:
            with pytest.raises(accel.InvalidArgumentError, match="sealed"):
                batch.blas.scal(ref, 2.0)
        await graph.replay()
        for _ in range(2):
            np.testing.assert_array_equal(await device.get(ref), x, seed)
            np.testing.assert_array_equal(await device.get(other), x, seed)
            assert (await device.get(empty)).shape == (0,)
            await patient.fault()
        await device.free(ref)


@HERE_AND_KILLED
async def test_a_graph_that_writes_a_buffer_is_refused_once_that_is_sealed(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(np.arange(5.0), durable=True)
        async with device.graph() as graph:
            graph.blas.scal(ref, 2.0)
        await graph.replay()
        await device.keep_checksum(ref)
        await failure(graph.replay(), accel.InvalidArgumentError)
        await patient.fault()
        np.testing.assert_array_equal(await device.get(ref), 2 * np.arange(5.0))


@HERE_AND_THERE
async def test_writes_that_were_sent_before_are_in_the_checksum_also_after_a_rebuild(way: Way) -> None:
    rng, seed = seeded()
    first, second = rng.integers(0, 100, (2, 5000), np.uint8)
    async with opened(way, max_in_flight=1) as patient:
        device = patient.device
        ref, other = await device.put(first, durable=True), await device.zeros(3)
        hang = patient.faults.hang("conv2d")
        busy = task(conv(device))
        await until(lambda: device.info().in_flight == 1 and patient.faults.armed is None)
        patient.faults.armed = "unary"
        faulting = task(device.elementwise.unary("neg", other))
        writing = task(device.put(second, out=ref))
        await until(lambda: device.info().queued == 2)
        sealing = task(device.keep_checksum(ref))
        await until(lambda: device.info().queued == 3)
        await failure(device.put(first, out=ref), accel.InvalidArgumentError)
        hang.release()
        await busy
        await failure(faulting, accel.ContextPoisonedError)
        await bounded(asyncio.gather(writing, sealing))
        assert device.generation == 2
        for _ in range(2):
            np.testing.assert_array_equal(await device.get(ref), second, seed)
            await patient.fault()
        wild_write(second, 200)
        assert not await device.verify_checksum(ref)


@HERE_AND_THERE
async def test_a_buffer_whose_writer_did_not_end_is_torn_and_not_sealed(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(way, max_in_flight=1) as patient:
        device = patient.device
        ref = await device.put(np.arange(5.0), durable=True)
        patient.faults.armed = "scal"
        writing, sealing = task(device.blas.scal(ref, 2.0)), task(device.keep_checksum(ref))
        await failure(bounded(writing), accel.ContextPoisonedError)
        with pytest.raises((accel.StaleRefError, accel.ContextPoisonedError)):
            await bounded(sealing)
        await patient.until(2)
        assert "durable_checksum_differs" not in caplog.text
        assert (await failure(device.get(ref), accel.StaleRefError)).reason == "torn"
        await device.put(np.arange(5.0), out=ref)
        await patient.fault()
        np.testing.assert_array_equal(await device.get(ref), np.arange(5.0))


async def test_a_buffer_whose_checksum_could_not_be_made_is_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().hang_at(1, op="unary")
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=plan, max_in_flight=1)
        ref = await device.put(np.arange(5.0), durable=True)
        busy = task(device.elementwise.unary("neg", ref))
        await until(lambda: device.info().in_flight == 1)
        with pytest.raises(accel.DeadlineExceededError):
            await device.keep_checksum(ref, timeout=0.01)
        await cancelled(task(device.keep_checksum(ref)))
        plan.release()
        await busy
        await device.put(np.ones(5), out=ref)
        assert await device.verify_checksum(ref)
        await device.keep_checksum(ref)
        await device.keep_checksum(ref)
        await failure(device.put(np.ones(5), out=ref), accel.InvalidArgumentError)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 1000])
async def test_the_checksum_is_of_every_byte(nbytes: int) -> None:
    rng, seed = seeded()
    array = rng.integers(0, 255, nbytes, np.uint8)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")

        async def checksum(values: Array) -> int:
            return int((await device.run(accel.ops.Checksum(await device.put(values))))[0])

        first = await checksum(array)
        assert await checksum(array) == first, seed
        seen = {first}
        for at in range(0, nbytes, max(1, nbytes // 9)):
            changed = array.copy()
            changed[at] ^= 1
            seen.add(await checksum(changed))
        assert len(seen) == 1 + len(range(0, nbytes, max(1, nbytes // 9))), seed


async def test_a_backend_without_checksums_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = CpuDevice.kernels
    monkeypatch.setattr(CpuDevice, "kernels", lambda self, library: {} if library == "memory" else kernels(self, library))
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", faults=FaultPlan().poison_at(1, op="unary"))
        error = await failure(device.put(np.zeros(3), durable=True, checksum=True), accel.UnsupportedError)
        assert "checksum" in str(error)
        ref = await device.zeros(3, durable=True)
        await failure(device.elementwise.unary("neg", await device.zeros(3)), accel.ContextPoisonedError)
        assert (await device.get(ref) == 0).all()
