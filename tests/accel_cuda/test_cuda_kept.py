"""What a dead context keeps is measured while it is closed: wherever that cannot be told, closing goes on."""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from accel_cuda.core.nvml import log_kept

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


class NvmlError(Exception):
    pass


class Nvml:
    """The names of ``cuda.bindings.nvml`` that are used."""

    NvmlError = NvmlError

    def __init__(self, init: Callable[[], None], processes: list[Any]) -> None:
        self.init_v2 = init
        self.is_shut = False
        self._processes = processes

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        return 1

    def device_get_compute_running_processes_v3(self, handle: int) -> list[Any]:
        return self._processes

    def shutdown(self) -> None:
        self.is_shut = True


def process(pid: int, nbytes: int) -> Any:
    return SimpleNamespace(pid=pid, used_gpu_memory=nbytes)


def not_installed() -> None:
    raise RuntimeError('"nvml" is an NVIDIA driver library and can only be found via system search')  # DynamicLibNotFoundError is one


def refused() -> None:
    raise NvmlError("Insufficient Permissions")


def ready() -> None:
    pass


@pytest.mark.parametrize(
    ("init", "processes", "told"),
    [
        (ready, [process(os.getpid(), 300 * MIB), process(os.getpid(), 5 * MIB), process(1, MIB)], "mib=305"),
        (ready, [process(1, MIB)], "mib=unknown"),
        (ready, [process(os.getpid(), (1 << 64) - 1)], "mib=unknown"),
        (refused, [], "mib=unknown"),
        (not_installed, [], "mib=unknown"),
    ],
    ids=["measured", "not listed", "no size", "refused", "not installed"],
)
def test_the_log_says_how_much_it_is_or_that_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, init: Callable[[], None], processes: list[Any], told: str
) -> None:
    nvml = Nvml(init, processes)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", nvml)
    with caplog.at_level(logging.WARNING, "accel.cuda"):
        log_kept(SimpleNamespace(uuid="GPU-0", spec="cuda:0"))  # type: ignore[arg-type]
    assert told in caplog.text
    assert nvml.is_shut is (init is ready)
