"""Pinned arrays: `device.pinned` on the CPU backend, which locks nothing, and on one that keeps count."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuDevice
from accel.memory import HostArena
from accel.memory.arena import HostBlock
from accel.testing import FaultPlan
from tests.device_support import bounded, cancelled, failure, generation, opened, task, turns, until

MIB = 1 << 20
LIMIT = MIB


class Registration:
    def __init__(self, known: dict[int, int], address: int) -> None:
        self._known, self._address = known, address

    def close(self) -> None:
        self._known.pop(self._address, None)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[CpuDevice, dict[int, int]]:
    """Make every context of the CPU backend a registrar; context -> what it knows."""
    contexts: dict[CpuDevice, dict[int, int]] = {}

    def register_host(self: CpuDevice, address: int, nbytes: int) -> Registration:
        mine = contexts.setdefault(self, {})
        assert address not in mine
        mine[address] = nbytes
        return Registration(mine, address)

    monkeypatch.setattr(CpuDevice, "register_host", register_host, raising=False)
    return contexts


def covered(known: dict[int, int], array: np.ndarray[Any, Any]) -> bool:
    address: int = array.ctypes.data
    return any(start <= address and address + array.nbytes <= start + nbytes for start, nbytes in known.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128", "bool", "int8"])
@pytest.mark.parametrize("shape", [(), 0, 3, (4, 0, 2), (5, 7, 3)])
async def test_it_is_an_ordinary_array_of_the_shape_and_dtype(shape: Any, dtype: str, device: accel.Device) -> None:
    array = await device.pinned(shape, dtype)
    expected = np.empty(shape, accel.DType.of(dtype).numpy)
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0 or not array.size
    array[...] = 1
    back = await device.pinned(shape, dtype)
    assert await device.get(await device.put(array), out=back) is back
    assert np.array_equal(back, array)


async def test_arrays_do_not_share_memory_and_views_keep_it() -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    async with opened(pinned_limit=LIMIT) as device:
        arrays = [await device.pinned(100 + number, "uint8") for number in range(20)]
        for number, array in enumerate(arrays):
            array[:] = number
        view = arrays[7][10:20].reshape(2, 5).T
        used = device.info().pinned.used
        del arrays[7], array
        more = [await device.pinned(107, "uint8") for _ in range(20)]
        for other in more:
            other[:] = np.random.default_rng(seed).integers(100, 256, 107)
        assert (view == 7).all(), seed
        assert device.info().pinned.used > used


async def test_the_picture_counts_bytes_and_who_waits() -> None:
    async with opened(pinned_limit=LIMIT) as device:
        assert device.info().pinned == accel.PinnedInfo(used=0, reserved=0, limit=LIMIT, waiting=0)
        array = await device.pinned(LIMIT, "uint8")
        waiting = task(device.pinned(1))
        await turns()
        assert device.info().pinned == accel.PinnedInfo(used=LIMIT, reserved=LIMIT, limit=LIMIT, waiting=1)
        del array
        small = await bounded(waiting)
        del waiting
        assert device.info().pinned == accel.PinnedInfo(used=256, reserved=LIMIT, limit=LIMIT, waiting=0)
        del small
        await turns()
        assert device.info().pinned.used == 0


async def test_an_array_that_dies_in_a_thread_or_in_the_collector_wakes_who_waits() -> None:
    async with opened(pinned_limit=LIMIT) as device:
        held = [await device.pinned(LIMIT, "uint8")]
        waiting = task(device.pinned(LIMIT, "uint8"))
        await turns()
        await asyncio.to_thread(held.clear)
        ring: list[Any] = [await bounded(waiting)]
        del waiting
        ring.append(ring)
        waiting = task(device.pinned(LIMIT, "uint8"))
        await turns()
        del ring
        assert not waiting.done()
        thread = threading.Thread(target=gc.collect)
        thread.start()
        assert (await bounded(waiting)).nbytes == LIMIT
        thread.join()


async def test_who_comes_between_two_that_wait_comes_after_them() -> None:
    async with opened(pinned_limit=LIMIT) as device:
        held = [await device.pinned(LIMIT // 4, "uint8") for _ in range(4)]
        order: list[str] = []
        arrays: list[Any] = []

        async def take(name: str) -> None:
            arrays.append(await device.pinned(LIMIT // 4, "uint8"))
            order.append(name)

        waiting = [task(take("first")), task(take("second"))]
        await turns()
        del held[2:]
        # The first has had its turn when this comes, and the second does not know yet that it is its own.
        asyncio.get_running_loop().call_soon(lambda: waiting.append(task(take("newcomer"))))
        await until(lambda: len(order) == 2)
        held.clear()
        await bounded(asyncio.gather(*waiting))
        assert order == ["first", "second", "newcomer"]


async def test_cancelling_while_a_block_is_made_leaves_the_limit_as_it_was() -> None:
    async with opened(pinned_limit=LIMIT) as device:
        for pause in range(12):
            waiting = task(device.pinned(LIMIT, "uint8"))
            for _ in range(pause):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            del waiting
        assert (await bounded(device.pinned(LIMIT, "uint8"))).nbytes == LIMIT


async def test_a_timeout_ends_the_waiting() -> None:
    async with opened(pinned_limit=LIMIT) as device:
        held = await device.pinned(LIMIT, "uint8")
        error = await failure(device.pinned(1, timeout=0.02), accel.DeadlineExceededError)
        assert (error.op, error.device) == ("pinned", "cpu:0")
        assert "pinned_limit" in str(error)
        del held
        assert (await device.pinned(1, timeout=5)).size == 1


async def test_what_can_never_fit_is_out_of_memory() -> None:
    async with opened(pinned_limit=LIMIT) as device:
        error = await failure(device.pinned(LIMIT + 1, "uint8"), accel.OutOfMemoryError)
        assert (error.requested, error.limit) == (LIMIT + 1, LIMIT)
        assert "pinned_limit" in str(error)


@pytest.mark.parametrize(("shape", "dtype"), [(-1, "float32"), ("3", "float32"), (3, "str"), ((2, None), "int8")])
async def test_wrong_arguments_are_told(shape: Any, dtype: str, device: accel.Device) -> None:
    with pytest.raises(accel.InvalidArgumentError):
        await device.pinned(shape, dtype)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1", True])
async def test_a_wrong_limit_is_told(limit: Any) -> None:
    async with accel.System() as system:
        await failure(system.open_device("cpu", pinned_limit=limit), accel.InvalidArgumentError)


async def test_closing_the_device_ends_who_waits_and_leaves_the_arrays() -> None:
    async with opened(pinned_limit=LIMIT) as device:
        array = await device.pinned(LIMIT, "uint8")
        array[:] = 3
        waiting = task(device.pinned(1))
        await turns()
        await device.aclose()
        await failure(waiting, accel.ClosedError)
        await failure(device.pinned(1), accel.ClosedError)
        assert device.info().pinned == accel.PinnedInfo(used=LIMIT, reserved=0, limit=LIMIT, waiting=0)
        assert (array == 3).all()
    array += 1
    assert array.sum() == 4 * LIMIT


async def test_losing_the_device_ends_who_waits() -> None:
    plan = FaultPlan().poison_at(1)
    async with opened(plan, pinned_limit=LIMIT, restart=accel.RestartStrategy(max_restarts=0)) as device:
        array = await device.pinned(LIMIT, "uint8")
        waiting = task(device.pinned(1))
        await turns()
        with pytest.raises(accel.AccelError):
            await device.put(np.ones(3))
        await failure(waiting, accel.DeviceLostError)
        array[:] = 1


async def test_every_generation_knows_the_arrays_there_are_and_those_to_come(known: dict[CpuDevice, dict[int, int]]) -> None:
    plan = FaultPlan().poison_at(2)
    async with opened(plan) as device:
        before = await device.pinned((100, 100))
        before[:] = 5
        (first,) = known.values()
        assert covered(first, before)
        await device.put(before)
        with pytest.raises(accel.ContextPoisonedError):
            await device.put(before)
        assert (before == 5).all()
        await generation(device, 2)
        second = list(known.values())[-1]
        assert len(known) == 2
        assert covered(second, before)
        after = await device.pinned(64 * MIB, "uint8")
        assert covered(second, after)
        await until(lambda: not first, "the first context's being told")
        assert np.array_equal(await device.get(await device.put(before)), before)
    assert not any(known.values())
    assert (before == 5).all()


@pytest.mark.parametrize("way", ["put", "get"])
async def test_a_cancelled_copy_keeps_its_array_until_it_has_ended(way: str) -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, pinned_limit=LIMIT) as device:
        array = await device.pinned(LIMIT, "uint8")
        array[:] = 9
        ref = await device.put(np.full(LIMIT, 4, np.uint8))
        copy = task(device.put(array, out=ref) if way == "put" else device.get(ref, out=array))
        await turns()
        await cancelled(copy)
        del array, copy
        gc.collect()
        waiting = task(device.pinned(LIMIT, "uint8"))
        await turns()
        assert not waiting.done(), "its memory was given to another while the device used it"
        plan.release()
        again = await bounded(waiting)
        again[:] = 0
        assert (await device.get(ref) == (9 if way == "put" else 4)).all()


async def test_closing_with_a_copy_that_hangs_leaves_its_array_mapped() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, pinned_limit=LIMIT) as device:
        array = await device.pinned(LIMIT, "uint8")
        array[:] = 6
        copy = task(device.put(array))
        await turns()
        await device.aclose(timeout=0.05)
        with pytest.raises(accel.AccelError):
            await copy
        assert (array == 6).all()
        del array, copy
        plan.release()


async def test_what_a_cancelled_call_leaves_is_unmapped_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make room a block is given up, which the driver may have to be waited for; the thread that should do so may never begin."""
    closed: list[threading.Thread] = []
    close = HostBlock.close

    def closing(self: HostBlock) -> None:
        if self.fd >= 0:
            closed.append(threading.current_thread())
        close(self)

    monkeypatch.setattr(HostBlock, "close", closing)
    async with opened(pinned_limit=64 * MIB) as device:
        small = await device.pinned(1, "uint8")
        del small
        assert device.info().pinned.reserved == 32 * MIB
        begun, go_on = threading.Event(), threading.Event()

        def never_begins(self: HostArena, request: object) -> None:
            begun.set()
            go_on.wait(10)

        monkeypatch.setattr(HostArena, "fulfil", never_begins)
        waiting = task(device.pinned(48 * MIB, "uint8"))
        await asyncio.to_thread(begun.wait, 10)
        monkeypatch.undo()
        monkeypatch.setattr(HostBlock, "close", closing)
        await cancelled(waiting)
        assert (await bounded(device.pinned(48 * MIB, "uint8"))).nbytes == 48 * MIB
        assert len(closed) == 1
        assert closed[0] is not threading.current_thread()
        go_on.set()
