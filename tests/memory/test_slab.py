"""Slabs of shared memory: mapped, sealed, and safe to close while somebody looks at them."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import secrets
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel.errors import AccelError, DriverError, InvalidArgumentError, OutOfMemoryError
from accel.memory import MemfdSlab
from accel.memory.machine import memory_left
from tests.child_support import descriptors

if TYPE_CHECKING:
    from accel.backend import SlabMemory

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd is Linux's")


def test_memory_is_zero_writable_and_aligned() -> None:
    slab: SlabMemory = MemfdSlab(100_000)
    assert slab.nbytes >= 100_000
    assert slab.nbytes % mmap.PAGESIZE == 0
    assert slab.address % 256 == 0
    assert ctypes.string_at(slab.address, 100_000) == bytes(100_000)
    data = secrets.token_bytes(64)
    ctypes.memmove(slab.address + slab.nbytes - 64, data, 64)
    assert ctypes.string_at(slab.address + slab.nbytes - 64, 64) == data
    slab.close()


def test_view_and_address_are_the_same_memory() -> None:
    slab = MemfdSlab(4096)
    data = secrets.token_bytes(4096)
    with slab.view() as view:
        view[:] = data
    assert ctypes.string_at(slab.address, 4096) == data
    slab.close()


@linux
def test_whoever_has_the_descriptor_has_the_memory_after_close() -> None:
    slab = MemfdSlab(8192)
    data = secrets.token_bytes(8192)
    ctypes.memmove(slab.address, data, len(data))
    kept = os.dup(slab.fd)
    slab.close()
    with mmap.mmap(kept, 8192) as other:
        assert other[:] == data
    os.close(kept)


@linux
@pytest.mark.parametrize("nbytes", [0, 4096, 1 << 20])
def test_the_size_is_sealed(nbytes: int) -> None:
    slab = MemfdSlab(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, nbytes)
    assert os.fstat(slab.fd).st_size == 8192
    assert not os.get_inheritable(slab.fd)
    slab.close()


def test_close_is_idempotent_and_gives_the_descriptor_back() -> None:
    slab = MemfdSlab(4096)
    fd = slab.fd
    slab.close()
    slab.close()
    assert slab.fd == -1
    if fd >= 0:
        with pytest.raises(OSError) as error:
            os.fstat(fd)
        assert error.value.errno == errno.EBADF
    with pytest.raises(InvalidArgumentError):
        slab.view()
    assert "closed" in repr(slab)


def test_arrays_stay_readable_when_the_slab_is_closed_under_them() -> None:
    slab = MemfdSlab(4096)
    array = np.frombuffer(slab.view(), dtype=np.uint8)
    array[:] = 7
    slab.close()
    assert array.sum() == 7 * 4096
    del array
    slab.close()


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 80])
def test_too_much_is_out_of_memory(nbytes: int) -> None:
    before = descriptors()
    with pytest.raises(OutOfMemoryError) as error:
        MemfdSlab(nbytes)
    assert error.value.requested == nbytes
    assert descriptors() == before


@pytest.mark.parametrize(("number", "kind"), [(errno.EMFILE, OutOfMemoryError), (errno.EPERM, DriverError)])
def test_a_shortage_is_retryable_and_another_refusal_the_drivers(
    number: int, kind: type[AccelError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> mmap.mmap:
        raise OSError(number, "refused")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(kind) as error:
        MemfdSlab(4096)
    assert error.value.code in (number, errno.errorcode[number])
    assert error.value.retryable is (kind is OutOfMemoryError)


@linux
def test_a_descriptor_that_cannot_be_sized_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close

    def refuse(fd: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    def note_and_close(fd: int) -> None:
        closed.append(fd)
        close(fd)

    monkeypatch.setattr(os, "ftruncate", refuse)
    monkeypatch.setattr(os, "close", note_and_close)
    with pytest.raises(OutOfMemoryError):
        MemfdSlab(4096)
    assert len(closed) == 1


def test_works_where_there_is_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    slab = MemfdSlab(10_000)
    assert slab.fd == -1
    ctypes.memset(slab.address, 5, 10_000)
    assert slab.view()[9_999] == 5
    slab.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_not_a_slab(nbytes: int) -> None:
    with pytest.raises(InvalidArgumentError):
        MemfdSlab(nbytes)


def test_a_forgotten_slab_warns_and_is_closed() -> None:
    slabs = [MemfdSlab(4096)]
    fd = slabs[0].fd
    with pytest.warns(ResourceWarning, match="was not closed"):
        slabs.clear()
    gc.collect()
    if fd >= 0:
        with pytest.raises(OSError) as error:
            os.fstat(fd)
        assert error.value.errno == errno.EBADF


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ([], None),
        ([(1 << 40, 1 << 30)], (1 << 40) - (1 << 30) - (64 << 20)),
        ([(80 << 20, 10 << 20)], 60 << 20),
        ([(80 << 20, 75 << 20)], 0),
        ([(1 << 40, 0), (80 << 20, 0), (1 << 39, 0)], 70 << 20),
    ],
)
def test_what_a_group_of_processes_may_still_take(monkeypatch: pytest.MonkeyPatch, limits: list[tuple[int, int]], left: int | None) -> None:
    monkeypatch.setattr("accel.memory.machine._limits", lambda: iter(limits))

    assert memory_left() == left
