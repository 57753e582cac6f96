"""The hardware of a GPU by NVML: through cuda-core, or through nvidia-ml-py."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from accel import BackendUnavailableError
from accel.backend import Diagnosis
from accel.telemetry.hardware import HardwareInfo
from accel_cuda.core.libraries import Requirement, load_module

__all__ = ["check", "hardware_reader"]

T = TypeVar("T")

# Numbers of fields in nvml.h: NVML_FI_DEV_...
_ECC_DBE_VOL_TOTAL, _POWER_INSTANT = 4, 186
_REMAPPED_COR, _REMAPPED_UNC, _REMAPPED_PENDING, _REMAPPED_FAILURE = 142, 143, 144, 145

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
    field : callable
        Returns the value of a field by its number.
    """

    refusals: tuple[type[Exception], ...]
    no_event: type[Exception]
    watch: Callable[[], Any]
    xid: Callable[[Any], int]
    utilization: Callable[[], int]
    memory: Callable[[], Any]
    temperature: Callable[[], int]
    field: Callable[[int], int]


def _cuda_core(uuid: str) -> _Nvml:
    """Return NVML by ``cuda.core.system``."""
    load_module("cuda.bindings.nvml", "cuda-bindings")
    system = load_module("cuda.core.system", "cuda-core")
    device = system.Device(uuid=uuid)
    return _Nvml(
        refusals=(system.NotSupportedError, system.NoPermissionError, system.InvalidArgumentError, system.FunctionNotFoundError),
        no_event=system.TimeoutError,
        watch=lambda: device.register_events("xid_critical_error"),
        xid=lambda events: int(events.wait(timeout_ms=_WAIT_MS).event_data),
        utilization=lambda: int(device.utilization.gpu),
        memory=lambda: device.memory_info,
        temperature=lambda: int(device.temperature.get_sensor()),
        field=lambda number: int(device.get_field_values([number])[0].value),
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

    def field(number: int) -> int:
        (found,) = nvml.nvmlDeviceGetFieldValues(device, [number])
        if found.nvmlReturn:
            raise nvml.NVMLError(found.nvmlReturn)
        return int(getattr(found.value, _MEMBERS[found.valueType]))

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
        field=field,
    )


_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Of the union of a field's value in pynvml, in the order of nvmlValueType_t."""

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
        nvml, field = self._nvml, self._field
        percent, memory, power = self._asked(nvml.utilization), self._asked(nvml.memory), field(_POWER_INSTANT)
        rows = [field(number) for number in (_REMAPPED_COR, _REMAPPED_UNC)]
        pending, failed = field(_REMAPPED_PENDING), field(_REMAPPED_FAILURE)
        self._take_xids()
        return HardwareInfo(
            utilization=None if percent is None else percent / 100,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power=None if power is None else power / 1000,
            temperature=self._asked(nvml.temperature),
            uncorrected_errors=field(_ECC_DBE_VOL_TOTAL),
            remapped_rows=None if None in rows else sum(filter(None, rows)),
            remap_pending=None if pending is None else pending > 0,
            remap_failed=None if failed is None else failed > 0,
            xid_errors=dict(self._xids),
        )

    def _asked(self, ask: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return ask(*arguments)
        except self._nvml.refusals:
            return None

    def _field(self, number: int) -> int | None:
        return self._asked(self._nvml.field, number)

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
