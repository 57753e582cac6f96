"""Which way an array takes to and from the device, without a GPU: staged whole, from where it lies, or by threads beside the loop."""

from __future__ import annotations

import contextlib
import weakref
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel.errors import ContextPoisonedError
from accel.memory import HostArena
from accel_cuda.core.blocking import Blocking
from accel_cuda.core.host_copies import HostCopies
from accel_cuda.core.stream import CudaStream
from accel_cuda.core.transfers import STAGED, StreamTransfers

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
def stream(context: Any) -> Iterator[CudaStream]:
    made: Any = SimpleNamespace(
        context=context,
        transfers=StreamTransfers(context.staging),
        pointer=None,
        handle=77,
        ready=lambda: context,
        at_close=lambda release: None,
    )
    made._copies = HostCopies(made)
    made.transfers.prepare()
    made.copy_htod, made.copy_dtoh = MethodType(CudaStream.copy_htod, made), MethodType(CudaStream.copy_dtoh, made)
    yield made
    made.transfers.close()


def may_block(stream: CudaStream, context: Any, array: Any) -> tuple[bool, bool]:
    """Return whether a put and a get of ``array`` may block; what that reserved is given back."""
    blocking = Blocking({}, {}, pinned=context.pinned)
    put, get = SimpleNamespace(library="memory", kind="put", source=array), SimpleNamespace(library="memory", kind="get", destination=array)
    answers = blocking.may_block(SimpleNamespace(stream=stream), put), blocking.may_block(SimpleNamespace(stream=stream), get)
    stream.transfers.release_reserved()
    return answers


def test_a_page_locked_array_is_transferred_from_where_it_lies_and_never_blocks(stream: CudaStream, context: Any) -> None:
    array = np.zeros(STAGED + 1, np.uint8)
    assert may_block(stream, context, array) == (False, False)
    stream.copy_htod(DEVICE, array.data)
    stream.copy_dtoh(array.data, DEVICE)
    address = array.ctypes.data
    assert context.calls == [("in", DEVICE, address, array.nbytes), ("out", address, DEVICE, array.nbytes)]


def test_an_array_that_is_transferred_lives_until_the_transfer_has_ended(stream: CudaStream, context: Any) -> None:
    array = np.zeros(STAGED + 1, np.uint8)
    is_there = weakref.ref(array)
    stream.copy_htod(DEVICE, array.data)
    del array
    assert is_there() is not None
    stream.transfers.finish(stream.transfers.issued)
    assert is_there() is None


def test_an_ordinary_array_is_copied_by_threads_beside_the_loop(stream: CudaStream, context: Any) -> None:
    context.pinned.covered = False
    array = np.zeros(STAGED + 1, np.uint8)
    assert may_block(stream, context, array) == (True, True)
    stream.copy_htod(DEVICE, array.data)
    stream.copy_dtoh(array.data, DEVICE)
    rest = DEVICE, array.ctypes.data, array.nbytes
    assert context.calls == [("threads", *rest, True), ("threads", *rest, False)]


def test_what_is_not_page_locked_any_more_is_not_transferred_as_if_it_were(stream: CudaStream, context: Any) -> None:
    array = np.zeros(STAGED + 1, np.uint8)
    assert may_block(stream, context, array) == (False, False)
    context.pinned.covered = False
    stream.copy_htod(DEVICE, array.data)
    assert [name for name, *_ in context.calls] == ["threads"]


def test_where_the_context_has_a_fault_the_copy_is_beside_and_raises_it(stream: CudaStream, context: Any) -> None:
    context.pinned.fault = ContextPoisonedError("the plan")
    array = np.zeros(STAGED + 1, np.uint8)
    assert may_block(stream, context, array) == (True, True)
    with pytest.raises(ContextPoisonedError):
        stream.copy_htod(DEVICE, array.data)
    assert not context.calls
