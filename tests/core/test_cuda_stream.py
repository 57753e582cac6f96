"""Streams, slabs and shared memory of the CUDA backend on a driver that only keeps books: what a mark stands for, and what is given back when."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel import AccelError, DriverError, FaultScope, LibraryError
from accel.memory import HostArena
from accel_cuda.core.channel import StreamChannel
from accel_cuda.core.driver import Handle
from accel_cuda.core.graph import capture
from accel_cuda.core.interop import CudaExchange
from accel_cuda.core.slab import CudaSlab
from accel_cuda.core.stream import CudaStream
from accel_cuda.errors import error_of
from accel_cuda.families.compute import CudaCompute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ILLEGAL_ADDRESS, INVALID_CAPTURE, CAPTURING, NO_MEMORY = 700, 901, 900, 2
ALLOCATION: Any = SimpleNamespace(properties=SimpleNamespace(location=None), granularity=4096)


class Structure:
    """Any of the driver's structures and enums."""

    CU_STREAM_CAPTURE_MODE_RELAXED = 2
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
    CU_STREAM_NON_BLOCKING = 1
    CU_EVENT_DISABLE_TIMING, CU_EVENT_BLOCKING_SYNC = 2, 1


class Driver:
    """Answers what it is told to."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"cuStreamCreateWithPriority": 77, "cuMemCreate": 5, "cuStreamEndCapture": 88}
        self.fails: dict[str, int] = {}
        self.called: list[tuple[Any, ...]] = []
        self.while_recording: Callable[[], object] = lambda: None
        self.hot = SimpleNamespace(
            launch=None,
            event_create=lambda handle, flags: 0,
            event_record=self.record,
            event_query=self.hot_call("query"),
            wait_event=self.wait_event,
            copy_from_host=self.hot_call("copy in"),
            copy_to_host=self.hot_call("copy out"),
            graph_launch=self.hot_call("graph"),
        )
        self.depth = 0
        self.waited: list[tuple[int, int]] = []

    def hot_call(self, name: str) -> Callable[..., int]:
        """Return a call that takes down whether it was made in the section."""

        def call(*_: Any) -> int:
            self.called.append((name, self.depth))
            return self.fails.get(name, 0)

        return call

    def record(self, event: Any, stream: Any) -> int:
        self.while_recording()
        return 0

    def wait_event(self, stream: Any, event: Any, flags: int) -> int:
        self.waited.append((stream.value, self.depth))
        return 0

    def call(self, name: str, *arguments: Any) -> Any:
        self.called.append((name, *arguments))
        if name in self.fails:
            raise error_of(self.fails[name], name)
        return self.answers.get(name, 1)

    def answer(self, name: str, *arguments: Any) -> tuple[int, Any]:
        self.called.append((name, *arguments))
        return self.fails.get(name, 0), self.answers.get(name, 1)

    def status(self, name: str, *arguments: Any) -> int:
        self.called.append((name, *arguments))
        return self.fails.get(name, 0)

    def ignore(self, name: str, *arguments: Any) -> None:
        self.called.append((name, *arguments))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("CU"):
            raise AttributeError(name)
        return Structure

    def names(self) -> list[str]:
        return [name for name, *_ in self.called]


class Context:
    """What streams and slabs ask of their context."""

    description = SimpleNamespace(spec="cuda:0", index=0)

    def __init__(self, arena: HostArena) -> None:
        self.driver = Driver()
        self.staging = arena
        self.fault: AccelError | None = None
        self.section = self
        self.handle = 1
        self.released: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self.driver.depth += 1

    def __exit__(self, *_: object) -> None:
        self.driver.depth -= 1

    def enter(self) -> None: ...

    def forget(self, stream: Any) -> None: ...

    def release(self, close: Callable[[], None]) -> None:
        self.released.append(close)

    def call(self, name: str, *arguments: Any) -> Any:
        return self.driver.call(name, *arguments)

    def check(self, status: int, call: str) -> None:
        if status:
            raise self.failure(status, call)

    def failure(self, status: int, call: str) -> AccelError:
        error = error_of(status, call)
        if error.is_fault and self.fault is None:
            self.fault = error
        return error


@pytest.fixture
def context() -> Iterator[Any]:
    arena = HostArena(1 << 20, block_bytes=1 << 20)
    yield Context(arena)
    arena.close()


@pytest.fixture
def stream(context: Any) -> CudaStream:
    return CudaStream(context, {}, 0)


def event_of(context: Any) -> Any:
    event = SimpleNamespace(context=context, tickets=[], handle=None)
    event.mark = lambda stream, ticket: event.tickets.append(ticket)
    return event


def test_graphs_and_copies_are_enqueued_in_the_section(stream: CudaStream, context: Any) -> None:
    """The driver crashes on a stream of a context that somebody has destroyed; to make it current is what tells."""
    compute = CudaCompute(stream, "memory")
    compute.init()
    array = np.zeros(4, np.uint8)
    context.driver.called.clear()
    stream.launch_graph(Handle(1))
    compute.copy_htod(1 << 20, array.data)
    compute.copy_dtoh(array.data, 1 << 20)
    assert context.driver.called == [("graph", 1), ("copy in", 1), ("copy out", 1)]
    context.driver.fails["graph"] = 700
    with pytest.raises(AccelError) as raised:
        stream.launch_graph(Handle(1))
    assert raised.value.code == 700
    assert context.fault is not None


def test_a_mark_says_nothing_of_what_is_begun_beside_while_it_is_recorded(stream: CudaStream, context: Any) -> None:
    event = event_of(context)
    stream.transfers.begin(None)
    context.driver.while_recording = lambda: stream.transfers.begin(None)
    stream.record(event)
    assert (event.tickets, stream.transfers.issued) == ([1], 2)


def test_a_fault_that_shows_at_the_end_of_a_stream_lands_nothing_and_destroys_nothing(stream: CudaStream, context: Any) -> None:
    target, piece = np.zeros(8, np.uint8), context.staging.grow(4096)
    ctypes.memset(piece.address, 7, 8)
    stream.transfers.begin(target, piece, target.ctypes.data, 8)
    destroyed: list[bool] = []
    stream.at_close(lambda: destroyed.append(True))
    context.driver.fails["cuStreamSynchronize"] = ILLEGAL_ADDRESS
    stream.close()
    assert context.fault is not None
    assert context.fault.code == ILLEGAL_ADDRESS
    assert not destroyed
    assert not target.any()
    assert "cuStreamDestroy" not in context.driver.names()


def test_a_stream_that_ends_well_is_given_back(stream: CudaStream, context: Any) -> None:
    destroyed: list[bool] = []
    stream.at_close(lambda: destroyed.append(True))
    stream.close()
    assert destroyed == [True]
    assert context.driver.names()[-2:] == ["cuStreamSynchronize", "cuStreamDestroy"]


def test_a_librarys_failure_is_the_devices_where_there_is_one(stream: CudaStream, context: Any) -> None:
    assert isinstance(stream.failure(13, "gemm", "cublas"), LibraryError)
    assert context.fault is None
    context.driver.fails["cuStreamQuery"] = ILLEGAL_ADDRESS
    found = stream.failure(13, "gemm", "cublas")
    assert isinstance(found, DriverError)
    assert found.code == ILLEGAL_ADDRESS
    assert context.fault is found


def test_a_stream_that_is_captured_is_not_asked(stream: CudaStream, context: Any) -> None:
    context.driver.fails["cuStreamQuery"] = CAPTURING
    stream.is_capturing = True
    assert isinstance(stream.failure(13, "gemm", "cublas"), LibraryError)
    assert "cuStreamQuery" not in context.driver.names()


@pytest.mark.parametrize("is_valid", [True, False])
def test_a_capture_that_fails_leaves_no_graph(stream: CudaStream, context: Any, is_valid: bool) -> None:
    def enqueue(lane: Any) -> None:
        raise LibraryError("broken")

    if not is_valid:
        context.driver.fails["cuStreamEndCapture"] = INVALID_CAPTURE
    prepared: list[str] = []
    lane = SimpleNamespace(stream=stream, compute=SimpleNamespace(prepare=prepared.append))
    op = SimpleNamespace(library="capture", program=SimpleNamespace(enqueue=enqueue))
    with pytest.raises(LibraryError, match="broken"):
        capture(lane, op, (), ())
    assert prepared == ["capture"], "what the ops need is made before"
    assert not stream.is_capturing
    assert (("cuGraphDestroy", 88) in context.driver.called) is is_valid


def test_waiting_for_a_copy_disturbs_no_capture(stream: CudaStream, context: Any) -> None:
    StreamChannel(stream).reached()
    # In the section, which sets the thread's mode: outside of it, it would end a capture that another thread has begun.
    assert ("query", 1) in context.driver.called


def test_default_streams_of_others_wait_in_our_context(context: Any) -> None:
    CudaExchange(context, {}).follow(1, SimpleNamespace(handle=None))  # type: ignore[arg-type]
    assert context.driver.waited == [(1, 1)]


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_slab_that_cannot_be_mapped_leaves_no_descriptor(context: Any, call: str) -> None:
    end, other = os.pipe()
    context.driver.answers["cuMemExportToShareableHandle"] = end
    context.driver.fails[call] = NO_MEMORY
    with pytest.raises(AccelError):
        CudaSlab(context, ALLOCATION, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(end)
    os.close(other)
    assert context.driver.names()[-1] == "cuMemRelease"


def test_a_descriptor_that_is_of_no_device_memory_is_no_fault(context: Any) -> None:
    end, other = os.pipe()
    context.driver.fails["cuMemImportFromShareableHandle"] = (
        999  # what an H200 answers to /dev/null; elsewhere it is a fault of the process
    )
    with pytest.raises(DriverError, match="of no memory of this device") as caught:
        CudaSlab(context, ALLOCATION, 1, fd=end)
    assert (caught.value.code, caught.value.scope) == (999, FaultScope.OP)
    assert context.fault is None
    context.driver.fails["cuMemGetInfo"] = 999
    with pytest.raises(AccelError) as fault:
        CudaSlab(context, ALLOCATION, 1, fd=end)
    assert fault.value.is_fault
    os.close(end)
    os.close(other)
