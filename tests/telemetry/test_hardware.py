"""The hardware's values: read on a thread of its own, stale when the driver does not answer, and then nothing waits."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import accel
from accel.cpu.backend import CpuBackend
from accel.errors import BackendUnavailableError
from accel.integrations.metrics import Metrics
from accel.telemetry.hardware import STALE_AFTER, HardwareInfo, HardwareMonitor
from tests.device_support import opened, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VALUES = HardwareInfo(0.5, 3 << 30, 80 << 30, 310.5, 61, 0, 2, False, False, {79: 1})


class Hardware:
    """A driver that answers, raises, or hangs until it is let go."""

    def __init__(self) -> None:
        self.answers: list[HardwareInfo | Exception] = [VALUES]
        self.hangs = threading.Event()
        self.let_go = threading.Event()
        self.threads: set[str] = set()
        self.readings = 0
        self.is_hanging = False

    def open(self) -> Callable[[], HardwareInfo]:
        return self.read

    def read(self) -> HardwareInfo:
        self.threads.add(threading.current_thread().name)
        self.readings += 1
        if self.hangs.is_set():
            self.is_hanging = True
            self.let_go.wait(30)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    made = Hardware()
    yield made
    made.let_go.set()


@pytest.fixture
def monitor(hardware: Hardware) -> Iterator[HardwareMonitor]:
    made = HardwareMonitor("cuda:0", hardware.open, period=0.001)
    yield made
    made.close()


async def test_nothing_is_read_before_it_is_asked_for_and_then_on_one_thread(hardware: Hardware, monitor: HardwareMonitor) -> None:
    assert hardware.readings == 0
    hardware.hangs.set()
    assert monitor.latest() is None, "it does not wait for the first answer"
    hardware.hangs.clear()
    hardware.let_go.set()
    await until(monitor.latest, "a reading")
    await until(lambda: hardware.readings > 5, "more readings")
    info = monitor.latest()
    assert info is not None
    assert (info.utilization, info.memory_total, info.xid_errors, info.is_stale) == (0.5, 80 << 30, {79: 1}, False)
    assert hardware.threads == {"accel-hardware-cuda:0"}


async def test_a_closed_monitor_has_no_thread_and_starts_none(hardware: Hardware, monitor: HardwareMonitor) -> None:
    monitor.latest()
    await until(monitor.latest, "a reading")
    monitor.close()
    await until(lambda: not any("accel-hardware" in each.name for each in threading.enumerate()), "the thread's end")
    assert monitor.latest() is not None
    unused = HardwareMonitor("cuda:0", hardware.open)
    unused.close()
    assert unused.latest() is None
    assert not any("accel-hardware" in each.name for each in threading.enumerate())


def test_values_that_are_not_read_again_are_stale_after_five_seconds(hardware: Hardware) -> None:
    now = 100.0
    monitor = HardwareMonitor("cuda:0", hardware.open, period=0.001, clock=lambda: now)
    try:
        while monitor.latest() is None:
            time.sleep(0.001)
        hardware.hangs.set()
        while not hardware.is_hanging:
            time.sleep(0.001)
        now += STALE_AFTER
        fresh = monitor.latest()
        now += 0.1
        stale = monitor.latest()
        assert fresh is not None
        assert stale is not None
        assert (fresh.is_stale, stale.is_stale, stale.temperature) == (False, True, 61)
        hardware.hangs.clear()
        hardware.let_go.set()
        while (again := monitor.latest()) is None or again.is_stale:
            time.sleep(0.001)
    finally:
        monitor.close()


async def test_errors_of_the_hardware_are_logged_once(hardware: Hardware, caplog: pytest.LogCaptureFixture) -> None:
    broken = RuntimeError("GPU is lost")
    worse = HardwareInfo(xid_errors={79: 1, 48: 2}, remapped_rows=3, remap_pending=True, remap_failed=False)
    hardware.answers = [VALUES, broken, broken, worse, worse, worse]
    monitor = HardwareMonitor("cuda:0", hardware.open, period=0.001)
    monitor.latest()
    with caplog.at_level(logging.WARNING, "accel"):
        await until(lambda: hardware.readings > 8, "all answers")
    monitor.close()
    told = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in told] == [
        *("xid_error", "memory_rows_remapped", "hardware_not_read", "xid_error", "memory_rows_remapped"),
    ]
    assert "xid=48 count=2" in told[3]
    assert "rows=3 pending=True failed=False" in told[4]


async def test_a_machine_without_a_reader_has_no_values_and_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    def none() -> Callable[[], HardwareInfo]:
        raise BackendUnavailableError("NVML is not there", remedy="Install it.")

    monitor = HardwareMonitor("cuda:0", none)
    with caplog.at_level(logging.INFO, "accel"):
        assert monitor.latest() is None
        await until(lambda: not any("accel-hardware" in each.name for each in threading.enumerate()), "the thread's end")
    assert monitor.latest() is None
    assert "hardware_not_read" in caplog.text


async def test_a_device_of_a_backend_that_reads_its_hardware(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reader(self: CpuBackend, uuid: str) -> Callable[[], HardwareInfo]:
        asked.append(uuid)
        return hardware.read

    monkeypatch.setattr(CpuBackend, "hardware_reader", reader, raising=False)
    async with opened() as device:
        assert not asked, "nothing has asked"
        device.hardware()
        await until(device.hardware, "a reading")
        assert asked == [device._core.description.uuid]
        metrics = Metrics(lambda: device)
        families = {family.name: family for family in text_string_to_metric_families(metrics.render()[0].decode())}
        values = {name: family.samples[0].value for name, family in families.items() if name.startswith("accel_hardware_")}
        assert values["accel_hardware_power_watts"] == 310.5
        assert values["accel_hardware_remapped_rows"] == 2
        (xid,) = families["accel_hardware_xid_errors"].samples
        assert (xid.name, xid.labels, xid.value) == ("accel_hardware_xid_errors_total", {"device": "cpu:0", "xid": "79"}, 1)
        assert len(values) == 11
        assert device._hardware is not None
        device._hardware._clock = lambda: time.monotonic() + 2 * STALE_AFTER
        text = metrics.render()[0].decode()
        assert "accel_hardware_age_seconds" in text
        assert "accel_hardware_power_watts" not in text, "stale values are no values"
        assert device.health().reason == "", "it serves"
    assert device.health().reason == "closed (the driver has told of Xid 79)"
    await until(lambda: not any("accel-hardware" in each.name for each in threading.enumerate()), "the thread's end")


async def test_the_cpu_backend_tells_nothing_of_its_hardware() -> None:
    async with opened() as device:
        assert device.hardware() is None
        assert "accel_hardware" not in Metrics(lambda: device).render()[0].decode()
    assert device.hardware() is None


async def test_a_call_that_hangs_holds_up_neither_the_loop_nor_the_close(hardware: Hardware) -> None:
    """Loop lag beside a reading that hangs, against loop lag without one."""

    async def lags(count: int) -> float:
        measured = []
        for _ in range(count):
            began = time.perf_counter()
            await asyncio.sleep(0)
            measured.append(time.perf_counter() - began)
        return float(np.quantile(measured, 0.99))

    quiet = min([await lags(2000) for _ in range(5)])
    hardware.hangs.set()
    monitor = HardwareMonitor("cuda:0", hardware.open)
    monitor.latest()
    await until(lambda: hardware.readings, "the call that hangs")
    beside = min([await lags(2000) for _ in range(5)])
    monitor.close()
    assert monitor.latest() is None
    assert beside <= quiet + 0.2e-3


def test_a_call_that_hangs_does_not_keep_the_process_from_exiting() -> None:
    program = (
        "import time\n"
        "from accel.telemetry.hardware import HardwareMonitor\n"
        "began = []\n"
        "def read():\n"
        "    began.append(1)\n"
        "    time.sleep(60)\n"
        "monitor = HardwareMonitor('cuda:0', lambda: read)\n"
        "monitor.latest()\n"
        "while not began:\n"
        "    time.sleep(0.001)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=30, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_fork_is_refused_and_has_no_thread(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "hardware_reader", lambda self, uuid: hardware.read, raising=False)
    async with opened() as device:
        device.hardware()
        await until(device.hardware, "a reading")
        pid = os.fork()
        if not pid:
            code = 1
            try:
                device.hardware()
            except accel.ClosedError:
                code = 0 if threading.active_count() == 1 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
