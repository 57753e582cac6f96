"""What the CUDA backend tells the doctor, piece by piece, and the command that fixes each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel.cli import main
from accel.errors import AccelError, BackendUnavailableError, DriverError, FaultScope, UnsupportedError
from accel_cuda import CudaBackend, backend
from accel_cuda.core import checks, libraries
from accel_cuda.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import Diagnosis

MODE, MPS = "COMPUTE_MODE", "MPS_ENABLED"
UNAVAILABLE = 46
DEFAULT, PROHIBITED, EXCLUSIVE = 0, 2, 3


class FakeDriver:
    """A driver with GPUs of these attributes."""

    version = 13000
    CUcomputemode = SimpleNamespace(CU_COMPUTEMODE_PROHIBITED=PROHIBITED, CU_COMPUTEMODE_EXCLUSIVE_PROCESS=EXCLUSIVE)
    CUresult = SimpleNamespace(CUDA_ERROR_DEVICE_UNAVAILABLE=UNAVAILABLE)

    def __init__(self, *devices: dict[str, int]) -> None:
        self._devices = devices
        self.fault: DriverError | None = None

    def call(self, name: str, *arguments: Any) -> int:
        if name == "cuDeviceGetCount":
            return len(self._devices)
        if name == "cuDeviceGet":
            return int(arguments[0])
        if name == "cuDevicePrimaryCtxRetain":
            raise error_of(UNAVAILABLE, name)
        raise AssertionError(name)

    def device_attribute(self, device: int, name: str) -> int:
        return self._devices[device].get(name, 0)


def nothing(name: str, distribution: str, extra: str) -> None:
    pass


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Diagnosis]]:
    """Return what is told of a machine with such GPUs, by name."""
    monkeypatch.setattr(libraries, "load_module", nothing)
    monkeypatch.setattr(libraries, "load_library", nothing)
    monkeypatch.setattr(libraries, "load_extension", lambda package, *names: None)

    def look(*devices: dict[str, int], fault: DriverError | None = None) -> dict[str, Diagnosis]:
        driver = FakeDriver(*devices)
        driver.fault = fault
        monkeypatch.setattr(checks, "load_driver", lambda: driver)
        return {check.name: check for check in CudaBackend().checks()}

    return look


def test_a_machine_where_all_is_well(found: Callable[..., dict[str, Diagnosis]]) -> None:
    told = found({}, {})
    assert {check.state for check in told.values()} == {"ok"}
    assert told["cuda driver"].detail == "supports CUDA 13.0"
    assert {"cuda:0 compute mode", "cuda:1 compute mode", *(needed.distribution for needed in libraries.REQUIRED)} <= set(told)
    called = {"nvmath-python", "nvidia-cublas", "nvidia-cufft", "nvidia-cusolver", "nvidia-cusparse", "cuda-cccl", "nvidia-cudnn-cu13"}
    assert called <= set(told), "what the families call"


def test_a_fault_of_this_process_is_told(found: Callable[..., dict[str, Diagnosis]]) -> None:
    told = found({}, fault=DriverError("it broke", code=700, scope=FaultScope.PROCESS, remedy="Start again."))
    assert (told["cuda context"].state, told["cuda context"].detail) == ("failed", "it broke")


def test_without_a_driver_the_libraries_are_looked_at_all_the_same(
    found: Callable[..., dict[str, Diagnosis]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found({})

    def none() -> None:
        raise BackendUnavailableError("there is no NVIDIA driver", remedy="Install it.")

    monkeypatch.setattr(checks, "load_driver", none)
    told = {check.name: check for check in CudaBackend().checks()}
    assert (told["cuda driver"].state, told["cuda driver"].remedy) == ("missing", "Install it.")
    assert told["nvidia-cublas"].state == "ok"


def test_the_wheel_that_is_missing_is_named(found: Callable[..., dict[str, Diagnosis]], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_cublas(name: str, distribution: str, extra: str) -> None:
        if name == "cublas":
            raise BackendUnavailableError(f"{distribution} is not installed", remedy=libraries.INSTALL)

    found({})
    monkeypatch.setattr(libraries, "load_library", without_cublas)
    told = {check.name: check for check in CudaBackend().checks()}
    assert told["nvidia-cublas"].state == "missing"
    assert "pip install '.[cuda]'" in told["nvidia-cublas"].remedy
    assert told["nvidia-cuda-nvrtc"].state == "ok"


def test_a_prohibited_gpu_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "load_driver", lambda: FakeDriver({}, {MODE: PROHIBITED}))
    with pytest.raises(BackendUnavailableError, match="PROHIBITED") as caught:
        CudaBackend().open(1)
    assert caught.value.device == "cuda:1"
    assert "nvidia-smi -i 1 -c DEFAULT" in caught.value.remedy


def test_a_gpu_for_one_process_gets_no_spare_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "load_driver", lambda: FakeDriver({}, {MODE: EXCLUSIVE}))
    CudaBackend().check_shareable(0)
    with pytest.raises(UnsupportedError, match="EXCLUSIVE_PROCESS") as caught:
        CudaBackend().check_shareable(1)
    assert caught.value.device == "cuda:1"
    assert "standby='imports'" in caught.value.remedy
    assert "nvidia-smi -i 1 -c DEFAULT" in caught.value.remedy


@pytest.mark.parametrize(("mode", "told"), [(EXCLUSIVE, "EXCLUSIVE_PROCESS, and another process has it"), (DEFAULT, "DEVICE_UNAVAILABLE")])
def test_a_gpu_that_another_process_has_for_itself_is_named(mode: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver({}, {MODE: mode})

    def retains(driver: FakeDriver, description: Any) -> int:
        return driver.call("cuDevicePrimaryCtxRetain", 1)

    monkeypatch.setattr(backend, "load_driver", lambda: driver)
    monkeypatch.setattr(backend, "CudaDevice", retains)
    monkeypatch.setattr(CudaBackend, "_describe", lambda self, driver, index: None)
    with pytest.raises(BackendUnavailableError, match=told) as caught:
        CudaBackend().open(1)
    error: AccelError = caught.value
    assert (error.code, error.library, error.scope, error.retryable) == (UNAVAILABLE, "driver", FaultScope.OP, True)
    assert ("nvidia-smi -i 1 -c DEFAULT" in error.remedy) == (mode == EXCLUSIVE)
    assert error.remedy


def test_checks_that_raise_are_told_as_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(self: CudaBackend) -> list[Diagnosis]:
        raise RuntimeError("oh")

    monkeypatch.setattr(CudaBackend, "checks", broken)
    assert main(["doctor"]) == 0
    assert "checks of cuda" in capsys.readouterr().out
