"""What NVML tells of a GPU: its hardware, through cuda-core or nvidia-ml-py, and what a dead context keeps on it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from accel import BackendUnavailableError
from accel.backend import Diagnosis
from accel.telemetry.hardware import HardwareInfo
from accel_cuda.core.libraries import Requirement, load_module

if TYPE_CHECKING:
    from accel import DeviceDescription

__all__ = ["check", "hardware_reader", "kept_nbytes", "log_kept"]

T = TypeVar("T")

logger = logging.getLogger("accel.cuda")

_UNCORRECTED, _SINCE_LOAD = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC

_NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE, which stands for a size that the driver does not know."""

_WAIT_MS = 1  # 0 would wait for ever
_MOST_EVENTS = 64
"""Xid errors that one reading takes: a GPU that has more has told enough."""


@dataclass(frozen=True, slots=True)
class _Nvml:
    """NVML for one GPU, by one of its bindings. All calls may block and raise its errors.

    Attributes
    ----------
    refusals : tuple of classes
        Errors for what this GPU, its driver or the permissions of the process do not give.
    no_event : class
        The error of ``xid`` where there is none.
    watch : callable
        Has Xid errors recorded from now on, and returns what ``xid`` takes.
    xid : callable
        Returns the next Xid error that was recorded.
    utilization, memory, temperature : callable
        Return percent, what has ``used`` and ``total`` bytes, and degrees Celsius.
    power : callable
        Returns milliwatts.
    uncorrected_errors : callable
        Returns the number of ECC errors since the driver was loaded.
    remapped_rows : callable
        Returns the rows that were remapped after corrected and after uncorrected errors, and
        whether a remap is pending and whether one has failed.
    """

    refusals: tuple[type[Exception], ...]
    no_event: type[Exception]
    watch: Callable[[], Any]
    xid: Callable[[Any], int]
    utilization: Callable[[], int]
    memory: Callable[[], Any]
    temperature: Callable[[], int]
    power: Callable[[], int]
    uncorrected_errors: Callable[[], int]
    remapped_rows: Callable[[], tuple[int, int, int, int]]


def _cuda_core(uuid: str) -> _Nvml:
    """Return NVML by ``cuda.core.system``."""
    nvml = load_module("cuda.bindings.nvml", "cuda-bindings")
    system = load_module("cuda.core.system", "cuda-core")
    device = system.Device(uuid=uuid)
    # What cuda-core offers only as fields is asked by its own calls: memory of a field that the
    # driver leaves out is not cleared, and has the value of another field then (cuda-core 1.2.0).
    handle = nvml.device_get_handle_by_uuid(uuid)
    return _Nvml(
        refusals=(system.NotSupportedError, system.NoPermissionError, system.InvalidArgumentError, system.FunctionNotFoundError),
        no_event=system.TimeoutError,
        watch=lambda: device.register_events("xid_critical_error"),
        xid=lambda events: int(events.wait(timeout_ms=_WAIT_MS).event_data),
        utilization=lambda: int(device.utilization.gpu),
        memory=lambda: device.memory_info,
        temperature=lambda: int(device.temperature.get_sensor()),
        power=lambda: int(nvml.device_get_power_usage(handle)),
        uncorrected_errors=lambda: int(nvml.device_get_total_ecc_errors(handle, _UNCORRECTED, _SINCE_LOAD)),
        remapped_rows=lambda: nvml.device_get_remapped_rows(handle),
    )


def _nvidia_ml_py(uuid: str) -> _Nvml:
    """Return NVML by the module ``pynvml``."""
    nvml = load_module("pynvml", "nvidia-ml-py")
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def watch() -> Any:
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
        return events

    return _Nvml(
        refusals=(
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_InvalidArgument,
            nvml.NVMLError_FunctionNotFound,
        ),
        no_event=nvml.NVMLError_Timeout,
        watch=watch,
        xid=lambda events: int(nvml.nvmlEventSetWait_v2(events, _WAIT_MS).eventData),
        utilization=lambda: int(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
        memory=lambda: nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2),
        temperature=lambda: int(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
        power=lambda: int(nvml.nvmlDeviceGetPowerUsage(device)),
        uncorrected_errors=lambda: int(nvml.nvmlDeviceGetTotalEccErrors(device, _UNCORRECTED, _SINCE_LOAD)),
        remapped_rows=lambda: nvml.nvmlDeviceGetRemappedRows(device),
    )


_BINDINGS = {"cuda-bindings": ("cuda.bindings.nvml", _cuda_core), "nvidia-ml-py": ("pynvml", _nvidia_ml_py)}
"""Distribution -> the module, and what opens NVML by it."""

_REMEDY = "Install a binding of NVML: pip install 'cuda-bindings>=13.1', or nvidia-ml-py."


class _Reader:
    """Reads all values of one GPU."""

    def __init__(self, nvml: _Nvml) -> None:
        self._nvml = nvml
        self._xids: Counter[int] = Counter()
        self._events: Any = None
        with contextlib.suppress(Exception):  # not every GPU, and not every container, tells of them
            self._events = nvml.watch()

    def __call__(self) -> HardwareInfo:
        nvml = self._nvml
        percent, memory, power = self._asked(nvml.utilization), self._asked(nvml.memory), self._asked(nvml.power)
        rows = self._asked(nvml.remapped_rows)
        self._take_xids()
        return HardwareInfo(
            utilization=None if percent is None else percent / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power=None if power is None else power / 1000,
            temperature=self._asked(nvml.temperature),
            uncorrected_errors=self._asked(nvml.uncorrected_errors),
            remapped_rows=None if rows is None else int(rows[0]) + int(rows[1]),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            xid_errors=dict(self._xids),
        )

    def _asked(self, ask: Callable[[], T]) -> T | None:
        """Return what a call returns; ``None`` for what NVML refuses here."""
        try:
            return ask()
        except self._nvml.refusals:
            return None

    def _take_xids(self) -> None:
        with contextlib.suppress(self._nvml.no_event):
            for _ in range(0 if self._events is None else _MOST_EVENTS):
                self._xids[self._nvml.xid(self._events)] += 1


def hardware_reader(uuid: str) -> Callable[[], HardwareInfo]:
    """Return what reads the values of the GPU of this UUID; see :class:`ReadsHardware`.

    Raises
    ------
    BackendUnavailableError
        If there is no binding of NVML, no NVML, or no such GPU for it.
    """
    reasons = []
    for distribution, (_, open_nvml) in _BINDINGS.items():
        try:
            return _Reader(open_nvml(uuid))
        except Exception as error:  # each binding has classes of its own
            reasons.append(f"{distribution}: {getattr(error, 'message', error)}")
    raise BackendUnavailableError(
        f"NVML does not tell of GPU {uuid} ({'; '.join(reasons)})",
        remedy=_REMEDY,
    )


def check() -> Diagnosis:
    """Say by what NVML is called, for ``accel doctor``. It asks NVML nothing, which might hang."""
    for distribution, (module, _) in _BINDINGS.items():
        with contextlib.suppress(BackendUnavailableError):
            Requirement(distribution, module).load()
            return Diagnosis("nvml", "ok", f"load, power, temperature and errors of GPUs, by {distribution}")
    return Diagnosis("nvml", "missing", "load, power, temperature and errors of GPUs are not told", _REMEDY)


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
