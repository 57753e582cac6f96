from __future__ import annotations

import threading
import weakref

import pytest

from accel.backend import Injection
from accel.cpu.backend import CpuBackend, CpuDevice
from accel.errors import (
    ClosedError,
    ContextPoisonedError,
    DriverError,
    FaultScope,
    InvalidArgumentError,
    LibraryError,
)
from tests.cpu_support import LARGE, PATIENCE, SMALL, Gate, Thing, ends, marked, until


class Signal:
    """A host function that is called from Python."""

    address = 0
    argument = 0

    def __init__(self) -> None:
        self.called = threading.Event()

    def __call__(self) -> None:
        self.called.set()


def test_poison_stops_every_stream_for_good(device: CpuDevice, gate: Gate) -> None:
    stream, other, idle = device.create_stream(), device.create_stream(), device.create_stream()
    signal, thing, ran = Signal(), Thing(), list[int]()
    gone = weakref.ref(thing)
    before = marked(device, idle)
    other.submit(gate, LARGE)
    running = marked(device, other)
    assert gate.begun.wait(PATIENCE)
    other.submit(lambda: ran.append(1), SMALL, thing)
    other.launch_host_function(signal)
    del thing
    device.inject(Injection("poison", DriverError("illegal address", code=700)), stream)
    event = device.create_event()
    with pytest.raises(DriverError, match="illegal address") as caught:
        stream.synchronize()
    assert (caught.value.code, caught.value.scope, caught.value.device) == (700, FaultScope.CONTEXT, "cpu:0")
    until(lambda: gone() is None)
    gate.opened.set()
    for blocked in (other.synchronize, idle.synchronize, running.synchronize, running.query):
        with pytest.raises(DriverError) as again:
            blocked()
        assert again.value is not caught.value
    for refused in (
        lambda: idle.submit(lambda: ran.append(2), SMALL),
        lambda: idle.record(event),
        lambda: idle.wait(event),
        lambda: idle.fill(0, b"a", 1),
        lambda: idle.launch_host_function(signal),
        device.create_stream,
    ):
        with pytest.raises(DriverError):
            refused()
    assert before.query()
    device.close()
    with pytest.raises(DriverError):
        running.query()  # the work ended after the fault: that is no success
    assert ran == []
    assert not signal.called.is_set()


def test_first_fault_stands(device: CpuDevice) -> None:
    first, second = device.create_stream(), device.create_stream()
    device.inject(Injection("poison", ContextPoisonedError("one", scope=FaultScope.PROCESS)), first)
    with pytest.raises(ContextPoisonedError) as caught:
        first.synchronize()
    assert caught.value.scope is FaultScope.PROCESS
    with pytest.raises(ContextPoisonedError, match="one"):
        device.inject(Injection("poison"), second)


def test_injection_into_a_foreign_stream_is_refused(device: CpuDevice) -> None:
    other = CpuBackend().open(0)
    stream = other.create_stream()
    with pytest.raises(InvalidArgumentError):
        device.inject(Injection("poison"), stream)
    for refused in (stream.record, stream.wait):
        with pytest.raises(InvalidArgumentError):
            refused(device.create_event())
    other.close()


@pytest.mark.parametrize("cost", [SMALL, LARGE])
def test_work_that_raises_poisons_with_its_error_as_the_cause(device: CpuDevice, cost: float) -> None:
    stream = device.create_stream()
    error = ZeroDivisionError("by zero")

    def work() -> None:
        raise error

    stream.submit(work, cost)
    with pytest.raises(LibraryError, match="by zero") as caught:
        stream.synchronize()
    assert caught.value.scope is FaultScope.CONTEXT
    assert caught.value.__cause__ is error


def test_fault_raised_by_work_is_the_contexts_fault(device: CpuDevice) -> None:
    stream = device.create_stream()

    def work() -> None:
        raise DriverError("gone", scope=FaultScope.DEVICE)

    stream.submit(work, LARGE)
    with pytest.raises(DriverError) as caught:
        stream.synchronize()
    assert caught.value.scope is FaultScope.DEVICE


def test_interrupt_inside_inline_work_poisons_and_is_not_swallowed(device: CpuDevice) -> None:
    stream = device.create_stream()

    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.submit(work, SMALL)
    with pytest.raises(LibraryError):
        stream.synchronize()


def test_hang_holds_its_stream_until_it_is_released(device: CpuDevice) -> None:
    stream, other = device.create_stream(), device.create_stream()
    released = threading.Event()
    threads: list[threading.Thread] = []

    def release() -> None:
        threads.append(threading.current_thread())
        assert released.wait(PATIENCE)

    device.inject(Injection("hang", release=release), stream)
    event = marked(device, stream)
    ran: list[int] = []
    stream.submit(lambda: ran.append(1), SMALL)
    other.submit(lambda: None, LARGE)
    other.synchronize()
    assert not event.query()
    released.set()
    stream.synchronize()
    assert ran == [1]
    assert event.query()
    assert threads[0] is not threading.current_thread()


def test_hang_without_release_ends_when_abandoned(device: CpuDevice) -> None:
    stream = device.create_stream()
    device.inject(Injection("hang"), stream)
    event = marked(device, stream)
    stream.close(abandon=True)
    with pytest.raises(ClosedError):
        event.query()
    until(lambda: ends(stream.name))


def test_abandon_returns_at_once_and_the_thread_ends_with_its_work(device: CpuDevice, gate: Gate) -> None:
    stream = device.create_stream()
    thing, ran = Thing(), list[int]()
    gone = weakref.ref(thing)
    stream.submit(gate, LARGE)
    stream.submit(lambda: ran.append(1), SMALL, thing)
    del thing
    event = marked(device, stream)
    assert gate.begun.wait(PATIENCE)
    device.close(abandon=True)
    device.close(abandon=True)
    assert gone() is None
    with pytest.raises(ClosedError):
        event.synchronize()
    gate.opened.set()
    until(lambda: ends(stream.name))
    assert ran == []


def test_stream_that_waits_for_an_abandoned_one_fails_with_it(device: CpuDevice, gate: Gate) -> None:
    first, second = device.create_stream(), device.create_stream()
    first.submit(gate, LARGE)
    second.wait(marked(device, first))
    waiting = marked(device, second)
    first.close(abandon=True)
    with pytest.raises(ClosedError):
        waiting.synchronize()


def test_abandoning_a_waiting_stream_wakes_its_thread(device: CpuDevice, gate: Gate) -> None:
    first, second = device.create_stream(), device.create_stream()
    first.submit(gate, LARGE)
    second.wait(marked(device, first))
    until(lambda: second._blocked is not None)
    second.close(abandon=True)
    until(lambda: ends(second.name))
    gate.opened.set()
    first.synchronize()


def test_slab_closed_under_abandoned_work_is_unmapped_when_that_has_ended(device: CpuDevice, gate: Gate) -> None:
    stream = device.create_stream()
    slab = device.create_slab(1 << 16)
    view = slab.view()

    def work() -> None:
        gate()
        view[:4] = b"done"

    stream.submit(work, LARGE)
    assert gate.begun.wait(PATIENCE)
    device.close(abandon=True)
    slab.close()
    assert slab.fd >= 0
    gate.opened.set()
    until(lambda: slab.fd < 0)
    assert bytes(view[:4]) == b"done"
    view.release()
    slab.close()


def test_slab_closed_with_a_hang_is_given_back_at_once(device: CpuDevice) -> None:
    stream = device.create_stream()
    hanging, released = threading.Event(), threading.Event()

    def release() -> None:
        hanging.set()
        assert released.wait(PATIENCE)

    device.inject(Injection("hang", release=release), stream)
    slab = device.create_slab(4096)
    assert hanging.wait(PATIENCE)
    device.close(abandon=True)
    slab.close()
    assert slab.fd < 0
    released.set()
