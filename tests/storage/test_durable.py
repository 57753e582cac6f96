"""Durable buffers: the data is there after a fault, on every host, by the same ref."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle

import numpy as np
import pytest

import accel
from tests.device_support import failure
from tests.durable_support import WAYS, Way, opened, seeded

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.parametrize("way", WAYS)]


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


async def test_ops_that_are_sent_while_rebuilding_wait_and_run(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        ref, ordinary = await device.put(np.arange(8.0), durable=True), await device.zeros(8, "float64")
        if way == "killed":
            pytest.skip("when the death is seen is not for the test to say")
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


async def test_many_buffers_of_all_sizes(way: Way) -> None:
    rng, seed = seeded()
    async with opened(way) as patient:
        device = patient.device
        kept: dict[accel.AccelRef, np.ndarray] = {}
        for count in range(120):
            array = rng.integers(0, 255, int(rng.integers(1, 200_000)), np.uint8)
            ref = await device.put(array, durable=True)
            if count % 3:
                kept[ref] = array
        del ref
        await patient.fault()
        for ref, array in kept.items():
            np.testing.assert_array_equal(await device.get(ref), array, seed)
        # What is made now must not lie where something lives.
        more = {await device.put(array + 1, durable=True): array + 1 for array in kept.values()}
        for ref, array in (*kept.items(), *more.items()):
            np.testing.assert_array_equal(await device.get(ref), array, seed)
        await patient.fault()
        for ref, array in (*kept.items(), *more.items()):
            np.testing.assert_array_equal(await device.get(ref), array, seed)


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


async def test_refs_that_are_dropped_while_rebuilding_are_not_bound(way: Way) -> None:
    if way == "killed":
        pytest.skip("when the death is seen is not for the test to say")
    async with opened(way) as patient:
        device = patient.device
        gone = await device.zeros(1 << 20, "uint8", durable=True)
        stays = await device.full(1 << 10, 7, "uint8", durable=True)
        await patient.poison("conv2d", _conv(device))
        del gone
        await patient.until(2)
        assert device.info().memory.durable == 1 << 10
        np.testing.assert_array_equal(await device.get(stays), np.full(1 << 10, 7, np.uint8))


async def test_the_limit_counts_durable_memory(way: Way) -> None:
    async with opened(way, memory_limit=8 << 20) as patient:
        device = patient.device
        ref = await device.full(3 << 20, 5, "uint8", durable=True)
        await patient.fault()
        error = await failure(device.zeros(7 << 20, "uint8"), accel.OutOfMemoryError)
        assert error.limit in {8 << 20, None}
        del ref
        await device.zeros(7 << 20, "uint8")


async def test_out_must_be_durable_where_that_is_asked_for(way: Way) -> None:
    async with opened(way) as patient:
        device = patient.device
        out = await device.zeros(3)
        await failure(device.put(np.ones(3, np.float32), out=out, durable=True), accel.InvalidArgumentError)
        await failure(device.put(np.ones(3), checksum=True), accel.InvalidArgumentError)
        await device.put(np.ones(3, np.float32), out=out)


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
