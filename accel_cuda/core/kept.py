"""What a dead context keeps on the device until its process ends, measured by NVML."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from accel import BackendUnavailableError
from accel_cuda.core.libraries import load_module

if TYPE_CHECKING:
    from accel import DeviceDescription

__all__ = ["kept_nbytes", "log_kept"]

logger = logging.getLogger("accel.cuda")

_NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE, which stands for a size that the driver does not know."""


def log_kept(description: DeviceDescription) -> None:
    """Log how much of a device a dead context keeps: modules, what libraries hold, managed memory, and all of torch and CuPy. May block."""
    nbytes = kept_nbytes(description)
    logger.warning(
        "dead_context_keeps_memory device=%r mib=%s: it comes back when this process ends; with host='process' a fault costs a child, and its memory "
        "comes back at once",
        description.spec,
        "unknown" if nbytes is None else nbytes >> 20,
    )


def kept_nbytes(description: DeviceDescription) -> int | None:
    """Return the bytes of a device that this process holds; ``None`` where NVML cannot tell, or is not there. May block."""
    try:
        nvml: Any = load_module("cuda.bindings.nvml", "cuda-bindings")
    except BackendUnavailableError:
        return None
    # RuntimeError: the driver's NVML is not installed, as in many containers, or lacks a function. That must not keep a context from being closed.
    with contextlib.suppress(nvml.NvmlError, RuntimeError):
        nvml.init_v2()
        try:
            handle = nvml.device_get_handle_by_uuid(description.uuid)
            processes = nvml.device_get_compute_running_processes_v3(handle)
            sizes = [int(each.used_gpu_memory) for each in processes if int(each.pid) == os.getpid()]
            # A process that is not listed, as in another namespace of process numbers, has memory all the same.
            return None if not sizes or _NOT_AVAILABLE in sizes else sum(sizes)
        finally:
            nvml.shutdown()
    return None
