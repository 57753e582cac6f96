"""Durable buffers that were being written when the context faulted: they say so, until all of them is written anew."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.remote.transfers import ArrayTransfers
from accel.testing import FaultPlan
from tests.device_support import child_pid, failure
from tests.durable_support import Way, opened, seeded
from tests.op_bugs_support import Bug, Bugs

if TYPE_CHECKING:
    from tests.durable_support import Patient

pytestmark = pytest.mark.usefixtures("nothing_left")
FAULTS = pytest.mark.parametrize("way", ["inline", "auto", "process"])


async def torn_by(patient: Patient) -> tuple[accel.AccelRef, accel.AccelRef]:
    """Return a torn buffer of ten numbers, and one of them that is sound."""
    device = patient.device
    ref, other = await device.put(np.arange(10.0), durable=True), await device.put(np.ones(10), durable=True)
    await patient.poison("unary", device.elementwise.unary("neg", other, out=ref))
    await patient.until(2)
    return ref, other


async def assert_torn(awaitable: object) -> None:
    error = await failure(awaitable, accel.StaleRefError)  # type: ignore[arg-type]
    assert error.reason == "torn"
    assert error.remedy
    assert "torn" in str(error)


@FAULTS
async def test_a_buffer_with_an_unfinished_writer_is_torn(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, other = await torn_by(patient)
        assert ref.is_stale
        assert not other.is_stale
        await assert_torn(device.get(ref))
        await assert_torn(device.get(ref[2:4]))
        await assert_torn(device.elementwise.unary("neg", ref))
        await assert_torn(device.blas.scal(ref, 2.0))
        await assert_torn(device.blas.axpy(other, ref))
        await assert_torn(device.elementwise.unary("neg", ref, out=ref))
        np.testing.assert_array_equal(await device.get(other), np.ones(10))


@FAULTS
async def test_it_is_sound_when_all_of_it_was_written_anew(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, other = await torn_by(patient)
        view = ref[2:4]
        await device.put(np.ones(4), out=ref[:4])
        await device.put(np.ones(6), out=ref[4:])
        await assert_torn(device.get(ref))
        await device.put(np.arange(10.0) + 3, out=ref)
        np.testing.assert_array_equal(await device.get(ref), np.arange(10.0) + 3)
        np.testing.assert_array_equal(await device.get(view), [5, 6])
        await patient.fault()
        np.testing.assert_array_equal(await device.get(ref), np.arange(10.0) + 3)
        np.testing.assert_array_equal(await device.get(other), np.ones(10))


@FAULTS
@pytest.mark.parametrize("how", ["fill", "copy", "unary", "gemv", "batch", "shaped"])
async def test_any_op_that_overwrites_all_of_it_makes_it_sound(way: Way, how: str) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, other = await torn_by(patient)
        expected = np.ones(10)
        if how == "fill":
            await device.run(accel.ops.Fill((10,), accel.DType.FLOAT64, 1, ref))
        elif how == "copy":
            await device.copy(other, ref)
        elif how == "unary":
            await device.elementwise.unary("neg", other, out=ref)
            expected = -expected
        elif how == "gemv":
            await device.blas.gemv(await device.put(np.eye(10)), other, out=ref)
        elif how == "shaped":
            await device.put(np.ones((5, 2)), out=ref.reshape((5, 2)))
        else:
            async with device.batch() as batch:
                batch.copy(other, ref)
                with pytest.raises(accel.StaleRefError):
                    batch.elementwise.unary("neg", ref)
        np.testing.assert_array_equal(await device.get(ref), expected)


@FAULTS
async def test_an_op_that_adds_to_what_is_there_does_not(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, other = await torn_by(patient)
        eye = await device.put(np.eye(10))
        await assert_torn(device.blas.gemv(eye, other, out=ref, beta=1.0))
        await assert_torn(device.get(ref))


@FAULTS
async def test_a_torn_buffer_can_be_freed(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, other = await torn_by(patient)
        before = device.info().memory.durable
        await device.free(ref)
        assert device.info().memory.durable < before
        error = await failure(device.get(ref), accel.StaleRefError)
        assert error.reason == "freed"
        del other


@FAULTS
async def test_an_op_that_was_queued_rewrites_it_and_one_that_reads_it_says_so(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(np.arange(10.0), durable=True)
        await patient.poison("scal", device.blas.scal(ref, 2.0))
        assert device.state is accel.DeviceState.REBUILDING
        await assert_torn(device.get(ref))
        await asyncio.wait_for(device.put(np.ones(10), out=ref), 30)
        np.testing.assert_array_equal(await device.get(ref), np.ones(10))


@FAULTS
async def test_a_buffer_that_is_torn_twice_is_torn_until_it_is_rewritten(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, _ = await torn_by(patient)
        await patient.fault()
        await assert_torn(device.get(ref))
        await patient.poison("put", device.put(np.ones(10), out=ref))
        await patient.until(4)
        await assert_torn(device.get(ref))
        await device.put(np.ones(10), out=ref)
        np.testing.assert_array_equal(await device.get(ref), np.ones(10))


@FAULTS
async def test_ops_that_only_read_tear_nothing(way: Way) -> None:
    rng, seed = seeded()
    array = rng.standard_normal(1000)
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(array, durable=True)
        await patient.poison("unary", device.elementwise.unary("neg", ref))
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(ref), 30), array, seed)


async def test_a_write_that_was_cancelled_counts_and_one_that_waits_in_the_queue_does_not() -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=plan, max_in_flight=1)
        begun, queued = await device.put(np.zeros(9), durable=True), await device.put(np.ones(9), durable=True)
        source = await device.put(np.ones(9), durable=True)
        writing = asyncio.ensure_future(device.copy(source, begun))
        waiting = asyncio.ensure_future(device.put(np.full(9, 5.0), out=queued))
        async with asyncio.timeout(20):
            while not (plan.fired and device.info().queued):
                await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait({writing})
        os.kill(child_pid(device), signal.SIGKILL)
        assert await asyncio.wait_for(waiting, 30) is queued
        plan.release()
        await assert_torn(device.get(begun))
        np.testing.assert_array_equal(await device.get(queued), np.full(9, 5.0))
        np.testing.assert_array_equal(await device.get(source), np.ones(9))


async def test_an_op_that_never_reached_the_device_tears_nothing() -> None:
    plan = FaultPlan().fail_at(1, accel.LibraryError("no"), op="scal").poison_at(1, op="unary")
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", faults=plan)
        ref, other = await device.put(np.arange(4.0), durable=True), await device.zeros(4)
        with pytest.raises(accel.LibraryError):
            await device.blas.scal(ref, 2.0)
        await failure(device.elementwise.unary("neg", other), accel.ContextPoisonedError)
        np.testing.assert_array_equal(await device.get(ref), np.arange(4.0))


async def test_a_rewrite_that_was_queued_before_the_fault_is_seen_by_who_waits_for_it() -> None:
    plan = FaultPlan().hang_at(1, op="copy")
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=plan, max_in_flight=1)
        ref, source = await device.put(np.zeros(9), durable=True), await device.put(np.ones(9), durable=True)
        writing = asyncio.ensure_future(device.copy(source, ref))

        async def rewrite() -> np.ndarray:
            await device.put(np.full(9, 5.0), out=ref)
            return await device.get(ref)

        rewriting = asyncio.ensure_future(rewrite())
        async with asyncio.timeout(20):
            while not (plan.fired and device.info().queued):
                await asyncio.sleep(0)
        os.kill(child_pid(device), signal.SIGKILL)
        await failure(writing, accel.ContextPoisonedError)
        np.testing.assert_array_equal(await asyncio.wait_for(rewriting, 30), np.full(9, 5.0))
        plan.release()


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_one_that_two_ops_wrote_anew_at_once_is_freed_with_its_last_ref(host: Any) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host)
        await device.register(Bugs)
        x, ref = await device.put(np.arange(4.0)), await device.put(np.ones(4), durable=True)
        await failure(device.run(Bug(x, "kernel:value", ref)), accel.LibraryError)
        was_stale = [ref.is_stale]
        await asyncio.gather(device.put(np.ones(4), out=ref), device.run(Bug(x, "slow", ref)))
        was_stale.append(ref.is_stale)
        assert was_stale == [True, False]
        del ref
        await device.put(np.ones(4))
        assert device.info().memory.durable == 0


async def test_a_put_in_parts_that_fails_halfway_tears_and_a_whole_one_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part is in the buffer when no thread is to be had for the second."""
    filled = 0
    fill = ArrayTransfers._fill

    async def failing(self: ArrayTransfers, *arguments: Any) -> None:
        nonlocal filled
        filled += 1
        if filled == 2:
            raise accel.OutOfMemoryError("no thread", library="os")
        await fill(self, *arguments)

    nbytes = 8 << 20
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", pinned_limit=4 << 20)
        durable = await device.zeros(nbytes, "uint8", durable=True)
        ordinary = await device.put(np.ones(3))
        with monkeypatch.context() as patch:
            patch.setattr(ArrayTransfers, "_fill", failing)
            with pytest.raises(accel.OutOfMemoryError, match="no thread"):
                await device.put(np.ones(nbytes, np.uint8), out=durable)
        assert filled == 2
        with pytest.raises(accel.StaleRefError) as caught:
            await device.get(durable)
        assert caught.value.reason == "torn"
        await device.put(np.full(nbytes, 7, np.uint8), out=durable)
        np.testing.assert_array_equal(await device.get(durable), np.full(nbytes, 7, np.uint8))
        np.testing.assert_array_equal(await device.get(ordinary), np.ones(3))
        assert device.generation == 1
