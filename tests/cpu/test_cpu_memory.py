"""The CPU device has the machine's memory, and says so when that is spent: the system itself would map more and end the process later."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import pytest

import accel
from accel.cpu.backend import CpuBackend, CpuDevice
from tests.device_support import failure, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 1 << 16
PATIENCE = 10.0


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """A context on a machine of ten pages."""
    made = CpuDevice(dataclasses.replace(CpuBackend().devices()[0], memory=10 * PAGE))
    yield made
    made.close(abandon=True)


async def test_more_than_the_machine_has_is_out_of_memory() -> None:
    memory = CpuBackend().devices()[0].memory
    assert memory > 0
    async with opened() as device:
        for nbytes in (1 << 42, memory + 1):
            error = await failure(device.empty(nbytes, "uint8"), accel.OutOfMemoryError)
            assert (error.requested, error.used, error.device) == (nbytes, 0, "cpu:0")
            assert isinstance(error.__cause__, accel.OutOfMemoryError)
            assert error.__cause__.limit == memory
        assert (await device.zeros(3)).shape == (3,)
        assert device.generation == 1


def test_bound_is_for_all_slabs_of_a_context_together(device: CpuDevice) -> None:
    slabs = [device.create_slab(5 * PAGE), device.create_slab(4 * PAGE)]
    with pytest.raises(accel.OutOfMemoryError) as caught:
        device.create_slab(2 * PAGE)
    assert (caught.value.requested, caught.value.reserved, caught.value.limit) == (2 * PAGE, 9 * PAGE, 10 * PAGE)
    slabs.append(device.create_slab(PAGE))
    slabs[0].close()
    slabs[0].close()
    with pytest.raises(accel.OutOfMemoryError):
        device.create_slab(5 * PAGE + 1)
    slabs.append(device.create_slab(5 * PAGE))
    for slab in slabs:
        slab.close()


def test_slab_that_could_not_be_made_is_not_counted(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("accel.memory.slab._sealed_memfd", refuse)
        with pytest.raises(accel.OutOfMemoryError):
            device.create_slab(10 * PAGE)
    for nbytes in (0, -1):
        with pytest.raises(accel.InvalidArgumentError):
            device.create_slab(nbytes)
    device.create_slab(10 * PAGE).close()


def test_memory_under_abandoned_work_counts_until_it_is_unmapped(device: CpuDevice) -> None:
    begun, opened_gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert opened_gate.wait(PATIENCE)

    slab, stream = device.create_slab(10 * PAGE), device.create_stream()
    stream.submit(work, 1.0)
    assert begun.wait(PATIENCE)
    stream.context.poison(accel.DriverError("now", scope=accel.FaultScope.CONTEXT))
    slab.close()
    slab.close()
    with pytest.raises(accel.OutOfMemoryError):
        device.create_slab(PAGE)
    opened_gate.set()
    device.close()
    device.create_slab(10 * PAGE).close()


def test_machine_of_unknown_size_sets_no_bound() -> None:
    made = CpuDevice(dataclasses.replace(CpuBackend().devices()[0], memory=0))
    slab = made.create_slab(1 << 40)
    assert slab.nbytes == 1 << 40
    slab.close()
    made.close()
