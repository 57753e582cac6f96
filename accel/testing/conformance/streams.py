"""Streams, events, host functions and faults of a context."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from accel.backend import Injection
from accel.errors import AccelError, ClosedError, FaultScope
from accel.semaphore import Semaphore
from accel.testing.conformance.device_harness import PATIENCE, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.backend import AccelDevice, AccelEvent, AccelStream
    from accel.testing.conformance.harness import Harness

__all__ = [
    "check_abandon_returns_while_a_stream_hangs",
    "check_close_is_idempotent",
    "check_copy_moves_bytes",
    "check_event_never_recorded_has_passed",
    "check_event_recorded_again_marks_the_new_place",
    "check_events_pass_with_their_stream",
    "check_fill_writes_patterns",
    "check_host_function_never_runs_after_a_fault",
    "check_host_function_runs_after_the_work_before_it",
    "check_marks_seen_before_a_fault_stay_passed",
    "check_nothing_succeeds_after_a_fault",
    "check_poison_reaches_every_wait",
    "check_stream_keeps_its_order",
    "check_streams_overlap",
    "check_wait_orders_streams",
    "check_wait_takes_the_mark_as_it_is_now",
]


class _Hang:
    """A stream stopped by an injection until it is let go."""

    def __init__(self, device: AccelDevice, stream: AccelStream) -> None:
        self._let_go = threading.Event()
        device.inject(Injection("hang", release=self._wait), stream)

    def _wait(self) -> None:
        self._let_go.wait(PATIENCE)

    def end(self) -> None:
        """Let the stream go on."""
        self._let_go.set()


@contextlib.contextmanager
def _hang(device: AccelDevice, stream: AccelStream) -> Iterator[_Hang]:
    hang = _Hang(device, stream)
    try:
        yield hang
    finally:
        hang.end()


@contextlib.contextmanager
def _streams(harness: Harness) -> Iterator[tuple[AccelDevice, AccelStream, AccelStream]]:
    """Open a context with two streams."""
    with harness.open_context() as device:
        yield device, device.create_stream(), device.create_stream()


@contextlib.contextmanager
def _memory(device: AccelDevice, nbytes: int) -> Iterator[int]:
    """Give the address of memory, which is freed."""
    slab = device.create_slab(nbytes)
    yield slab.address
    slab.close()


def _mark(device: AccelDevice, stream: AccelStream) -> AccelEvent:
    event = device.create_event()
    stream.record(event)
    return event


async def _bounded(what: str, call: Callable[[], object]) -> None:
    """Run a blocking call on a thread of its own, so that one which never returns fails the check; raise what it raises."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # handed to the caller
            outcome.append(error)
        else:
            outcome.append(None)

    threading.Thread(target=run, name="accel-conformance", daemon=True).start()
    await until(what, lambda: bool(outcome))
    if outcome[0] is not None:
        raise outcome[0]


async def _fault(what: str, call: Callable[[], object]) -> AccelError:
    """Return the fault that ``call`` raises, which has ended within bounded time."""
    try:
        await _bounded(what, call)
    except AccelError as error:
        fault = error
    else:
        raise AssertionError(f"{what} raised nothing in a poisoned context")
    assert fault.scope >= FaultScope.CONTEXT, f"{what} raised {fault!r}, whose scope is not more than the op"
    return fault


async def _poison(device: AccelDevice, stream: AccelStream) -> None:
    """Poison the context, and wait until the stream says so."""
    device.inject(Injection("poison"), stream)
    await _fault("stream.synchronize()", stream.synchronize)


def _read(device: AccelDevice, address: int, nbytes: int) -> bytes:
    """Read device memory in a new stream."""
    stream = device.create_stream()
    data = bytearray(nbytes)
    stream.copy_dtoh(memoryview(data), address)
    stream.synchronize()
    stream.close()
    return bytes(data)


async def check_event_never_recorded_has_passed(harness: Harness) -> None:
    """Check that a fresh event counts as complete, to queries, to threads and to streams."""
    with _streams(harness) as (device, stream, _):
        event = device.create_event()
        assert event.query() is True, "a fresh event has not passed"
        await _bounded("event.synchronize()", event.synchronize)
        stream.wait(event)
        await _bounded("stream.synchronize()", stream.synchronize)
        event.close()
        event.close()


async def check_events_pass_with_their_stream(harness: Harness) -> None:
    """Check that a mark is passed after everything enqueued before it, and not before."""
    with _streams(harness) as (device, stream, _):
        with _hang(device, stream) as hang:
            event = device.create_event()
            assert stream.record(event) is False, "record() says that a hanging stream has passed the mark"
            assert event.query() is False, "the event has passed while its stream hangs"
            hang.end()
            await _bounded("event.synchronize()", event.synchronize)
        assert event.query() is True, "the event has not passed after synchronize()"


async def check_event_recorded_again_marks_the_new_place(harness: Harness) -> None:
    """Check that an event that has passed can be recorded again, and has then not passed until the new place is."""
    with _streams(harness) as (device, stream, _):
        event = _mark(device, stream)
        await _bounded("event.synchronize()", event.synchronize)
        with _hang(device, stream) as hang:
            stream.record(event)
            assert event.query() is False, "the event still shows the old mark"
            hang.end()
            await _bounded("event.synchronize()", event.synchronize)
        assert event.query() is True


async def check_stream_keeps_its_order(harness: Harness) -> None:
    """Check that work of one stream runs in the order in which it was enqueued, large and small mixed."""
    rounds, nbytes = 50, 1 << 20
    with _streams(harness) as (device, stream, _), _memory(device, nbytes + rounds) as address:
        for number in range(rounds):
            size = nbytes if harness.rng.integers(2) else 1
            stream.fill(address + nbytes - size, bytes([number + 1]), size)
            stream.copy(address + nbytes + number, address + nbytes - 1, 1)
        await _bounded("stream.synchronize()", stream.synchronize)
        got = _read(device, address + nbytes, rounds)
        assert got == bytes(range(1, rounds + 1)), f"the work ran in another order: {list(got)} (seed {harness.seed})"


async def check_streams_overlap(harness: Harness) -> None:
    """Check that a stream that stands still holds no other stream up."""
    with _streams(harness) as (device, first, second), _memory(device, 1 << 20) as address, _hang(device, first) as hang:
        event = _mark(device, first)
        second.fill(address, b"\x07", 1 << 20)
        await _bounded("the other stream's synchronize()", second.synchronize)
        assert event.query() is False
        hang.end()
        await _bounded("stream.synchronize()", first.synchronize)


async def check_wait_orders_streams(harness: Harness) -> None:
    """Check that work enqueued after ``wait`` sees what was enqueued before the mark in the other stream."""
    with _streams(harness) as (device, writer, reader), _memory(device, 1 << 20) as address:
        half = 1 << 19
        writer.fill(address, b"\0", 1 << 20)
        await _bounded("stream.synchronize()", writer.synchronize)
        with _hang(device, writer) as hang:
            writer.fill(address, b"\x09", half)
            reader.wait(_mark(device, writer))
            reader.copy(address + half, address, half)
            assert _mark(device, reader).query() is False, "the waiting stream went on"
            hang.end()
            await _bounded("stream.synchronize()", reader.synchronize)
        assert _read(device, address + half, half) == b"\x09" * half, "the reader ran before the writer"


async def check_wait_takes_the_mark_as_it_is_now(harness: Harness) -> None:
    """Check that recording an event again changes nothing for a stream that waits for its earlier mark."""
    with _streams(harness) as (device, first, second), _hang(device, first) as earlier:
        event = _mark(device, first)
        second.wait(event)
        with _hang(device, first) as later:
            first.record(event)
            earlier.end()
            await _bounded("the waiting stream's synchronize()", second.synchronize)
            assert event.query() is False, "the event recorded again shows the earlier mark"
            later.end()
            await _bounded("stream.synchronize()", first.synchronize)


async def check_host_function_runs_after_the_work_before_it(harness: Harness) -> None:
    """Check that a host function is called, once, when everything enqueued before it has ended."""
    with harness.open_context() as device:
        stream, semaphore = device.create_stream(), Semaphore()
        with _hang(device, stream) as hang:
            stream.launch_host_function(semaphore)
            assert not semaphore.try_acquire(), "the host function ran before the work ahead of it"
            hang.end()
            await until("the call of the host function", semaphore.try_acquire)
            await _bounded("stream.synchronize()", stream.synchronize)
        assert not semaphore.try_acquire(), "the host function ran twice"


async def check_host_function_never_runs_after_a_fault(harness: Harness) -> None:
    """Check that a host function behind a fault is not called, in no stream of the context."""
    with harness.open_context() as device:
        stream, other, semaphore = device.create_stream(), device.create_stream(), Semaphore()
        with _hang(device, stream) as hang:
            stream.launch_host_function(semaphore)
            await _poison(device, other)
            with contextlib.suppress(AccelError):
                other.launch_host_function(semaphore)
            hang.end()
            await _fault("stream.synchronize()", stream.synchronize)
        await _bounded("device.close()", device.close)
        assert not semaphore.try_acquire(), "a host function ran after the fault"


async def check_poison_reaches_every_wait(harness: Harness) -> None:
    """Check that after a fault, queries and waits for marks that were not passed raise it in bounded time, each an instance of its own."""
    with _streams(harness) as (device, stream, other), _hang(device, other) as hang:
        elsewhere = _mark(device, other)
        device.inject(Injection("poison"), stream)
        with contextlib.suppress(AccelError):  # a driver may know already
            event = _mark(device, stream)
            await _fault("event.synchronize()", event.synchronize)
            await _fault("event.query()", event.query)
        first = await _fault("stream.synchronize()", stream.synchronize)
        second = await _fault("stream.synchronize()", stream.synchronize)
        assert first is not second, "two waiters got the same instance"
        hang.end()
        await _fault("another stream's event.synchronize()", elsewhere.synchronize)
        await _fault("another stream's event.query()", elsewhere.query)
        await _fault("another stream's synchronize()", other.synchronize)


async def check_nothing_succeeds_after_a_fault(harness: Harness) -> None:
    """Check that work that is enqueued in a poisoned context is refused, or its mark is never passed."""
    with _streams(harness) as (device, stream, other):
        await _poison(device, stream)
        for each in (stream, other):
            with contextlib.suppress(AccelError):
                event = device.create_event()
                assert each.record(event) is False, "a mark was passed after the fault"
                assert event.query() is False, "a mark was passed after the fault"


async def check_marks_seen_before_a_fault_stay_passed(harness: Harness) -> None:
    """Check that a mark that was seen to be passed is passed after the fault too."""
    with _streams(harness) as (device, stream, other):
        events = [_mark(device, stream), _mark(device, other)]
        for event in events:
            await _bounded("event.synchronize()", event.synchronize)
            assert event.query() is True
        await _poison(device, stream)
        assert [event.query() for event in events] == [True, True], "a passed mark was taken back by the fault"


async def check_fill_writes_patterns(harness: Harness) -> None:
    """Check that fill writes patterns of 1, 2, 4, 8 and 16 bytes, as often as asked, and nothing beside them."""
    with _streams(harness) as (device, stream, _), _memory(device, 1 << 20) as address:
        for width in (1, 2, 4, 8, 16):
            for count in (0, 1, 3, int(harness.rng.integers(4, 60_000))):
                what = f"fill of {count} x {width} bytes (seed {harness.seed})"
                pattern = harness.rng.bytes(width)
                stream.fill(address, b"\xa5", width * count + 512)
                stream.fill(address + 256, pattern, count)
                await _bounded(what, stream.synchronize)
                got = _read(device, address, width * count + 512)
                assert got[256 : 256 + width * count] == pattern * count, f"{what}: other bytes were written"
                assert got[:256] == got[256 + width * count :] == b"\xa5" * 256, f"{what}: wrote beside the memory"


async def check_copy_moves_bytes(harness: Harness) -> None:
    """Check that copies of any size move exactly their bytes."""
    with _streams(harness) as (device, stream, _), _memory(device, 4 << 20) as address:
        half = 2 << 20
        for nbytes in (0, 1, 255, 4096, int(harness.rng.integers(1 << 16, half - 512))):
            data = np.frombuffer(harness.rng.bytes(nbytes), np.uint8).tobytes()
            stream.copy_htod(address, memoryview(data))
            stream.fill(address + half, b"\xa5", nbytes + 256)
            stream.copy(address + half, address, nbytes)
            await _bounded("stream.synchronize()", stream.synchronize)
            got = _read(device, address + half, nbytes + 256)
            assert got == data + b"\xa5" * 256, f"copy of {nbytes} bytes moved others (seed {harness.seed})"


async def check_close_is_idempotent(harness: Harness) -> None:
    """Check that streams, slabs and contexts can be closed again; closing a stream waits for its work."""
    with _streams(harness) as (device, stream, other):
        slab = device.create_slab(1 << 20)
        stream.fill(slab.address, b"\x01", 1 << 20)
        await _bounded("stream.close()", stream.close)
        await _bounded("stream.close() again", stream.close)
        assert _read(device, slab.address, 1 << 20) == b"\x01" * (1 << 20), "closing the stream did not wait for its work"
        other.close(abandon=True)
        other.close()
        slab.close()
        slab.close()
        await _bounded("device.close()", device.close)
        await _bounded("device.close() again", device.close)


async def check_abandon_returns_while_a_stream_hangs(harness: Harness) -> None:
    """Check that a context with a hanging stream can be abandoned at once, and no wait for its marks goes on."""
    with _streams(harness) as (device, stream, _), _hang(device, stream) as hang:
        event = _mark(device, stream)
        started = time.monotonic()
        await _bounded("stream.close(abandon=True)", lambda: stream.close(abandon=True))
        await _bounded("device.close(abandon=True)", lambda: device.close(abandon=True))
        assert time.monotonic() - started < PATIENCE / 2, "abandoning waited for the hang"
        with contextlib.suppress(ClosedError):
            assert event.query() is False, "abandoning passed the mark"
        hang.end()
