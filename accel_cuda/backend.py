"""The class that the entry point ``accel.backends: cuda`` names: it lists NVIDIA GPUs and opens contexts on them."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accel import BackendUnavailableError, DeviceDescription, DeviceLostError
from accel_cuda.core.checks import all_checks, check_shareable, refused, usable_mode
from accel_cuda.core.driver import Handle, load_driver
from accel_cuda.core.libraries import requirements
from accel_cuda.core.nvml import hardware_reader
from accel_cuda.device import CudaDevice
from accel_cuda.families.kernels.bench import EmptyKernel, launch_and_wait
from accel_cuda.families.parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel import AccelError, AccelRef
    from accel.backend import Diagnosis
    from accel.telemetry.hardware import HardwareInfo
    from accel_cuda.core.driver import Driver

__all__ = ["CudaBackend"]


class CudaBackend:
    """NVIDIA GPUs.

    Attributes
    ----------
    name : str
        ``"cuda"``, as in ``open_device("cuda:1")``.
    shares_fate : bool
        ``True``: a fault of one device ends CUDA for the whole process.
    groups_span_machines : bool
        ``True``: NCCL connects machines.
    preference : int
        Higher than the CPU backend's, so that ``open_device("auto")`` takes a GPU where there is one that can be used.
    """

    name: str = "cuda"
    preference: int = 100
    shares_fate: bool = True
    groups_span_machines: bool = True
    device_files: tuple[str, ...] = ("/dev/nvidia",)

    @property
    def fault(self) -> AccelError | None:
        """What has ended CUDA for this process; see :class:`accel.backend.AccelBackend`."""
        try:
            return load_driver().fault
        except BackendUnavailableError:
            return None

    def preload(self, libraries: Sequence[str]) -> None:
        """Load the bindings, the compiler, and what the named families call; see :class:`accel.backend.PreloadsLibraries`. Initializes no driver."""
        for needed in requirements(library for name in libraries if name in PARTS for library in PARTS[name].libraries):
            needed.load()

    def check_shareable(self, index: int) -> None:
        """See that more than one process can have a context on GPU ``index``; see :class:`accel.backend.AccelBackend`.

        Raises
        ------
        UnsupportedError
            If its compute mode is EXCLUSIVE_PROCESS.
        """
        check_shareable(load_driver(), index)

    def hardware_reader(self, uuid: str) -> Callable[[], HardwareInfo]:
        """Return what reads load, memory, power, temperature and errors of a GPU; see :class:`accel.telemetry.hardware.ReadsHardware`.

        Raises
        ------
        BackendUnavailableError
            If NVML does not tell of it.
        """
        return hardware_reader(uuid)

    def can_access_peer(self, index: int, other: int) -> bool:
        """Return whether GPU ``index`` can reach the memory of GPU ``other``; see :class:`accel.backend.KnowsPeers`."""
        driver = load_driver()
        return bool(driver.call("cuDeviceCanAccessPeer", driver.call("cuDeviceGet", index), driver.call("cuDeviceGet", other)))

    def devices(self) -> Sequence[DeviceDescription]:
        """List the GPUs that this process may use. May block: it loads the driver.

        Raises
        ------
        BackendUnavailableError
            If something is missing; it says what, and what to do.
        """
        driver = load_driver()
        return tuple(self._describe(driver, index) for index in range(int(driver.call("cuDeviceGetCount"))))

    def open(self, index: int) -> CudaDevice:
        """Create a context on GPU ``index``: the device's primary one, which torch and cupy use too. Blocks for some tenths of a second.

        Raises
        ------
        BackendUnavailableError
            If there is no such GPU, another process has it for itself, or something is missing.
        DeviceLostError
            If a fault has ended CUDA for this process.
        """
        try:
            driver = load_driver()
        except BackendUnavailableError as error:
            raise error.clone(device=f"cuda:{index}") from error
        if driver.fault is not None:
            lost = DeviceLostError(
                f"a fault has ended CUDA for this process: {driver.fault.message}",
                code=driver.fault.code,
                library="driver",
                device=f"cuda:{index}",
                remedy="Open it with host='auto' or 'process': a child process has CUDA still. In this process only a restart helps.",
            )
            raise lost from driver.fault.clone()
        count = int(driver.call("cuDeviceGetCount"))
        if not 0 <= index < count:
            raise BackendUnavailableError(f"cuda:{index} is not there: the process may use {count} GPU(s)", device=f"cuda:{index}")
        usable_mode(driver, index)
        try:
            return CudaDevice(driver, self._describe(driver, index))
        except BackendUnavailableError as error:
            if (better := refused(driver, index, error)) is error:
                raise
            raise better from error

    def checks(self) -> Sequence[Diagnosis]:
        """Say what CUDA needs and what of it is here; see :class:`accel.backend.AccelBackend`. May block."""
        return all_checks(library for part in PARTS.values() for library in part.libraries)

    def empty_op(self, out: AccelRef) -> EmptyKernel:
        """Return an op that launches an empty kernel; see :class:`accel.backend.LaunchesEmptyKernels`."""
        return EmptyKernel(out)

    @contextmanager
    def raw_launch(self, index: int) -> Iterator[Callable[[], object]]:
        """Lend a call that launches the same kernel by the driver alone; see :class:`accel.backend.LaunchesEmptyKernels`."""
        device = self.open(index)
        try:
            yield launch_and_wait(device, device.functions["empty"], device.create_stream().handle)
        finally:
            device.driver.hot.set_current(Handle(0))
            device.close()

    def _describe(self, driver: Driver, index: int) -> DeviceDescription:
        device = driver.call("cuDeviceGet", index)
        name = bytes(driver.call("cuDeviceGetName", 128, device)).split(b"\0", 1)[0].decode()
        identity = uuid.UUID(bytes=bytes(driver.call("cuDeviceGetUuid", device).bytes))
        return DeviceDescription(self.name, index, name, f"GPU-{identity}", int(driver.call("cuDeviceTotalMem", device)))
