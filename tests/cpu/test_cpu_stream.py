from __future__ import annotations

import gc
import threading
import time
import weakref

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


@pytest.mark.parametrize(("pattern", "count"), [(b"", 1), (b"abc", 1), (b"a" * 32, 1), (b"a", -1)])
def test_fill_refuses_other_patterns(device: CpuDevice, pattern: bytes, count: int) -> None:
    with pytest.raises(InvalidArgumentError):
        device.create_stream().fill(0, pattern, count)


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


def test_a_span_has_the_time_of_the_work_between_its_begin_and_its_end(device: CpuDevice) -> None:
    stream = device.create_stream()
    stream.submit(lambda: time.sleep(0.2), LARGE)
    span = stream.begin_span()
    stream.submit(lambda: time.sleep(0.01), LARGE)
    stream.submit(lambda: time.sleep(0.01), SMALL)
    stream.end_span(span)
    stream.submit(lambda: time.sleep(0.2), LARGE)
    stream.synchronize()
    assert 0.02 <= span.seconds() < 0.2


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
