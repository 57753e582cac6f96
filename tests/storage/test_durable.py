"""Durable buffers: the data is there after a fault, on every host, by the same ref; those that were being written say so until they are written anew."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import child_pid, failure
from tests.durable_support import EVERY_WAY, HERE_AND_KILLED, HERE_AND_THERE, Way, opened, seeded
from tests.op_bugs_support import Bug, Bugs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.durable_support import Patient


pytestmark = pytest.mark.usefixtures("nothing_left")


@EVERY_WAY
async def test_the_data_and_the_ref_outlive_faults(way: Way) -> None:
    rng, seed = seeded()
    array = rng.standard_normal((300, 211))
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(array, durable=True)
        ordinary = await device.put(array)
        assert ref.durable
        assert not ordinary.durable
        for _ in range(2):
            generation = device.generation
            await patient.fault()
            assert device.generation > generation
            assert ordinary.is_stale
            assert not ref.is_stale
            assert ref.generation == device.generation
            np.testing.assert_array_equal(await device.get(ref), array, seed)
            await failure(device.get(ordinary), accel.StaleRefError)
        doubled = await device.elementwise.binary("add", ref, ref)
        np.testing.assert_array_equal(await device.get(doubled), array + array, seed)


@HERE_AND_KILLED
async def test_all_that_make_buffers_make_durable_ones(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        zeros = await device.zeros((3, 4), durable=True)
        full = await device.full(7, 3, "int16", durable=True)
        empty = await device.empty(5, "float64", durable=True)
        nothing = await device.put(np.ones((0, 3)), durable=True)
        scalar = await device.put(np.float64(2.5), durable=True)
        assert await device.put(np.arange(5.0), out=empty, durable=True) is empty
        await patient.fault()
        np.testing.assert_array_equal(await device.get(zeros), np.zeros((3, 4), np.float32))
        np.testing.assert_array_equal(await device.get(full), np.full(7, 3, np.int16))
        np.testing.assert_array_equal(await device.get(empty), np.arange(5.0))
        assert (await device.get(nothing)).shape == (0, 3)
        assert await device.get(scalar) == 2.5


@HERE_AND_KILLED
async def test_what_ops_write_is_there_too(way: Way) -> None:
    rng, seed = seeded()
    a, b = rng.standard_normal((2, 40, 40))
    async with opened(way) as patient:
        device = patient.device
        out = await device.zeros((40, 40), "float64", durable=True)
        await device.blas.gemm(await device.put(a), await device.put(b), out=out)
        async with device.batch() as batch:
            batch.blas.scal(out, 2.0)
        await device.put(b[0], out=out[3])
        expected = 2 * (a @ b)
        expected[3] = b[0]
        await patient.fault()
        np.testing.assert_allclose(await device.get(out), expected, rtol=1e-12, atol=1e-12, err_msg=seed)


@HERE_AND_KILLED
async def test_views_and_tokens_follow_their_buffer(way: Way) -> None:
    rng, seed = seeded()
    array = rng.standard_normal((10, 6))
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(array, durable=True)
        view, flat = ref[2:5], ref.ravel()
        assert view.durable
        token, part = pickle.loads(pickle.dumps(ref)), pickle.loads(pickle.dumps(view))
        await patient.fault()
        assert not view.is_stale
        np.testing.assert_array_equal(await device.get(view), array[2:5], seed)
        np.testing.assert_array_equal(await device.get(flat), array.ravel(), seed)
        assert device.resolve(token) is ref
        np.testing.assert_array_equal(await device.get(device.resolve(part)), array[2:5], seed)
        assert copy.deepcopy(ref) is ref
        del ref, view, flat
        gc.collect()
        with pytest.raises(accel.StaleRefError):
            device.resolve(token)


@HERE_AND_THERE
async def test_ops_that_are_sent_while_rebuilding_wait_and_run(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, ordinary = await device.put(np.arange(8.0), durable=True), await device.zeros(8, "float64")
        await patient.poison("conv2d", _conv(device))
        assert device.state is accel.DeviceState.REBUILDING
        assert not ref.is_stale
        assert ref[1:].is_stale is False
        await failure(device.get(ordinary), accel.StaleRefError)
        read, negated, written = await asyncio.gather(
            device.get(ref), device.elementwise.unary("neg", ref), device.put(np.ones(2), out=ref[:2])
        )
        assert device.generation == 2
        np.testing.assert_array_equal(read, np.arange(8.0))
        np.testing.assert_array_equal(await device.get(negated), -np.arange(8.0))
        np.testing.assert_array_equal(await device.get(ref), [1, 1, 2, 3, 4, 5, 6, 7])
        assert not written.is_stale


async def _conv(device: accel.Device) -> None:
    await device.dnn.conv2d(await device.zeros((1, 1, 2, 2)), await device.zeros((1, 1, 1, 1)))


@HERE_AND_KILLED
async def test_memory_is_accounted_for_and_given_back(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref = await device.zeros(3 << 20, "uint8", durable=True)
        small = await device.zeros(256, "uint8", durable=True)
        assert (device.info().memory.durable, device.info().memory.used) == ((3 << 20) + 256, (3 << 20) + 256)
        ordinary = await device.zeros(512, "uint8")
        await patient.fault()
        memory = device.info().memory
        assert (memory.durable, memory.used) == ((3 << 20) + 256, (3 << 20) + 256)
        reserved = memory.reserved
        assert reserved >= memory.durable
        del ref
        assert device.info().memory.durable == 256
        await device.free(small)
        await failure(device.get(small), accel.StaleRefError)
        async with asyncio.timeout(20):
            while device.info().memory.reserved >= reserved:
                await asyncio.sleep(0)
        assert (device.info().memory.durable, device.info().memory.used) == (0, 0)
        assert ordinary.is_stale


@HERE_AND_KILLED
async def test_the_limit_counts_durable_memory(way: Way) -> None:
    async with opened(way, memory_limit=8 << 20) as patient:
        device = patient.device
        ref = await device.full(3 << 20, 5, "uint8", durable=True)
        await patient.fault()
        error = await failure(device.zeros(7 << 20, "uint8"), accel.OutOfMemoryError)
        assert error.limit in {8 << 20, None}
        del ref
        await device.zeros(7 << 20, "uint8")


@HERE_AND_KILLED
async def test_out_must_be_durable_where_that_is_asked_for(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        out = await device.zeros(3)
        await failure(device.put(np.ones(3, np.float32), out=out, durable=True), accel.InvalidArgumentError)
        await failure(device.put(np.ones(3), checksum=True), accel.InvalidArgumentError)
        await device.put(np.ones(3, np.float32), out=out)


@HERE_AND_KILLED
async def test_closing_ends_them(way: Way) -> None:
    async with opened(way) as patient:
        ref = await patient.device.zeros(3, durable=True)
        await patient.device.aclose()
        assert ref.is_stale
        error = await failure(patient.device.get(ref), accel.ClosedError)
        assert error.device
        assert patient.device.info().memory.durable == 0
        with pytest.raises(accel.StaleRefError) as caught:
            ref.check()
        assert caught.value.reason == "generation"


async def torn_by(patient: Patient) -> tuple[accel.AccelRef, accel.AccelRef]:
    """Return a torn buffer of ten numbers, and one of them that is sound."""
    device = patient.device
    ref, other = await device.put(np.arange(10.0), durable=True), await device.put(np.ones(10), durable=True)
    wanted = device.generation + 1
    await patient.poison("unary", device.elementwise.unary("neg", other, out=ref))
    await patient.until(wanted)
    return ref, other


async def assert_torn(awaitable: object) -> None:
    error = await failure(awaitable, accel.StaleRefError)  # type: ignore[arg-type]
    assert error.reason == "torn"
    assert error.remedy
    assert "torn" in str(error)


@HERE_AND_THERE
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


@HERE_AND_THERE
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


@HERE_AND_THERE
async def test_any_op_that_overwrites_all_of_it_makes_it_sound(way: Way) -> None:
    async def batched(ref: accel.AccelRef, other: accel.AccelRef) -> None:
        async with ref.device.batch() as batch:
            batch.copy(other, ref)
            with pytest.raises(accel.StaleRefError):
                batch.elementwise.unary("neg", ref)

    async def multiplied(ref: accel.AccelRef, other: accel.AccelRef) -> None:
        await ref.device.blas.gemv(await ref.device.put(np.eye(10)), other, out=ref)

    overwrites: list[Callable[[accel.AccelRef, accel.AccelRef], Awaitable[object]]] = [
        lambda ref, other: ref.device.run(accel.ops.Fill((10,), accel.DType.FLOAT64, 1, ref)),
        lambda ref, other: ref.device.copy(other, ref),
        lambda ref, other: ref.device.elementwise.unary("abs", other, out=ref),
        lambda ref, other: ref.device.put(np.ones((5, 2)), out=ref.reshape((5, 2))),
        multiplied,
        batched,
    ]
    async with opened(way) as patient:
        for overwrite in overwrites:
            ref, other = await torn_by(patient)
            await overwrite(ref, other)
            np.testing.assert_array_equal(await patient.device.get(ref), np.ones(10))


@HERE_AND_THERE
async def test_an_op_that_adds_to_what_is_there_does_not(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, other = await torn_by(patient)
        eye = await device.put(np.eye(10))
        await assert_torn(device.blas.gemv(eye, other, out=ref, beta=1.0))
        await assert_torn(device.get(ref))


@HERE_AND_THERE
async def test_an_op_that_was_queued_rewrites_it_and_one_that_reads_it_says_so(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref = await device.put(np.arange(10.0), durable=True)
        await patient.poison("scal", device.blas.scal(ref, 2.0))
        assert device.state is accel.DeviceState.REBUILDING
        await assert_torn(device.get(ref))
        await asyncio.wait_for(device.put(np.ones(10), out=ref), 30)
        np.testing.assert_array_equal(await device.get(ref), np.ones(10))


@HERE_AND_THERE
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


async def test_one_that_two_ops_wrote_anew_at_once_is_freed_with_its_last_ref(hosted: accel.Device) -> None:
    await hosted.register(Bugs)
    x, ref = await hosted.put(np.arange(4.0)), await hosted.put(np.ones(4), durable=True)
    await failure(hosted.run(Bug(x, "kernel:value", ref)), accel.LibraryError)
    was_stale = [ref.is_stale]
    await asyncio.gather(hosted.put(np.ones(4), out=ref), hosted.run(Bug(x, "slow", ref)))
    was_stale.append(ref.is_stale)
    assert was_stale == [True, False]
    del ref
    await hosted.put(np.ones(4))
    assert hosted.info().memory.durable == 0
