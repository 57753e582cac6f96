"""Handles: what they say, how they travel, and what happens when they go away."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.ref import ViewToken
from accel.testing import FaultPlan
from tests.device_support import failure, generation, in_flight, opened, task, turns, until, used

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_ref_describes_its_memory(device: accel.Device) -> None:
    ref = await device.zeros((2, 3), "float16")
    assert (ref.shape, ref.dtype, ref.nbytes, ref.device, ref.generation) == ((2, 3), accel.DType.FLOAT16, 12, device, 1)
    assert (ref.durable, ref.is_stale, ref.size, ref.ndim, len(ref)) == (False, False, 6, 2, 2)
    ref.check()
    assert "float16[2, 3]" in repr(ref)
    with pytest.raises(TypeError):
        len(await device.zeros(()))


async def test_ref_is_no_array_and_says_what_to_do(device: accel.Device) -> None:
    ref = await device.zeros(3)
    for use in (lambda: np.asarray(ref), lambda: np.zeros(3) + ref, lambda: np.sum(ref), lambda: np.array([ref, ref])):
        with pytest.raises(TypeError, match=r"await device\.get"):
            use()


async def test_pickle_gives_a_token_that_owns_nothing(device: accel.Device) -> None:
    ref = await device.full(2, 5.0)
    token = pickle.loads(pickle.dumps(ref))
    assert type(token) is accel.AccelToken
    assert (token.generation, token) == (1, ref.token())
    assert device.resolve(token) is ref
    assert hash(token) == hash(ref.token())
    del ref
    await turns(1)  # the loop itself holds what it has just delivered
    assert used(device) == 0, "a token keeps no memory"
    with pytest.raises(accel.StaleRefError) as caught:
        device.resolve(token)
    assert caught.value.reason == "freed"


async def test_token_of_a_freed_ref_or_of_another_device_is_refused(device: accel.Device) -> None:
    async with opened() as other:
        ref = await device.zeros(2)
        token = ref.token()
        with pytest.raises(accel.InvalidArgumentError):
            other.resolve(token)
        await failure(other.get(ref), accel.InvalidArgumentError)
        await device.free(ref)
        with pytest.raises(accel.StaleRefError) as caught:
            device.resolve(token)
        assert caught.value.reason == "freed"
        with pytest.raises(accel.StaleRefError):
            pickle.dumps(ref)


async def test_a_ref_of_an_old_generation_is_refused_at_once() -> None:
    async with opened(FaultPlan().poison_at(2)) as device:
        a = await device.zeros(3)
        await failure(device.elementwise.unary("neg", a), accel.ContextPoisonedError)
        assert a.is_stale
        for call in (device.get(a), device.elementwise.unary("neg", a), device.free(a), device.put(np.zeros(3, "f4"), out=a)):
            assert (await failure(call, accel.StaleRefError)).reason == "generation"
        assert device.state is accel.DeviceState.REBUILDING, "it does not wait for the next generation"
        await generation(device, 2)
        assert (await failure(device.get(a), accel.StaleRefError)).generation == 2


async def test_a_token_of_an_old_generation_is_refused() -> None:
    async with opened(FaultPlan().poison_at(2)) as device:
        ref = await device.zeros(2)
        token = ref.token()
        await failure(device.elementwise.unary("neg", ref), accel.ContextPoisonedError)
        await generation(device, 2)
        with pytest.raises(accel.StaleRefError) as caught:
            device.resolve(token)
        assert caught.value.reason == "generation"


async def test_pickled_op_runs_on_the_device_of_its_refs(device: accel.Device) -> None:
    x = np.arange(4.0).reshape(2, 2)
    a, out = await device.put(x), await device.zeros((2, 2), "float64")
    op = pickle.loads(pickle.dumps(ops.Gemm(a, a, out=out, alpha=2.0)))
    assert type(op.a) is accel.AccelToken
    assert await device.run(op) is out
    np.testing.assert_array_equal(await device.get(out), 2 * x @ x)
    with pytest.raises(accel.InvalidArgumentError, match="resolve"):
        op.plan()
    put = pickle.loads(pickle.dumps(ops.Put(x)))
    np.testing.assert_array_equal(await device.get(await device.run(put)), x)


async def test_free_makes_the_ref_unusable_at_once(device: accel.Device) -> None:
    ref = await device.zeros(4)
    freeing = task(device.free(ref))
    await asyncio.sleep(0)
    assert ref.is_stale
    error = await failure(device.get(ref), accel.StaleRefError)
    assert (error.reason, error.device) == ("freed", "cpu:0")
    await freeing
    await failure(device.free(ref), accel.StaleRefError)
    assert used(device) == 0
    assert "freed" in repr(ref)
    with pytest.raises(accel.InvalidArgumentError):
        await device.free("nothing")  # type: ignore[arg-type]


async def test_ref_dropped_while_its_op_is_queued_or_running() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=1, libraries=["blas"]) as device:
        a = await device.put(np.full((2, 2), 2.0))
        running = task(device.blas.gemm(a, a))
        await in_flight(device, 1)
        queued = task(device.blas.gemm(a, a))
        await turns()
        del a
        plan.release()
        for call in (running, queued):
            np.testing.assert_array_equal(await device.get(await call), np.full((2, 2), 8.0))
        del running, queued, call
        await until(lambda: used(device) == 0)


async def test_ref_dropped_on_another_thread(device: accel.Device) -> None:
    refs = [await device.zeros(8) for _ in range(50)]
    thread = threading.Thread(target=refs.clear)
    thread.start()
    thread.join()
    await turns(1)
    assert used(device) == 0
    again = [await device.full(8, float(number)) for number in range(50)]
    for number, ref in enumerate(again):
        np.testing.assert_array_equal(await device.get(ref), np.full(8, number, np.float32))


async def test_ref_dropped_inside_the_collector(device: accel.Device) -> None:
    cycle: list[object] = [await device.zeros(8)]
    cycle.append(cycle)
    del cycle
    await turns(1)
    gc.collect()
    assert used(device) == 0


async def test_result_that_nobody_takes_is_freed(device: accel.Device) -> None:
    for _ in range(3):
        await device.zeros(8)
    await turns(1)
    assert used(device) == 0


async def test_info_and_health_tell_the_numbers() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, memory_limit=64 << 20) as device:
        info = device.info()
        assert (info.name, info.backend, info.index, info.host, info.pid) == ("cpu:0", "cpu", 0, "inline", None)
        assert (info.state, info.generation, info.restarts, info.queued, info.in_flight) == (accel.DeviceState.READY, 1, 0, 0, 0)
        assert info.memory == accel.MemoryInfo(used=0, durable=0, reserved=0, limit=64 << 20)
        assert device.health() == accel.DeviceHealth(True, True, accel.DeviceState.READY, 1, "")
        work = task(device.zeros(1))
        await in_flight(device, 1)
        assert device.health().is_ready, "health is told from the state, not from queued work"
        with pytest.raises(AttributeError):
            info.state = accel.DeviceState.LOST  # type: ignore[misc]
        plan.release()
        await work
        assert "ready generation 1" in repr(device)


@pytest.mark.parametrize(
    "forged",
    [
        {"offset": 4},
        {"offset": -8},
        {"offset": 1 << 62},
        {"shape": (4, 4)},
        {"shape": (-1, -2)},
        {"shape": (1 << 40, 1 << 40)},
        {"shape": [2, 3]},
        {"shape": (2.0, 3)},
        {"shape": None},
        {"offset": 8.0},
        {"offset": True},
        {"dtype": "complex128"},
        {"dtype": "nonsense"},
        {"buffer": [1]},
    ],
    ids=repr,
)
async def test_a_token_of_a_view_that_runs_past_its_buffer_is_refused(device: accel.Device, forged: dict[str, Any]) -> None:
    ref = await device.zeros((3, 3), "float64")
    token = ref[1:].token()
    assert isinstance(token, ViewToken)
    again = device.resolve(token)
    assert (again.offset, again.shape, again.dtype) == (24, (2, 3), ref.dtype)
    fields = {name: getattr(token, name) for name in ("device", "buffer", "generation", "offset", "shape", "dtype")}
    with pytest.raises(accel.InvalidArgumentError) as caught:
        device.resolve(ViewToken(**{**fields, **forged}))
    assert caught.value.remedy


async def test_a_forged_token_cannot_be_put_to_use_in_an_op(device: accel.Device) -> None:
    ref, other = await device.zeros(8, "float64"), await device.zeros(64, "float64")
    named = ref.token()
    token: Any = ViewToken(named.device, named.buffer, named.generation, 0, (64,), "float64")
    error = await failure(device.run(ops.Copy(token, other)), accel.InvalidArgumentError)
    assert "64 bytes" in error.message
