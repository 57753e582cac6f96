"""The namespace of a device, ``device.xp``: the functions, constants and dtypes of the Python array API standard."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from accel.dtype import DType
from accel.expressions.evaluate import evaluate
from accel.expressions.fft import FourierFunctions
from accel.expressions.functions import explained
from accel.expressions.info import DTypeFunctions
from accel.expressions.linalg import LinalgFunctions
from accel.expressions.recordings import Recordings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from accel.expressions.array import Array

__all__ = ["Namespace"]

_NOT_METHODS = frozenset(("asarray", "from_dlpack", "full", "empty", "zeros", "ones", "arange", "linspace", "eye", "meshgrid"))
_NOT_METHODS |= {"broadcast_arrays", "concat", "stack", "result_type", "can_cast", "isdtype", "finfo", "iinfo", "make", "method", "einsum"}
_NOT_METHODS |= {"fft", "linalg", "check_device", "evaluate", "indexed", "masked", "recordings", "repeated", "several"}


@explained("xp")
class Namespace(DTypeFunctions):
    """Functions of the Python array API standard on one device: ``xp = device.xp``. They record; ``await`` computes.

    Parameters
    ----------
    device
        What computes.
    """

    __array_api_version__: ClassVar[str] = "2024.12"

    e: ClassVar[float] = math.e
    inf: ClassVar[float] = math.inf
    nan: ClassVar[float] = math.nan
    newaxis: ClassVar[None] = None
    pi: ClassVar[float] = math.pi

    bool = DType.BOOL
    int8 = DType.INT8
    int16 = DType.INT16
    int32 = DType.INT32
    int64 = DType.INT64
    uint8 = DType.UINT8
    uint16 = DType.UINT16
    uint32 = DType.UINT32
    uint64 = DType.UINT64
    float16 = DType.FLOAT16
    bfloat16 = DType.BFLOAT16
    float32 = DType.FLOAT32
    float64 = DType.FLOAT64
    complex64 = DType.COMPLEX64
    complex128 = DType.COMPLEX128

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.recordings = Recordings(device)
        self._methods: dict[str, Callable[..., Array] | None] = {}  # bound once: arrays look them up for each call

    @property
    def fft(self) -> FourierFunctions:
        """Fourier transforms; see :class:`~accel.expressions.fft.FourierFunctions`."""
        return FourierFunctions(self)

    @property
    def linalg(self) -> LinalgFunctions:
        """Linear algebra; see :class:`~accel.expressions.linalg.LinalgFunctions`."""
        return LinalgFunctions(self)

    def __repr__(self) -> str:
        return f"<xp of {self.device.name}>"

    def evaluate(self, *arrays: Array) -> Coroutine[Any, Any, tuple[Array, ...]]:
        """See :func:`accel.evaluate`."""
        return evaluate(*arrays)

    def method(self, name: str) -> Callable[..., Array] | None:
        """Return the function that arrays have as a method of that name, such as ``x.sum(axis=1)``."""
        found = self._methods.get(name)
        if found is None and name not in _NOT_METHODS and not isinstance(getattr(type(self), name, None), DType):
            made: Any = getattr(self, name, None)
            found = self._methods[name] = made if callable(made) else None
        return found
