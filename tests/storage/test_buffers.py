"""Putting, getting and making buffers; how much memory is held, by whom, and until when."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import accel
from accel.memory import Allocator
from accel.ops import Spec
from accel.storage.buffers import Buffers
from accel.storage.oom_retry import OomRetry
from accel.testing import FaultPlan
from tests.device_support import Array, cancelled, failure, in_flight, opened, task, until, used

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

MIB = 1 << 20


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed is freed by counting references alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["requires grad", "conjugate", "negative"])
async def test_tensors_that_numpy_does_not_read_are_refused_with_what_to_call(device: accel.Device, kind: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3, requires_grad=True) if kind == "requires grad" else torch.ones(3, dtype=torch.complex64).conj()
    tensor, call = (
        (tensor.imag if kind == "negative" else tensor),
        {"requires grad": "detach", "conjugate": "conj", "negative": "neg"}[kind],
    )
    assert call in (await failure(device.put(tensor), accel.InvalidArgumentError)).message
    with pytest.raises(accel.InvalidArgumentError, match=call):
        device.xp.asarray(tensor)
    with pytest.raises(accel.InvalidArgumentError, match=call):
        async with device.batch() as batch:
            batch.put(tensor)


class Foreign:
    """Something that numpy reads through ``__array__``, as tensors of other packages are."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.array if dtype is None else self.array.astype(dtype)


class Unreadable:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise TypeError("tensor is on another device")


SOURCES: dict[str, tuple[Any, Any]] = {
    "0-d": (np.float32(3.5), np.array(3.5, np.float32)),
    "0-d array": (np.array(7), np.array(7)),
    "python float": (2.5, np.array(2.5)),
    "python bool": (True, np.array(True)),
    "list": ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),
    "tuple of complex": ((1j, 2), np.array([1j, 2])),
    "empty": (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)),
    "empty list": ([], np.array([])),
    "bytes per element": (np.arange(5, dtype=np.int8), np.arange(5, dtype=np.int8)),
    "transposed": (np.arange(12.0).reshape(3, 4).T, np.arange(12.0).reshape(3, 4).T),
    "strided": (np.arange(12)[::-3], np.array([11, 8, 5, 2])),
    "fortran": (np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)),
    "broadcast": (np.broadcast_to(np.float64(4), (2, 2)), np.full((2, 2), 4.0)),
    "big-endian": (np.arange(4, dtype=">f4"), np.arange(4, dtype=np.float32)),
    "read-only": (np.frombuffer(b"\x01\x02", np.uint8), np.array([1, 2], np.uint8)),
    "bfloat16": (np.arange(3).astype(ml_dtypes.bfloat16), np.arange(3).astype(ml_dtypes.bfloat16)),
    "float8": (np.arange(3).astype(ml_dtypes.float8_e4m3fn), np.arange(3).astype(ml_dtypes.float8_e4m3fn)),
    "float4": (np.arange(3).astype(ml_dtypes.float4_e2m1fn), np.arange(3).astype(ml_dtypes.float4_e2m1fn)),
    "memoryview": (memoryview(b"abc"), np.array([97, 98, 99], np.uint8)),
    "foreign": (Foreign(np.arange(3.0)), np.arange(3.0)),
    "subclass": (np.rec.fromarrays([[1.0]]).f0, np.array([1.0])),
    "large transposed": (np.arange(300_000.0).reshape(500, 600).T, np.arange(300_000.0).reshape(500, 600).T),
    "large big-endian": (np.arange(200_000, dtype=">i4"), np.arange(200_000, dtype=np.int32)),
}


@pytest.mark.parametrize("name", SOURCES)
async def test_put_keeps_shape_dtype_and_values(device: accel.Device, name: str) -> None:
    source, expected = SOURCES[name]
    ref = await device.put(source)
    assert (ref.shape, ref.dtype.numpy, ref.nbytes) == (expected.shape, expected.dtype, expected.nbytes)
    got = await device.get(ref)
    assert type(got) is np.ndarray
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.tobytes() == np.ascontiguousarray(expected).tobytes()


REJECTED: dict[str, Any] = {
    "objects": [object()],
    "none": None,
    "text": "text",
    "ragged": [[1, 2], [3]],
    "dates": np.zeros(2, "datetime64[s]"),
    "structure": np.zeros(2, [("a", "f4")]),
    "long double": np.zeros(2, np.longdouble),
    "unreadable": Unreadable(),
    "set": {1, 2},
    "large objects": np.full((200, 400), None, dtype=object).T,
}


@pytest.mark.parametrize("name", REJECTED)
async def test_put_rejects_what_is_no_array_of_ours(device: accel.Device, name: str) -> None:
    error = await failure(device.put(REJECTED[name]), accel.InvalidArgumentError)
    assert isinstance(error, ValueError)
    with pytest.raises(accel.InvalidArgumentError):
        async with device.batch() as batch:
            batch.put(REJECTED[name])


async def test_put_of_a_ref_names_the_remedy(device: accel.Device) -> None:
    ref = await device.zeros(2)
    assert "device.copy" in str(await failure(device.put(ref), accel.InvalidArgumentError))


async def test_put_into_an_existing_buffer(device: accel.Device, rng: np.random.Generator) -> None:
    ref, array = await device.zeros((2, 3)), rng.standard_normal((2, 3)).astype(np.float32)
    before = used(device)
    assert await device.put(array, out=ref) is ref
    np.testing.assert_array_equal(await device.get(ref), array)
    assert used(device) == before
    for wrong in (array.T, array.astype(np.float64)):
        await failure(device.put(wrong, out=ref), accel.InvalidArgumentError)


async def test_get_fills_the_array_it_is_given_and_refuses_others(device: accel.Device) -> None:
    ref = await device.put(np.arange(6, dtype=np.float32).reshape(2, 3))
    target = np.full((2, 3), -1, np.float32)
    assert await device.get(ref, out=target) is target
    np.testing.assert_array_equal(target, np.arange(6).reshape(2, 3))
    frozen = np.zeros((2, 3), np.float32)
    frozen.flags.writeable = False
    for wrong in (np.zeros((3, 2), np.float32), np.zeros((2, 3)), np.zeros((3, 2), np.float32).T, frozen, [0.0] * 6):
        await failure(device.get(ref, out=wrong), accel.InvalidArgumentError)  # type: ignore[arg-type]
    await failure(device.get(target), accel.InvalidArgumentError)  # type: ignore[arg-type]


async def test_buffers_made_on_the_device(device: accel.Device) -> None:
    assert (await device.empty((2, 3))).shape == (2, 3)
    assert (await device.empty(4, "bfloat16")).dtype is accel.DType.BFLOAT16
    np.testing.assert_array_equal(await device.get(await device.zeros((3,), "complex64")), np.zeros(3, np.complex64))
    np.testing.assert_array_equal(await device.get(await device.full((), 2.5)), np.float32(2.5))
    np.testing.assert_array_equal(await device.get(await device.full((2, 2), -3, "int64")), np.full((2, 2), -3))
    np.testing.assert_array_equal(await device.get(await device.full((0, 4), 1)), np.zeros((0, 4), np.float32))
    np.testing.assert_array_equal(await device.get(await device.full(3, True, bool)), np.ones(3, bool))


async def test_copy_is_independent_of_its_source(device: accel.Device, rng: np.random.Generator) -> None:
    array = rng.standard_normal(5)
    source, copy = await device.put(array), await device.empty(5, "float64")
    assert await device.copy(source, copy) is copy
    await device.blas.scal(source, 0)
    np.testing.assert_array_equal(await device.get(copy), array)


async def test_used_memory_is_what_live_refs_hold(device: accel.Device) -> None:
    assert device.info().memory == accel.MemoryInfo(0, 0, 0, None)
    a = await device.zeros(256)
    b = await device.zeros(1)
    assert used(device) == 1024 + 256
    assert device.info().memory.reserved >= 1280
    await device.free(b)
    assert used(device) == 1024
    del a
    assert used(device) == 0


async def test_memory_limit_holds_and_is_recovered_from() -> None:
    async with opened(memory_limit=4 * MIB) as device:
        kept = [await device.zeros(MIB, "uint8") for _ in range(3)]
        error = await failure(device.zeros(2 * MIB, "uint8"), accel.OutOfMemoryError)
        assert isinstance(error, MemoryError)
        assert (error.requested, error.limit, error.device) == (2 * MIB, 4 * MIB, "cpu:0")
        assert error.used is not None
        assert error.used >= 3 * MIB
        assert error.retryable
        assert device.state is accel.DeviceState.READY
        assert device.info().memory.reserved <= 4 * MIB
        del kept
        large = await device.full(3 * MIB, 7, "uint8")
        assert int((await device.get(large)).sum(dtype=np.int64)) == 7 * 3 * MIB
        assert device.info().memory.limit == 4 * MIB


async def test_failed_growth_in_a_batch_keeps_earlier_results() -> None:
    async with opened(memory_limit=2 * MIB) as device:
        async with device.batch() as batch:
            pass
        error: accel.OutOfMemoryError | None = None
        try:
            async with device.batch() as batch:
                first = batch.full(16, 3.0)
                second = batch.full(4 * MIB, 3.0)
                third = batch.full(16, 4.0)
        except accel.OutOfMemoryError as caught:
            error = caught
        assert error is not None
        assert error.op_index == 1
        np.testing.assert_array_equal(await device.get(first), np.full(16, 3, np.float32))
        for ref in (second, third):
            assert ref.is_stale
            await failure(device.get(ref), accel.StaleRefError)


async def test_nothing_is_held_after_batches_that_failed(no_collector: None) -> None:
    plan = FaultPlan().fail_at(2, accel.LibraryError("no"), op="unary")
    async with opened(plan, memory_limit=2 * MIB) as device:
        a = await device.zeros((8, 8))
        for large, kind in ((False, accel.LibraryError), (True, accel.OutOfMemoryError)):
            try:
                async with device.batch() as batch:
                    h = batch.elementwise.unary("neg", a)
                    if large:
                        h = batch.zeros(4 * MIB)
                    h = batch.elementwise.unary("neg", h)
            except kind:
                pass
            else:
                raise AssertionError(kind)
        del a, h, batch
        await until(lambda: used(device) == 0, "no memory in use")


async def test_nothing_is_held_after_cancellation_and_deadline(no_collector: None) -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, libraries=["blas"], streams=1) as device:
        a = await device.zeros((8, 8))
        first = task(device.blas.gemm(a, a))
        second = task(device.blas.gemm(a, a, timeout=0.1))
        await in_flight(device, 2)
        await cancelled(first)
        with pytest.raises(accel.DeadlineExceededError):
            await second
        del a, first, second
        assert used(device) == 2 * 256, "the results stay until the device has written them"
        plan.release()
        await in_flight(device, 0)
        await until(lambda: used(device) == 0, "no memory in use")


async def test_nothing_is_held_after_a_batch(device: accel.Device, no_collector: None) -> None:
    a = await device.zeros((8, 8))
    async with device.batch() as batch:
        h = batch.blas.gemm(a, a)
        h = batch.elementwise.unary("relu", h)
    assert used(device) == 2 * 256
    del h, a, batch
    assert used(device) == 0


async def test_host_arrays_live_as_long_as_the_device_uses_them() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan) as device:
        ref = await device.zeros(1000)
        source, target = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
        watched = [weakref.ref(source), weakref.ref(target)]
        put, get = task(device.put(source, out=ref)), task(device.get(ref, out=target))
        await in_flight(device, 2)
        await cancelled(put)
        await cancelled(get)
        del source, target, put, get
        gc.collect()
        assert all(each() is not None for each in watched), "an array was freed under the device"
        plan.release()
        await in_flight(device, 0)
        await until(lambda: all(each() is None for each in watched), "the arrays are freed")
        np.testing.assert_array_equal(await device.get(ref), np.arange(1000))


async def test_put_that_was_cancelled_while_queued_never_reads_its_source() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=1) as device:
        hanging = task(device.zeros(4))
        await in_flight(device, 1)
        source = np.zeros(4, np.float32)
        watched = weakref.ref(source)
        queued = [task(device.put(source)) for _ in range(3)]
        await asyncio.sleep(0)
        for each in queued:
            await cancelled(each)
        del source, queued, each
        plan.release()
        await hanging
        await until(lambda: watched() is None, "the source is freed")
        assert plan.count == 1


class Wanting:
    """A stream whose library wants a small workspace, and then one that needs a slab of its own."""

    def __init__(self) -> None:
        self.sizes, self.given = [MIB, 128 * MIB], list[int]()

    def workspace_wanted(self, library: str) -> int:
        return self.sizes[len(self.given)] if len(self.given) < len(self.sizes) else 0

    def use_workspace(self, address: int, nbytes: int) -> None:
        assert nbytes == self.workspace_wanted("blas")
        self.given.append(nbytes)

    def release_workspaces(self) -> None:
        self.given.clear()


async def test_workspaces_that_two_libraries_ask_for_at_once_have_the_sizes_that_are_wanted(device: accel.Device) -> None:
    context: Any = device._host.context
    buffers, lane, stream = context.buffers, context.lanes.pool[0], Wanting()
    await asyncio.gather(*(buffers.provide_workspaces(lane, stream, library) for library in ("blas", "solver")))
    assert stream.given == [MIB, 128 * MIB]
    assert buffers.workspace_nbytes == 129 * MIB
    assert buffers.release_workspaces(lane)


class Slab:
    """A slab that notes whether it was closed."""

    def __init__(self, nbytes: int) -> None:
        self.address, self.nbytes, self.is_closed = MIB, nbytes, False

    def close(self) -> None:
        self.is_closed = True


async def test_a_slab_that_is_wanted_no_more_is_closed_though_the_wait_for_that_is_cancelled_too() -> None:
    began, go_on = asyncio.Event(), asyncio.Event()
    slabs: list[Slab] = []

    def create_slab(nbytes: int) -> Slab:
        slabs.append(Slab(nbytes))
        return slabs[-1]

    async def run_blocking(call: Callable[..., object], *arguments: object) -> None:
        if not slabs:
            call(*arguments)
            began.set()
            await asyncio.Event().wait()  # the thread has made the slab, and is not waited for any more
        began.set()
        await go_on.wait()
        call(*arguments)

    system: Any = SimpleNamespace(loop=asyncio.get_running_loop(), run_blocking=run_blocking)
    refs: Any = SimpleNamespace(dropped=deque())
    durables: Any = SimpleNamespace()
    allocator = Allocator(create_slab, device="cpu:0")
    buffers = Buffers(refs, system, OomRetry(), allocator, 1, lambda: None, durables, lambda lane: False)
    lane: Any = object()
    growing = task(buffers.ensure_room((Spec((8,), accel.DType.FLOAT32),), lane))
    for _ in range(2):
        await began.wait()
        began.clear()
        growing.cancel()
    await asyncio.wait((growing,))
    assert growing.cancelled()
    go_on.set()
    await buffers.aclose()
    assert [slab.is_closed for slab in slabs] == [True]
