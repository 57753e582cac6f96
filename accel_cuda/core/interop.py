"""Memory shared with torch, CuPy, numba and others in the process, which use the device's primary context as this backend does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from accel import AccelError, InvalidArgumentError, dlpack
from accel.dtype import DType
from accel_cuda.core.driver import Handle
from accel_cuda.core.managed import CudaManaged
from accel_cuda.core.stream import CudaStream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.event import CudaEvent

__all__ = ["CudaExchange", "CudaForeign", "PrimaryContext"]

_NOT_WHILE_CAPTURING = "Use memory that is shared with another library only while none of them captures a graph."


class CudaForeign:
    """The memory of another library's array; see :class:`~accel.exchange.ForeignMemory`.

    Parameters
    ----------
    context
        For whose abandoned streams closing waits.
    keep
        What keeps the memory: the array, or its capsule.
    address, shape, dtype
        The memory.
    """

    __slots__ = ("_context", "_keep", "address", "dtype", "nbytes", "shape")

    def __init__(self, context: CudaContext, keep: Any, address: int, shape: tuple[int, ...], dtype: DType) -> None:
        self._context = context
        self._keep = keep
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def close(self) -> None:
        """Let go of the array, as soon as no abandoned stream can touch it. Idempotent."""
        self._context.release(self._drop)

    def _drop(self) -> None:
        self._keep = None


class PrimaryContext(CudaStream):
    """A stream whose marks stand for the work of all streams of the primary context, also those of other libraries.

    Nothing is enqueued in it but waits for the producers of arrays, so a mark comes after their work too.
    """

    __slots__ = ()

    def record(self, event: CudaEvent) -> bool:
        """Mark everything enqueued in the context so far; return ``False``.

        Raises
        ------
        DriverError
            While another library captures a graph in the context; the driver ends the capture, too.
        """
        context = self.ready()
        status = context.driver.hot.context_record(Handle(context.handle), event.handle)
        if status == context.driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
            raise context.failure(status, "cuCtxRecordEvent").clone(remedy=_NOT_WHILE_CAPTURING)
        context.check(status, "cuCtxRecordEvent")
        event.mark(self.transfers, 0)
        return False


class CudaExchange:
    """See :class:`~accel.exchange.Exchange`.

    Parameters
    ----------
    context
        The device's context.
    functions
        The backend's own kernels by name.
    """

    speaks_cuda: ClassVar[bool] = True

    def __init__(self, context: CudaContext, functions: Mapping[str, Handle]) -> None:
        self._context = context
        self.stream = PrimaryContext(context, functions)
        self.device = (dlpack.CUDA, context.description.index)

    def follow(self, stream: int, event: CudaEvent) -> None:
        """Let another library's stream wait for an event."""
        context = self._context
        with context.section:  # the default streams have no handles of their own: 1 and 2 are those of the current context
            status = context.driver.hot.wait_event(Handle(stream), event.handle, 0)
        context.check(status, "cuStreamWaitEvent")

    def take(self, array: Any) -> CudaForeign:
        """Take a CUDA array by DLPack, or else by its ``__cuda_array_interface__``.

        A producer that speaks DLPack is given a stream to have the data ready in; the streams of the other interface are in the context, and every mark
        stands for them anyhow.
        """
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            keep, address, shape, dtype = self._by_dlpack(array)
        elif hasattr(array, "__cuda_array_interface__"):
            keep, address, shape, dtype = self._by_interface(array)
        else:
            raise InvalidArgumentError(
                f"array is a {type(array).__name__}, not a CUDA array", remedy="Copy it over: await device.put(array)."
            )
        if address % dtype.itemsize:
            raise InvalidArgumentError(
                f"the array is not aligned to its elements of {dtype.itemsize} bytes", remedy="Copy it in its library."
            )
        if 0 not in shape:
            self._check_place(address)
        return CudaForeign(self._context, keep, address, shape, dtype)

    def _by_dlpack(self, array: Any) -> tuple[Any, int, tuple[int, ...], DType]:
        kind, index = (int(part) for part in array.__dlpack_device__())
        if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
            raise InvalidArgumentError(
                f"the array is on DLPack device type {kind}, not on a GPU", remedy="Copy it over: await device.put(array)."
            )
        if kind == dlpack.CUDA and index != self._context.description.index:
            raise InvalidArgumentError(f"the array is on GPU {index}", remedy=f"Open 'cuda:{index}', or copy it over.")
        stream = self.stream.handle
        try:
            capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # from before there were versions
            capsule = array.__dlpack__(stream=stream)
        except BufferError as error:
            raise InvalidArgumentError(f"the array cannot be shared: {error}", remedy="Copy it in its library.") from error
        tensor = dlpack.read(capsule)
        dlpack.check_contiguous(tensor.shape, tensor.strides)
        _check_writable(tensor.read_only)
        return capsule, tensor.address, tensor.shape, tensor.dtype

    def _by_interface(self, array: Any) -> tuple[Any, int, tuple[int, ...], DType]:
        found = array.__cuda_array_interface__
        if found.get("mask") is not None:
            raise InvalidArgumentError("the array is masked", remedy="Give the array without its mask.")
        dtype = DType.of(np.dtype(found["typestr"]))
        shape = tuple(int(n) for n in found["shape"])
        dlpack.check_contiguous(shape, found.get("strides"), dtype.itemsize)
        address, read_only = found["data"]
        _check_writable(read_only)
        return array, int(address or 0), shape, dtype

    def _check_place(self, address: int) -> None:
        """Raise unless an address is in this GPU's memory."""
        context = self._context
        attribute = context.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        try:
            with context.section:
                index = int(context.call("cuPointerGetAttribute", attribute, address))
        except AccelError as error:
            if error.is_fault:
                raise
            raise InvalidArgumentError(
                f"{address:#x} is not an address of CUDA memory: {error.message}", remedy="Give a CUDA array."
            ) from error
        if index != context.description.index:
            raise InvalidArgumentError(f"the array is on GPU {index}", remedy=f"Open 'cuda:{index}', or copy it over.")

    def create_managed(self, nbytes: int) -> CudaManaged:
        """Take managed memory. May block."""
        return CudaManaged(self._context, nbytes)

    def settle(self) -> None:
        """Block until the device's primary context is idle, or has no user left in the process.

        Raises
        ------
        AccelError
            If the driver does not say: a fault, or a library captures a graph at this moment.
        """
        context = self._context
        _, is_active = context.call("cuDevicePrimaryCtxGetState", context.device)
        if int(is_active):
            with context.section:
                context.call("cuCtxSynchronize")

    def close(self) -> None:
        """Do nothing: the stream is closed with the context."""


def _check_writable(read_only: object) -> None:
    if read_only:
        raise InvalidArgumentError("the array is read-only, and ops may write it", remedy="Copy it in its library.")
