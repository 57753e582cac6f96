"""The log in a child process: structlog, which takes long to import, is imported there with the first event."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import accel
from accel import _log
from accel.ops import Plan, Spec

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Tell(accel.KernelOp):
    """Where it runs, and whether structlog is imported there, before it logs ``event``."""

    library: ClassVar[str] = "telling"
    kind: ClassVar[str] = "tell"

    event: str = ""

    def plan(self) -> Plan:
        return Plan((), (), (Spec((2,), accel.DType.INT64),))


class Telling(accel.KernelLibrary):
    """Runs in the child."""

    name = "telling"

    @accel.kernel(Tell)
    def tell(self, op: Tell, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        found, out = (os.getpid(), "structlog" in sys.modules), np.asarray(outputs[0])
        _log.get_logger().debug("hidden", value=3)
        if op.event:
            _log.get_logger().warning(op.event, value=4)
        stream.submit(lambda: np.copyto(out, found), 1e-6)


async def test_a_child_imports_structlog_with_the_first_event_that_it_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "accel")
    async with asyncio.timeout(20), accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Telling)
        pid = device.info().pid
        assert pid != os.getpid()
        for event, is_imported in (("", 0), ("told", 0), ("", 1)):
            np.testing.assert_array_equal(await device.get(await device.run(Tell(event))), [pid, is_imported])
        while not (told := [record for record in caplog.records if record.getMessage().startswith("told")]):
            await device.get(await device.run(Tell()))  # the log travels on the same connection
    assert [record.getMessage() for record in told] == [f"told value=4 device='cpu:0' pid={pid} host='process'"]
    assert told[0].levelno == logging.WARNING
    assert not any("hidden" in record.getMessage() for record in caplog.records)
