from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel.backend import AccelBackend
from accel.cpu.backend import CpuBackend, CpuDevice
from accel.cpu.stream import INLINE_LIMIT
from accel.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
    OutOfMemoryError,
)
from accel.registry import find_device
from tests.cpu_support import LARGE, PATIENCE, SMALL, Gate, Thing, ends, marked, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = CpuBackend().open(0)
    yield opened
    opened.close(abandon=True)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def test_backend_is_found_and_describes_this_machine() -> None:
    backend, description = find_device("cpu")
    assert isinstance(backend, AccelBackend)
    assert (description.spec, backend.preference) == ("cpu:0", 0)
    assert description.name
    assert description.memory > 1 << 20
    assert description.uuid == CpuBackend().devices()[0].uuid
    assert find_device(description.uuid)[1] == description
    with pytest.raises(BackendUnavailableError):
        backend.open(1)


def test_backend_describes_machines_that_tell_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("os.sysconf", refuse)
    (description,) = CpuBackend().devices()
    assert description.name
    assert description.uuid.startswith("CPU-")
    assert description.memory == 0


def test_small_work_runs_at_once_on_the_callers_thread(device: CpuDevice) -> None:
    stream = device.create_stream()
    threads: list[threading.Thread] = []
    stream.submit(lambda: threads.append(threading.current_thread()), SMALL)
    assert threads == [threading.current_thread()]
    assert stream.record(device.create_event())


def test_large_work_runs_on_the_streams_own_named_thread(device: CpuDevice) -> None:
    names: list[str] = []
    first, second = device.create_stream(), device.create_stream()
    for stream in (first, second):
        stream.submit(lambda: names.append(threading.current_thread().name), INLINE_LIMIT)
        stream.synchronize()
    assert names == ["accel-cpu-0-stream-1", "accel-cpu-0-stream-2"]


def test_work_of_any_size_runs_in_order() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    device = CpuBackend().open(0)
    stream = device.create_stream()
    ran: list[int] = []
    for number in range(300):
        stream.submit(lambda number=number: ran.append(number), rng.choice((SMALL, LARGE)))  # type: ignore[misc]
    stream.synchronize()
    assert ran == list(range(300)), f"{seed=}"
    device.close()


def test_work_from_many_threads_all_runs_and_keeps_each_threads_order(device: CpuDevice) -> None:
    stream = device.create_stream()
    ran: list[tuple[int, int]] = []

    def send(sender: int) -> None:
        for number in range(200):
            stream.submit(lambda number=number: ran.append((sender, number)), LARGE if number % 3 else SMALL)  # type: ignore[misc]

    senders = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in senders:
        thread.start()
    for thread in senders:
        thread.join()
    stream.synchronize()
    assert len(ran) == 800
    for sender in range(4):
        assert [number for who, number in ran if who == sender] == list(range(200))


def test_two_streams_overlap(device: CpuDevice) -> None:
    barrier = threading.Barrier(2)
    streams = [device.create_stream(), device.create_stream()]
    for stream in streams:
        stream.submit(lambda: barrier.wait(PATIENCE), LARGE)  # each needs the other to be running
    for stream in streams:
        stream.synchronize()
    assert not barrier.broken


def test_event_passes_with_its_stream(device: CpuDevice, gate: Gate) -> None:
    stream = device.create_stream()
    event = device.create_event()
    assert event.query()
    event.synchronize()
    stream.submit(gate, LARGE)
    assert not stream.record(event)
    stream.submit(lambda: None, SMALL)
    assert not event.query()
    gate.opened.set()
    event.synchronize()
    assert event.query()


def test_event_recorded_again_marks_the_new_place_only(device: CpuDevice, gate: Gate) -> None:
    stream = device.create_stream()
    event = device.create_event()
    assert stream.record(event)
    stream.submit(gate, LARGE)
    stream.record(event)
    assert not event.query()
    event.close()
    event.close()
    assert event.query()


def test_wait_orders_streams_by_the_mark_as_it_was(device: CpuDevice, gate: Gate) -> None:
    first, second = device.create_stream(), device.create_stream()
    later = Gate()
    ran: list[str] = []
    first.submit(gate, LARGE)
    first.submit(lambda: ran.append("first"), SMALL)
    event = marked(device, first)
    second.wait(event)
    first.submit(later, LARGE)
    first.record(event)
    second.submit(lambda: ran.append("second"), SMALL)
    assert ran == []
    gate.opened.set()
    second.synchronize()  # though the event, recorded anew, has not been passed
    assert ran == ["first", "second"]
    assert not event.query()
    later.opened.set()


def test_waiting_for_what_is_passed_or_own_costs_nothing(device: CpuDevice, gate: Gate) -> None:
    stream, other = device.create_stream(), device.create_stream()
    stream.wait(device.create_event())
    stream.wait(marked(device, other))
    assert stream.record(device.create_event())
    stream.submit(gate, LARGE)
    own = marked(device, stream)
    stream.wait(own)
    gate.opened.set()
    stream.synchronize()
    assert own.query()


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("count", [0, 1, 33, 70_000])
def test_fill_writes_the_pattern_and_nothing_else(device: CpuDevice, width: int, count: int) -> None:
    stream = device.create_stream()
    seed = random.randrange(2**32)
    pattern = random.Random(seed).randbytes(width)
    memory = np.full(width * count + 32, 0xA5, np.uint8)
    stream.fill(memory.ctypes.data + 16, pattern, count)
    stream.synchronize()
    assert memory[16:-16].tobytes() == pattern * count, f"{seed=}"
    assert memory[:16].tobytes() == memory[-16:].tobytes() == b"\xa5" * 16


@pytest.mark.parametrize(("pattern", "count"), [(b"", 1), (b"abc", 1), (b"a" * 32, 1), (b"a", -1)])
def test_fill_refuses_other_patterns(device: CpuDevice, pattern: bytes, count: int) -> None:
    with pytest.raises(InvalidArgumentError):
        device.create_stream().fill(0, pattern, count)


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 1 << 16, 3 << 20])
def test_copy_moves_the_bytes(device: CpuDevice, nbytes: int) -> None:
    stream = device.create_stream()
    seed = random.randrange(2**32)
    source = np.frombuffer(random.Random(seed).randbytes(nbytes), np.uint8)
    target = np.full(nbytes + 8, 0xA5, np.uint8)
    stream.copy(target.ctypes.data, source.ctypes.data, nbytes)
    stream.synchronize()
    np.testing.assert_array_equal(target[:nbytes], source, err_msg=f"{seed=}")
    assert target[nbytes:].tobytes() == b"\xa5" * 8


class Signal:
    """A host function that is called from Python."""

    address = 0
    argument = 0

    def __init__(self) -> None:
        self.called = threading.Event()

    def __call__(self) -> None:
        self.called.set()


def test_host_function_runs_after_the_work_before_it(device: CpuDevice, gate: Gate) -> None:
    stream = device.create_stream()
    signal = Signal()
    stream.submit(gate, LARGE)
    stream.launch_host_function(signal)
    assert gate.begun.wait(PATIENCE)
    assert not signal.called.is_set()
    gate.opened.set()
    assert signal.called.wait(PATIENCE)


def test_work_keeps_alive_what_it_is_given_until_it_has_ended(device: CpuDevice, gate: Gate) -> None:
    stream = device.create_stream()
    thing = Thing()
    gone = weakref.ref(thing)
    stream.submit(gate, LARGE, thing)
    del thing
    assert gate.begun.wait(PATIENCE)
    gc.collect()
    assert gone() is not None
    gate.opened.set()
    stream.synchronize()
    until(lambda: gone() is None)


def test_close_ends_the_work_and_the_thread() -> None:
    before = set(threading.enumerate())  # of streams that other tests have abandoned, some may still end
    device = CpuBackend().open(0)
    stream = device.create_stream()
    ran: list[int] = []
    for number in range(20):
        stream.submit(lambda number=number: ran.append(number), LARGE)  # type: ignore[misc]
    event = marked(device, stream)
    device.close()
    assert ran == list(range(20))
    assert event.query()
    assert set(threading.enumerate()) <= before
    device.close()
    stream.close()
    stream.close(abandon=True)
    for refused in (lambda: stream.submit(lambda: None, SMALL), lambda: stream.record(event), device.create_stream):
        with pytest.raises(ClosedError):
            refused()
    assert event.query()


def test_close_waits_for_work_that_another_thread_runs_inline(device: CpuDevice, gate: Gate) -> None:
    stream = device.create_stream()
    runner = threading.Thread(target=stream.submit, args=(gate, SMALL))
    runner.start()
    assert gate.begun.wait(PATIENCE)
    ran: list[str] = []
    stream.submit(lambda: ran.append(threading.current_thread().name), SMALL)  # the stream is not idle: handed to the worker
    assert ran == []
    gate.opened.set()
    stream.close()
    assert ran == [stream.name]
    runner.join()
    until(lambda: ends(stream.name))


def test_slab_larger_than_memory_is_out_of_memory(device: CpuDevice) -> None:
    with pytest.raises(OutOfMemoryError):
        device.create_slab(1 << 62)


def test_copies_to_and_from_the_host_are_work_of_the_stream(device: CpuDevice, gate: Gate) -> None:
    stream = device.create_stream()
    assert device.kernels("no library") == {}
    source, target = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    stream.submit(gate, LARGE)
    stream.copy_htod(target.ctypes.data, memoryview(source.tobytes()))
    assert not target.any()
    gate.opened.set()
    back = bytearray(source.nbytes)
    stream.copy_dtoh(memoryview(back), target.ctypes.data)
    stream.synchronize()
    np.testing.assert_array_equal(target, source)
    assert bytes(back) == source.tobytes()
