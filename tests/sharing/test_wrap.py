"""Arrays of other libraries as refs, on the CPU device: what is taken, how long it is kept, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import failure, generation, in_flight, opened, task, until

pytestmark = pytest.mark.usefixtures("nothing_left")


class Array(np.ndarray[Any, Any]):
    """An array that can be watched."""


def watched(values: Any) -> tuple[Array, weakref.ref[Array]]:
    array = np.array(values).view(Array)
    return array, weakref.ref(array)


class Tensor:
    """An array of another library, which speaks DLPack and nothing else."""

    def __init__(self, array: np.ndarray[Any, Any], kind: int = 1) -> None:
        self.array, self.kind = array, kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("wrapper", [np.asarray, Tensor])
async def test_wrapped_array_is_read_and_written_in_place(device: accel.Device, rng: np.random.Generator, wrapper: Any) -> None:
    array = rng.standard_normal((3, 4))
    before = array.copy()
    ref = await device.wrap(wrapper(array))
    assert (ref.shape, ref.dtype, ref.is_foreign, ref.is_managed, ref.device) == ((3, 4), accel.DType.FLOAT64, True, False, device)
    assert np.array_equal(await device.get(ref), before)
    assert device.info().memory.used == 0, "the memory is another's"
    await device.elementwise.unary("neg", ref[1:], out=ref[1:])
    assert np.array_equal(array[1:], -before[1:])
    array[0] = 7.0
    assert np.array_equal(await device.get(ref[0]), np.full(4, 7.0))
    product = await device.blas.gemm(ref, ref, transpose_b=True)
    np.testing.assert_allclose(await device.get(product), array @ array.T)
    async with device.batch() as batch:
        batch.elementwise.binary("add", ref, ref, out=ref)
    assert np.array_equal(array[0], np.full(4, 14.0))


@pytest.mark.parametrize(
    "array", [np.zeros(()), np.zeros((0, 3)), np.arange(4, dtype="int16"), np.zeros(3, ml_dtypes.bfloat16), np.zeros((2, 1, 1))[::2]]
)
async def test_shapes_and_dtypes(device: accel.Device, array: np.ndarray[Any, Any]) -> None:
    ref = await device.wrap(array)
    found = await device.get(ref)
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert np.array_equal(found, array)


async def test_what_cannot_be_wrapped_is_refused_with_a_remedy(device: accel.Device) -> None:
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    odd = np.zeros(9, np.uint8)[1:].view(np.uint8)
    misaligned = np.ndarray((1,), np.float64, odd.data) if odd.__array_interface__["data"][0] % 8 else odd[:0].view(np.float64)
    ref = await device.zeros(3)
    cases = [
        np.zeros((4, 4))[:, 1:],
        np.zeros((4, 4)).T,
        frozen,
        np.zeros(3, ">f4"),
        np.array(["a"]),
        [1.0],
        None,
        ref,
        Tensor(np.zeros(3), 2),
    ]
    if misaligned.size:
        cases.append(misaligned)
    for case in cases:
        error = await failure(device.wrap(case), accel.InvalidArgumentError)
        assert error.remedy, error


async def test_a_ref_of_another_device_is_to_be_copied(device: accel.Device) -> None:
    async with opened() as other:
        for ref, remedy in [
            (await device.put(np.ones(2)), "Use it as it is."),
            (await other.put(np.ones(2)), "Copy it: await device.put(ref)."),
        ]:
            assert (await failure(device.wrap(ref), accel.InvalidArgumentError)).remedy == remedy


async def test_array_is_kept_until_the_last_use_is_over() -> None:
    """The wrapped array is let go of after the ops on it, and not before."""
    plan = FaultPlan().hang_at(1, op="unary")
    async with opened(plan) as device:
        array, gone = watched(np.arange(6.0))
        other = await device.wrap(np.zeros(6))
        ref = await device.wrap(array)
        del array
        use = task(device.elementwise.unary("neg", ref, out=other))
        await in_flight(device, 1)
        del ref
        device.info()  # frees the buffers of refs that were dropped
        gc.collect()
        await in_flight(device, 2)
        assert gone() is not None, "let go of under a running op"
        plan.release()
        await use
        await until(lambda: gone() is None, "letting go")
        assert np.array_equal(await device.get(other), -np.arange(6.0))


async def test_many_arrays_leave_at_once(device: accel.Device) -> None:
    arrays, gone = zip(*(watched(np.zeros(4)) for _ in range(3000)), strict=True)
    refs = [await device.wrap(array) for array in arrays]
    total = await device.zeros(4, "float64")
    work = [task(device.elementwise.binary("add", total, ref, out=total)) for ref in refs[:64]]
    for each in work:
        await each
    del arrays, refs, work, each
    gc.collect()
    device.info()
    await until(lambda: not any(ref() is not None for ref in gone), "letting go of all")
    assert device.info().in_flight == 0


async def test_closing_lets_go() -> None:
    array, gone = watched(np.zeros(3))
    async with opened() as device:
        ref = await device.wrap(array)
        del array
    gc.collect()
    assert gone() is None
    assert ref.is_stale


async def test_after_a_fault_the_array_is_let_go_of_and_the_ref_is_stale() -> None:
    plan = FaultPlan().poison_at(1, op="gemm")
    async with opened(plan) as device:
        array, gone = watched(np.eye(3))
        ref = await device.wrap(array)
        del array
        await failure(device.blas.gemm(ref, ref), accel.ContextPoisonedError)
        await generation(device, 2)
        assert (await failure(device.get(ref), accel.StaleRefError)).reason == "generation"
        await until(lambda: gone() is None, "letting go")
        again = await device.wrap(np.eye(3))
        assert np.array_equal(await device.get(again), np.eye(3))


class Others:
    """Stands for everybody else in the process, whose work cannot be marked for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_captured = False
        self.refused = 0

        def record(stream: Any, event: Any) -> bool:
            if self.is_captured:
                self.refused += 1
                raise accel.DriverError("a capture of another library goes on", code=906)
            return True

        monkeypatch.setattr("accel.cpu.exchange._Others.record", record)


async def test_what_could_not_be_given_back_is_given_back_later(device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(monkeypatch)
    first, first_gone = watched(np.eye(3))
    second, second_gone = watched(np.eye(3))
    refs = [await device.wrap(first), await device.wrap(second)]
    await device.blas.gemm(refs[0], refs[1])
    del first, second
    others.is_captured = True
    refs.pop()
    assert device.info().in_flight == 0
    await until(lambda: others.refused > 1, "a second try")
    assert second_gone() is not None, "what others do to it has not been waited for"
    refs.pop()
    await until(lambda: not device.info().queued and others.refused > 3, "more tries")
    assert first_gone() is not None
    others.is_captured = False
    await until(lambda: not device.info().in_flight and first_gone() is None and second_gone() is None, "letting go")
    assert device.generation == 1


async def test_what_could_not_be_given_back_goes_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(monkeypatch)
    async with opened() as device:
        array, gone = watched(np.eye(3))
        ref = await device.wrap(array)
        await device.get(ref)
        del array
        others.is_captured = True
        del ref
        await until(lambda: device.info().in_flight == 0 and others.refused > 1, "a second try")
    assert gone() is None
    assert others.refused < 20, "it is not tried all the time"


async def test_an_op_that_cannot_wait_for_others_still_waits_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes next waits for the op that failed alone: so that one has to come after what it would have come after."""
    others, plan = Others(monkeypatch), FaultPlan().hang_at(2)
    async with opened(plan) as device:
        shared, own = await device.wrap(np.full(5, 2.0)), await device.put(np.full(5, 1.0))
        reading = task(device.elementwise.binary("add", own, own))  # hangs, and reads what is written next
        await in_flight(device, 1)
        others.is_captured = True
        await failure(device.blas.axpy(shared, own), accel.DriverError)
        others.is_captured = False
        writing = task(device.put(np.zeros(5), out=own))
        await in_flight(device, 3)
        assert not writing.done()
        plan.release()
        assert np.array_equal(await device.get(await reading), np.full(5, 2.0)), "the write came before the read"
        await writing


async def test_cpu_refs_are_not_shared_and_say_what_to_do(device: accel.Device) -> None:
    ref = await device.zeros(3)
    with pytest.raises(BufferError, match=r"await device\.get"):
        np.from_dlpack(ref)
    with pytest.raises(BufferError, match=r"await device\.get"):
        ref.__dlpack__()
    assert not hasattr(ref, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="not in CUDA memory"):
        _ = ref.__cuda_array_interface__
    await device.free(ref)
    with pytest.raises(accel.StaleRefError):
        ref.__dlpack_device__()


async def test_array_in_device_memory_is_not_put(device: accel.Device) -> None:
    class OnDevice:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"version": 3}

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("it is on a GPU")

    error = await failure(device.put(OnDevice()), accel.InvalidArgumentError)
    assert "device.wrap" in (error.remedy or "")
