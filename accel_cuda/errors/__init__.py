"""What each status of the driver and of the libraries means: one table per library, status -> class, scope, whether to retry, and what to do.

A status that is missing from a table (one of a newer release) is a :class:`~accel.DriverError` or :class:`~accel.LibraryError` of scope OP that names the
code. A library never tells a fault of the device by name: its "execution failed" may be one, so the caller asks the driver.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from accel import DriverError, FaultScope, LibraryError
from accel_cuda.errors.driver import DRIVER
from accel_cuda.errors.libraries import CUBLAS, CUDNN, CUDSS, CUFFT, CURAND, CUSOLVER, CUSPARSE, CUTENSOR, NCCL, NVRTC
from accel_cuda.errors.meaning import Meaning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel import AccelError

__all__ = [
    "CUBLAS",
    "CUDNN",
    "CUDSS",
    "CUFFT",
    "CURAND",
    "CUSOLVER",
    "CUSPARSE",
    "CUTENSOR",
    "DRIVER",
    "NCCL",
    "NOT_READY",
    "NVRTC",
    "TABLES",
    "Meaning",
    "error_of",
    "is_out_of_memory",
]

NOT_READY = 600
"""What a query answers while there is still work ahead of the mark; not an error."""

TABLES: Mapping[str, Mapping[int, Meaning]] = {
    "driver": DRIVER,
    "cublas": CUBLAS,
    "cublasLt": CUBLAS,
    "cudnn": CUDNN,
    "cudss": CUDSS,
    "cufft": CUFFT,
    "curand": CURAND,
    "cusolver": CUSOLVER,
    "cusparse": CUSPARSE,
    "cutensor": CUTENSOR,
    "nccl": NCCL,
    "nvrtc": NVRTC,
}
"""Library -> its statuses but success. cuBLASLt answers with those of cuBLAS."""

_CLASSES: Final = (("torch", "OutOfMemoryError"), ("cupy.cuda.memory", "OutOfMemoryError"))
"""Module and class. A package that was not imported cannot have raised anything."""


def error_of(status: int, call: str, *, library: str = "driver", **fields: Any) -> AccelError:
    """Return the error that ``status`` stands for.

    Parameters
    ----------
    status
        What the library answered; not success.
    call
        Name of the function that answered.
    library
        Whose status it is; a key of :data:`TABLES`.
    **fields
        Further fields of the error, such as ``device=``.
    """
    meaning = TABLES[library].get(status)
    if meaning is None:
        fallback = DriverError if library == "driver" else LibraryError
        meaning = Meaning("a status that this release does not know", fallback, FaultScope.OP, retryable=False, remedy="")
    if meaning.remedy:
        fields.setdefault("remedy", meaning.remedy)
    error: AccelError = meaning.kind(
        f"{call} answered {meaning.name}", code=status, library=library, scope=meaning.scope, retryable=meaning.retryable, **fields
    )
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is a package's way to say that the device has no memory. Any thread may ask."""
    for module, name in _CLASSES:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and isinstance(error, found):
            return True
    return False
