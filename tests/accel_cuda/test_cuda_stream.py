"""Streams, slabs and shared memory of the CUDA backend on a driver that only keeps books: what a mark stands for, and what is given back when."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel import AccelError, DriverError, DType, FaultScope, LibraryError
from accel.engine.status import PendingStatus
from accel.engine.stream_clock import EventPool
from accel.ops import Spec, Status
from accel_cuda.core.channel import StreamChannel
from accel_cuda.core.driver import Handle, HotCalls
from accel_cuda.core.event import CudaEvent
from accel_cuda.core.graph import capture, replay
from accel_cuda.core.interop import CudaExchange
from accel_cuda.core.slab import CudaSlab
from accel_cuda.core.stream import CudaStream

ILLEGAL_ADDRESS, INVALID_CAPTURE, CAPTURING, NO_MEMORY, NOT_READY = 700, 901, 900, 2, 600
ALLOCATION: Any = SimpleNamespace(properties=SimpleNamespace(location=None), granularity=4096)


@pytest.fixture
def stream(context: Any) -> CudaStream:
    return CudaStream(context, {})


def event_of(context: Any) -> Any:
    event = SimpleNamespace(context=context, tickets=[], handle=None)
    event.mark = lambda stream, ticket: event.tickets.append(ticket)
    return event


def test_graphs_and_copies_are_enqueued_in_the_section(stream: CudaStream, context: Any) -> None:
    """The driver crashes on a stream of a context that somebody has destroyed; to make it current is what tells."""
    array = np.zeros(4, np.uint8)
    context.driver.called.clear()
    stream.launch_graph(Handle(1))
    stream.copy_htod(1 << 20, array.data)
    stream.copy_dtoh(array.data, 1 << 20)
    assert context.driver.called == [("graph", 1), ("copy in", 1), ("copy out", 1)]
    context.driver.fails["graph"] = 700
    with pytest.raises(AccelError) as raised:
        stream.launch_graph(Handle(1))
    assert raised.value.code == 700
    assert context.fault is not None


def test_a_span_is_two_events_with_timing_which_are_used_again(stream: CudaStream, context: Any) -> None:
    hot, made, recorded = context.driver.hot, [], []

    def elapsed(milliseconds: Any, begin: Handle, end: Handle) -> int:
        assert context.driver.depth == 1, "in the section"
        ctypes.c_float.from_address(ctypes.addressof(milliseconds._obj)).value = float((end.value or 0) - (begin.value or 0))
        return 0

    def create(event: Any, flags: int) -> int:
        made.append(flags)
        event._obj.value = 10 * len(made)
        return 0

    def record(event: Any, stream: Any) -> int:
        recorded.append(event.value)
        return 0

    hot.event_create, hot.event_record, hot.event_elapsed = create, record, elapsed
    for _ in range(3):
        span = stream.begin_span()
        stream.end_span(span)
        assert span.seconds() == pytest.approx(0.01)
    first, second = stream.begin_span(), stream.begin_span()
    assert made == [0, 0, 0, 0], "flags of events with timing; two spans at once, at most"
    assert recorded == [10, 20] * 3 + [10, 30]
    assert first is not second
    context.fault = DriverError("illegal address", code=ILLEGAL_ADDRESS, scope=FaultScope.PROCESS)
    with pytest.raises(AccelError):
        first.seconds()
    context.fault = None
    context.driver.called.clear()
    stream.dispose()
    assert [call for call in context.driver.called if call[0] == "cuEventDestroy"] == [("cuEventDestroy", n) for n in (10, 20, 30, 40)]


def test_a_stream_does_not_call_the_driver_in_a_forked_process(stream: CudaStream, context: Any) -> None:
    HotCalls.refuse(context.driver.hot)  # as the driver does in a fork
    context.driver.called.clear()
    context.driver.while_recording = lambda: context.driver.called.append("record")
    for call in (lambda: stream.record(event_of(context)), lambda: stream.launch_graph(Handle(1)), lambda: stream.launch(Handle(1), 1, 32)):
        with pytest.raises(AccelError) as raised:
            call()
        assert raised.value.code == 3  # CUDA_ERROR_NOT_INITIALIZED
        context.fault = None
    assert context.driver.called == []


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
    lane = SimpleNamespace(stream=stream, device=SimpleNamespace(prepare=lambda library, stream: prepared.append(library)))
    op = SimpleNamespace(library="capture", program=SimpleNamespace(enqueue=enqueue))
    with pytest.raises(LibraryError, match="broken"):
        capture(lane, op, None, (), ())
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


def test_a_status_is_cleared_before_the_kernel_and_on_the_host_when_its_event_is_passed(stream: CudaStream, context: Any) -> None:
    order: list[str] = []
    stream.transfers.prepare()
    hot = context.driver.hot

    def copy_out(pinned: Any, device: Any, nbytes: Any, _: Any) -> int:
        order.append(f"{nbytes.value} bytes from {device.value}")
        ctypes.memset(pinned.value, 1, nbytes.value)
        return 0

    def fill(device: Any, value: Any, count: Any, _: Any) -> int:
        order.append(f"{count.value} zeros at {device.value}" if not value.value else "no zeros")
        return 0

    hot.copy_to_host, hot.fill = copy_out, {1: fill}
    seen: list[list[int]] = []
    status = Status(Spec((2,), DType.INT32), lambda info: seen.append(info.tolist()))
    device: Any = SimpleNamespace(
        create_event=lambda: CudaEvent(context), may_block=lambda lane, op: not stream.transfers.reserve(op.destination.nbytes)
    )
    lane: Any = SimpleNamespace(stream=stream, events=EventPool(device), device=device)
    pending = PendingStatus(status, lambda *_: order.append("kernel"), lane)
    pending.address = 4096
    assert not pending.may_block(device, lane), "the pinned memory is there"
    assert not pending.is_known()
    context.driver.fails["query"] = NOT_READY
    pending(lane, SimpleNamespace(kind="solve"), None, (), (4096,))  # type: ignore[arg-type]
    assert order == ["8 zeros at 4096", "kernel", "8 bytes from 4096"]
    assert not pending.is_known()
    del context.driver.fails["query"]
    assert pending.is_known()
    assert pending.failure() is None
    assert seen == [[0x01010101, 0x01010101]]
    stream.transfers.close()


def test_a_replay_copies_the_statuses_of_its_graph_behind_it(stream: CudaStream, context: Any) -> None:
    called = context.driver.called
    called.clear()
    program = SimpleNamespace(native=SimpleNamespace(pointer=Handle(5)), copy_status=lambda lane, outputs: called.append(outputs))
    replay(SimpleNamespace(stream=stream), SimpleNamespace(program=program), None, (), (0, 4096))
    assert called == [("graph", 1), (0, 4096)]
