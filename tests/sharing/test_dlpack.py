"""DLPack capsules: ours as numpy reads them, and others' as we do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import accel
from accel import dlpack


class Memory:
    """Host memory that is exported as if it were a device's."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0)

    def __dlpack__(self, **options: Any) -> Any:
        dtype = accel.DType.of(self.array.dtype)
        address = int(self.array.__array_interface__["data"][0])
        return dlpack.export(address, self.array.shape, dtype, (dlpack.CPU, 0), self, max_version=options.get("max_version"))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4), (2, 0, 3)])
def test_numpy_reads_what_is_exported(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    source = np.asarray(rng.standard_normal(shape) * 100).astype(dtype)
    found = np.from_dlpack(Memory(source))
    assert (found.dtype, found.shape) == (source.dtype, shape)
    assert np.array_equal(found, source)
    if source.size:
        assert np.shares_memory(found, source)


@pytest.mark.parametrize("versioned", [True, False])
def test_consumer_keeps_the_owner_and_no_longer(versioned: bool) -> None:
    memory = Memory(np.zeros(3))
    gone = weakref.ref(memory)
    capsule = memory.__dlpack__(max_version=(1, 0) if versioned else None)
    assert ("versioned" in repr(capsule)) == versioned
    del memory
    gc.collect()
    assert gone() is not None
    del capsule
    gc.collect()
    assert gone() is None, "a capsule that nobody consumed keeps its memory for ever"
    memory = Memory(np.zeros(3))
    gone = weakref.ref(memory)
    array = np.from_dlpack(memory)
    del memory
    gc.collect()
    assert gone() is not None
    del array
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", list(accel.DType))
def test_what_is_exported_is_read_back(dtype: accel.DType) -> None:
    def export() -> Any:
        return dlpack.export(4096, (2, 3), dtype, (dlpack.CUDA, 5), None, max_version=(1, 1))

    if dtype is accel.DType.FLOAT4_E2M1FN:
        with pytest.raises(BufferError, match="uint8"):
            export()
        return
    capsule = export()
    found = dlpack.read(capsule)
    assert (found.address, found.shape, found.dtype, found.device, found.read_only) == (4096, (2, 3), dtype, (dlpack.CUDA, 5), False)
    assert found.strides in (None, (3, 1))


def test_what_is_no_capsule_is_refused() -> None:
    with pytest.raises(accel.InvalidArgumentError, match="capsule"):
        dlpack.read(3)
    array = np.zeros(3)
    capsule = array.__dlpack__()
    np.from_dlpack(type("Once", (), {"__dlpack__": lambda self, **_: capsule, "__dlpack_device__": lambda self: (1, 0)})())
    with pytest.raises(accel.InvalidArgumentError, match="consumed"):
        dlpack.read(capsule)


def test_read_only_arrays_say_so() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert dlpack.read(array.__dlpack__(max_version=(1, 0))).read_only


@pytest.mark.parametrize(
    ("shape", "strides", "unit", "fits"),
    [
        ((2, 3), None, 1, True),
        ((2, 3), (3, 1), 1, True),
        ((2, 3), (12, 4), 4, True),
        ((2, 3), (1, 2), 1, False),
        ((1, 3), (99, 1), 1, True),
        ((2, 0), (7, 9), 1, True),
        ((4,), (2,), 1, False),
        ((), (), 1, True),
    ],
)
def test_contiguity(shape: tuple[int, ...], strides: tuple[int, ...] | None, unit: int, fits: bool) -> None:
    if fits:
        dlpack.check_contiguous(shape, strides, unit)
    else:
        with pytest.raises(accel.InvalidArgumentError):
            dlpack.check_contiguous(shape, strides, unit)
