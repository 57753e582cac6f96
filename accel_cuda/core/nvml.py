"""The hardware of a GPU by NVML: through cuda-core where its bindings have NVML, else through nvidia-ml-py."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from accel import BackendUnavailableError
from accel.backend import Diagnosis
from accel.telemetry.hardware import HardwareInfo
from accel_cuda.core.libraries import Requirement, load_module

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check", "hardware_reader"]

T = TypeVar("T")

# Numbers of fields in nvml.h: NVML_FI_DEV_...
_ECC_DBE_VOL_TOTAL, _POWER_INSTANT = 4, 186
_REMAPPED_COR, _REMAPPED_UNC, _REMAPPED_PENDING, _REMAPPED_FAILURE = 142, 143, 144, 145

_WAIT_MS = 1  # 0 would wait for ever
_MOST_EVENTS = 64
"""Xid errors that one reading takes: a GPU that has more has told enough."""


class _Nvml(Protocol):
    """NVML for one GPU, by one of its bindings. Every method may block, and raises the binding's errors.

    Attributes
    ----------
    module, distribution : str
        The binding.
    refusals : tuple of classes
        Errors for what this GPU, its driver or the permissions of the process do not give.
    no_event : class
        The error of :meth:`xid` where there is none.
    """

    module: ClassVar[str]
    distribution: ClassVar[str]
    refusals: tuple[type[Exception], ...]
    no_event: type[Exception]

    def watch(self) -> None:
        """Have Xid errors recorded from now on."""

    def xid(self) -> int:
        """Return the next Xid error that was recorded."""

    def utilization(self) -> int:
        """Percent."""

    def memory(self) -> tuple[int, int]:
        """Bytes that are used, and all."""

    def temperature(self) -> int:
        """Degrees Celsius."""

    def field(self, number: int) -> int:
        """Return the value of a field."""


class _CudaCore(_Nvml):
    """See :class:`_Nvml`; by ``cuda.core.system``."""

    module, distribution = "cuda.bindings.nvml", "cuda-bindings"

    def __init__(self, uuid: str) -> None:
        load_module(self.module, self.distribution)
        system = load_module("cuda.core.system", "cuda-core")
        self._device = system.Device(uuid=uuid)
        self.refusals = (
            system.NotSupportedError,
            system.NoPermissionError,
            system.InvalidArgumentError,
            system.FunctionNotFoundError,
        )
        self.no_event = system.TimeoutError

    def watch(self) -> None:
        self._events = self._device.register_events("xid_critical_error")

    def xid(self) -> int:
        return int(self._events.wait(timeout_ms=_WAIT_MS).event_data)

    def utilization(self) -> int:
        return int(self._device.utilization.gpu)

    def memory(self) -> tuple[int, int]:
        info = self._device.memory_info
        return int(info.used), int(info.total)

    def temperature(self) -> int:
        return int(self._device.temperature.get_sensor())

    def field(self, number: int) -> int:
        return int(self._device.get_field_values([number])[0].value)


class _NvidiaMlPy(_Nvml):
    """See :class:`_Nvml`; by the module ``pynvml``."""

    module, distribution = "pynvml", "nvidia-ml-py"
    _MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    """Of the union of a field's value, in the order of nvmlValueType_t."""

    def __init__(self, uuid: str) -> None:
        pynvml = load_module(self.module, self.distribution)
        pynvml.nvmlInit()
        self._nvml = pynvml
        self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.refusals = (
            pynvml.NVMLError_NotSupported,
            pynvml.NVMLError_NoPermission,
            pynvml.NVMLError_InvalidArgument,
            pynvml.NVMLError_FunctionNotFound,
        )
        self.no_event = pynvml.NVMLError_Timeout

    def watch(self) -> None:
        self._events = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(self._device, self._nvml.nvmlEventTypeXidCriticalError, self._events)

    def xid(self) -> int:
        return int(self._nvml.nvmlEventSetWait_v2(self._events, _WAIT_MS).eventData)

    def utilization(self) -> int:
        return int(self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu)

    def memory(self) -> tuple[int, int]:
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._device, version=self._nvml.nvmlMemory_v2)
        return int(info.used), int(info.total)

    def temperature(self) -> int:
        return int(self._nvml.nvmlDeviceGetTemperature(self._device, self._nvml.NVML_TEMPERATURE_GPU))

    def field(self, number: int) -> int:
        (found,) = self._nvml.nvmlDeviceGetFieldValues(self._device, [number])
        if found.nvmlReturn:
            raise self._nvml.NVMLError(found.nvmlReturn)
        return int(getattr(found.value, self._MEMBERS[found.valueType]))


_BINDINGS: tuple[type[_CudaCore | _NvidiaMlPy], ...] = (_CudaCore, _NvidiaMlPy)
_REMEDY = "Install a binding of NVML: pip install 'cuda-bindings>=13.1', or nvidia-ml-py."


class _Reader:
    """Reads all values of one GPU."""

    def __init__(self, nvml: _Nvml) -> None:
        self._nvml = nvml
        self._xids: Counter[int] = Counter()
        self._is_watching = False
        with contextlib.suppress(Exception):  # not every GPU, and not every container, tells of them
            nvml.watch()
            self._is_watching = True

    def __call__(self) -> HardwareInfo:
        nvml = self._nvml
        used, total = self._asked(nvml.memory) or (None, None)
        percent, power = self._asked(nvml.utilization), self._field(_POWER_INSTANT)
        correctable, uncorrectable = self._field(_REMAPPED_COR), self._field(_REMAPPED_UNC)
        pending, failed = self._field(_REMAPPED_PENDING), self._field(_REMAPPED_FAILURE)
        self._take_xids()
        return HardwareInfo(
            utilization=None if percent is None else percent / 100,
            memory_used=used,
            memory_total=total,
            power=None if power is None else power / 1000,
            temperature=self._asked(nvml.temperature),
            uncorrected_errors=self._field(_ECC_DBE_VOL_TOTAL),
            remapped_rows=None if correctable is None or uncorrectable is None else correctable + uncorrectable,
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
        for _ in range(_MOST_EVENTS if self._is_watching else 0):
            try:
                self._xids[self._nvml.xid()] += 1
            except self._nvml.no_event:
                return


def hardware_reader(uuid: str) -> Callable[[], HardwareInfo]:
    """Return what reads the values of the GPU of this UUID; see :class:`accel.telemetry.hardware.ReadsHardware`.

    Raises
    ------
    BackendUnavailableError
        If there is no binding of NVML, no NVML, or no such GPU for it.
    """
    reasons = []
    for binding in _BINDINGS:
        try:
            return _Reader(binding(uuid))
        except Exception as error:  # each binding has classes of its own
            reasons.append(f"{binding.distribution}: {getattr(error, 'message', error)}")
    raise BackendUnavailableError(
        f"NVML does not tell of GPU {uuid} ({'; '.join(reasons)})",
        remedy=_REMEDY,
    )


def check() -> Diagnosis:
    """Say by what NVML is called, for ``accel doctor``. It asks NVML nothing, which might hang."""
    for binding in _BINDINGS:
        with contextlib.suppress(BackendUnavailableError):
            Requirement(binding.distribution, binding.module).load()
            return Diagnosis("nvml", "ok", f"load, power, temperature and errors of GPUs, by {binding.distribution}")
    return Diagnosis("nvml", "missing", "load, power, temperature and errors of GPUs are not told", _REMEDY)
