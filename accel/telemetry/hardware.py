"""The hardware of a device: load, memory, power, temperature and errors, read on its own thread."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from accel._log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HardwareInfo", "HardwareMonitor", "ReadsHardware"]

logger = get_logger()

STALE_AFTER = 5.0
"""Seconds after which values are stale."""


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """The hardware of a device, as it was read last.

    It is all of the hardware, with what other processes do there. A value that the hardware, or its
    driver, does not have is ``None``.

    Parameters
    ----------
    utilization
        Part of the driver's last sampling period in which work ran, from 0 to 1.
    memory_used, memory_total
        Bytes.
    power
        Watts.
    temperature
        Degrees Celsius.
    uncorrected_errors
        Memory errors that ECC could not correct, since the driver was loaded.
    remapped_rows
        Rows of memory that were replaced after errors.
    remap_pending
        Whether a row waits for a reset of the device to be replaced.
    remap_failed
        Whether a row could not be replaced: the device should be.
    xid_errors
        Number of an NVIDIA driver's Xid error -> how often it came since the first reading.
    age
        Seconds since these values were read.
    """

    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    temperature: float | None = None
    uncorrected_errors: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    xid_errors: Mapping[int, int] = field(default_factory=dict)
    age: float = 0.0

    @property
    def is_stale(self) -> bool:
        """Whether the values are older than 5 s, because the driver does not answer."""
        return self.age > STALE_AFTER


@runtime_checkable
class ReadsHardware(Protocol):
    """What an :class:`~accel.AccelBackend` has besides if its hardware can be asked how it is."""

    def hardware_reader(self, uuid: str) -> Callable[[], HardwareInfo]:
        """Return what reads the values of one device. Both may block, and are called on one thread.

        Raises
        ------
        BackendUnavailableError
            If they cannot be read on this machine.
        """


class HardwareMonitor:
    """Reads the hardware of a device once a second, on a daemon thread of its own.

    No other part waits for that thread: a driver may answer an ailing device's calls late, or never.

    Parameters
    ----------
    name
        Name of the device.
    open_reader
        Returns what reads the values, as :meth:`ReadsHardware.hardware_reader` does.
    period
        Seconds between two readings.
    clock
        Returns seconds.
    """

    def __init__(
        self,
        name: str,
        open_reader: Callable[[], Callable[[], HardwareInfo]],
        *,
        period: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._open_reader = open_reader
        self._period = period
        self._clock = clock
        self._read: tuple[HardwareInfo, float] | None = None  # the values, and when they were read
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        # A daemon: a call that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=f"accel-hardware-{name}", daemon=True)

    def latest(self) -> HardwareInfo | None:
        """Return the values that were read last, or ``None``. Starts the thread; never waits for it."""
        with self._lock:
            if self._thread.ident is None and not self._stopping.is_set():
                self._thread.start()
        if self._read is None:
            return None
        info, read_at = self._read
        return dataclasses.replace(info, age=self._clock() - read_at)

    @property
    def xid_errors(self) -> Mapping[int, int]:
        """Those of the values that were read last. Starts no thread."""
        return {} if self._read is None else self._read[0].xid_errors

    def close(self) -> None:
        """Let the thread end as soon as its call has returned. Idempotent."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            read = self._open_reader()
        except Exception as error:
            logger.info("hardware_not_read", device=self._name, error=error)
            return
        is_failing = False
        while not self._stopping.is_set():
            try:
                info = read()
            except Exception as error:
                if not is_failing:
                    logger.warning("hardware_not_read", device=self._name, error=error)
                is_failing = True
            else:
                is_failing = False
                self._log_errors(HardwareInfo() if self._read is None else self._read[0], info)
                self._read = info, self._clock()
            self._stopping.wait(self._period)

    def _log_errors(self, before: HardwareInfo, now: HardwareInfo) -> None:
        for xid, count in now.xid_errors.items():
            if count > before.xid_errors.get(xid, 0):
                logger.warning("xid_error", device=self._name, xid=xid, count=count)
        states = [(each.remapped_rows or 0, bool(each.remap_pending), bool(each.remap_failed)) for each in (before, now)]
        if states[1] > states[0]:
            rows, pending, failed = states[1]
            logger.warning("memory_rows_remapped", device=self._name, rows=rows, pending=pending, failed=failed)
