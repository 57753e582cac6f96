"""How the CPU device takes other libraries' arrays: they are in this process's memory already."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from accel import dlpack
from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from accel.cpu.context import CpuContext
    from accel.cpu.stream import CpuEvent

__all__ = ["CpuExchange", "CpuForeign"]


class CpuForeign:
    """The memory of an array; see :class:`~accel.exchange.ForeignMemory`."""

    __slots__ = ("_array", "_context", "address", "dtype", "nbytes", "shape")

    def __init__(self, context: CpuContext, array: Any, address: int, shape: tuple[int, ...], dtype: DType) -> None:
        self._context = context
        self._array = array
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def close(self) -> None:
        """Let go of the array, as soon as no abandoned work can touch it. Idempotent."""
        self._context.release(self._drop)

    def _drop(self) -> None:
        self._array = None


class _Others:
    """Everybody else in the process: what they do to an array is over when their call returns."""

    def record(self, event: CpuEvent) -> bool:
        """Return ``True``."""
        return True


class CpuExchange:
    """See :class:`~accel.exchange.Exchange`.

    Parameters
    ----------
    context
        The device's context.
    """

    speaks_cuda: ClassVar[bool] = False

    def __init__(self, context: CpuContext) -> None:
        self._context = context
        self.stream = _Others()
        self.device = (0, 0)  # an op may still be writing on its thread, and a consumer that reads at once would not wait

    def follow(self, stream: int, event: Any) -> NoReturn:
        """Never called: nothing is exported."""
        raise UnsupportedError("host memory has no streams", device=self._context.device_name, remedy="Copy it: await device.get(ref).")

    def take(self, array: Any) -> CpuForeign:
        """Take a numpy array, or a tensor in host memory that speaks DLPack."""
        if isinstance(array, np.ndarray):
            dlpack.check_contiguous(array.shape, array.strides, array.itemsize)
            self._check(array.ctypes.data, DType.of(array.dtype), read_only=not array.flags.writeable)
            return CpuForeign(self._context, array, array.ctypes.data, array.shape, DType.of(array.dtype))
        if not hasattr(array, "__dlpack_device__"):
            raise InvalidArgumentError(
                f"array is a {type(array).__name__}, which does not speak DLPack", remedy="Use device.put(array), which copies."
            )
        kind, _ = array.__dlpack_device__()
        if kind != dlpack.CPU:
            raise InvalidArgumentError(
                f"the array is on DLPack device type {int(kind)}, not in host memory", remedy="Open the device that it is on."
            )
        capsule = array.__dlpack__()
        tensor = dlpack.read(capsule)
        dlpack.check_contiguous(tensor.shape, tensor.strides)
        self._check(tensor.address, tensor.dtype, read_only=tensor.read_only)
        return CpuForeign(self._context, capsule, tensor.address, tensor.shape, tensor.dtype)

    def _check(self, address: int, dtype: DType, *, read_only: bool) -> None:
        if read_only:
            raise InvalidArgumentError("the array is read-only, and ops may write it", remedy="Use device.put(array), which copies.")
        if address % dtype.itemsize:
            raise InvalidArgumentError(
                f"the array is not aligned to its elements of {dtype.itemsize} bytes", remedy="Use device.put(array)."
            )

    def create_managed(self, nbytes: int) -> NoReturn:
        """Refuse: host memory is where it is."""
        raise UnsupportedError(
            "a CPU has no memory that moves between device and host",
            device=self._context.device_name,
            remedy="Use device.empty(shape, dtype).",
        )

    def settle(self) -> None:
        """Do nothing: what others do is over when their calls return."""

    def close(self) -> None:
        """Do nothing."""
