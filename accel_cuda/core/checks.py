"""What CUDA needs of a machine, looked at piece by piece: for ``accel doctor``, and for errors that say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel import BackendUnavailableError, UnsupportedError
from accel.backend import Diagnosis
from accel_cuda.core import nvml
from accel_cuda.core.driver import load_driver
from accel_cuda.core.libraries import requirements, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from accel_cuda.core.driver import Driver
    from accel_cuda.core.libraries import VendorLibrary

__all__ = ["all_checks", "check_shareable", "refused", "usable_mode"]


def all_checks(libraries: Iterable[VendorLibrary]) -> list[Diagnosis]:
    """Look at the driver, the GPUs, and the distributions that the backend and these libraries need. May block: it loads them."""
    return [*_driver_and_devices(), *_distributions(libraries), nvml.check()]


def usable_mode(driver: Driver, index: int) -> None:
    """Refuse a GPU on which no context may be made: the driver's own answer would read like a fault.

    Raises
    ------
    BackendUnavailableError
        If its compute mode is PROHIBITED.
    """
    if _attribute(driver, index, "COMPUTE_MODE") == driver.CUcomputemode.CU_COMPUTEMODE_PROHIBITED:
        raise BackendUnavailableError(
            f"cuda:{index} is in compute mode PROHIBITED: no process may use it",
            device=f"cuda:{index}",
            remedy=f"Have it set back: sudo nvidia-smi -i {index} -c DEFAULT",
        )


def check_shareable(driver: Driver, index: int) -> None:
    """Refuse a GPU that is one process's at a time, for what takes two.

    Raises
    ------
    UnsupportedError
        If its compute mode is EXCLUSIVE_PROCESS.
    """
    if _is_exclusive(driver, index):
        raise UnsupportedError(
            f"cuda:{index} is in compute mode EXCLUSIVE_PROCESS: a spare child cannot have a context beside the one in use",
            device=f"cuda:{index}",
            remedy=f"Use standby='imports', or have it set back: sudo nvidia-smi -i {index} -c DEFAULT",
        )


def refused(driver: Driver, index: int, error: BackendUnavailableError) -> BackendUnavailableError:
    """Return what to say where the driver makes no context: of a GPU that another process has for itself it says only that it is not to be had."""
    if error.code != driver.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE or not _is_exclusive(driver, index):
        return error
    return BackendUnavailableError(
        f"cuda:{index} is in compute mode EXCLUSIVE_PROCESS, and another process has it: this one's parent, if that used it",
        code=error.code,
        library="driver",
        device=f"cuda:{index}",
        retryable=True,
        remedy=f"Wait for that process to end, or have it set back: sudo nvidia-smi -i {index} -c DEFAULT",
    )


def _attribute(driver: Driver, index: int, name: str) -> int:
    return driver.device_attribute(driver.call("cuDeviceGet", index), name)


def _is_exclusive(driver: Driver, index: int) -> bool:
    exclusive: int = driver.CUcomputemode.CU_COMPUTEMODE_EXCLUSIVE_PROCESS
    return _attribute(driver, index, "COMPUTE_MODE") == exclusive


def _driver_and_devices() -> Iterator[Diagnosis]:
    try:
        driver = load_driver()
        count = int(driver.call("cuDeviceGetCount"))
    except BackendUnavailableError as error:
        yield Diagnosis("cuda driver", "missing", error.message, error.remedy)
        return
    yield Diagnosis("cuda driver", "ok", f"supports CUDA {driver.version // 1000}.{driver.version % 1000 // 10}")
    if driver.fault is not None:
        yield Diagnosis("cuda context", "failed", driver.fault.message, driver.fault.remedy)
        return
    for index in range(count):
        yield from _modes(driver, index)


def _modes(driver: Driver, index: int) -> Iterator[Diagnosis]:
    name, mode, modes = f"cuda:{index} compute mode", _attribute(driver, index, "COMPUTE_MODE"), driver.CUcomputemode
    restore = f"sudo nvidia-smi -i {index} -c DEFAULT"
    if mode == modes.CU_COMPUTEMODE_PROHIBITED:
        yield Diagnosis(name, "failed", "PROHIBITED: no process may use this GPU", restore)
    elif mode == modes.CU_COMPUTEMODE_EXCLUSIVE_PROCESS:
        yield Diagnosis(
            name,
            "limited",
            "EXCLUSIVE_PROCESS: one process at a time, so there can be no standby='context', no quarantine, and no child beside a process that uses it",
            restore,
        )
    else:
        yield Diagnosis(name, "ok", "DEFAULT")
    if _attribute(driver, index, "MPS_ENABLED"):
        yield Diagnosis(
            f"cuda:{index} MPS",
            "limited",
            "contexts go through MPS: a fault of one client ends the others, and a standby process would die with it",
            "To go without MPS: unset CUDA_MPS_PIPE_DIRECTORY, or stop the server: echo quit | nvidia-cuda-mps-control",
        )


def _distributions(libraries: Iterable[VendorLibrary]) -> Iterator[Diagnosis]:
    missing: dict[str, BackendUnavailableError | None] = {}
    for needed in requirements(libraries):
        if missing.setdefault(needed.distribution, None) is None:
            try:
                needed.load()
            except BackendUnavailableError as error:
                missing[needed.distribution] = error
    for distribution, absent in missing.items():
        if absent is None:
            yield Diagnosis(distribution, "ok", version_of(distribution) or "found in the CUDA toolkit")
        else:
            yield Diagnosis(distribution, "missing", absent.message, absent.remedy)
