"""Which way an array takes to and from the device, without a GPU: staged whole, from where it lies, or by threads beside the loop."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel.errors import ContextPoisonedError
from accel.memory import HostArena
from accel_cuda.core.blocking import Blocking
from accel_cuda.core.transfers import STAGED, StreamTransfers
from accel_cuda.families.compute import CudaCompute
from accel_cuda.families.dnn import DnnLibrary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICE = 0x1000


class Ranges:
    """Everything is page-locked, or nothing, or the context has a fault."""

    def __init__(self) -> None:
        self.covered = True
        self.fault: Exception | None = None

    def covers(self, address: int, nbytes: int) -> bool:
        if self.fault is not None:
            raise self.fault
        return self.covered


class Context:
    """A context whose driver takes down what it is given."""

    description = SimpleNamespace(spec="cuda:0", index=0)
    is_alive = False
    fault = None

    def __init__(self, arena: HostArena) -> None:
        self.pinned = Ranges()
        self.calls: list[tuple[Any, ...]] = []
        self.has_room = True
        self.copiers = SimpleNamespace(copy=self._copy)
        self.staging = arena
        self.section = contextlib.nullcontext()
        hot = SimpleNamespace(
            event_create=lambda handle, flags: 0,
            event_record=lambda event, stream: 0,
            event_query=lambda event: 0,
            copy_from_host=self._transfer("in"),
            copy_to_host=self._transfer("out"),
        )
        self.driver = SimpleNamespace(hot=hot, CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1))

    def _transfer(self, way: str) -> Callable[..., int]:
        def transfer(destination: Any, source: Any, nbytes: Any, stream: Any) -> int:
            self.calls.append((way, destination.value, source.value, nbytes.value))
            return 0

        return transfer

    def _copy(self, channel: Any, device: int, host: int, nbytes: int, *, is_put: bool) -> bool:
        self.calls.append(("threads", device, host, nbytes, is_put))
        return self.has_room

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))

    def check(self, status: int, call: str) -> None:
        assert status == 0, call


@pytest.fixture
def context() -> Iterator[Any]:
    arena = HostArena(1 << 20, block_bytes=1 << 20)
    yield Context(arena)
    arena.close()


@pytest.fixture
def compute(context: Any) -> Iterator[CudaCompute]:
    transfers = StreamTransfers(context.staging)
    stream: Any = SimpleNamespace(
        context=context, transfers=transfers, pointer=None, handle=77, ready=lambda: context, at_close=lambda release: None
    )
    made = CudaCompute(stream, "memory", DnnLibrary(context))
    made.init()
    yield made
    transfers.close()


def lane(compute: CudaCompute) -> Any:
    return SimpleNamespace(compute=compute, stream=compute.stream)


def may_block(compute: CudaCompute, context: Any, array: Any) -> tuple[bool, bool]:
    """Return whether a put and a get of ``array`` may block; what that reserved is given back."""
    blocking = Blocking({}, {}, pinned=context.pinned)
    put, get = SimpleNamespace(kind="put", source=array), SimpleNamespace(kind="get", destination=array)
    answers = blocking.may_block(lane(compute), put), blocking.may_block(lane(compute), get)
    compute.stream.transfers.release_reserved()
    return answers


def test_a_page_locked_array_is_transferred_from_where_it_lies_and_never_blocks(compute: CudaCompute, context: Any) -> None:
    array = np.zeros(STAGED + 1, np.uint8)
    assert may_block(compute, context, array) == (False, False)
    compute.copy_htod(DEVICE, array.data)
    compute.copy_dtoh(array.data, DEVICE)
    address = array.ctypes.data
    assert context.calls == [("in", DEVICE, address, array.nbytes), ("out", address, DEVICE, array.nbytes)]


def test_an_array_that_is_transferred_lives_until_the_transfer_has_ended(compute: CudaCompute, context: Any) -> None:
    array = np.zeros(STAGED + 1, np.uint8)
    is_there = weakref.ref(array)
    compute.copy_htod(DEVICE, array.data)
    del array
    assert is_there() is not None
    compute.stream.transfers.finish(compute.stream.transfers.issued)
    assert is_there() is None


def test_an_ordinary_array_is_copied_by_threads_beside_the_loop(compute: CudaCompute, context: Any) -> None:
    context.pinned.covered = False
    array = np.zeros(STAGED + 1, np.uint8)
    assert may_block(compute, context, array) == (True, True)
    compute.copy_htod(DEVICE, array.data)
    compute.copy_dtoh(array.data, DEVICE)
    rest = DEVICE, array.ctypes.data, array.nbytes
    assert context.calls == [("threads", *rest, True), ("threads", *rest, False)]


def test_what_is_not_page_locked_any_more_is_not_transferred_as_if_it_were(compute: CudaCompute, context: Any) -> None:
    array = np.zeros(STAGED + 1, np.uint8)
    assert may_block(compute, context, array) == (False, False)
    context.pinned.covered = False
    compute.copy_htod(DEVICE, array.data)
    assert [name for name, *_ in context.calls] == ["threads"]


def test_where_no_pinned_memory_is_left_the_driver_copies_it(compute: CudaCompute, context: Any) -> None:
    context.pinned.covered = context.has_room = False
    array = np.zeros(STAGED + 1, np.uint8)
    compute.copy_htod(DEVICE, array.data)
    compute.copy_dtoh(array.data, DEVICE)
    address = array.ctypes.data
    assert context.calls[1::2] == [
        ("cuMemcpyHtoDAsync", DEVICE, address, array.nbytes, 77),
        ("cuMemcpyDtoHAsync", address, DEVICE, array.nbytes, 77),
    ]


def test_a_small_array_is_staged_whole_and_lands_when_its_transfer_has_ended(compute: CudaCompute, context: Any) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    source = np.random.default_rng(seed).integers(1, 256, STAGED, np.uint8)
    target = np.zeros_like(source)
    assert may_block(compute, context, source) == (False, False)
    compute.copy_htod(DEVICE, source.data)
    compute.copy_dtoh(target.data, DEVICE)
    (_, to, staged, nbytes), (_, landing, origin, _) = context.calls
    assert (to, origin, nbytes) == (DEVICE, DEVICE, STAGED)
    assert ctypes.string_at(staged, nbytes) == source.tobytes(), seed
    ctypes.memmove(landing, staged, nbytes)  # the device copies
    assert not target.any()
    compute.stream.transfers.finish(compute.stream.transfers.issued)
    assert np.array_equal(source, target), seed


def test_where_the_context_has_a_fault_the_copy_is_beside_and_raises_it(compute: CudaCompute, context: Any) -> None:
    context.pinned.fault = ContextPoisonedError("the plan")
    array = np.zeros(STAGED + 1, np.uint8)
    assert may_block(compute, context, array) == (True, True)
    with pytest.raises(ContextPoisonedError):
        compute.copy_htod(DEVICE, array.data)
    assert not context.calls


def test_nothing_is_enqueued_for_an_empty_array(compute: CudaCompute, context: Any) -> None:
    array = np.zeros(0, np.uint8)
    assert may_block(compute, context, array) == (False, False)
    compute.copy_htod(DEVICE, array.data)
    compute.copy_dtoh(array.data, DEVICE)
    assert not context.calls
