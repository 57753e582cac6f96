"""NVML's values of a GPU: by either binding, by a stand-in here and beside nvidia-smi on a GPU."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import accel
from accel.errors import BackendUnavailableError
from accel_cuda import CudaBackend
from accel_cuda.core import nvml
from accel_cuda.core.nvml import hardware_reader


class NvmlError(Exception):
    """Any error of NVML's."""


class NotSupportedError(NvmlError):
    """A value that this GPU does not have."""


class NoEventError(NvmlError):
    """No Xid error came."""


class Gpu:
    """What NVML says of one GPU. Names in ``lacking`` are not supported."""

    def __init__(self) -> None:
        self.lacking: set[str] = set()
        self.xids = [79, 31, 79]

    def say(self, name: str, value: Any) -> Any:
        if name in self.lacking:
            raise NotSupportedError(name)
        return value

    def power(self, handle: int) -> int:
        milliwatts: int = self.say("power", 310_500)
        return milliwatts

    def errors(self, handle: int, kind: int, counter: int) -> int:
        found: int = self.say("errors", {(1, 0): 1}[kind, counter])
        return found

    def rows(self, handle: int) -> tuple[int, int, int, int]:
        found: tuple[int, int, int, int] = self.say("rows", (2, 1, 0, 1))
        return found

    def event(self) -> int:
        if not self.xids:
            raise NoEventError
        return self.xids.pop(0)


def by_cuda_core(gpu: Gpu) -> dict[str, ModuleType]:
    """Return stand-ins for the modules of cuda-core."""

    class Device:
        def __init__(self, *, uuid: str) -> None:
            if uuid != "GPU-1":
                raise NvmlError(f"there is no {uuid}")

        utilization = property(lambda self: SimpleNamespace(gpu=gpu.say("utilization", 42)))
        memory_info = property(lambda self: SimpleNamespace(used=gpu.say("memory", 3 << 30), total=80 << 30))
        temperature = property(lambda self: SimpleNamespace(get_sensor=lambda: gpu.say("temperature", 61)))

        def register_events(self, kind: str) -> Any:
            assert kind == "xid_critical_error"
            return gpu.say("events", SimpleNamespace(wait=lambda timeout_ms: SimpleNamespace(event_data=gpu.event())))

    system: Any = ModuleType("cuda.core.system")
    system.Device, system.TimeoutError = Device, NoEventError
    system.NotSupportedError = system.NoPermissionError = system.InvalidArgumentError = system.FunctionNotFoundError = NotSupportedError
    bindings: Any = ModuleType("cuda.bindings.nvml")
    bindings.device_get_handle_by_uuid = lambda uuid: {"GPU-1": 1}[uuid]
    bindings.device_get_power_usage = gpu.power
    bindings.device_get_total_ecc_errors = gpu.errors
    bindings.device_get_remapped_rows = gpu.rows
    return {"cuda.bindings.nvml": bindings, "cuda.core.system": system}


def by_nvidia_ml_py(gpu: Gpu) -> dict[str, ModuleType]:
    """Return a stand-in for pynvml."""
    module: Any = ModuleType("pynvml")
    module.NVMLError_Timeout = NoEventError
    module.NVMLError_NotSupported = module.NVMLError_NoPermission = NotSupportedError
    module.NVMLError_InvalidArgument = module.NVMLError_FunctionNotFound = NotSupportedError
    module.nvmlMemory_v2, module.NVML_TEMPERATURE_GPU, module.nvmlEventTypeXidCriticalError = 2, 0, 8
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-1": 1}[uuid]
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=gpu.say("utilization", 42))
    module.nvmlDeviceGetMemoryInfo = lambda handle, version: SimpleNamespace(used=gpu.say("memory", 3 << 30), total=80 << 30)
    module.nvmlDeviceGetTemperature = lambda handle, sensor: gpu.say("temperature", 61)
    module.nvmlDeviceGetPowerUsage = gpu.power
    module.nvmlDeviceGetTotalEccErrors = gpu.errors
    module.nvmlDeviceGetRemappedRows = gpu.rows
    module.nvmlEventSetCreate = lambda: 5
    module.nvmlDeviceRegisterEvents = lambda handle, kinds, events: gpu.say("events", None)
    module.nvmlEventSetWait_v2 = lambda events, timeout: SimpleNamespace(eventData=gpu.event())
    return {"pynvml": module}


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture(params=[by_cuda_core, by_nvidia_ml_py])
def bound(request: pytest.FixtureRequest, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have NVML called by one binding."""
    modules = request.param(gpu)
    absent = dict.fromkeys(("cuda.bindings.nvml", "cuda.core.system", "pynvml"))
    for name, module in {**absent, **modules}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return "cuda-bindings" if "cuda.core.system" in modules else "nvidia-ml-py"


def test_values_have_the_units_that_they_say(bound: str, gpu: Gpu) -> None:
    read = hardware_reader("GPU-1")
    info = read()
    assert (info.utilization, info.memory_used, info.memory_total) == (0.42, 3 << 30, 80 << 30)
    assert (info.power, info.temperature, info.uncorrected_errors) == (310.5, 61, 1)
    assert (info.remapped_rows, info.remap_pending, info.remap_failed) == (3, False, True)
    assert info.xid_errors == {79: 2, 31: 1}
    gpu.xids = [48]
    assert read().xid_errors == {79: 2, 31: 1, 48: 1}
    assert info.xid_errors == {79: 2, 31: 1}, "a reading is not changed by the next one"


def test_what_a_gpu_does_not_have_is_none_and_the_rest_is_told(bound: str, gpu: Gpu) -> None:
    gpu.lacking = {"utilization", "memory", "power", "rows", "events"}
    info = hardware_reader("GPU-1")()
    assert (info.utilization, info.memory_used, info.memory_total, info.power, info.remapped_rows) == (None,) * 5
    assert (info.temperature, info.uncorrected_errors, info.remap_failed, info.xid_errors) == (61, 1, None, {})


def test_xid_errors_without_end_do_not_hold_up_a_reading(bound: str, gpu: Gpu) -> None:
    gpu.xids = [31] * 1000
    assert hardware_reader("GPU-1")().xid_errors == {31: 64}


def test_a_gpu_that_nvml_does_not_know_is_told_with_what_each_binding_said(bound: str) -> None:
    with pytest.raises(BackendUnavailableError, match=r"cuda-bindings: .*; nvidia-ml-py: ") as caught:
        hardware_reader("GPU-2")
    assert "pip install" in caught.value.remedy


def test_the_doctor_names_the_binding(bound: str) -> None:
    assert nvml.check().state == "ok"
    assert nvml.check().detail.endswith(f"by {bound}")


def test_without_a_binding_the_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda.bindings.nvml", "cuda.core.system", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    assert (nvml.check().state, nvml.check().name) == ("missing", "nvml")
    assert "pip install" in nvml.check().remedy
    with pytest.raises(BackendUnavailableError):
        hardware_reader("GPU-1")


# -- on a GPU


def nvidia_smi(uuid: str, *names: str) -> list[float | None]:
    """Return what nvidia-smi says of a GPU; ``None`` for what it does not have."""
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nvidia-smi does not answer: {error}")
    return [None if "N/A" in value or "Not" in value else float(value) for value in text.strip().split(",")]


@pytest.mark.gpu
@pytest.mark.parametrize("distribution", ["cuda-bindings", "nvidia-ml-py"])
def test_values_are_those_of_nvidia_smi(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    binding = nvml._BINDINGS[distribution]
    pytest.importorskip(binding[0])
    monkeypatch.setattr(nvml, "_BINDINGS", {distribution: binding})
    uuid = CudaBackend().devices()[0].uuid
    info = hardware_reader(uuid)()
    total, used, temperature, power = nvidia_smi(uuid, "memory.total", "memory.used", "temperature.gpu", "power.draw")
    assert info.memory_total is not None
    assert info.memory_used is not None
    assert info.temperature is not None
    assert total is not None
    assert used is not None
    assert temperature is not None
    assert info.memory_total >> 20 == pytest.approx(total, rel=0.02)
    assert info.memory_used >> 20 == pytest.approx(used, abs=1024)
    assert info.temperature == pytest.approx(temperature, abs=5)
    if power is not None:
        assert info.power == pytest.approx(power, rel=0.5)
    (errors,) = nvidia_smi(uuid, "ecc.errors.uncorrected.volatile.total")
    assert info.uncorrected_errors == (None if errors is None else int(errors))
    assert info.utilization is None or 0 <= info.utilization <= 1
    print(info)


@pytest.mark.gpu
@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_device_tells_of_its_hardware(host: Any) -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host)
        began = time.monotonic()
        while (info := device.hardware()) is None:
            assert time.monotonic() - began < 20, "no reading came"
            await asyncio.sleep(0.01)
        assert info.memory_used is not None
        assert info.memory_used > 100 << 20, "a context is there"
        assert not info.is_stale
