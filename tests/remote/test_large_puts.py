"""Process host: arrays of any size and number move through little shared memory, in order, and give it back; waiting for it ends with its reason."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest

import accel
from accel.remote import requests
from accel.remote.arrays import MAX_INLINE_COPY, SharedArray
from accel.testing import FaultPlan
from tests.device_support import child_pid, task, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel import Device

MIB = 1 << 20
LIMIT = 4 * MIB
pytestmark = pytest.mark.timeout(30)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture
async def system() -> AsyncIterator[accel.System]:
    async with accel.System() as made:
        yield made


async def opened(system: accel.System, **options: Any) -> Device:
    return await system.open_device("cpu", host="process", pinned_limit=LIMIT, **options)


async def waiting(device: Device, *tasks: asyncio.Future[Any]) -> None:
    """Wait until all of ``tasks`` wait for pinned memory."""

    def are_waiting() -> bool:
        assert not any(each.done() for each in tasks), "there is no room, and it does not wait for any"
        return device.info().pinned.waiting == len(tasks)

    await until(are_waiting)


def some(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)


async def test_an_array_larger_than_the_limit_goes_there_and_back_and_leaves_nothing_reserved(system: accel.System) -> None:
    device = await opened(system)
    await device.put(np.ones(4))
    before = device.info().pinned
    array = some(6 * LIMIT + 12_345)
    ref = await device.put(array)
    assert device.info().pinned == before
    np.testing.assert_array_equal(await device.get(ref), array)
    pinned = device.info().pinned
    assert (pinned.used, pinned.reserved, pinned.waiting) == (0, before.reserved, 0)
    assert device.state is accel.DeviceState.READY


@pytest.mark.parametrize("dtype", ["bfloat16", "complex128", "bool"])
async def test_parts_keep_the_shape_and_dtype_and_an_array_that_is_written_keeps_the_rest(system: accel.System, dtype: str) -> None:
    device = await opened(system)
    kind = accel.DType.of(dtype).numpy
    array = some(3 * 5 * LIMIT // 8).astype(kind).reshape(3, 5, -1)
    ref = await device.put(array)
    assert (ref.shape, ref.dtype.value) == (array.shape, dtype)
    await device.put(np.zeros(array.shape[1:], kind), out=ref[1])
    array[1] = 0
    np.testing.assert_array_equal(await device.get(ref), array)
    out = np.empty(array.shape[1:], kind)
    assert await device.get(ref[2], out=out) is out
    np.testing.assert_array_equal(out, array[2])


async def test_many_at_once_wait_for_room(system: accel.System) -> None:
    device = await opened(system, max_in_flight=16)

    async def there_and_back(number: int) -> None:
        array = some(MIB if number % 8 else 2 * LIMIT, number)
        np.testing.assert_array_equal(await device.get(await device.put(array)), array)

    await asyncio.gather(*[there_and_back(number) for number in range(48)])
    ref = await device.put(some(LIMIT))
    found = await asyncio.gather(*[device.get(ref) for _ in range(24)])
    assert all(np.array_equal(each, some(LIMIT)) for each in found)
    pinned = device.info().pinned
    assert (pinned.used, pinned.waiting) == (0, 0)
    assert pinned.reserved <= LIMIT


async def test_they_wait_in_order_and_ops_without_arrays_pass(system: accel.System) -> None:
    device = await opened(system)
    rest = await device.pinned(LIMIT - MIB, "uint8")
    held = [await device.pinned(MIB, "uint8")]  # room for one of them
    order: list[int] = []

    async def put(number: int) -> None:
        await device.put(some(MIB, number))
        order.append(number)

    putting = [task(put(number)) for number in range(6)]
    await waiting(device, *putting)
    small = await device.elementwise.unary("neg", await device.full(4, 1.0))
    assert not order
    del small
    held.clear()
    await asyncio.gather(*putting)
    assert order == list(range(6))
    assert device.info().pinned.used == rest.nbytes


async def test_an_op_on_the_buffer_of_a_put_that_waits_comes_after_it(system: accel.System) -> None:
    device = await opened(system)
    old, new = np.zeros(LIMIT, np.uint8), some(LIMIT)
    ref, small = await device.put(old), np.empty(256, np.uint8)
    held = [await device.pinned(LIMIT - MIB, "uint8"), await device.pinned(MIB, "uint8")]
    putting = task(device.put(new, out=ref))
    await waiting(device, putting)
    negating, reading = task(device.elementwise.binary("add", ref, ref)), task(device.get(ref[:256], out=small))
    freeing = task(device.free(ref))
    await device.elementwise.unary("neg", await device.full(4, 3.0))  # what has nothing to do with it passes
    assert not any(each.done() for each in (putting, negating, reading, freeing))
    held.clear()
    await asyncio.gather(putting, reading, freeing)
    np.testing.assert_array_equal(small, new[:256])
    np.testing.assert_array_equal(await device.get(await negating), new + new)


async def test_who_gives_up_waiting_leaves_the_queue(system: accel.System) -> None:
    device = await opened(system)
    held = [await device.pinned(LIMIT, "uint8")]
    cancelled, late, last = task(device.put(some(MIB))), task(device.put(some(MIB), timeout=0.5)), task(device.put(some(2 * LIMIT)))
    await waiting(device, cancelled, late, last)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    with pytest.raises(accel.DeadlineExceededError):
        await late
    await waiting(device, last)
    assert device.info().in_flight == 0
    held.clear()
    ref = await last
    np.testing.assert_array_equal(await device.get(ref), some(2 * LIMIT))
    assert device.info().pinned.used == 0


async def test_what_waits_for_room_at_a_fault_runs_in_the_next_generation(system: accel.System) -> None:
    device = await opened(system)
    ref = await device.put(np.zeros(MIB, np.uint8), durable=True)
    held, array = [await device.pinned(LIMIT, "uint8")], some(MIB)
    making, writing = task(device.put(array)), task(device.put(array, out=ref))
    await waiting(device, making, writing)
    os.kill(child_pid(device), signal.SIGKILL)
    await until(lambda: device.generation == 2 and device.state is accel.DeviceState.READY)
    held.clear()
    np.testing.assert_array_equal(await device.get(await making), array)
    await writing
    np.testing.assert_array_equal(await device.get(ref), array)
    assert device.info().pinned.used == 0


async def test_a_durable_buffer_that_was_written_in_part_is_torn_and_the_plan_counts_one_put(system: accel.System) -> None:
    device = await opened(system, faults=FaultPlan().poison_at(3, op="put"))
    ref = await device.put(np.zeros(2 * LIMIT, np.uint8), durable=True)
    await device.put(some(2 * LIMIT), out=ref)
    with pytest.raises(accel.ContextPoisonedError):
        await device.put(some(2 * LIMIT), out=ref)
    with pytest.raises(accel.StaleRefError) as caught:
        await device.get(ref)
    assert caught.value.reason == "torn"
    array = some(2 * LIMIT, 1)
    await device.put(array, out=ref)
    np.testing.assert_array_equal(await device.get(ref), array)
    assert device.generation == 2


async def test_what_the_device_has_no_memory_for_is_the_error_of_its_put(system: accel.System) -> None:
    device = await opened(system, memory_limit=LIMIT)
    for _ in range(2):
        with pytest.raises(accel.OutOfMemoryError) as caught:
            await device.put(some(2 * LIMIT))
        assert caught.value.op == "put"
    ref = await device.put(some(LIMIT // 2))
    info = device.info()
    assert (info.pinned.used, info.memory.used, info.in_flight) == (0, ref.nbytes, 0)
    np.testing.assert_array_equal(await device.get(ref), some(LIMIT // 2))


async def test_a_planned_fault_that_cannot_be_injected_is_the_error_of_its_put(
    system: accel.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise accel.OutOfMemoryError("planted: no thread")

    device = await opened(system, faults=FaultPlan())
    await device.put(np.ones(4))
    with monkeypatch.context() as patch:
        patch.setattr(requests, "begin_action", refuse)
        with pytest.raises(accel.OutOfMemoryError, match="planted"):
            await device.put(some(LIMIT))
    info = device.info()
    assert (info.in_flight, info.pinned.used) == (0, 0)
    array = some(2 * LIMIT)
    np.testing.assert_array_equal(await device.get(await device.put(array)), array)


async def test_all_puts_that_wait_for_room_are_answered_when_the_device_closes(system: accel.System) -> None:
    device = await opened(system, max_in_flight=8)
    os.kill(child_pid(device), signal.SIGSTOP)  # nothing is given back
    tasks = [task(device.put(some(MIB))) for _ in range(40)]
    await until(lambda: device.info().pinned.waiting == 8)
    await device.aclose(timeout=0.1)
    answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert {type(answer) for answer in answers} == {accel.ClosedError}


async def test_a_batch_whose_time_is_over_while_it_waits_for_room_lets_others_pass(system: accel.System) -> None:
    device = await opened(system)
    ref = await device.put(np.ones(4))
    held = await device.pinned(LIMIT, "uint8")
    with pytest.raises(accel.DeadlineExceededError):
        async with device.batch(timeout=0.2) as batch:
            batch.elementwise.unary("neg", ref)  # it is sent before the next one, and ends
            batch.put(some(MIB))
    negative = await device.elementwise.unary("neg", ref, timeout=5)
    assert device.info().pinned.waiting == 0
    del held
    np.testing.assert_array_equal(await device.get(negative), -np.ones(4))


@pytest.mark.parametrize("fails", [1, 2])
async def test_ops_of_a_batch_before_an_array_that_cannot_be_copied_run(
    system: accel.System, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    device = await opened(system)
    source, written = await device.put(np.ones(4)), await device.zeros(4, "float64")
    bad = np.full(MAX_INLINE_COPY // 8 + 1, 7.0)  # a thread copies it
    copy_in, attempts = SharedArray.copy_in, 0

    def copied(shared: SharedArray) -> None:
        nonlocal attempts
        if shared.array is bad:
            attempts += 1
            if attempts <= fails:
                raise accel.OutOfMemoryError("no thread")
        copy_in(shared)

    monkeypatch.setattr(SharedArray, "copy_in", copied)
    error: accel.AccelError | None = None
    try:
        async with device.batch() as batch:
            batch.elementwise.unary("neg", source, out=written)
            before = batch.put(np.full(4, 5.0))
            put = batch.put(bad)
    except accel.OutOfMemoryError as raised:
        error = raised
    np.testing.assert_array_equal(await device.get(written), -np.ones(4))
    np.testing.assert_array_equal(await device.get(before), np.full(4, 5.0))
    if fails == 1:
        np.testing.assert_array_equal(await device.get(put), bad)  # another message, another attempt
    else:
        assert error is not None
        assert error.op_index == 2
