"""DLPack, by which array libraries share memory: capsules made of our memory, and those of others read.

A capsule's deleter may be called anywhere, when the interpreter is going away too, so it must be native code that knows how to deal with that. numpy has
such a one: a capsule of ours is numpy's, of an array over an address that is not read through it, with device and element type set right afterwards.
What the structures mean: https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.views import steps_of

__all__ = ["CPU", "CUDA", "CUDA_MANAGED", "Tensor", "check_contiguous", "export", "read"]

CPU: Final = 1
CUDA: Final = 2
CUDA_MANAGED: Final = 13

_READ_ONLY = 1
_VERSIONED = b"dltensor_versioned"
_UNVERSIONED = b"dltensor"
_NUMPY_KNOWS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))

_CODES: dict[str, int] = {"integer": 0, "unsigned": 1, "float": 2, "complex": 5, "bool": 6}
_OWN_CODES = {DType.BFLOAT16: 4, DType.FLOAT8_E4M3FN: 10, DType.FLOAT8_E5M2: 12}
_PACKED = {DType.FLOAT4_E2M1FN}  # two to a byte in DLPack, one in ours
_TYPES = {
    dtype: (_OWN_CODES[dtype] if dtype in _OWN_CODES else _CODES[dtype.kind], 8 * dtype.itemsize) for dtype in DType if dtype not in _PACKED
}
_DTYPES = {pair: dtype for dtype, pair in _TYPES.items()}
_STAND_INS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class _Holder:
    """What numpy takes for an array: an address, and what keeps the memory there."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], owner: object) -> None:
        steps = tuple([step * dtype.itemsize for step in strides])
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": shape, "strides": steps, "typestr": dtype.str}
        self.owner = owner


def export(
    address: int,
    shape: tuple[int, ...],
    dtype: DType,
    device: tuple[int, int],
    owner: object,
    *,
    strides: tuple[int, ...] | None = None,
    max_version: tuple[int, int] | None,
) -> Any:
    """Return a capsule over device memory.

    Parameters
    ----------
    address, shape, dtype
        The memory.
    device
        DLPack's device type and number.
    owner
        Kept as long as the consumer's tensor.
    strides
        In elements; ``None`` for C order.
    max_version
        What the consumer asked for; it gets a capsule with a version from 1.0 on.

    Raises
    ------
    BufferError
        If DLPack has no such elements.
    """
    if dtype not in _TYPES:
        raise BufferError(f"DLPack packs two {dtype.value} into a byte, and here each has its own: share ref.view('uint8')")
    holder = _Holder(address, shape, steps_of(shape) if strides is None else strides, np.dtype(_STAND_INS[dtype.itemsize]), owner)
    array = np.asarray(holder)
    versioned = _NUMPY_KNOWS_VERSIONS and max_version is not None and tuple(max_version) >= (1, 0)
    capsule = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    tensor, _ = _opened(capsule)
    tensor.device_type, tensor.device_id = device
    tensor.code, tensor.bits = _TYPES[dtype]
    return capsule


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a capsule of another library's says.

    Parameters
    ----------
    address
        Of the first element; 0 may be given where there is none.
    shape
        Of the tensor.
    strides
        In elements, or ``None`` for C order.
    dtype
        Of the elements.
    device
        DLPack's device type and number.
    read_only
        Whether it must not be written.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    device: tuple[int, int]
    read_only: bool


def read(capsule: Any) -> Tensor:
    """Read a capsule. The memory is there as long as the capsule is, which is not consumed: what keeps it keeps the memory.

    Raises
    ------
    InvalidArgumentError
        If it is none, was consumed before, or its elements have no :class:`~accel.DType`.
    """
    tensor, flags = _opened(capsule)
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise InvalidArgumentError(
            f"DLPack's type {tensor.code} of {tensor.bits} bits x {tensor.lanes} has no counterpart on a device", remedy="Convert it first."
        )
    ndim = tensor.ndim
    return Tensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=tuple(tensor.shape[i] for i in range(ndim)),
        strides=tuple(tensor.strides[i] for i in range(ndim)) if tensor.strides else None,
        dtype=dtype,
        device=(tensor.device_type, tensor.device_id),
        read_only=bool(flags & _READ_ONLY),
    )


def _opened(capsule: Any) -> tuple[Any, int]:
    """Return the tensor in a capsule, and its flags."""
    if _is_valid(capsule, _VERSIONED):
        found = _Versioned.from_address(_pointer(capsule, _VERSIONED))
        if found.major != 1:
            raise InvalidArgumentError(
                f"the array speaks DLPack {found.major}.{found.minor}; 1.x is known", remedy="Use another release of its library."
            )
        return found.tensor, found.flags
    if _is_valid(capsule, _UNVERSIONED):
        return _Tensor.from_address(_pointer(capsule, _UNVERSIONED)), 0
    raise InvalidArgumentError(f"{capsule!r} is no DLPack capsule, or was consumed before", remedy="Give the array itself.")


def check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, unit: int = 1) -> None:
    """Raise unless an array lies in C order without gaps.

    Parameters
    ----------
    shape, strides
        Of the array; ``None`` means that it does.
    unit
        What neighbours on the last axis are apart: 1 where strides count elements, else the bytes of one.

    Raises
    ------
    InvalidArgumentError
    """
    if strides is None or 0 in shape:
        return
    expected = unit
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            raise InvalidArgumentError(f"the array's strides {strides} are not those of C order", remedy="Make it contiguous first.")
        expected *= length
